"""Expansion: which cells a grid has, in which order, and what an exclusion drops."""

import itertools

import pytest

from harness.suite.grid import AXES, count_cells, expand
from harness.variants.specs import VARIANTS
from tests.support import python

DEFAULTS = {
    "variant": ("mha",),
    "embed_dim": (64,),
    "heads": (4,),
    "kv_heads": (None,),
    "head_dim": (None,),
    "q_lora_rank": (None,),
    "kv_lora_rank": (None,),
    "rope_head_dim": (None,),
    "v_head_dim": (None,),
    "bias": (True,),
    "seq_len": (8,),
    "mask": ("none",),
    "phase": ("prefill",),
    "dtype": ("float32",),
    "batch": (1,),
    "kernel": ("eager",),
}
OTHERS = dict(
    zip(
        DEFAULTS,
        ("mla_naive", 128, 8, 2, 24, 20, 12, 6, 10, False, 5, "alibi", "train", "float16", 3, "sdpa"),
        strict=True,
    )
)


def grid(**axes):
    return {**DEFAULTS, **axes}


def test_the_axes_are_all_named_once_and_variant_is_outermost():
    assert AXES[0] == "variant"
    assert AXES[-1] == "kernel"
    assert sorted(AXES) == sorted(DEFAULTS)


def test_the_product_has_every_cell_once_in_the_order_of_the_axes():
    axes = grid(variant=("mqa", "mha"), embed_dim=(64, 32), seq_len=(16, 8), mask=("none", "causal"), batch=(2, 1))
    cases = expand([axes]).cases
    wanted = list(itertools.product(*(axes[a] for a in ("variant", "embed_dim", "seq_len", "mask", "batch"))))
    assert [(c.variant, c.embed_dim, c.seq_len, c.mask, c.batch) for c in cases] == wanted
    assert len({case.case_id for case in cases}) == len(cases) == count_cells(axes) == 32


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_reaches_its_field_of_the_case(axis):
    other = OTHERS[axis]
    variant = "gqa" if axis == "kv_heads" else "mla"
    (case,) = expand([grid(**{"variant": (variant,), axis: (other,)})]).cases
    assert getattr(case, axis) == other


def test_an_axis_that_does_not_apply_collapses():
    axes = grid(variant=("mha", "mqa", "gqa", "mla"), kv_heads=(1, 2, 4), kv_lora_rank=(8, 16), q_lora_rank=(None, 4))
    by_variant = {v: [c for c in expand([axes]).cases if c.variant == v] for v in axes["variant"]}
    assert {v: len(cases) for v, cases in by_variant.items()} == {"mha": 1, "mqa": 1, "gqa": 3, "mla": 4}
    assert by_variant["mha"][0].kv_heads == 4
    assert by_variant["mqa"][0].kv_heads == 1
    assert by_variant["mha"][0].kv_lora_rank is None
    assert {c.kv_heads for c in by_variant["mla"]} == {None}
    assert count_cells(axes) == 9


def test_an_axis_that_a_variant_overrides_does_not_duplicate():
    assert len(expand([grid(variant=("block_pre_ln",), head_dim=(None, 16, 32))]).cases) == 1
    # A default written out is the same module as the default left out.
    assert len(expand([grid(head_dim=(None, 16, 32))]).cases) == 2


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_registered_variant_expands(variant):
    (case,) = expand([grid(variant=(variant,), kv_heads=(2,), mask=("causal",))]).cases
    assert case.variant == variant
    assert VARIANTS[variant].params(case) > 0


def test_impossible_geometry_is_a_clash_and_the_possible_rest_expands():
    found = expand([grid(variant=("mha", "mqa"), heads=(4, 7))])
    assert [(c.variant, c.key, c.value) for c in found.clashes] == [("mha", "heads", 7), ("mqa", "heads", 7)]
    assert "embed_dim (64)" in found.clashes[0].rule
    assert {c.heads for c in found.cases} == {4}


def test_a_phase_that_the_variant_lacks_is_a_clash():
    found = expand([grid(variant=("block_mla",), phase=("prefill", "decode"))])
    assert [(c.key, c.value) for c in found.clashes] == [("phase", "decode")]
    assert "prefill, train" in found.clashes[0].rule


def test_each_variant_is_held_to_its_own_phases():
    found = expand([grid(variant=("mha", "block_mla", "mqa"), phase=("decode",))])
    assert [(c.variant, c.key) for c in found.clashes] == [("block_mla", "phase")]
    assert [c.variant for c in found.cases] == ["mha", "mqa"]


def test_decode_of_one_token_is_a_clash_and_prefill_of_one_is_not():
    found = expand([grid(seq_len=(1, 2), phase=("prefill", "decode"))])
    assert [(c.key, c.value) for c in found.clashes] == [("seq_len", 1)]
    assert [(c.seq_len, c.phase) for c in found.cases] == [(1, "prefill"), (2, "prefill"), (2, "decode")]


def test_a_clash_names_its_block_and_is_said_once():
    found = expand([grid(), grid(heads=(7,), mask=("none", "causal"), batch=(1, 2))])
    assert [(c.block, c.key) for c in found.clashes] == [(1, "heads")]


