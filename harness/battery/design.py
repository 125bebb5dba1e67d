"""A covering design: every pair of levels of two axes that can stand in one call does stand in one.

Greedy: for a pair that is still missing, several calls that have it are tried, and the one with the most missing pairs
for its cost is taken. The same seed gives the same design.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.battery.axes import AXES, NONE, WEIGHTS, Point, possible, sized

Level = tuple[str, str]  # axis, level
Pair = tuple[Level, Level]

TRIES = 6  # calls that are compared for one missing pair
SEARCH = 40  # draws to find one call with a pair, before it counts as impossible
OPTIONS = 3  # levels that are compared for one axis of a call
PLACE = {axis: place for place, axis in enumerate(AXES)}
# Axes that go together in few ways; their levels are drawn as a whole, from all ways there are.
OF_MASK = ("mask", "mask_shape", "mask_strides", "mask_dtype")
OF_MODE = ("mode", "gradients")
HARMLESS = {axis: levels[0] for axis, levels in AXES.items()} | {"batch": "2", "kv_heads": "2", "mode": "no_grad"}


@dataclass(frozen=True)
class Design:
    points: tuple[Point, ...]
    covered: int  # pairs of levels
    impossible: int  # pairs that are no call, or a call that would take too long
    seed: int

    @property
    def words(self) -> str:
        return (
            f"{len(self.points)} calls, pairwise over {len(AXES)} axes: all {self.covered:,} pairs of levels that make "
            f"a call ({self.impossible:,} make none, or one that would take too long)"
        )


def pairs_of(point: Point) -> Iterator[Pair]:
    levels = [(axis, point.levels[axis]) for axis in AXES]
    return itertools.combinations(levels, 2)


def all_pairs() -> list[Pair]:
    found: list[Pair] = []
    for one, other in itertools.combinations(AXES, 2):
        found += [((one, a), (other, b)) for a in AXES[one] for b in AXES[other]]
    return found


def covering(seed: int) -> Design:
    rng = random.Random(seed)
    wanted = all_pairs()
    rng.shuffle(wanted)
    missing = set(wanted)  # never walked: a set has another order in every process
    points: list[Point] = []
    impossible = 0
    for pair in wanted:
        if pair not in missing:
            continue
        found: list[Point] = []
        for tried in range(SEARCH):
            if tried >= TRIES and found:
                break
            point = _with(dict(pair), missing, rng, options=OPTIONS if tried < TRIES else 1)
            found += [] if point is None else [point]
        if not found:
            impossible += 1
            continue
        best = max(found, key=lambda point: sum(p in missing for p in pairs_of(point)) / _cost(point))
        points.append(best)
        missing.difference_update(pairs_of(best))
    covered = {pair for point in points for pair in pairs_of(point)}
    return Design(tuple(points), len(covered), impossible, seed)


def _cost(point: Point) -> float:
    """Of a call with all its draws, in those of the smallest."""
    return 1 + point.work / 2**23


def _ways(axes: tuple[str, ...]) -> list[dict[str, str]]:
    """All levels of these axes that go together; with a half type, for that goes with every mask."""
    found = []
    for levels in itertools.product(*(AXES[axis] for axis in axes)):
        way = dict(zip(axes, levels, strict=True))
        around = {"dtype": "bfloat16"} if axes == OF_MASK else {}
        if axes == OF_MODE and "m" in way["gradients"]:
            around = {"mask": "float", "mask_shape": "(L,S)", "mask_strides": "plain", "mask_dtype": "as q"}
        if possible({**HARMLESS, **around, **way}):
            found.append(way)
    return found


_WAYS: dict[tuple[str, ...], list[dict[str, str]]] = {axes: _ways(axes) for axes in (OF_MASK, OF_MODE)}


@functools.cache
def _ways_with(axes: tuple[str, ...], own: tuple[Level, ...], mask_gradient: bool) -> list[dict[str, str]]:
    """Those that have these levels. Few masks have a gradient: one only where that is asked for."""
    ways = [way for way in _WAYS[axes] if all(way[axis] == level for axis, level in own)]
    if axes == OF_MODE:
        return [way for way in ways if ("m" in way["gradients"]) == mask_gradient]
    return [way for way in ways if way["mask_dtype"] not in (NONE, "bool")] if mask_gradient else ways


def _with(fixed: dict[str, str], missing: set[Pair], rng: random.Random, *, options: int) -> Point | None:
    """A call that has the fixed levels, the others such that they bring missing pairs; None if they do not go together.

    One after the other, in a random order: of a few draws each, the one with the most missing pairs so far.
    """
    mask_gradient = "m" in fixed.get("gradients", "")
    units: list[tuple[str, ...]] = [OF_MASK, OF_MODE, *((axis,) for axis in AXES if axis not in (*OF_MASK, *OF_MODE))]
    rng.shuffle(units)
    levels = dict(fixed)
    for axes in units:
        if all(axis in fixed for axis in axes):
            continue
        if len(axes) == 1:
            found = [{axes[0]: _drawn(axes[0], rng)} for _ in range(options)]
        else:
            around = {"mode": _drawn("mode", rng)} if axes == OF_MODE and not set(OF_MODE) & fixed.keys() else {}
            own = tuple((axis, level) for axis, level in (fixed | around).items() if axis in axes)
            ways = _ways_with(axes, own, mask_gradient)
            if not ways:
                return None
            found = [rng.choice(ways) for _ in range(options)]
        levels |= found[0] if options == 1 else max(found, key=lambda option: _gain(dict(option), levels, missing))
    return _fitting(levels, fixed, rng) if _reconciled(levels, fixed, rng) else None


def _gain(option: dict[str, str], levels: dict[str, str], missing: set[Pair]) -> int:
    """How many missing pairs an option would bring beside the levels chosen so far."""
    gained = 0
    for one in option.items():
        for other in levels.items():
            pair = (one, other) if PLACE[one[0]] < PLACE[other[0]] else (other, one)
            gained += pair in missing
    return gained


def _drawn(axis: str, rng: random.Random) -> str:
    return rng.choices(AXES[axis], WEIGHTS.get(axis))[0]


def _reconciled(levels: dict[str, str], fixed: dict[str, str], rng: random.Random) -> bool:
    """The free axes among those that others forbid are drawn again until they go together."""
    free = [axis for axis in ("values", "layout", "batch", "kv_heads", "dtype") if axis not in fixed]
    for _ in range(12):
        if possible(levels):
            return True
        for axis in free:
            levels[axis] = _drawn(axis, rng)
    return False


def _fitting(levels: dict[str, str], fixed: dict[str, str], rng: random.Random) -> Point | None:
    """With sizes; where that is too large the free ones give way, one after the other."""
    point = sized(levels, rng)
    for axis in ("keys", "queries", "kv_heads", "groups", "batch", "head_dim"):
        if point is not None or axis in fixed:
            continue
        smaller = AXES[axis][1:5] if axis in ("keys", "queries") else AXES[axis][:2]
        levels[axis] = rng.choice(smaller)
        if axis == "batch" and levels["layout"] == "expanded":
            levels[axis] = "2"
        if axis == "kv_heads" and levels["layout"] == "shared heads":
            levels[axis] = "2"
        point = sized(levels, rng)
    return point


def by_cost(points: Sequence[Point], steps: int = 8) -> list[Point]:
    """Cheap calls first, and within each of the steps in which they grow everything mixed."""
    ordered = sorted(points, key=lambda point: point.work)
    size = math.ceil(len(ordered) / steps)
    mixed: list[Point] = []
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        random.Random(start).shuffle(part)
        mixed += part
    return mixed
