"""Numbers and foreign strings to text, in one place, for the terminal and for Markdown alike."""

from typing import Any

import pandas as pd

ABSENT = "-"


def is_absent(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def count(value: Any) -> str:
    """Exact below 10,000, then three digits and a unit: 8,192 and 1.05M."""
    if is_absent(value):
        return ABSENT
    number = float(value)
    if abs(number) < 10_000:
        return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if abs(number) / size < 999.5 or unit == "G":
            return f"{number / size:.3g}{unit}" if abs(number) / size < 999.5 else f"{number / size:,.0f}{unit}"
    raise AssertionError("unreachable: G takes the rest")


def plural(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def span(low: Any, high: Any) -> str:
    """One number, or the range over cells of several sizes."""
    return count(low) if is_absent(low) or low == high else f"{count(low)}…{count(high)}"


def small(value: Any) -> str:
    """Errors: two digits, scientific."""
    return ABSENT if is_absent(value) else f"{value:.1e}"


def ratio(value: Any) -> str:
    if is_absent(value):
        return ABSENT
    if abs(value) >= 1e4 and abs(value) != float("inf"):
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def interval(low: Any, high: Any) -> str:
    return ABSENT if is_absent(low) or is_absent(high) else f"{ratio(low)}…{ratio(high)}"


def milliseconds(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def measured_line(measured_share: float | None, elapsed: float | None) -> str | None:
    """None where nothing was clocked: no share is made up."""
    if measured_share is None or elapsed is None:
        return None
    return f"{measured_share:.0%}".replace("%", " %") + f" of {elapsed:.0f} s inside measured or compared calls"


def plain(text: Any) -> str:
    """Foreign text made visible: escape sequences and direction marks of a kernel's message stay letters."""
    if is_absent(text):
        return ""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))


def first_line(text: Any, limit: int = 300) -> str:
    """Of a message that may be a whole traceback."""
    lines = [] if is_absent(text) else [line for line in str(text).splitlines() if line.strip()]
    line = plain(lines[0].strip()) if lines else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"