def test_an_exclusion_drops_a_cell_only_if_every_axis_matches():
    axes = grid(mask=("none", "causal"), dtype=("float32", "float16"))
    cases = expand([axes], [{"mask": ("causal",), "dtype": ("float16",)}]).cases
    assert [(c.mask, c.dtype) for c in cases] == [("none", "float32"), ("none", "float16"), ("causal", "float32")]


def test_an_exclusion_matches_resolved_values():
    axes = grid(variant=("mha", "mqa", "mla"))
    assert [c.variant for c in expand([axes], [{"kv_heads": (1,)}]).cases] == ["mha", "mla"]
    assert [c.variant for c in expand([axes], [{"kv_heads": (None,)}]).cases] == ["mha", "mqa"]
    assert [c.variant for c in expand([axes], [{"kv_heads": (1, 4)}]).cases] == ["mla"]
    assert expand([axes], [{"head_dim": (16,)}]).cases == ()


def test_an_exclusion_drops_impossible_cells_by_raw_values():
    found = expand([grid(variant=("gqa",), kv_heads=(2, 3))], [{"kv_heads": (3,), "heads": (4,)}])
    assert found.clashes == ()
    assert [c.kv_heads for c in found.cases] == [2]


def test_an_impossible_module_must_be_excluded_in_every_way_it_would_be_run():
    axes = grid(heads=(4, 7), mask=("none", "causal"))
    assert len(expand([axes], [{"heads": (7,), "mask": ("none",)}]).clashes) == 1
    both = [{"heads": (7,), "mask": ("none",)}, {"heads": (7,), "mask": ("causal",)}]
    assert expand([axes], both).clashes == ()


def test_an_exclusion_drops_an_impossible_phase_and_a_decode_of_one_token():
    axes = grid(variant=("mha", "block_mla"), seq_len=(1, 4), phase=("prefill", "decode"))
    found = expand([axes], [{"variant": ("block_mla",), "phase": ("decode",)}, {"seq_len": (1,), "phase": ("decode",)}])
    assert found.clashes == ()
    assert found.unused == ()
    assert len(found.cases) == 2 * 4 - 2 - 1


def test_an_exclusion_that_matches_nothing_is_reported():
    drops: list[dict] = [{"heads": (4,), "batch": (1,)}, {"batch": (7,)}, {"heads": (5,)}, {"variant": ("gqa",)}]
    assert expand([grid(batch=(1, 2))], drops).unused == (1, 2, 3)


def test_an_exclusion_that_another_makes_superfluous_is_still_used():
    drops: list[dict] = [{"batch": (2,)}, {"batch": (2,), "mask": ("none",)}, {"heads": (4,), "batch": (2,)}]
    assert expand([grid(batch=(1, 2))], drops).unused == ()


def test_blocks_follow_each_other_and_the_first_position_of_a_case_wins():
    cases = expand([grid(batch=(1, 2)), grid(batch=(3, 2)), grid(head_dim=(16,), batch=(1,))]).cases
    assert [c.batch for c in cases] == [1, 2, 3]


def test_an_exclusion_holds_for_every_block():
    assert [c.batch for c in expand([grid(batch=(1, 2)), grid(batch=(2, 3))], [{"batch": (2,)}]).cases] == [1, 3]


def test_kernels_replace_the_axis_without_duplicates():
    cases = expand([grid(kernel=("eager", "sdpa"), batch=(1, 2))], kernels=("b", "a")).cases
    assert [(c.batch, c.kernel) for c in cases] == [(1, "b"), (1, "a"), (2, "b"), (2, "a")]


def test_exclusions_by_kernel_are_judged_before_and_after_the_replacement():
    axes = grid(kernel=("eager", "sdpa"), batch=(1, 2))
    drops: list[dict] = [{"kernel": ("sdpa",), "batch": (2,)}]
    assert expand([axes], drops, kernels=("mine",)).unused == ()
    assert len(expand([axes], drops, kernels=("mine",)).cases) == 2
    assert [c.batch for c in expand([axes], drops, kernels=("sdpa",)).cases] == [1]


def test_a_hundred_thousand_cells_are_all_there_and_all_different():
    # Not timed here; this grid must stay well under 2 seconds.
    axes = grid(
        variant=("mha", "mqa", "gqa", "mla"),
        embed_dim=(256, 512, 768, 1024, 1280),
        heads=(8, 16),
        kv_heads=(2,),
        seq_len=tuple(range(2, 142)),
        phase=("prefill", "decode", "train"),
        dtype=("float32", "bfloat16", "float16"),
        batch=(1, 2),
    )
    cases = expand([axes]).cases
    assert len(cases) == len(set(cases)) == count_cells(axes) == 100_800


def test_counting_expands_nothing():
    assert count_cells(grid(seq_len=range(1, 10**6), batch=range(1, 10**6))) == (10**6 - 1) ** 2


def test_neither_torch_nor_pandas_is_imported():
    code = "import sys, harness.suite.config; print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    assert python("-c", code).out.strip() == "[]"
