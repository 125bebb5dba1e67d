"""Which missing cell is which new one under another name? A guess, to be shown with a question mark."""

from collections.abc import Mapping
from difflib import SequenceMatcher

from harness.case import CASE_FIELDS
from harness.gate.columns import EXACT, Row, show


def renames(missing: Mapping[str, Row], new: Mapping[str, Row]) -> dict[str, str]:
    """Old id -> new id: the same counts, and all axes but at most one; each new cell stands for one old one."""
    old_axes, new_axes = ({each: _shown(row, CASE_FIELDS) for each, row in rows.items()} for rows in (missing, new))
    counts = {each: _shown(row, EXACT) for rows in (missing, new) for each, row in rows.items()}
    pairs = []
    for before, axes in old_axes.items():
        for after, others in new_axes.items():
            apart = sum(a != b for a, b in zip(axes, others, strict=True))
            if apart <= 1 and counts[before] == counts[after]:
                pairs.append((apart, -SequenceMatcher(None, before, after).ratio(), before, after))
    found: dict[str, str] = {}
    for _, _, before, after in sorted(pairs):
        if before not in found and after not in found.values():
            found[before] = after
    return found


def _shown(row: Row, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(show(row[column]) for column in columns)
