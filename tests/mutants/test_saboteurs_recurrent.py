"""Saboteurs of states: each changes the result exactly in the cells in which it says so, and is seen in all of them."""

from collections.abc import Iterator

import pytest
import torch

from harness.case import Case
from harness.cell.build import Pair, build_pair
from harness.cell.draws import fast_path_off
from harness.cell.referee import outputs
from harness.cell.regimes import make_inputs
from harness.kernels.front import find_kernel
from harness.mutants.result import SURVIVED
from harness.mutants.saboteurs.saboteur import load_all
from harness.mutants.study import StudiedCell, right_problem, try_saboteur
from harness.variants.specs.recurrent import CHUNK
from tests.support.attention import make_case

VARIANTS = ("lightning", "gated_deltanet", "kda", "mamba2")
SIZES = {"embed_dim": 12, "heads": 4, "head_dim": 4, "kv_heads": 2}
# Seen only when the module is called again: the first call is right.
BY_REPETITION = {"state_left_from_the_last_call"}


def cells(dtype: str = "float64") -> Iterator[Case]:
    for variant in VARIANTS:
        sizes = {**SIZES, "dtype": dtype}
        for phase, length in (("prefill", 9), ("prefill", CHUNK + 3), ("decode", CHUNK + 9), ("decode", 11)):
            yield make_case(variant, **sizes, phase=phase, seq_len=length)
        yield make_case(variant, **sizes, phase="train", seq_len=7)
        yield make_case(variant, **sizes, phase="decode", seq_len=20, mask="left_padding", batch=3)
        yield make_case(variant, **sizes, phase="prefill", seq_len=12, mask="left_padding", batch=1)


ALL = load_all()
OF_STATES = {name: ALL[name] for name in ALL if ALL[name].core == "recurrence"}


def found(pair: Pair) -> dict[str, torch.Tensor]:
    inputs = make_inputs(pair.case, "plain", torch.Generator().manual_seed(1), poison=None)
    assert inputs is not None
    cotangent = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(2)).to(inputs.x.dtype)
    with fast_path_off():
        return outputs(pair, pair.candidate, inputs.candidate_x, cotangent)


def test_there_are_enough_and_each_stands_for_a_bug_of_its_own() -> None:
    assert len(OF_STATES) >= 25
    assert all(any(saboteur.applies(case) for case in cells()) for saboteur in OF_STATES.values())
    bugs = [saboteur.stands_for for saboteur in OF_STATES.values()]
    assert len(set(bugs)) == len(bugs) and all(len(bug) > 20 for bug in bugs)


@pytest.mark.parametrize("case", list(cells()), ids=lambda case: case.case_id)
def test_applies_is_exact(case: Case) -> None:
    """Where a saboteur says that it is, something changes; elsewhere not a bit does."""
    right = found(build_pair(case, find_kernel("eager"), seed=3))
    for name, saboteur in OF_STATES.items():
        if name in BY_REPETITION:
            continue
        pair = build_pair(case, find_kernel("eager"), seed=3)
        assert saboteur.spoil is not None
        saboteur.spoil(pair)
        wrong = found(pair)
        same = all(torch.equal(wrong[key], right[key]) for key in right)
        assert same != saboteur.applies(case), (name, same)


@pytest.mark.parametrize("case", [c for c in cells("float32") if c.variant in ("kda", "mamba2")], ids=str)
def test_every_one_is_seen_where_it_applies(case: Case) -> None:
    studied = StudiedCell(case, seed=0, regimes=["plain", "tiny"])
    assert right_problem(studied) is None
    survivors = [
        name for name, saboteur in OF_STATES.items() if try_saboteur(studied, saboteur).outcome == SURVIVED
    ]  # fmt: skip
    assert survivors == []


def test_saboteurs_of_softmaxes_leave_recurrent_layers_alone() -> None:
    case = make_case("kda", **SIZES, phase="decode")
    others = [ALL[name] for name in ALL if name not in OF_STATES]
    assert len(others) >= 130 and not any(saboteur.applies(case) for saboteur in others)
    assert not any(saboteur.applies(make_case("gqa", phase="decode")) for saboteur in OF_STATES.values())
