"""The saboteurs judged by the rules of others: what each lets through that ours does not.

Each rule gets what its project feeds it, plain Gaussian inputs, and more: random biases, every cell, and in training
cells all gradients (but transformers', which compares none, and whose atol would reject right ones). Constants are
facts taken from the projects' sources (stored copies, read November 2026); no code is.
`python -m bench.sensitivity.rivals [CONFIG]` prints the table.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from harness.candidate.state import preserved
from harness.case import Case
from harness.cell.build import Pair
from harness.cell.draws import fast_path_off
from harness.cell.referee import outputs, source_of
from harness.mutants.result import KILLED
from harness.mutants.saboteurs.saboteur import Saboteur, load_all
from harness.mutants.study import StudiedCell, right_problem, try_saboteur
from harness.registry import Registry
from harness.suite.config import load_suite
from harness.suite.schema import REGIMES

OURS = "ours"
REGIME = "plain"
CONFIG = "configs/smoke.yaml"


@dataclass(frozen=True)
class Compared:
    """One tensor of a comparison: the candidate, the reference in the same dtype, and the golden in float64."""

    candidate: Tensor
    reference: Tensor
    golden: Tensor
    is_gradient: bool = False


Rule = Callable[[Compared], bool]
RULES: Registry[Rule] = Registry("rule")


def rule(judge: Rule) -> Rule:
    return RULES.add(judge.__name__, judge)


@rule
def assert_close(t: Compared) -> bool:
    """torch.testing.assert_close with its defaults, which depend on the dtype: float32 rtol 1.3e-6, atol 1e-5;
    bfloat16 1.6e-2, 1e-5; float16 1e-3, 1e-5; float64 1e-7, 1e-7. The installed function itself is called.
    """
    try:
        torch.testing.assert_close(t.candidate, t.reference)
    except AssertionError:
        return False
    return True


@rule
def transformers(t: Compared) -> bool:
    """transformers' `_test_eager_matches_sdpa_inference` (tests/test_modeling_common.py), its CPU row: float32 atol
    1e-6, rtol 1e-4; float16 5e-3, 5e-3; bfloat16 1e-2, 1e-2, where atol is at least 3 % of the largest output. allclose
    for each batch row apart, and 80 % of the rows are enough. It has no float64: float32's limits stand in. It compares
    no gradients; a weight's has no batch rows either.
    """
    if t.is_gradient:
        return True
    atol, rtol = {torch.float16: (5e-3, 5e-3), torch.bfloat16: (1e-2, 1e-2)}.get(t.reference.dtype, (1e-6, 1e-4))
    if t.reference.dtype == torch.bfloat16:
        atol = max(atol, 3e-2 * max(float(t.candidate.abs().max()), float(t.reference.abs().max())))
    rows = zip(t.candidate, t.reference, strict=True)
    matches = [torch.allclose(mine, theirs, atol=atol, rtol=rtol) for mine, theirs in rows]
    return sum(matches) >= 0.8 * len(matches)


@rule
def kernelbench_2024(t: Compared) -> bool:
    """KernelBench's older limit, as it is quoted: allclose(atol=1e-2, rtol=1e-2), whatever the dtype. Not checked
    against that version's source.
    """
    return torch.allclose(t.candidate, t.reference, atol=1e-2, rtol=1e-2)


@rule
def kernelbench(t: Compared) -> bool:
    """KernelBench today (`get_tolerance_for_precision`): 1e-4 for float32, 1e-2 for half types, as atol and as rtol.
    It has no float64: float32's limit stands in.
    """
    limit = 1e-2 if t.reference.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return torch.allclose(t.candidate, t.reference, atol=limit, rtol=limit)


@rule
def flash_attention(t: Compared) -> bool:
    """flash-attention's tests: at most twice the error of plain PyTorch in the same dtype, both against the upcast
    computation, plus an atol of two roundings at 0.3: 2 max|(G + 0.3 - 0.3) - G|. Theirs are half types alone.
    """
    golden = t.golden.to(t.reference.dtype)
    atol = 2 * (golden + 0.3 - 0.3 - golden).abs().max()
    error, allowed = (t.candidate - golden).abs().max(), 2 * (t.reference - golden).abs().max()
    return bool(error <= allowed + atol)


def compared(cell: StudiedCell, pair: Pair) -> Iterator[Compared]:
    """Output, and in training cells all gradients, under plain inputs; as their tests call it, nothing is watched."""
    expected = cell.referee.expected(REGIME)
    assert expected is not None, f"{REGIME} applies to every cell"
    pair.watch.checking = False
    with preserved(), fast_path_off():
        torch.manual_seed(cell.seed)
        found = outputs(pair, pair.candidate, expected.inputs.candidate_x, expected.cotangent)
    for name, candidate in found.items():
        if name == "weights":
            continue
        references, goldens = expected.tensor(name, source_of(pair, name))
        yield Compared(candidate, references[0], goldens[0], name.startswith("grad "))


def passes(cell: StudiedCell, pair: Pair) -> dict[str, bool]:
    """By rule. A candidate that raises, or gives another shape, is seen by every test."""
    try:
        tensors = list(compared(cell, pair))
    except Exception:  # a wrong candidate may break in any way
        return dict.fromkeys(RULES, False)
    if any(t.candidate.shape != t.reference.shape or t.candidate.dtype != t.reference.dtype for t in tensors):
        return dict.fromkeys(RULES, False)
    return {name: all(RULES[name](t) for t in tensors) for name in RULES}


@dataclass(frozen=True)
class Judged:
    """A rule sees a saboteur where it rejects it; a rule that rejects the right candidate too has seen nothing."""

    saboteur: str
    case_id: str
    dtype: str
    rule: str
    seen: bool
    cries_wolf: bool


def rivalry(cases: Iterable[Case], saboteurs: Sequence[Saboteur], *, seed: int = 0) -> pd.DataFrame:
    """One row per (saboteur, applicable cell, rule)."""
    return pd.DataFrame([judged for case in cases for judged in _cell_rivalry(case, saboteurs, seed)])


def _cell_rivalry(case: Case, saboteurs: Sequence[Saboteur], seed: int) -> Iterator[Judged]:
    cell = StudiedCell(case, seed=seed, regimes=REGIMES)
    applicable = [saboteur for saboteur in saboteurs if saboteur.applies(case)]
    right = passes(cell, cell.pair_with(cell.right.watch.kernel)) | {OURS: right_problem(cell) is None}
    for saboteur in applicable:
        passed = passes(cell, cell.sabotaged(saboteur))
        passed[OURS] = try_saboteur(cell, saboteur).outcome not in KILLED
        for name, accepted in passed.items():
            seen = right[name] and not accepted
            yield Judged(saboteur.name, case.case_id, case.dtype, name, seen, cries_wolf=not right[name])


def rivals_table(judged: pd.DataFrame) -> pd.DataFrame:
    """Saboteur x rule: in how many of its cells each rule sees it."""
    counts = judged.pivot_table(index="saboteur", columns="rule", values="seen", aggfunc="sum", sort=False)
    cells = judged.groupby("saboteur", sort=False)["case_id"].nunique()
    return counts.astype(int).reindex(columns=[*RULES, OURS]).assign(cells=cells)


def scores(judged: pd.DataFrame) -> pd.DataFrame:
    """By rule: share of (saboteur, cell) pairs seen, by dtype and in all; saboteurs never seen though ours sees them;
    and in how many cells the rule rejects the right candidate.
    """
    by_dtype = judged.pivot_table(index="rule", columns="dtype", values="seen", aggfunc="mean")
    table = by_dtype.assign(all=judged.groupby("rule")["seen"].mean())
    table["never_seen"] = {name: len(unseen) for name, unseen in never_seen(judged).items()}
    wolf = judged.groupby(["rule", "case_id"])["cries_wolf"].first()
    table["rejects_right"] = wolf.groupby("rule").sum()
    return table.reindex([*RULES, OURS])


def never_seen(judged: pd.DataFrame) -> dict[str, list[str]]:
    """By rule: the saboteurs that it lets through in every cell, though ours sees them in at least one."""
    table = rivals_table(judged)
    return {name: list(table.index[(table[name] == 0) & (table[OURS] > 0)]) for name in [*RULES, OURS]}


def main(config: str = CONFIG) -> int:
    started = time.perf_counter()
    saboteurs = load_all()
    judged = rivalry(load_suite(config).cases, [saboteurs[name] for name in saboteurs])
    print(rivals_table(judged).to_string())
    print(f"\n{scores(judged).to_string(float_format='{:.3f}'.format)}\n")
    for name, unseen in never_seen(judged).items():
        print(f"{name} never sees {len(unseen)}: {', '.join(unseen)}")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
