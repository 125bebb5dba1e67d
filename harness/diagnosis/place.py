"""Which batches, heads, rows, keys and channels of a tensor are wrong: a sentence and a picture. Pure arithmetic."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.battery.call import allowed_of
from harness.candidate.request import Request
from harness.diagnosis.result import Place

AXES = {
    "out": ("batch", "head", "row", "channel"),
    "grad q": ("batch", "head", "row", "channel"),
    "grad k": ("batch", "key head", "key", "channel"),
    "grad v": ("batch", "key head", "key", "channel"),
    "grad mask": ("batch", "head", "row", "key"),
}
PLURAL = {"batch": "batches"}
TILES = (8, 16, 32, 64, 128, 256, 512, 1024)
SAME = 1e-2  # of their size: slices that differ by less are the same
LISTED = 4
BLOCKS = " ░▒▓█"
WIDTH, HEIGHT = 64, 12  # of a picture


def find_place(name: str, got: Tensor, golden: Tensor, limit: float, request: Request) -> Place | None:
    """`limit`: an error up to it may be rounding. None where nothing is beyond it."""
    if got.shape != golden.shape:
        return Place(name, f"its shape is {tuple(got.shape)}, not {tuple(golden.shape)}{_other_shape(got, golden)}", ())
    got, golden = got.double(), golden.double()
    broken = got.isfinite() != golden.isfinite()
    error = (got - golden).abs().masked_fill(broken, math.inf)
    error = error.masked_fill(~got.isfinite() & ~broken, 0.0)
    wrong = ~(error <= limit)
    if not bool(wrong.any()):
        return None
    axes = AXES.get(name, tuple(f"axis {number}" for number in range(got.ndim)))[-got.ndim :]
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    parts = [where_wrong(wrong, axes)]
    if got.ndim == 4:
        parts += list(_patterns(name, got, golden, wrong, axes, request))
    return Place(
        tensor=name,
        sentence="; ".join(parts),
        picture=() if bool(wrong.all()) else picture_of(error, limit, axes),
        index=index,
        expected=float(golden[index]),
        got=float(got[index]),
        share=float(wrong.double().mean()),
    )


def where_wrong(wrong: Tensor, axes: Sequence[str]) -> str:
    """`wrong`: bool, an axis for each name."""
    if bool(wrong.all()):
        return "every element is wrong"
    parts, box = [], torch.ones_like(wrong)
    for dim, name in enumerate(axes):
        others = [d for d in range(wrong.ndim) if d != dim]
        here = wrong.any(dim=others) if others else wrong
        shape = [1] * wrong.ndim
        shape[dim] = -1
        box = box & here.view(shape)
        if not bool(here.all()):
            parts.append(described(name, here.tolist()))
    share = float(wrong.sum() / box.sum())
    words = "wrong: " + (", ".join(parts) if parts else f"in all {', '.join(PLURAL.get(n, f'{n}s') for n in axes)}")
    return words if share > 0.9 else f"{words} ({100 * share:.2g} % of the elements there)"


def described(name: str, marks: Sequence[bool]) -> str:
    """Which of them: `marks` has one for each index."""
    n, names = len(marks), PLURAL.get(name, f"{name}s")
    at = [i for i, mark in enumerate(marks) if mark]
    if len(at) == n:
        return f"all {n} {names}"
    if len(at) == 1:
        end = " (the last)" if at[0] == n - 1 else " (the first)" if at[0] == 0 else ""
        return f"{name} {at[0]}{end}"
    first, last = at[0], at[-1]
    if len(at) == last - first + 1:
        if last == n - 1:
            tile = next((T for T in reversed(TILES) if n > T and first == n // T * T and n % T), None)
            return f"{names} from {first} on" + (f" (the last, partial tile of {tile})" if tile else "")
        return f"{names} {first} to {last}" + ("" if first else f" (the first {len(at)})")
    step = at[1] - at[0]
    is_regular = len(at) > 2 and all(b - a == step for a, b in itertools.pairwise(at))
    if is_regular and first < step and last + step >= n:
        return f"every {_ordinal(step)} {name}, from {first} on"
    tile = next((T for T in TILES if n >= 2 * T and all(marks[i] == marks[i % T] for i in range(n))), None)
    if tile is not None:
        return f"{described(name, marks[:tile])}, and so in every {tile} {names}"
    rest = [i for i, mark in enumerate(marks) if not mark]
    if len(rest) <= 2:
        return f"all {names} but {_listed(rest)}"
    return f"{len(at)} of {n} {names} ({_listed(at)})"


def _ordinal(n: int) -> str:
    return f"{n}{'th' if 10 < n % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:LISTED]))
    return shown if len(numbers) <= LISTED else f"{shown} ..."


def _other_shape(got: Tensor, golden: Tensor) -> str:
    """A hint: which transposition it would be."""
    if got.numel() != golden.numel():
        return ""
    for one in range(golden.ndim):
        for other in range(one + 1, golden.ndim):
            if golden.transpose(one, other).shape == got.shape:
                return f": dimensions {one} and {other} have changed places"
    return ": as many elements"


def _patterns(
    name: str, got: Tensor, golden: Tensor, wrong: Tensor, axes: Sequence[str], request: Request
) -> Iterator[str]:
    """What the wrong elements have in common; each sentence holds for all of them."""
    if name in ("out", "grad q"):
        yield from _by_mask(wrong.any(-1), request)
    there = got[wrong]
    if not bool(there.isfinite().all()):
        nan, inf = int(there.isnan().sum()), int(there.isinf().sum())
        words = "NaN" if not inf else "infinite" if not nan else "NaN or infinite"
        yield f"{words} there" if nan + inf == there.numel() else f"{nan + inf} of these elements are {words}"
        return
    if bool((there == there[0]).all()) and there.numel() > 1:
        yield f"all of these are {float(there[0]):.4g}" + (": as if never written" if float(there[0]) == 0 else "")
        return
    true = golden[wrong]
    factor = float((there * true).sum() / true.square().sum()) if float(true.square().sum()) else 0.0
    if there.numel() > 2 and factor and float((there - factor * true).norm()) <= 1e-3 * float((there - true).norm()):
        yield f"each is {factor:.5g} times what it should be"
        return
    for dim in (1, 0, 2, 3):
        if words := _exchanged(got, golden, wrong, dim, axes[dim]):
            yield words
            return


def _by_mask(wrong: Tensor, request: Request) -> Iterator[str]:
    """`wrong` (B, H, L), beside what each row sees."""
    seen = seen_by(request)
    if seen is None:
        return
    seen = seen.expand(*wrong.shape, seen.shape[-1])
    kinds = {
        "no key at all": ~seen.any(-1),
        "a single key": seen.sum(-1) == 1,
        "some keys hidden": ~seen.all(-1) & seen.any(-1),
        "all keys": seen.all(-1),
    }
    for words, rows in kinds.items():
        if bool(rows.any()) and not bool(rows.all()) and torch.equal(wrong, rows):
            yield f"just the rows that see {words}" if words != "some keys hidden" else "just the rows with hidden keys"
            return
    if bool(kinds["no key at all"].any()) and not bool((wrong & kinds["no key at all"]).any()):
        return
    if bool(wrong.any()) and bool((wrong <= kinds["no key at all"]).all()):
        yield "only rows that see no key at all"


def seen_by(request: Request) -> Tensor | None:
    """(B or 1, H or 1, L, S): what each row may see; None: everything."""
    L, S = request.q.shape[2], request.k.shape[2]
    allowed = allowed_of(request.mask, request.is_causal, L, S)
    return None if allowed is None else allowed.expand(*allowed.shape[:2], L, S)


def _exchanged(got: Tensor, golden: Tensor, wrong: Tensor, dim: int, name: str) -> str:
    """Whether the wrong slices along a dimension are those of other indices, or copies of others."""
    n = got.shape[dim]
    if n < 2 or n > 512 or got.numel() // n < 2:
        return ""
    ours, true = (t.movedim(dim, 0).reshape(n, -1) for t in (got, golden))
    places = wrong.movedim(dim, 0).reshape(n, -1).any(-1).nonzero().flatten().tolist()
    away = torch.cdist(ours, true)  # (n, n)
    size = true.norm(dim=-1)
    from_other = {i: int(away[i].argmin()) for i in places}
    names = PLURAL.get(name, f"{name}s")
    if all(float(away[i, j]) <= SAME * float(size[j]) and i != j and float(size[j]) for i, j in from_other.items()):
        shifts = {(j - i) % n for i, j in from_other.items()}
        if len(set(from_other.values())) == 1 and len(places) > 1:
            return f"{names} {_listed(places)} hold the answer of {name} {from_other[places[0]]}"
        if len(shifts) == 1 and len(places) == n:
            return f"{name} i holds the answer of {name} i + {shifts.pop()} (of {n})"
        if all(j == n - 1 - i for i, j in from_other.items()):
            return f"the {names} are in reverse order"
        shown = ", ".join(f"{i} that of {j}" for i, j in list(from_other.items())[:LISTED])
        return f"{names} hold each other's answers: {shown}"
    alike = torch.cdist(ours, ours) <= 1e-6 * size.max()
    expected = torch.cdist(true, true) > SAME * size.max()
    pairs = (alike & expected).nonzero().tolist()
    pairs = [(i, j) for i, j in pairs if i > j and i in places]
    if pairs and {i for i, _ in pairs} == set(places) - {pairs[0][1]}:
        return f"{name} {pairs[0][0]} equals {name} {pairs[0][1]}"
    return ""


def picture_of(error: Tensor, limit: float, axes: Sequence[str]) -> tuple[str, ...]:
    """A line for each (batch, head), the next axis from left to right; darker is worse, in powers of ten."""
    if error.ndim < 3:
        return ()
    lines = error.amax(-1).flatten(0, -2)  # (lines, L)
    return drawn(lines / limit if limit > 0 else lines, f"{axes[-2]}s ->, a line for each {' and '.join(axes[:-2])}")


def drawn(matrix: Tensor, legend: str) -> tuple[str, ...]:
    """Numbers above 1 in four shades, by powers of ten; a large matrix by its largest in each field."""
    rows, columns = matrix.shape
    height, width = min(rows, HEIGHT), min(columns, WIDTH)
    if not rows or not columns:
        return ()
    small = torch.stack([part.amax(0) for part in matrix.tensor_split(height, 0)])
    small = torch.stack([part.amax(1) for part in small.tensor_split(width, 1)], dim=1)
    highest = float(small[small.isfinite()].max().clamp(min=1.0)) if bool(small.isfinite().any()) else 1.0
    levels = 1 + 3 * small.clamp(min=1.0).log10() / max(math.log10(highest), 1.0)
    levels = torch.where(small > 1.0, levels.clamp(max=4.0).nan_to_num(4.0, 4.0), 0.0)
    lines = ["".join(BLOCKS[round(float(level))] for level in line) for line in levels]
    return (legend, *(f"|{line}|" for line in lines))
