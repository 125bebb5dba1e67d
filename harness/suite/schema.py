"""The shape of a config file: keys, types and the rule for each value. Impossible combinations are config.py's."""

import keyword
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from harness.case import DTYPES, PHASES
from harness.kernels.names import BadOption, is_plugin, kernel_names, read_options, split_name
from harness.registry import nearest
from harness.suite.grid import AXES
from harness.variants.masks import MASKS
from harness.variants.specs import VARIANTS

REGIMES = ("plain", "peaked", "offset", "tiny", "wide", "poison")
# Inputs as models see them: what an approximate kernel may leave out depends on them. Only where a config asks.
STRUCTURES = ("locally_smooth", "text_like")

T = TypeVar("T")


def show(value: Any) -> str:
    """Short, on one line, and never failing: a value may be nested without end or have a million digits."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxlong = 2, 60, 60, 60
    try:
        return short.repr(value)
    except ValueError:  # an int beyond Python's limit of digits
        return f"<{type(value).__name__}>"


def unknown(kind: str, name: Any, known: Iterable[str]) -> str:
    names = list(known)
    hint = nearest(name, names) if isinstance(name, str) else ""
    return f"unknown {kind}{hint} (known: {', '.join(names)})"


def _broken(rule: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def _check(holds: Callable[[Any], bool], rule: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise _broken(rule)
        return value

    return BeforeValidator(check)


# `type(...) is` and not isinstance: True is no number, 8.0 is no count and "8" is neither.
def _whole(low: int, high: int) -> BeforeValidator:
    kind = "a positive whole number" if low == 1 else f"a whole number of at least {low}"

    def check(value: Any) -> Any:
        if type(value) is not int or value < low:
            raise _broken(f"must be {kind}")
        if value > high:
            raise _broken(f"must be at most {high}")
        return value

    return BeforeValidator(check)


def _known(kind: str, value: Any, known: Iterable[str]) -> str:
    if type(value) is str and value in known:
        return value
    # The nearest name is searched for later, and only for the problems that are shown.
    raise PydanticCustomError("unknown", "unknown {kind}", {"kind": kind, "known": tuple(known)})


def _one_of(kind: str, known: Iterable[str]) -> BeforeValidator:
    return BeforeValidator(lambda value: _known(kind, value, known))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values:
        raise _broken("must not be an empty list")
    return values


def _no_repeats(values: tuple[T, ...]) -> tuple[T, ...]:
    seen: set[T] = set()
    for at, value in enumerate(values):
        if value in seen:
            raise PydanticCustomError("repeated", "listed twice", {"at": at, "value": value})
        seen.add(value)
    return values


def resolve_kernel(value: Any, folder: Path | None) -> str:
    """A kernel's name, or the user's own: checked as far as that goes without running it."""
    if type(value) is str and not is_plugin(value) and "?" in value:
        _known("kernel", split_name(value)[0], kernel_names())
        try:
            read_options(value)
        except BadOption as error:
            raise _broken(error.rule) from None
        return value
    if type(value) is str and value.endswith(".py"):
        raise _broken(f"which function of it? {show(f'{value}:NAME')}")
    if type(value) is not str or not is_plugin(value):
        return _known("kernel", value, (*kernel_names(), "file.py:function", "package.module:function"))
    place, _, function = value.rpartition(":")
    if not function.isidentifier() or keyword.iskeyword(function):
        raise _broken(f"{show(function)} after the colon is not the name of a function")
    if not place.endswith(".py"):
        if all(part.isidentifier() for part in place.split(".")):
            return value
        raise _broken("must be a kernel's name, file.py:function or package.module:function")
    if os.path.isfile(place):
        return value
    beside = os.path.abspath(os.path.join(folder or "", place))
    if os.path.isfile(beside):
        return f"{beside}:{function}"
    looked = "the current directory" + ("" if folder is None else f" or in {show(str(folder))}")
    raise _broken(f"there is no file {show(place)} in {looked}")


Axis = Annotated[tuple[T, ...], BeforeValidator(_as_tuple), AfterValidator(_no_repeats)]
Text = Annotated[str, _check(lambda value: type(value) is str, "must be text; put it in quotes")]
Flag = Annotated[bool, _check(lambda value: type(value) is bool, "must be true or false")]
Width = Annotated[int, _whole(1, 1_048_576)]
Heads = Annotated[int, _whole(1, 65_536)]
Length = Annotated[int, _whole(1, 16_777_216)]
Variant = Annotated[str, _one_of("variant", VARIANTS)]
Blocks = Annotated[int, _whole(3, 100_000)]
Name = Annotated[
    Text,
    _check(
        lambda value: type(value) is not str or bool(re.fullmatch(r"(?!\.+$)[A-Za-z0-9_.-]{1,100}", value)),
        "must be 1 to 100 letters, digits, '_', '.' or '-', and not only dots: a folder is named after it",
    ),
]


KernelName = Annotated[str, BeforeValidator(lambda value, info: resolve_kernel(value, info.context))]


def _seconds(most: int) -> BeforeValidator:
    holds = lambda value: type(value) in (int, float) and 0 < value <= most  # noqa: E731
    return _check(holds, f"must be a number of seconds, 0 < s <= {most}")


UNITS = {"": 1, "b": 1} | {
    prefix + end: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for end, base in (("ib", 1024), ("b", 1000))
}
SMALLEST_MEMORY, LARGEST_MEMORY = 64 << 20, 1 << 50


def _bytes(value: Any) -> int:
    """`8GiB`, `500 MB` or a plain number of bytes."""
    found = re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,6})?) ?([a-z]{0,3})", value.lower()) if type(value) is str else None
    size = value if type(value) is int else None
    if found is not None and found[2] in UNITS:
        size = int(float(found[1]) * UNITS[found[2]])
    if size is None or not SMALLEST_MEMORY <= size <= LARGEST_MEMORY:
        raise _broken("must be a size of at least 64MiB and at most 1PiB, such as 8GiB or 500MB")
    return size


MINUTES = "must be a number of minutes, 0 < m <= 600"


@dataclass(frozen=True)
class Timing:
    """How long each case is timed: blocks of interleaved pairs until the budget is spent."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    enabled: Flag = True
    budget_s: Annotated[float, _seconds(600)] = 0.5
    min_blocks: Blocks = 11
    max_blocks: Blocks = 101


