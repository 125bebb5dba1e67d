"""Real extra work in what is timed: small matrix products on buffers of their own, after each call of the candidate.

A slowed version is a copy of the tree whose `harness/cell/measure.py` ends with `ADDED`, and which holds `COUNTS`:
how many rows are multiplied after each call of a cell. The count is fixed, so that every process does the same work.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COUNTS = "extra_work.json"  # in the tree's harness folder
WIDTH = 64  # of the matrices: what a head's keys are wide
PIECE = 64  # rows of one product: about 10 us, in the cache
ADDED = """

from bench.gate_study.extra_work import slowed as _slowed  # noqa: E402

timed_call = _slowed(timed_call, Path(__file__).parent.parent)
"""

Call = Callable[[], object]


class ExtraWork:
    """`rows` rows of matrix products: whole pieces and a rest. Lean, so that a few microseconds can be asked for."""

    def __init__(self, rows: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(rows)
        pieces, rest = divmod(rows, PIECE)
        weight = torch.randn(WIDTH, WIDTH, generator=generator)
        whole, out = torch.randn(PIECE, WIDTH, generator=generator), torch.empty(PIECE, WIDTH)
        last = (torch.randn(rest, WIDTH, generator=generator), torch.empty(rest, WIDTH))
        self.rows, self._multiply, self._weight = rows, torch.mm, weight
        self._products = [(whole, out)] * pieces + [last] * bool(rest)

    def __call__(self) -> None:
        multiply, weight = self._multiply, self._weight
        for rows, out in self._products:
            multiply(rows, weight, out=out)


def followed_by(call: Call, work: ExtraWork) -> Call:
    def both() -> object:
        result = call()
        work()
        return result

    return both


def slowed(timed_call: Callable[..., Call], folder: Path) -> Callable[..., Call]:
    """`timed_call` whose candidates do the extra work that the folder's counts ask for; references are left alone."""
    counts: Mapping[str, int] = json.loads((folder / COUNTS).read_text(encoding="utf-8"))

    def timed_call_with_extra_work(pair: Any, side: Any, seed: int) -> Call:
        call = timed_call(pair, side, seed)
        rows = counts.get(pair.case.case_id, 0)
        return followed_by(call, ExtraWork(rows)) if rows and side is pair.candidate else call

    return timed_call_with_extra_work
