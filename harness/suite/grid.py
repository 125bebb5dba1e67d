"""Grid -> cases: the product of all axes. An axis that does not apply to a variant collapses, never duplicates.

The geometry (which modules) is small and has rules, so it is expanded and resolved first; the rest
(how each module is run) is large and has almost none, so it is multiplied in last.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from harness.case import Case
from harness.variants.specs import OPTIONAL_AXES, VARIANTS, Impossible

# Outermost first: the order of the cases.
GEOMETRY = (
    *("variant", "embed_dim", "heads", "kv_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim"),
)
REST = ("bias", "seq_len", "mask", "phase", "dtype", "batch", "kernel")
AXES = GEOMETRY + REST

MAX_CLASHES = 1000  # found one by one and slowly, and a message shows ten

Axes = Mapping[str, Sequence[Any]]  # every axis -> its values, without repetition
Exclusion = Mapping[str, Sequence[Any]]  # some axes -> the values to drop
Cell = tuple[Any, ...]
Conditions = Sequence[tuple[int, frozenset[Any]]]  # place in a cell -> the values that match


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
    return modules * prod(len(axes[axis]) for axis in REST)


def expand(blocks: Sequence[Axes], exclusions: Sequence[Exclusion] = (), *, kernels: Sequence[str] = ()) -> Expansion:
    """All blocks, one after the other; a case that an earlier block has is not repeated.

    `kernels` take the place of the kernels that the surviving cells have; the exclusions hold for them too.
    """
    cases: dict[Case, None] = {}
    clashes: dict[Clash, None] = {}
    used: set[int] = set()
    on_geometry, on_rest = (_conditions(exclusions, names) for names in (GEOMETRY, REST))
    for number, axes in enumerate(blocks):
        block = _Block(axes, on_geometry, on_rest)
        for geometry, impossible in _geometries(axes):
            variant = geometry[0]
            cells, broken = block.survivors(geometry)
            if impossible is None:
                cases.update(dict.fromkeys(_cases(geometry, cells)))
            elif cells or broken:
                broken = (impossible,)
            for b in broken:
                clashes[Clash(number, variant, b.key, b.value, b.rule)] = None
            if len(clashes) >= MAX_CLASHES:
                return Expansion((), tuple(clashes), ())
        used |= block.used
    unused = tuple(n for n in range(len(exclusions)) if n not in used)
    if kernels:
        swapped = (replace(case, kernel=kernel) for case in cases for kernel in kernels)
        cases = dict.fromkeys(case for case in swapped if not any(_excludes(e, case) for e in exclusions))
    return Expansion(tuple(cases), tuple(clashes), unused)


def _columns(axes: Axes, variant: str) -> list[Sequence[Any]]:
    applies = VARIANTS[variant].axes
    return [axes[axis] if axis not in OPTIONAL_AXES or axis in applies else (None,) for axis in GEOMETRY[1:]]


def _geometries(axes: Axes) -> Iterator[tuple[Cell, Impossible | None]]:
    """Each module: resolved, or with raw values if the combination is impossible."""
    for variant in axes["variant"]:
        spec = VARIANTS[variant]
        for values in product(*_columns(axes, variant)):
            impossible = None
            try:
                raw = dict(zip(GEOMETRY[1:], values, strict=True))
                resolved = spec.resolve(raw)
                values = (*values[:2], *(resolved.get(axis) for axis in GEOMETRY[3:]))
            except Impossible as found:
                impossible = found
            yield (variant, *values), impossible


def _cases(geometry: Cell, cells: Sequence[Cell]) -> list[Case]:
    # Positional, because this line runs once per case of a large grid.
    variant, embed_dim, heads, kv_heads, head_dim, *ranks = geometry
    return [
        Case(variant, kernel, embed_dim, heads, kv_heads, head_dim, seq_len, batch, mask, dtype, phase, bias, *ranks)
        for bias, seq_len, mask, phase, dtype, batch, kernel in cells
    ]


def _excludes(exclusion: Exclusion, case: Case) -> bool:
    return all(getattr(case, axis) in values for axis, values in exclusion.items())


def _conditions(exclusions: Sequence[Exclusion], names: Sequence[str]) -> list[Conditions]:
    return [[(names.index(axis), frozenset(e[axis])) for axis in names if axis in e] for e in exclusions]


def _matches(conditions: Conditions, cell: Cell) -> bool:
    for at, values in conditions:  # noqa: SIM110 - a generator triples the time of a large grid
        if cell[at] not in values:
            return False
    return True


class _Block:
    """One grid's way of running a module, less what the exclusions drop. Modules that share exclusions share it."""

    def __init__(self, axes: Axes, on_geometry: Sequence[Conditions], on_rest: Sequence[Conditions]) -> None:
        self._values = [axes[axis] for axis in REST]
        self.rest = list(product(*self._values))
        self.used: set[int] = set()
        self._known: dict[tuple[Any, ...], tuple[list[Cell], tuple[Impossible, ...]]] = {}
        self._geometry, self._rest = on_geometry, on_rest

    def survivors(self, geometry: Cell) -> tuple[list[Cell], tuple[Impossible, ...]]:
        """What is left to run with this module, and what is left but cannot be run."""
        variant = geometry[0]
        active = tuple([n for n, conditions in enumerate(self._geometry) if _matches(conditions, geometry)])
        key = (variant, active)
        if key not in self._known:
            self._known[key] = self._sift(variant, active)
        return self._known[key]

    def _sift(self, variant: str, active: tuple[int, ...]) -> tuple[list[Cell], tuple[Impossible, ...]]:
        cells = self.rest
        for n in active:
            # Each exclusion is held against all cells: one that only repeats another is no typo. They are a product, so
            # that one of them matches if every axis has a value that does.
            if all(not values.isdisjoint(self._values[at]) for at, values in self._rest[n]):
                self.used.add(n)
                cells = [cell for cell in cells if not _matches(self._rest[n], cell)]
        broken = dict.fromkeys((cell[3], cell[1]) for cell in cells)
        broken_rules = {pair: rule for pair in broken if (rule := _phase_rule(variant, *pair)) is not None}
        if not broken_rules:
            return cells, ()
        return [cell for cell in cells if (cell[3], cell[1]) not in broken_rules], tuple(broken_rules.values())


def _phase_rule(variant: str, phase: str, seq_len: int) -> Impossible | None:
    phases = VARIANTS[variant].phases
    if phase not in phases:
        return Impossible("phase", phase, f"this variant has only {', '.join(phases)}")
    if phase == "decode" and seq_len < 2:
        return Impossible("seq_len", seq_len, "decode needs at least 2 tokens, one in the cache and one to add")
    return None