@dataclass(frozen=True)
class Limits:
    """What one case may take; beyond it the case ends as `timeout` or `oom`, and the next goes on."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    timeout_s: Annotated[float, _seconds(7 * 24 * 3600)] = 600.0
    # Of its whole process; None: 80 % of the machine's, shared among the workers.
    max_memory: Annotated[int, BeforeValidator(_bytes)] | None = None


@dataclass(frozen=True)
class Battery:
    """What `harness judge` asks a user's kernel beside the grid: a row of its own."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    enabled: Flag = True
    minutes: Annotated[float, _check(lambda value: type(value) in (int, float) and 0 < value <= 600, MINUTES)] = 1.0


def _limit(most: float) -> BeforeValidator:
    holds = lambda value: type(value) in (int, float) and 0 <= value <= most  # noqa: E731
    return _check(holds, f"must be a number from 0 to {most:g}")


@dataclass(frozen=True)
class Accuracy:
    """What approximate kernels are held to, each over the whole output against the golden; None: not limited."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    rel_l1: Annotated[float, _limit(1e6)] | None = None  # at most
    cosine: Annotated[float, _limit(1)] | None = None  # at least
    rmse: Annotated[float, _limit(1e6)] | None = None  # at most
    max_abs: Annotated[float, _limit(1e6)] | None = None  # at most


CONTESTED = ("variant", "kernel", "kv_heads", "kv_lora_rank", "dtype", "mask")


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Grid(Closed):
    variant: Axis[Variant]
    embed_dim: Axis[Width]
    heads: Axis[Heads]
    kv_heads: Axis[Heads | None] = (None,)
    head_dim: Axis[Width | None] = (None,)
    q_lora_rank: Axis[Width | None] = (None,)
    kv_lora_rank: Axis[Width | None] = (None,)
    rope_head_dim: Axis[Width | None] = (None,)
    v_head_dim: Axis[Width | None] = (None,)
    bias: Axis[Flag] = (True,)
    seq_len: Axis[Length]
    mask: Axis[Annotated[str, _one_of("mask", MASKS)]] = ("none",)
    phase: Axis[Annotated[str, _one_of("phase", PHASES)]] = ("prefill",)
    dtype: Axis[Annotated[str, _one_of("dtype", DTYPES)]] = ("float32",)
    batch: Axis[Annotated[int, _whole(1, 65_536)]] = (1,)
    kernel: Axis[KernelName] = ("eager",)

    def axes(self) -> dict[str, tuple[Any, ...]]:
        return {axis: getattr(self, axis) for axis in AXES}


class Exclude(Grid):
    """The same axes, none required; only those that are set count."""

    variant: Axis[Variant] = ()
    embed_dim: Axis[Width] = ()
    heads: Axis[Heads] = ()
    seq_len: Axis[Length] = ()


class Document(Closed):
    name: Name
    description: Text = ""
    seed: Annotated[int, _whole(0, 2**63 - 1)] = 0
    threads: Annotated[int, _whole(1, 4096)] | None = None
    timing: Timing = Timing()
    limits: Limits = Limits()
    regimes: Axis[Annotated[str, _one_of("regime", (*REGIMES, *STRUCTURES))]] | None = None
    equivalence: Annotated[str, _one_of("equivalence", ("exact", "approximate"))] = "exact"
    accuracy: Accuracy = Accuracy()
    kernels: Axis[KernelName] | None = None  # in the place of every grid's, as --kernel
    contest: Annotated[str, _one_of("axis", CONTESTED)] | None = None
    against: str | int | None = None
    judge_len: Annotated[int, _whole(8, 1_000_000)] | None = None
    battery: Battery | None = None  # None: for `kernels` and those of the command line
    grid: Grid | None = None
    include: list[Grid] = []
    exclude: list[Exclude] = []
