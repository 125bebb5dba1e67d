"""Grid -> cases: the product of all axes. An axis that does not apply to a variant collapses, never duplicates.

The geometry (which modules) is small and has rules, so it is expanded and resolved first; the rest
(how each module is run) is large and has almost none, so it is multiplied in last.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from harness.case import Case
from harness.variants.specs import NO_KERNEL, OPTIONAL_AXES, VARIANTS, Impossible


class Geometry(NamedTuple):
    """Which module. Like the axes of Way below, outermost first: the order of the cases."""

    variant: str
    embed_dim: int
    heads: int
    kv_heads: int | None
    head_dim: int | None
    q_lora_rank: int | None
    kv_lora_rank: int | None
    rope_head_dim: int | None
    v_head_dim: int | None


class Way(NamedTuple):
    """How a module is run."""

    bias: bool
    seq_len: int
    mask: str
    phase: str
    dtype: str
    batch: int
    kernel: str


AXES = Geometry._fields + Way._fields
MAX_CLASHES = 1000  # found one by one and slowly, and a message shows ten

Axes = Mapping[str, Sequence[Any]]  # every axis -> its values, without repetition
Exclusion = Mapping[str, Sequence[Any]]  # some axes -> the values to drop
Condition = Mapping[str, frozenset[Any]]  # some axes -> the values that match


@dataclass(frozen=True)
class Clash:
    """A cell that cannot exist, named by the axis value that breaks the rule."""

    block: int
    variant: str
    key: str
    value: Any
    rule: str


@dataclass(frozen=True)
class Expansion:
    cases: tuple[Case, ...]
    clashes: tuple[Clash, ...]
    unused: tuple[int, ...]  # exclusions that match no cell


def count_cells(axes: Axes) -> int:
    """Before anything is excluded or found to be the same; counted without expanding it."""
    modules = sum(prod(len(column) for column in _columns(axes, variant)) for variant in axes["variant"])
    return modules * prod(len(axes[axis]) for axis in Way._fields)


def expand(blocks: Sequence[Axes], exclusions: Sequence[Exclusion] = (), *, kernels: Sequence[str] = ()) -> Expansion:
    """All blocks, one after the other; a case that an earlier block has is not repeated.

    `kernels` take the place of the kernels that the surviving cells have; the exclusions hold for them too.
    """
    cases: dict[Case, None] = {}
    clashes: dict[Clash, None] = {}
    used: set[int] = set()
    # Once for all blocks: there may be a thousand of each.
    of_modules, of_ways = (
        [_condition(each, names) for each in exclusions] for names in (Geometry._fields, Way._fields)
    )
    for number, axes in enumerate(blocks):
        ways = _Ways(axes, of_modules, of_ways)
        for geometry, impossible in _geometries(axes):
            left = ways.left_for(geometry)
            broken = left.broken
            if impossible is None:
                cases.update(dict.fromkeys(_cases(geometry, left.possible)))
            elif left.possible or left.broken:
                broken = (impossible,)
            clashes |= {Clash(number, geometry.variant, b.key, b.value, b.rule): None for b in broken}
            if len(clashes) >= MAX_CLASHES:
                return Expansion((), tuple(clashes), ())
        used |= ways.used
    unused = tuple(n for n in range(len(exclusions)) if n not in used)
    if kernels:
        conditions = [_condition(exclusion, AXES) for exclusion in exclusions]
        swapped = (
            case if VARIANTS[case.variant].core == "recurrence" else replace(case, kernel=kernel)
            for case in cases
            for kernel in kernels
        )
        cases = dict.fromkeys(case for case in swapped if not any(_matches(c, case) for c in conditions))
    return Expansion(tuple(cases), tuple(clashes), unused)


def _columns(axes: Axes, variant: str) -> list[Sequence[Any]]:
    applies = VARIANTS[variant].axes
    names = Geometry._fields[1:]
    return [axes[axis] if axis not in OPTIONAL_AXES or axis in applies else (None,) for axis in names]


def _geometries(axes: Axes) -> Iterator[tuple[Geometry, Impossible | None]]:
    """Each module: resolved, or with raw values if the combination is impossible."""
    for variant in axes["variant"]:
        for values in product(*_columns(axes, variant)):
            raw = Geometry(variant, *values)
            try:
                resolved = VARIANTS[variant].resolve(raw._asdict())
            except Impossible as impossible:
                yield raw, impossible
            else:
                yield Geometry(*raw[:3], *(resolved.get(axis) for axis in Geometry._fields[3:])), None


def _cases(geometry: Geometry, ways: Sequence[Way]) -> list[Case]:
    # Positional, because this line runs once per case of a large grid.
    variant, embed_dim, heads, kv_heads, head_dim, *ranks = geometry
    assert head_dim is not None  # resolved
    if VARIANTS[variant].core == "recurrence":  # the axis collapses: no kernel is called
        ways = list(dict.fromkeys(way._replace(kernel=NO_KERNEL) for way in ways))
    return [
        Case(variant, kernel, embed_dim, heads, kv_heads, head_dim, seq_len, batch, mask, dtype, phase, bias, *ranks)
        for bias, seq_len, mask, phase, dtype, batch, kernel in ways
    ]


def _condition(exclusion: Exclusion, axes: Sequence[str]) -> Condition:
    return {axis: frozenset(exclusion[axis]) for axis in axes if axis in exclusion}


def _matches(condition: Condition, cell: Geometry | Way | Case) -> bool:
    for axis, values in condition.items():  # noqa: SIM110 - a generator triples the time of a large grid
        if getattr(cell, axis) not in values:
            return False
    return True


@dataclass(frozen=True)
class _Left:
    """What no exclusion drops: the ways to run a module, and the rules that further ways would break."""

    possible: Sequence[Way]
    broken: tuple[Impossible, ...] = ()


class _Ways:
    """One grid's ways of running its modules, less what the exclusions drop. Modules that share exclusions share it."""

    def __init__(self, axes: Axes, of_modules: Sequence[Condition], of_ways: Sequence[Condition]) -> None:
        """The two halves of each exclusion: which modules it is about, and which ways of running those."""
        self._axes, self._of_modules, self._of_ways = axes, of_modules, of_ways
        self._all = [Way(*values) for values in product(*(axes[axis] for axis in Way._fields))]
        self._known: dict[tuple[str, tuple[int, ...]], _Left] = {}
        self.used: set[int] = set()  # exclusions that match some cell

    def left_for(self, geometry: Geometry) -> _Left:
        active = tuple(
            [n for n, condition in enumerate(self._of_modules) if not condition or _matches(condition, geometry)]
        )
        key = geometry.variant, active
        if key not in self._known:
            self._known[key] = self._sift(*key)
        return self._known[key]

    def _sift(self, variant: str, active: tuple[int, ...]) -> _Left:
        ways = self._all
        for n in active:
            condition = self._of_ways[n]
            # Each exclusion is held against all cells: one that only repeats another is no typo. They are a product, so
            # that one of them matches if every axis has a value that does.
            if all(not values.isdisjoint(self._axes[axis]) for axis, values in condition.items()):
                self.used.add(n)
                ways = [way for way in ways if not _matches(condition, way)]
        some = dict.fromkeys((way.phase, way.seq_len, way.mask) for way in ways)
        broken = {one: rule for one in some if (rule := _way_rule(variant, *one)) is not None}
        if not broken:
            return _Left(ways)
        return _Left([way for way in ways if (way.phase, way.seq_len, way.mask) not in broken], tuple(broken.values()))


def _way_rule(variant: str, phase: str, seq_len: int, mask: str) -> Impossible | None:
    spec = VARIANTS[variant]
    if phase not in spec.phases:
        return Impossible("phase", phase, f"this variant has only {', '.join(spec.phases)}")
    if spec.masks is not None and mask not in spec.masks:
        return Impossible("mask", mask, f"this variant has only {', '.join(spec.masks)}")
    if phase == "decode" and seq_len < 2:
        return Impossible("seq_len", seq_len, "decode needs at least 2 tokens, one in the cache and one to add")
    return None
