"""YAML -> Suite. Whatever is wrong is said before anything runs: file, line, key, value and the rule."""

import difflib
import keyword
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from harness.case import DTYPES, PHASES, Case
from harness.grid import AXES, Clash, count_cells, expand
from harness.kernels.names import is_plugin, kernel_names
from harness.masks import MASKS
from harness.specs import VARIANTS
from harness.yaml_lines import Node, Where, YamlError, parse, read_text

REGIMES = ("plain", "peaked", "offset", "tiny", "wide", "poison")
MAX_CELLS = 1_000_000
MAX_PROBLEMS = 10  # lines of one message

T = TypeVar("T")


class Absent(Enum):
    """No value, where None would be one. An Enum, because it stays itself through pickling."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Problem:
    rule: str
    file: str | None = None
    line: int | None = None
    key: str = ""
    value: Any = ABSENT

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file and self.line else self.file
        shown = "" if self.value is ABSENT else show(self.value)
        return ": ".join(part for part in (place, self.key, shown, self.rule) if part)


class ConfigError(ValueError):
    """A config that cannot be run: one line per problem; the attributes are those of the first."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems
        first = problems[0]
        self.file, self.line, self.key = first.file, first.line, first.key
        self.value, self.rule = first.value, first.rule

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:MAX_PROBLEMS]]
        more = len(self.problems) - MAX_PROBLEMS
        return "\n".join([*lines, f"... and {more} more"] if more > 0 else lines)


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
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
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


def _kernel(value: Any, info: ValidationInfo) -> str:
    return resolve_kernel(value, info.context)


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
Seconds = Annotated[
    float,
    _check(lambda value: type(value) in (int, float) and 0 < value <= 600, "must be a number of seconds, 0 < s <= 600"),
]


@dataclass(frozen=True)
class Timing:
    """How long each case is timed: blocks of interleaved pairs until the budget is spent."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    enabled: Flag = True
    budget_s: Seconds = 0.5
    min_blocks: Blocks = 11
    max_blocks: Blocks = 101


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    seed: int
    threads: int | None  # None: all cores
    cases: tuple[Case, ...]
    regimes: tuple[str, ...] | None  # None: all
    timing: Timing
    source: str  # YAML text that gives this suite again (less the kernels of the command line)
    path: Path | None


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
    kernel: Axis[Annotated[str, BeforeValidator(_kernel)]] = ("eager",)

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
    regimes: Axis[Annotated[str, _one_of("regime", REGIMES)]] | None = None
    grid: Grid | None = None
    include: list[Grid] = []
    exclude: list[Exclude] = []


@dataclass(frozen=True)
class _Origin:
    """Where a config came from; `root` is absent if it came as a mapping, and then there are no lines."""

    file: str
    root: Node | None = None

    def problem(self, rule: str, where: Where, value: Any = ABSENT) -> Problem:
        line = None if self.root is None else self.root.line_of(where)
        return Problem(rule, self.file, line, key_text(where), value)


def key_text(where: Where) -> str:
    """`grid.heads`, `include[2].heads`; which of an axis's values it is, the value itself tells."""
    text = ""
    for at, part in enumerate(where):
        if isinstance(part, str):
            text += ("." if text else "") + (part if re.fullmatch(r"[\w-]{1,60}", part) else show(part))
        elif at and where[at - 1] in ("include", "exclude"):
            text += f"[{part}]"
    return text


def load_suite(config: str | Path | Mapping[str, Any], *, kernels: Sequence[str] = ()) -> Suite:
    """Everything is checked here. `kernels` take the place of the config's own, which are checked all the same."""
    if isinstance(config, Mapping):
        path, text, origin, data = None, None, _Origin("<config>"), dict(config)
    else:
        path = Path(config)
        try:
            text = read_text(path)
            origin = _Origin(str(path), parse(text))
        except YamlError as error:
            raise ConfigError(Problem(error.rule, str(path), error.line, key_text(error.path))) from None
        assert origin.root is not None
        data = origin.root.plain()
    folder = None if path is None else path.parent
    document = _validate(data, origin, folder)
    cases = _expand(document, origin, _given_kernels(kernels, folder))
    if text is None:
        text = yaml.safe_dump(document.model_dump(exclude_unset=True), sort_keys=False, allow_unicode=True)
    return Suite(
        name=document.name,
        description=document.description,
        seed=document.seed,
        threads=document.threads,
        cases=cases,
        regimes=document.regimes,
        timing=document.timing,
        source=text,
        path=path,
    )


