"""YAML -> Suite. Whatever is wrong is said before anything runs: file, line, key, value and the rule."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from harness.case import Case
from harness.errors import BadInput
from harness.kernels.names import is_plugin
from harness.registry import nearest
from harness.suite.contest import Contest, contests
from harness.suite.grid import AXES, Clash, count_cells, expand
from harness.suite.schema import Accuracy, Battery, Document, Limits, Timing, resolve_kernel, show, unknown
from harness.yaml_lines import Node, Where, YamlError, parse, read_text

SHIPPED = Path(__file__).parent.parent / "configs"
MAX_CELLS = 200_000  # two seconds of expanding, days of running
MAX_EXCLUDING = 2_000_000  # cells times exclusions: another second
MAX_PROBLEMS = 10  # lines of one message


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


class ConfigError(BadInput):
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


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    seed: int
    threads: int | None  # None: all cores
    cases: tuple[Case, ...]
    regimes: tuple[str, ...] | None  # None: all
    timing: Timing
    limits: Limits
    battery: Battery  # how long a user's kernel is asked directly
    contest: Contest | None  # cells that differ in one axis are timed together; None: each beside its reference
    judge_len: int | None  # longer cells are judged at this length
    accuracy: Accuracy | None  # what approximate kernels are held to; None: the acceptance rule holds for all
    source: str  # YAML text that gives this suite again, with the kernels of the command line
    path: Path | None


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


def threads_of(suite: Suite) -> int:
    """Comparing needs one, so that the number of workers changes no sum; a timing has the machine to itself."""
    if suite.threads is not None:
        return suite.threads
    if not suite.timing.enabled:
        return 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) >= 1:
        return int(given)
    # As torch would choose, without loading it: physical cores, as far as this process may use them.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def shipped_configs() -> dict[str, str]:
    """Of the configs in the package: name -> what it is for, its `description`."""
    found = {path.stem: parse(read_text(path)).content for path in sorted(SHIPPED.glob("*.yaml"))}
    return {name: str(keys["description"].content) if "description" in keys else "" for name, keys in found.items()}


def find_config(config: str | Path) -> Path:
    """A path wins; a bare name is that of a config in the package."""
    path = Path(config)
    if path.suffix or os.sep in str(config) or len(path.parts) != 1 or (os.path.exists(path) and not path.is_dir()):
        return path
    shipped = SHIPPED / f"{path.name}.yaml"
    if shipped.is_file():
        return shipped
    rule = unknown("config, and no file", path.name, (each.stem for each in sorted(SHIPPED.glob("*.yaml"))))
    raise ConfigError(Problem(rule, key="CONFIG", value=str(config)))


def load_suite(config: str | Path | Mapping[str, Any], *, kernels: Sequence[str] = ()) -> Suite:
    """Everything is checked here. `kernels` take the place of the config's own, which are checked all the same."""
    if isinstance(config, Mapping):
        path, text, origin, data = None, None, _Origin("<config>"), dict(config)
    else:
        path = find_config(config)
        try:
            text = read_text(path)
            origin = _Origin(str(path), parse(text))
        except YamlError as error:
            rule = error.rule if os.path.lexists(path) else f"{error.rule}{nearest(path.name, _beside(path))}"
            raise ConfigError(Problem(rule, str(path), error.line, key_text(error.path))) from None
        assert origin.root is not None
        data = origin.root.plain()
    folder = None if path is None else path.parent
    document = _validate(data, origin, folder)
    given = _given_kernels(kernels, folder) or document.kernels or ()
    cases = _expand(document, origin, given)
    battery = document.battery or Battery(enabled=bool(given))
    if battery.enabled and document.equivalence == "exact":
        cases += tuple(Case.battery(kernel) for kernel in _plugins(cases))
    contest = _contest(document, origin, cases)
    if text is None or kernels:
        text = _effective(text, document, given)
    return Suite(
        name=document.name,
        description=document.description,
        seed=document.seed,
        threads=document.threads,
        cases=cases,
        regimes=document.regimes,
        timing=document.timing,
        limits=document.limits,
        battery=battery,
        contest=contest,
        judge_len=document.judge_len,
        accuracy=document.accuracy if document.equivalence == "approximate" else None,
        source=text,
        path=path,
    )


