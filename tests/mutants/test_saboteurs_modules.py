"""Saboteurs of modules and caches: each changes the result exactly in the cells in which it says that it does."""

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import Pair, build_pair
from harness.cell.referee import Referee, outputs
from harness.kernels.front import find_kernel
from harness.mutants.saboteurs.saboteur import Saboteur, load_all

OURS = [s for s in (load_all()[name] for name in load_all()) if s.spoil is not None and s.core == "softmax"]
CACHED = ("gqa", "mla", "mla_naive", "mla_absorbed")
BLOCKS = ("block_post_ln", "block_pre_ln", "block_mla")


def case(variant: str, **axes: Any) -> Case:
    common: dict[str, Any] = {
        "kernel": "eager", "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "seq_len": 11, "batch": 2,
        "mask": "causal", "dtype": "float64", "phase": "prefill",
    }  # fmt: skip
    if "mla" in variant:
        common |= {"kv_heads": None, "kv_lora_rank": 12, "rope_head_dim": 4, "v_head_dim": 8}
    elif variant == "gqa":
        common |= {"heads": 4, "head_dim": 4}
    return Case(variant, **(common | axes))


def grid() -> Iterator[Case]:
    for variant in CACHED:
        yield case(variant, mask="dead_rows")
        yield case(variant, phase="train")
        for mask in ("none", "causal", "dead_rows"):
            yield case(variant, phase="decode", mask=mask)
        yield case(variant, phase="decode", bias=False, batch=1)
        # One token, one decoded token, hidden decoded tokens, a window of one key, page borders.
        yield case(variant, phase="decode", seq_len=1)
        yield case(variant, phase="decode", seq_len=2)
        yield case(variant, phase="decode", seq_len=20, mask="padding")
        yield case(variant, phase="decode", seq_len=7, mask="sliding_window")
    for variant in ("mha", "mla_naive", "mla_absorbed"):
        yield case(variant, phase="decode", seq_len=64, batch=1)
        yield case(variant, phase="decode", seq_len=132, mask="padding", batch=1)
        yield case(variant, phase="decode", seq_len=67, mask="sliding_window")
        yield case(variant, phase="decode", dtype="bfloat16")
    for variant in BLOCKS:
        yield case(variant, mask="padding")
        yield case(variant, phase="train", bias=False)
    for variant in ("mla_naive", "mla_absorbed"):
        yield case(variant, q_lora_rank=6)
        yield case(variant, rope_head_dim=2)
        yield case(variant, heads=1)
        yield case(variant, kv_lora_rank=8)
        yield case(variant, v_head_dim=4)
    for seq_len in (257, 258):
        yield case("mla_absorbed", seq_len=seq_len, batch=1, heads=1)


CELLS = tuple(grid())


@cache
def right(cell: Case) -> tuple[Pair, Tensor, Tensor, dict[str, Tensor]]:
    pair = build_pair(cell, find_kernel("eager"), 0)
    generator = torch.Generator().manual_seed(1)
    shape = (2, cell.batch, cell.seq_len, cell.embed_dim)
    x, cotangent = torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, cell.dtype))
    return pair, x, cotangent, outputs(pair, pair.candidate, x, cotangent)


def spoilt(saboteur: Saboteur, cell: Case) -> Pair:
    pair = build_pair(cell, find_kernel("eager"), 0)
    assert saboteur.spoil is not None
    saboteur.spoil(pair)
    return pair


def test_there_are_many():
    assert len(OURS) >= 30
    assert all(len(saboteur.stands_for) > 20 for saboteur in OURS)


@pytest.mark.parametrize("saboteur", OURS, ids=lambda s: s.name)
def test_it_changes_the_result_where_it_applies_and_no_bit_elsewhere(saboteur: Saboteur):
    seen = set()
    for cell in CELLS:
        _, x, cotangent, expected = right(cell)
        pair = spoilt(saboteur, cell)
        found = outputs(pair, pair.candidate, x, cotangent)
        assert found.keys() == expected.keys()
        applies = saboteur.applies(cell)
        seen.add(applies)
        if applies:
            change = max(float((found[key] - expected[key]).abs().max()) for key in expected)
            assert change > 1e-8 or change != change, cell.case_id
        else:
            assert all(torch.equal(found[key], expected[key]) for key in expected), cell.case_id
    assert seen == {True, False}


@pytest.mark.parametrize("saboteur", OURS, ids=lambda s: s.name)
def test_parameters_and_the_reference_are_left_alone(saboteur: Saboteur):
    for cell in (case("gqa", phase="decode"), case("mla", phase="decode", q_lora_rank=6), case("block_post_ln")):
        whole, pair = right(cell)[0], spoilt(saboteur, cell)
        for old, new in ((whole.candidate, pair.candidate), (whole.reference, pair.reference)):
            names = dict(new.module.named_parameters())
            assert all(torch.equal(names.pop(name), value) for name, value in old.module.named_parameters())
            assert not names


@pytest.mark.parametrize("saboteur", OURS, ids=lambda s: s.name)
def test_a_copy_in_float32_is_spoilt_too(saboteur: Saboteur):
    """And runs: otherwise the float32 shadow of a half-precision cell would be skipped, and the bug excused."""
    cell = next(cell for cell in CELLS if saboteur.applies(cell))
    _, x, cotangent, _ = right(cell)
    pair = spoilt(saboteur, cell)
    twin = copy.deepcopy(pair.candidate.module)
    assert type(twin) is type(pair.candidate.module)
    shadow = pair.in_float32()
    expected = outputs(pair, pair.candidate, x, cotangent)
    found = outputs(shadow, shadow.candidate, x.float(), cotangent.float())
    for key, value in expected.items():
        assert found[key].dtype == torch.float32
        assert float((found[key] - value).abs().max()) < 1e-3 * max(1.0, float(value.abs().max())), key


def judged() -> Iterator[Any]:
    for saboteur in OURS:
        for dtype in ("float32", "bfloat16"):
            cells = [dataclasses.replace(cell, dtype=dtype) for cell in CELLS]
            applicable = [cell for cell in cells if saboteur.applies(cell)]
            if applicable:
                yield pytest.param(saboteur, applicable[0], id=f"{saboteur.name}-{dtype}")


@pytest.mark.parametrize(("saboteur", "cell"), list(judged()))
def test_the_comparison_sees_it(saboteur: Saboteur, cell: Case):
    referee = Referee(build_pair(cell, find_kernel("eager"), 0), ("plain",), seed=0, poison=None)
    assert any(verdict.status == "mismatch" for verdict in referee.examine(spoilt(saboteur, cell))), cell.case_id
