"""Which queries of a large problem have a golden, and how all others are held to the reference.

Given keys and values, the rows of attention are independent. So the golden of some says how much rounding explains, and
within that every other row is held to the reference's own answer in its own dtype. A row that departs from it is
promoted: it gets a golden, and is held to that, for the reference may be the one that rounds worse.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.rule import OK_FACTOR, TensorVerdict, Yardstick, decide, ratio_to
from harness.references import reference_of
from harness.variants import masks
from harness.variants.specs import VARIANTS

# Operations of the reference's prefill: beyond it a cell has some rows of its golden alone. Every cell of default.yaml
# is below it.
LARGEST_DENSE = 4e9
FULL_WORK = 1e11  # of all regimes that a large cell has at its full length; the first is always one
SHORT_WORK = 6e8  # of one regime at the length that the others have
SHORTEST = 64
ROWS = 48  # that have a golden
LOOKED_AT, FEWEST = 256, 4  # queries among which those with the fewest keys are found
BORDERS = (16, 32, 64, 128, 256, 512, 1024)  # of tiles
OTHER_ROWS = 4.0  # of N: both sides may be off by 2 N
PROMOTED, PROMOTIONS = 6, 4  # queries that get a golden because they depart from the reference; so many times
ALL_QUERIES = "out (all queries)"


def operations(case: Case) -> int:
    """Of the reference over the whole sequence."""
    spec = VARIANTS[case.variant]
    return spec.flops(replace(case, phase="prefill"))


def is_large(case: Case) -> bool:
    """Whether some rows alone have a golden: of a cell that would cost too much, where its reference can give those."""
    reference = reference_of(case)
    can_be = (reference.streams if case.phase == "decode" else reference.run_rows) is not None
    return can_be and operations(case) > LARGEST_DENSE and case.seq_len > ROWS


def short_length(case: Case) -> int:
    """A power of two: as long as a cell can be and still be judged in every regime at little cost."""
    length = SHORTEST
    while 2 * length < case.seq_len and operations(replace(case, seq_len=2 * length)) <= SHORT_WORK:
        length *= 2
    return length


def rows_of(case: Case, seed: int) -> Tensor:
    """Of a cell; the special ones are those that see the fewest keys, none at all where there are such."""
    generator = torch.Generator().manual_seed(seed)
    S = case.seq_len
    looked_at = torch.randperm(S, generator=generator)[:LOOKED_AT].sort().values
    at = masks.positions(case.batch, case.heads, range(0), range(S), S)
    mask = masks.dense(masks.MASKS[case.mask], replace(at, i=looked_at.view(1, 1, -1, 1)), torch.float32)
    special: list[int] = []
    if mask is not None and mask.shape[2] > 1:
        seen = (mask if mask.dtype == torch.bool else mask != float("-inf")).sum(-1).amin((0, 1))
        special = looked_at[seen.topk(FEWEST, largest=False).indices].tolist()
    return choose_rows(S, ROWS, generator, special=special)


def places_of(length: int) -> list[int]:
    """Of single decode steps: beside the borders of tiles, and the last ones."""
    return sorted({*beside_borders(length), *range(max(0, length - 4), length)})


def beside_borders(length: int) -> list[int]:
    """The first query of a tile and the last one of the tile before, of tiles of any usual size."""
    return [place for border in BORDERS for place in (border, border - 1) if place < length]


def choose_rows(length: int, count: int, generator: torch.Generator, *, special: Sequence[int] = ()) -> Tensor:
    """Sorted: first, last, `special` ones, beside the borders of tiles, at random; 3 at least."""
    near = beside_borders(length)
    wanted = [0, length - 1, *special]
    wanted += [near[place] for place in torch.randperm(len(near), generator=generator).tolist()[: count // 2]]
    wanted += torch.randperm(length, generator=generator).tolist()
    return torch.tensor(sorted(dict.fromkeys(wanted[: max(count, 3)])))


def judge_others(
    answer: Tensor,
    whole: Tensor,
    stick: Yardstick,
    *,
    known: Tensor,
    rows: int,
    promote: Callable[[Tensor], TensorVerdict],
) -> TensorVerdict:
    """Every query against the reference's `whole` answer, by the floor of those that have a golden: `stick` is theirs.

    rows      the dimension along which queries lie
    known     bool, broadcastable to the answer: where the reference's own can be compared with
    promote   the verdict by the golden on some queries; the worst of it speaks
    """
    u, floor = torch.finfo(stick.dtype).eps, stick.floor
    known = known & whole.isfinite()
    wide = torch.promote_types(stick.dtype, torch.float32)
    N = float(floor.r.rows.max() + floor.jitter.rows.max()) + u * float(whole.masked_fill(~known, 0.0).abs().max())
    error = (answer.to(wide) - whole.to(wide)).abs_().masked_fill_(~known, 0.0)
    along = tuple(dim for dim in range(error.ndim) if dim != rows)
    by_query = ratio_to(error.nan_to_num(float("inf")).amax(along), torch.tensor(N)) * OK_FACTOR / OTHER_ROWS
    verdict = TensorVerdict(ALL_QUERIES, "", "ok", err_ratio=float(by_query.max()))
    for _ in range(PROMOTIONS):
        if decide(float(by_query.max()), 0.0) == "ok":
            break
        most = by_query.topk(min(PROMOTED, by_query.shape[0])).indices.sort().values
        verdict = promote(most)
        if verdict.status not in ("ok", "skipped"):
            return replace(verdict, reason=f"{verdict.reason}, most {_place(error)}")
        by_query[most] = 0.0
    return verdict


def _place(error: Tensor) -> str:
    """Of the largest error of a (B, L, E) or (B, H, L, D) tensor."""
    at = [int(n) for n in torch.unravel_index(error.argmax(), error.shape)]
    names = ("batch", "head", "query") if error.ndim == 4 else ("batch", "query")
    return "at " + ", ".join(f"{name} {place}" for name, place in zip(names, at, strict=False))
