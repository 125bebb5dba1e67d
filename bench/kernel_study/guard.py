"""A wrong kernel is never timed: before each measurement the sides must agree, with float64 and with each other."""

import dataclasses

import torch
from torch import Tensor

from bench.kernel_study.cell import Cell, Point, Sides
from harness.cell.rule import DEGRADED_FACTOR
from harness.kernels.call import Unsupported

# Beyond 32 N rounding cannot explain a difference; N = max|R - G| + u max|G| (the acceptance rule's noise floor without
# its conditioning term: inputs are plain here).
FACTOR = DEGRADED_FACTOR
SMALL_QUERIES, SMALL_KEYS = 160, 320
TRUSTED = 256  # the reference itself must be within this many u max|G| of float64


class WrongReference(RuntimeError):
    """The side that all others are compared with is itself wrong: nothing can be measured here."""


def problems(point: Point, sides: Sides) -> dict[str, str]:
    """Why a side must not be timed, for each such side.

    In half precision 32 N would hide much, so there each side is also judged in float32 at a small size.
    """
    found = disagreements(sides)
    cell = point.cell
    if cell.dtype != "float32":
        small = point.build(_small(cell))
        for name, problem in disagreements(small).items():
            found.setdefault(name, f"{problem} (in float32 at {_small(cell).label})")
    return found


def disagreements(sides: Sides) -> dict[str, str]:
    reference = sides.calls[sides.reference]()
    golden = sides.golden()
    u, largest = torch.finfo(reference.dtype).eps, float(golden.value.abs().max())
    own = _distance(golden.pick(reference), golden.value)
    if not own <= TRUSTED * u * largest:
        raise WrongReference(f"{sides.reference} is {own:.1e} from float64, with values up to {largest:.1e}")
    limit = FACTOR * (own + u * largest)
    found = {}
    for name, call in sides.calls.items():
        if name == sides.reference or name in sides.unlike:
            continue
        try:
            out = call()
        except Unsupported as refusal:
            found[name] = f"unsupported: {refusal}"
            continue
        if problem := _problem(out, reference, limit):
            found[name] = f"wrong: {problem}"
        elif not (error := _distance(golden.pick(out), golden.value)) <= limit:
            found[name] = f"wrong: {error:.1e} from float64, limit {limit:.1e}"
    return found


def _problem(out: Tensor, reference: Tensor, limit: float) -> str | None:
    if out.shape != reference.shape or out.dtype != reference.dtype:
        return f"gives {tuple(out.shape)} {out.dtype}, not {tuple(reference.shape)} {reference.dtype}"
    # Both may be a limit away from the truth.
    if not (error := _distance(out, reference)) <= 2 * limit:
        return f"{error:.1e} from the reference, limit {2 * limit:.1e}"
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.to(b.dtype) - b).abs().max()) if a.numel() else 0.0


def _small(cell: Cell) -> Cell:
    L, S = min(cell.queries, SMALL_QUERIES), min(cell.keys, SMALL_KEYS)
    keys = L if cell.queries == cell.keys else S
    return dataclasses.replace(cell, dtype="float32", queries=L, keys=keys)