def _validate(data: Any, origin: _Origin, folder: Path | None) -> Document:
    try:
        document = Document.model_validate(data, context=folder)
    except ValidationError as error:
        raise ConfigError(*_translate(error, origin)) from None
    timing, given = document.timing, document.model_fields_set
    if timing.max_blocks < timing.min_blocks:
        rule = f"must not be less than min_blocks ({timing.min_blocks})"
        raise ConfigError(origin.problem(rule, ("timing", "max_blocks"), timing.max_blocks))
    if document.grid is None and ("grid" in given or not document.include):
        rule = "must be a mapping of axes" if "grid" in given else "required key is missing (or give include)"
        raise ConfigError(origin.problem(rule, ("grid",)))
    for at, exclude in enumerate(document.exclude):
        if not exclude.model_fields_set:
            raise ConfigError(origin.problem("must name at least one axis", ("exclude", at)))
    return document


def _translate(error: ValidationError, origin: _Origin) -> Iterator[Problem]:
    for found in error.errors(include_url=False):
        where, value, context = found["loc"], found["input"], found.get("ctx", {})
        kind, rule = found["type"], found["msg"]
        if kind == "unknown":
            rule = unknown(context["kind"], value, context["known"])
        elif kind == "repeated":
            where, value = (*where, context["at"]), context["value"]
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            rule = unknown("key", where[-1], _keys_beside(where))
        elif kind == "missing":
            rule, value = "required key is missing", ABSENT
        elif kind in ("model_type", "dataclass_type"):
            rule = "must be a mapping of keys to values"
        elif kind == "list_type":
            rule = "must be a list"
        elif kind == "invalid_key":
            rule = "keys must be text"
        yield origin.problem(rule, where, value)


def _keys_beside(where: Where) -> Iterable[str]:
    if len(where) == 1:
        return Document.model_fields
    return (field.name for field in fields(Timing)) if where[0] == "timing" else AXES


def _given_kernels(kernels: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    resolved: dict[str, None] = {}
    for kernel in (kernels,) if isinstance(kernels, str) else kernels:
        try:
            resolved[resolve_kernel(kernel, folder)] = None
        except PydanticCustomError as error:
            context: Any = error.context
            rule = unknown("kernel", kernel, context["known"]) if error.type == "unknown" else context["rule"]
            raise ConfigError(Problem(rule, key="--kernel", value=kernel)) from None
    return tuple(resolved)


def _expand(document: Document, origin: _Origin, kernels: tuple[str, ...]) -> tuple[Case, ...]:
    places: list[Where] = [] if document.grid is None else [("grid",)]
    places += [("include", at) for at in range(len(document.include))]
    blocks = [grid.axes() for grid in (document.grid, *document.include) if grid is not None]
    if (cells := sum(map(count_cells, blocks))) > MAX_CELLS:
        raise ConfigError(origin.problem(f"gives {cells} cells, and the limit is {MAX_CELLS}", places[0]))
    exclusions = [
        {axis: getattr(drop, axis) for axis in AXES if axis in drop.model_fields_set} for drop in document.exclude
    ]
    expansion = expand(blocks, exclusions, kernels=kernels)

    def impossible(clash: Clash) -> Problem:
        values = blocks[clash.block][clash.key]
        index = (values.index(clash.value),) if clash.value in values else ()
        rule = f"impossible for {clash.variant}: {clash.rule} (`exclude` can drop the combination)"
        return origin.problem(rule, (*places[clash.block], clash.key, *index), clash.value)

    problems = [impossible(clash) for clash in expansion.clashes]
    for at in expansion.unused:
        given = {axis: list(values) for axis, values in exclusions[at].items()}
        problems.append(origin.problem("matches no cell, so it drops nothing", ("exclude", at), given))
    if not problems and not expansion.cases:
        problems.append(origin.problem("drops every cell: nothing is left to run", ("exclude",)))
    if problems:
        raise ConfigError(*problems)
    return expansion.cases