def _effective(text: str | None, document: Document, kernels: tuple[str, ...]) -> str:
    """The text with the kernels added at its end, so that lines and comments stay; anew where that cannot be."""
    if text is not None and document.kernels is None:
        longer = f"{text.rstrip()}\nkernels: {json.dumps(list(kernels))}  # by --kernel\n"
        try:
            found = parse(longer).plain()
        except YamlError:  # the whole config is one {...}
            found = None
        if found is not None and found.get("kernels") == list(kernels):
            return longer
    whole = document.model_dump(exclude_unset=True) | ({"kernels": list(kernels)} if kernels else {})
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)


def _beside(path: Path) -> list[str]:
    """What a path that leads nowhere may have meant."""
    folder = sorted(each.name for each in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return [*folder, *(each.stem for each in SHIPPED.glob("*.yaml"))]


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
    if document.equivalence == "approximate" and document.accuracy == Accuracy():
        rule = "required with equivalence: approximate, with at least one of rel_l1, cosine, rmse, max_abs"
        problem = origin.problem(rule, ("accuracy",))
        if "accuracy" not in given:  # then the line is that of the key which asks for it
            problem = replace(problem, line=origin.problem(rule, ("equivalence",)).line)
        raise ConfigError(problem)
    if document.equivalence == "exact" and "accuracy" in given:
        rule = "only with equivalence: approximate; exact kernels are judged by the acceptance rule"
        raise ConfigError(origin.problem(rule, ("accuracy",)))
    for at, exclude in enumerate(document.exclude):
        if not exclude.model_fields_set:
            raise ConfigError(origin.problem("must name at least one axis", ("exclude", at)))
    return document


def _contest(document: Document, origin: _Origin, cases: Sequence[Case]) -> Contest | None:
    """Refused where it would time nothing."""
    if document.contest is None:
        for key in ("against", "judge_len"):
            if getattr(document, key) is not None:
                raise ConfigError(origin.problem("only with contest: AXIS", (key,), getattr(document, key)))
        return None
    if document.against is None:
        rule = "needs `against`: the value that the other cells are held to"
        raise ConfigError(origin.problem(rule, ("contest",), document.contest))
    contest = Contest(document.contest, document.against)
    held = contests(cases, contest)
    if not held:
        rule = f"no two cells differ in {contest.axis} alone, one of which has this value: there is no contest"
        raise ConfigError(origin.problem(rule, ("against",), contest.against))
    if _plugins(cases):
        rule = "kernels of your own are timed beside their reference, not in contests"
        raise ConfigError(origin.problem(rule, ("contest",), contest.axis))
    alone = {case.case_id for case in cases} - {case.case_id for group in held for case in group}
    if alone:
        rule = f"{len(alone)} cells are in no contest, such as {min(alone)}"
        raise ConfigError(origin.problem(rule, ("contest",), contest.axis))
    return contest


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
    group = {"timing": Timing, "limits": Limits, "accuracy": Accuracy, "battery": Battery}.get(str(where[0]))
    return AXES if group is None else (field.name for field in fields(group))


def _plugins(cases: Sequence[Case]) -> list[str]:
    return [kernel for kernel in dict.fromkeys(case.kernel for case in cases) if is_plugin(kernel)]


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
    if (work := cells * len(exclusions)) > MAX_EXCLUDING:
        rule = f"{len(exclusions)} entries over {cells} cells are {work} comparisons, and the limit is {MAX_EXCLUDING}"
        raise ConfigError(origin.problem(f"{rule}; write fewer and broader ones", ("exclude",)))
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
