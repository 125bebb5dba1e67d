"""Kernels with options are named like `sparse?topk=0.5&pv=50`: a name, and a query string of declared options.

No torch here, so that a config is checked before anything is loaded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from harness.errors import BadInput

Value = float | int | bool | str


class BadOption(BadInput):
    """The message names the kernel as it was written, the option, its value and the rule."""

    def __init__(self, text: str, rule: str) -> None:
        super().__init__(f"kernel {text!r}: {rule}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Option:
    """`kind` is float, int or bool; numbers lie within [low, high]."""

    kind: type
    about: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # `low` itself is too little

    def read(self, text: str) -> Value:
        """Raises ValueError for what it is not."""
        if self.kind is bool:
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        value: Value = self.kind(text)
        if self.kind is str:
            return value
        number = float(value)
        if not self.low <= number <= self.high or (self.above and number == self.low):  # NaN is never within
            raise ValueError(text)
        return value

    @property
    def rule(self) -> str:
        if self.kind is bool:
            return "must be 0 or 1"
        if self.kind is str:
            return "must be text"
        kind = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.high):
            least = f" above {self.low:g}" if self.above else f" of at least {self.low:g}"
            return f"must be {kind}" + ("" if math.isinf(self.low) else least)
        return f"must be {kind} from {self.low:g} to {self.high:g}"


BLOCKS = {
    "block_q": Option(int, "queries in a block (128)", 1, 65_536),
    "block_k": Option(int, "keys in a block (64)", 1, 65_536),
}
# Those of each kernel that has any; its `make(**options)` takes them.
OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "sparse": {
        "topk": Option(float, "share of the key blocks that are kept (0.5); 1 is exact", 0, 1),
        "cdf": Option(float, "instead of topk: share of the pooled softmax that is kept; 1 is exact", 0, 1),
        "sim": Option(float, "blocks less alike than this are always kept (-0.1 with topk, 0.6 with cdf)", -1, 1),
        "pv": Option(
            float,
            "nats below the highest score from which values are skipped (off with topk, 50 with cdf)",
            0,
            above=True,  # at 0 the highest score itself is that far below
        ),
        "sink": Option(bool, "keep the first block of keys (0)"),
        "smooth": Option(bool, "subtract the mean key before choosing (1)"),
        **BLOCKS,
    },
    "sparse_window": {"window": Option(int, "tokens on either side of self (1024)", 0), **BLOCKS},
    "sparse_sink": {
        "window": Option(int, "tokens on either side of self (1024)", 0),
        "sink": Option(int, "first tokens that are kept too (4)", 0),
        **BLOCKS,
    },
    "sparse_topk": {"count": Option(int, "blocks of keys that each block of queries keeps (16)", 1), **BLOCKS},
}
# Options that say the same thing in two ways.
RIVALS = (("topk", "cdf"),)


def split_name(text: str) -> tuple[str, str]:
    """`sparse?topk=0.5` to `sparse` and `topk=0.5`."""
    name, _, query = text.partition("?")
    return name, query


def read_options(text: str) -> dict[str, Value]:
    """The options in a kernel's name, checked against those that it declares."""
    name, marked, query = text.partition("?")
    if not marked:
        return {}
    declared = OPTIONS.get(name, {})
    known = ", ".join(declared) if declared else "none"
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
        if not pairs:  # nothing after the question mark: Python calls that no error
            raise ValueError(text)
    except ValueError:
        raise BadOption(text, f"options are written name?option=value&option=value; {name} has: {known}") from None
    read: dict[str, Value] = {}
    for option, value in pairs:
        if option not in declared:
            raise BadOption(text, f"kernel {name} has no option {option!r} (known: {known})")
        if option in read:
            raise BadOption(text, f"option {option!r} is given twice")
        try:
            read[option] = declared[option].read(value)
        except (ValueError, KeyError, OverflowError):
            raise BadOption(text, f"{option} = {value!r} {declared[option].rule}") from None
    for first, second in RIVALS:
        if first in read and second in read:
            raise BadOption(text, f"give either {first} or {second}, not both")
    return read
