"""The cost model of latent attention: counts that are torch's, a choice that the module follows, and `--explain`."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import harness
from harness.case import Case
from harness.report.plan import print_explanations, why
from harness.variants.specs.latent import (
    FLOPS_PER_BYTE,
    Cost,
    FormChoice,
    LatentSizes,
    absorbed_cost,
    choose,
    expanded_cost,
)
from tests.support import printed

SMALL = LatentSizes(heads=4, nope=16, rope=8, value=12, rank=32)
DEEPSEEK_V3 = LatentSizes(heads=128, nope=128, rope=64, value=128, rank=512)
E = 24


def module(sizes: LatentSizes, mode: str = "auto", dtype: torch.dtype = torch.float32) -> Any:
    H, N, R, V, r = sizes.heads, sizes.nope, sizes.rope, sizes.value, sizes.rank
    dims: dict[str, Any] = {"kv_lora_rank": r, "nope_head_dim": N, "rope_head_dim": R, "v_head_dim": V, "mode": mode}
    return harness.MultiHeadLatentAttention(E, H, **dims, dtype=dtype).eval()


def counted_flops(latent_attention: Any, sizes: LatentSizes, queries: int, keys: int) -> int:
    """Of everything but the projections from and to E, which both forms share."""
    dtype = next(latent_attention.parameters()).dtype
    cache = latent_attention.new_cache(keys)
    cache.append(torch.randn(1, 1, keys - queries, sizes.rank + sizes.rope).to(dtype))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        latent_attention(torch.randn(1, queries, E).to(dtype), causal=True, cache=cache)
    per_token = sizes.heads * (sizes.nope + sizes.rope) + sizes.rank + sizes.rope + sizes.heads * sizes.value
    return counter.get_total_flops() - 2 * queries * E * per_token


@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (7, 40), (40, 40)])
def test_the_flops_are_those_that_torch_counts(queries, keys):
    absorbed = counted_flops(module(SMALL, "absorbed"), SMALL, queries, keys)
    assert absorbed == absorbed_cost(SMALL, queries, keys, 4).flops
    expanding = module(SMALL)
    expanding._absorbs = lambda *_: False  # over cached latents, as auto does it
    assert counted_flops(expanding, SMALL, queries, keys) == expanded_cost(SMALL, queries, keys, 4).flops


def test_the_bytes_by_hand():
    sizes = LatentSizes(heads=2, nope=3, rope=2, value=5, rank=7)
    # Two queries (moved 7, joined 9, mixed 7, brought back 5, for 2 heads) over 10 keys (9 as key, 7 as value).
    assert absorbed_cost(sizes, 2, 10, 4).bytes == 4 * (2 * 2 * 28 + 10 * 16)
    # Per key: 9 read, 16 made; 6 + 2 read and 10 joined; 10 + 10 attended. Per query 5 + 5 for 2 heads.
    assert expanded_cost(sizes, 2, 10, 4).bytes == 4 * (10 * (9 + 16 + 8 + 10 + 20) + 2 * 20)
    # Half precision: what is attended is read, written in 4 bytes and read again.
    assert absorbed_cost(sizes, 2, 10, 2).bytes == 2 * 2 * 2 * 28 + 10 * 16 * (2 + 4 + 4)
    assert absorbed_cost(sizes, 2, 10, 8).bytes == 2 * absorbed_cost(sizes, 2, 10, 4).bytes


def test_the_lower_price_wins_and_bytes_have_theirs():
    assert Cost(flops=5, bytes=3).price == 5 + 3 * FLOPS_PER_BYTE
    assert FormChoice(absorbed=Cost(10, 1), expanded=Cost(10, 2)).absorbs
    assert not FormChoice(absorbed=Cost(10, 1), expanded=Cost(10, 1)).absorbs
    assert not FormChoice(absorbed=Cost(11, 1), expanded=Cost(10, 1)).absorbs


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_deepseek_decodes_in_latent_space_and_prefills_outside(itemsize):
    assert all(choose(DEEPSEEK_V3, 1, keys, itemsize=itemsize).absorbs for keys in (2, 64, 4096, 131_072))
    assert not any(choose(DEEPSEEK_V3, n, n, itemsize=itemsize).absorbs for n in (1024, 4096, 32_768))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sizes=st.builds(
        LatentSizes,
        heads=st.integers(1, 64),
        nope=st.integers(1, 128),
        rope=st.integers(0, 64),
        value=st.integers(1, 128),
        rank=st.integers(1, 512),
    ),
    keys=st.integers(1, 5000),
    itemsize=st.sampled_from([2, 4, 8]),
)
def test_prices_are_straight_lines_in_the_queries_so_there_is_one_crossover(sizes, keys, itemsize):
    choices = [choose(sizes, n, keys, itemsize=itemsize) for n in (1, 2, 3, 50)]
    for form in ("absorbed", "expanded"):
        one, two, three, fifty = (getattr(choice, form).price for choice in choices)
        assert three - two == two - one > 0 and fifty - one == 49 * (two - one)


def test_auto_does_what_the_model_says_on_both_sides_of_the_crossover():
    keys = 64
    crossover = next(n for n in range(1, keys) if not choose(SMALL, n, keys).absorbs)
    assert 1 < crossover < keys
    for queries, cost in ((crossover - 1, absorbed_cost), (crossover, expanded_cost)):
        assert counted_flops(module(SMALL), SMALL, queries, keys) == cost(SMALL, queries, keys, 4).flops


def test_auto_looks_at_the_dtype_of_the_cache():
    keys, dtypes = 64, {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    absorbs = {n: {size: choose(SMALL, n, keys, itemsize=size).absorbs for size in dtypes} for n in range(1, keys)}
    queries = next(n for n, by_size in absorbs.items() if len(set(by_size.values())) == 2)
    for size, dtype in dtypes.items():
        cost = absorbed_cost if absorbs[queries][size] else expanded_cost
        assert counted_flops(module(SMALL, dtype=dtype), SMALL, queries, keys) == cost(SMALL, queries, keys, size).flops


# ---- --explain -------------------------------------------------------------------------------------------------------


def case(variant: str = "mla", phase: str = "decode", seq_len: int = 512, **changes: object) -> Case:
    latent = {"kv_lora_rank": 128, "rope_head_dim": 16, "v_head_dim": 32} if "mla" in variant else {}
    fields: dict[str, Any] = {
        "kernel": "eager",
        "embed_dim": 256,
        "heads": 8,
        "kv_heads": None,
        "head_dim": 32,
        "batch": 1,
    }
    fields |= {"mask": "causal", "dtype": "float32", **latent, **changes}
    return Case(variant=variant, phase=phase, seq_len=seq_len, **fields)


def explained(*cases: Case) -> str:
    return printed(lambda console: print_explanations(cases, console), width=60)


def test_decode_is_absorbed_and_prefill_expanded_with_their_counts():
    step, prefill = case(phase="decode"), case(phase="prefill")
    chosen = choose(LatentSizes(8, 32, 16, 32, 128), 1, 512)
    assert str(why(step)).startswith("absorbed: absorbed 2.36M FLOPs")
    assert chosen.absorbed.flops == pytest.approx(2.36e6, rel=2e-3)
    assert str(why(prefill)).startswith("expanded: ")
    text = explained(step, prefill)
    assert text.index(step.case_id) < text.index("absorbed:") < text.index(prefill.case_id) < text.index("expanded:")
    assert f"FLOPs + {FLOPS_PER_BYTE} x bytes" in text


def test_fixed_forms_say_that_they_are_fixed():
    assert "its cache holds decompressed keys" in str(why(case("mla_naive")))
    assert str(why(case("mla_absorbed", phase="prefill"))).startswith("absorbed: the variant says so")


def test_other_variants_name_their_kernel_alone():
    other = case("mha", kv_heads=8)
    assert why(other) is None
    assert explained(other).splitlines() == [other.case_id, "  kernel eager, as the config says"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"phase": "decode", "seq_len": 4096},
            "kernel grouped: 1 rows over 4096 keys, 1 queries, causal or windowed, decode",
        ),
        ({"phase": "prefill", "seq_len": 1024}, "kernel tiled: 1024 rows over 1024 keys, 1024 queries"),
        ({"phase": "prefill", "seq_len": 64}, "kernel eager: 64 rows"),
    ],
)
def test_what_auto_comes_to_is_told_with_its_numbers(options, told):
    assert told in " ".join(explained(case("mha", kv_heads=8, kernel="auto", mask="causal", **options)).split())
