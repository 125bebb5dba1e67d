"""Which kernels exist, what options they have, and which of them `auto` takes. No torch: a config is checked first.

A kernel is a file of this package with a `KERNEL` in it. One with options is named like `sparse?topk=0.5&pv=50`: a
name, and a query string of declared options.

`auto` goes by a rule learnt from measurements (docs/kernels.md). Weights asked for, or few queries and keys: eager. One
or a few queries over a long cache: grouped. Long prefills: tiled; in training later, because it computes every tile
twice, unless a causal mask or a window lets it skip most of them. Where nothing is skipped and all scores fit a
server's cache, tiles gain nothing, and their threads have to take turns with torch's own, which wait actively after
each projection: eager.
"""

import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from harness.errors import BadInput

# Files of this package that hold machinery rather than a kernel.
MACHINERY = frozenset(
    {
        "names",
        "call",
        "plugin",
        "prefill",
        "sources",
        "shield",
        "front",
        "threads",
        "tiles",
        "transforms",
        "blocksparse",
        "domain",
        "domain_file",
        "layouts",
    }
)
# Listed once, here: torch.compile warns of a functools.cache in its way.
_FOUND = tuple(sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in MACHINERY))

Value = float | int | bool | str


def kernel_names() -> tuple[str, ...]:
    return _FOUND


def is_plugin(name: str) -> bool:
    """`file.py:function` or `package.module:function`: code of the user's, run only because it was named."""
    return ":" in name


def content_of(origin: str) -> str:
    """A kernel's file may lie elsewhere on another machine; its hash says whether it is the same."""
    _, marked, digest = origin.partition("sha256:")
    return digest if marked else origin


class BadOption(BadInput):
    """The message names the kernel as it was written, the option, its value and the rule."""

    def __init__(self, text: str, rule: str) -> None:
        super().__init__(f"kernel {text!r}: {rule}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class KernelOption:
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
        number = float(value)
        if not self.low <= number <= self.high or (self.above and number == self.low):  # NaN is never within
            raise ValueError(text)
        return value

    @property
    def rule(self) -> str:
        if self.kind is bool:
            return "must be 0 or 1"
        kind = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.high):
            least = f" above {self.low:g}" if self.above else f" of at least {self.low:g}"
            return f"must be {kind}" + ("" if math.isinf(self.low) else least)
        return f"must be {kind} from {self.low:g} to {self.high:g}"


BLOCKS = {
    "block_q": KernelOption(int, "queries in a block (128)", 1, 65_536),
    "block_k": KernelOption(int, "keys in a block (64)", 1, 65_536),
}
# Those of each kernel that has any; its `make(**options)` takes them.
OPTIONS: Mapping[str, Mapping[str, KernelOption]] = {
    "sparse": {
        "topk": KernelOption(float, "share of the key blocks that are kept (0.5); 1 is exact", 0, 1),
        "cdf": KernelOption(float, "instead of topk: share of the pooled softmax that is kept; 1 is exact", 0, 1),
        "sim": KernelOption(float, "blocks less alike than this are always kept (-0.1 with topk, 0.6 with cdf)", -1, 1),
        "pv": KernelOption(
            float,
            "nats below the highest score from which values are skipped (off with topk, 50 with cdf)",
            0,
            above=True,  # at 0 the highest score itself is that far below
        ),
        "sink": KernelOption(bool, "keep the first block of keys (0)"),
        "smooth": KernelOption(bool, "subtract the mean key before choosing (1)"),
        **BLOCKS,
    },
    "sparse_window": {"window": KernelOption(int, "tokens on either side of self (1024)", 0), **BLOCKS},
    "sparse_sink": {
        "window": KernelOption(int, "tokens on either side of self (1024)", 0),
        "sink": KernelOption(int, "first tokens that are kept too (4)", 0),
        **BLOCKS,
    },
    "sparse_topk": {"count": KernelOption(int, "blocks of keys that each block of queries keeps (16)", 1), **BLOCKS},
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


FEW = 128  # rows of one product: beyond that it is bound by arithmetic, not by reading the keys
LONG_CACHE = 2048  # keys from which grouped wins
LONG = 512  # queries from which tiled wins
LONG_TRAINING = 2048  # the same in training, where nothing is skipped: there it wins by its memory
MANY = 1 << 22  # scores of all heads and batch rows, 16 MiB in float32: half of a server's cache
TOO_MANY = 1 << 26  # 256 MiB: not to be held at once, however few the queries


def pick(rows: int, queries: int, keys: int, *, products: int, slanted: bool, trains: bool, need_weights: bool) -> str:
    """The kernel that `auto` takes, by name. `rows`: the queries of all heads that share a key, of which there are
    `products` (batch rows times key heads); `slanted`: causal or with a window."""
    if need_weights:
        return "eager"
    if rows <= FEW:
        return "grouped" if keys >= LONG_CACHE else "eager"
    scores = products * rows * keys
    if scores >= TOO_MANY:
        return "tiled"
    long_enough = queries >= (LONG_TRAINING if trains and not slanted else LONG)
    return "tiled" if long_enough and (slanted or scores >= MANY) else "eager"
