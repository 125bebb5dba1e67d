"""For a user's own pytest: a kernel's battery as items, paired timing, and a report. No torch until an item needs it.

    @pytest.mark.attention("my_kernels.py:fast")     # or the function itself
    def test_fast(attention):
        attention()

Each item is one question of `harness judge`, so that -k, -x and xdist work. Numbers are new in every session, and the
same in all of its xdist workers; a failure names the seed that repeats them.
"""

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.battery.result import Finding
    from harness.battery.steps import Step
    from harness.cell.timing import Ratio

SEEDS = 2**31
DIAGNOSIS_S = 5.0
SEED = pytest.StashKey[int]()
REPORT = pytest.StashKey[list[dict[str, Any]]]()
PROPERTY = "harness"  # of an item's report: xdist carries it from its workers
MARKER = """\
attention(kernel, checks=None, strict=False, **domain): the kernel that the fixture `attention` asks, a function, \
file.py:function or package.module:function; `checks`: so many questions (default: the first 90 or so, of 600), \
`strict`: rounded worse than the reference fails; `domain`: what it is for, as harness.kernel(...) declares it\
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness", "attention kernels, proven by harness")
    group.addoption("--harness-report", metavar="DIR", type=Path, help="write attention.md and benchmark.json there")
    group.addoption("--harness-seed", metavar="N", type=int, help="the numbers of an earlier session again")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    given = config.getoption("--harness-seed")
    workers: dict[str, Any] = getattr(config, "workerinput", {})
    if given is None:
        session = workers.get("testrunuid")
        given = random.Random(session).randrange(SEEDS) if session else random.SystemRandom().randrange(SEEDS)
    config.stash[SEED] = given
    config.stash[REPORT] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "attention" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("attention")
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the fixture `attention` needs @pytest.mark.attention(KERNEL)"
        )
    steps = _questions(metafunc.config.stash[SEED], marker.kwargs.get("checks"))
    names = [f"{re.sub(r'[^a-z0-9]+', '-', step.group)}-{number:03}" for number, step in enumerate(steps)]
    metafunc.parametrize("attention", range(len(steps)), ids=names, indirect=True)


@functools.cache  # a design takes seconds to make
def _questions(seed: int, count: int | None) -> "list[Step]":
    """In the order of the battery; `count` beyond the opening takes those of the design, too."""
    from harness.battery.design import covering
    from harness.battery.plan import opening, remainder

    steps = opening(seed)
    if count is not None and count > len(steps):
        steps += remainder(covering(seed), seed, is_first=True)
    return steps[:count]


@pytest.fixture(scope="session")
def _attention_kernels() -> Iterator[dict[Any, Any]]:
    """Each kernel has one process for the session."""
    from harness.candidate.client import Process

    kernels: dict[Any, Any] = {}
    yield kernels
    for kernel in kernels.values():
        if isinstance(kernel, Process):
            kernel.stop()


@pytest.fixture
def attention(request: pytest.FixtureRequest, _attention_kernels: dict[Any, Any]) -> "Callable[[], Finding]":
    """Asks the marked kernel one question: gives what was found, fails with its diagnosis, skips what it refuses."""
    from harness.battery.subject import examinee_of

    marker = request.node.get_closest_marker("attention")
    options = dict(marker.kwargs)
    count, strict = options.pop("checks", None), options.pop("strict", False)
    key = (marker.args[0], repr(sorted(options.items())))
    if key not in _attention_kernels:
        _attention_kernels[key] = examinee_of(marker.args[0], **options)
    examinee = _attention_kernels[key]
    seed = request.config.stash[SEED]
    step = _questions(seed, count)[request.param]

    def ask() -> "Finding":
        from harness.cell.draws import torch_threads

        with torch_threads(1):
            finding = step.done(examinee)
        request.node.user_properties.append((PROPERTY, {"kernel": examinee.name, "seed": seed, **asdict(finding)}))
        if finding.status in ("mismatch", "error") or (strict and finding.status == "degraded"):
            is_first = (key, "told") not in _attention_kernels
            _attention_kernels[key, "told"] = None
            pytest.fail(_told(examinee, finding, seed, diagnosed=is_first), pytrace=False)
        if finding.status in ("refused", "skipped"):
            pytest.skip(f"{finding.status}: {finding.reason}")
        return finding

    return ask


def _told(examinee: Any, finding: "Finding", seed: int, *, diagnosed: bool) -> str:
    """With a diagnosis (what, where, the worst element, the smallest call) of a kernel's first failure."""
    kernel = examinee.name
    words = {"mismatch": "gives a wrong answer", "error": "fails", "degraded": "rounds worse than the reference"}
    lines = [
        f"{kernel} {words[finding.status]}",
        f"  asked     {finding.call}",
        f"  checked   {finding.check} ({finding.group})",
        f"  found     {finding.reason}",
        "            (N is the error that rounding explains; up to 2 N is ok)",
        *(_diagnosis(examinee, finding, seed) if diagnosed else ()),
        f"  again     pytest --harness-seed {seed}   or   harness judge {kernel} --seed {seed}",
    ]
    return "\n".join(lines)


def _diagnosis(examinee: Any, finding: "Finding", seed: int) -> list[str]:
    from harness.battery.result import Judgement
    from harness.diagnosis.session import diagnose
    from harness.report.judgement import diagnosis_lines

    alone = Judgement(examinee.name, seed, "", (finding,), planned=1, seconds=finding.seconds, minutes=1)
    found = diagnose(examinee, alone, seconds=DIAGNOSIS_S, scripts=False)
    return [] if found is None else [f"  {mark:<10}{words}" for mark, words in diagnosis_lines(found)]


@dataclass(frozen=True)
class Contest:
    """Seconds a call of both, sample by sample in turn, and their ratio with its 95 % interval."""

    name: str
    candidate: list[float]
    reference: list[float]
    ratio: "Ratio"


@pytest.fixture
def paired_timing(request: pytest.FixtureRequest) -> Callable[..., Contest]:
    """`paired_timing(candidate, reference, *arguments, budget_s=0.5)`: two functions in turn, in the same moments.

    The samples go into benchmark.json of --harness-report, as pytest-benchmark writes it.
    """

    def contest(
        candidate: Callable[..., object], reference: Callable[..., object], *arguments: Any, budget_s: float = 0.5
    ) -> Contest:
        from harness.cell.timing import interleave, paired_ratio

        calls = {"candidate": lambda: candidate(*arguments), "reference": lambda: reference(*arguments)}
        timed = interleave(
            calls, budget_s=budget_s, min_blocks=11, max_blocks=501, seed=request.config.stash[SEED], warm_up=True
        )
        ratio = paired_ratio(timed["candidate"], timed["reference"], seed=0)
        samples = {name: each.seconds for name, each in timed.items()}
        done = Contest(request.node.name, **samples, ratio=ratio)
        told = {"nodeid": request.node.nodeid, "ratio": [ratio.value, ratio.lo, ratio.hi], **samples}
        request.node.user_properties.append((PROPERTY, {"timed": told}))
        return done

    return contest


# ---- the report: in the process that all reports come to ------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Collector(session.config), "harness-report")


class _Collector:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_worker = hasattr(config, "workerinput")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or self._is_worker:
            return
        found = [value for name, value in report.user_properties if name == PROPERTY]
        self._config.stash[REPORT] += [{"nodeid": report.nodeid, **value} for value in found if isinstance(value, dict)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = self._config.stash[REPORT]
        folder: Path | None = self._config.getoption("--harness-report")
        for line in _summary([row for row in rows if "timed" not in row]):
            terminalreporter.write_line(line)
        if folder is None or self._is_worker:
            return
        from harness import store

        folder.mkdir(parents=True, exist_ok=True)
        store.write_atomically(folder / "attention.md", _markdown(rows).encode())
        if timed := [row["timed"] for row in rows if "timed" in row]:
            store.write_atomically(folder / "benchmark.json", json.dumps(_benchmarks(timed), indent=1).encode())
        terminalreporter.write_line(f"harness: {folder}/attention.md")


def _summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        counts = {status: sum(row["status"] == status for row in mine) for status in ("ok", "degraded", "mismatch",
                  "error", "refused", "skipped")}  # fmt: skip
        told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
        worst = max((row["err_ratio"] for row in mine if row["err_ratio"] is not None), default=None)
        yield f"harness: {kernel}: {told}" + ("" if worst is None else f"; worst error {worst:.2f} N, ok up to 2")


def _markdown(rows: list[dict[str, Any]]) -> str:
    from harness.report.table import escaped
    from harness.text import first_line

    asked, timed = [row for row in rows if "timed" not in row], [row["timed"] for row in rows if "timed" in row]
    lines = ["# Attention kernels", "", *(f"- {escaped(line)}" for line in _summary(asked))]
    if seeds := dict.fromkeys(row["seed"] for row in asked):
        lines.append(f"- the same numbers again: `pytest --harness-seed {next(iter(seeds))}`")
    lines.append("")
    if failed := [row for row in asked if row["status"] in ("mismatch", "error", "degraded")]:
        lines += ["| kernel | asked | found | error/N |", "|:--|:--|:--|--:|"]
        for row in failed:
            ratio = "" if row["err_ratio"] is None else f"{row['err_ratio']:.3g}"
            texts = (escaped(row["kernel"]), escaped(row["call"]), escaped(first_line(row["reason"])))
            lines.append(f"| {' | '.join(texts)} | {ratio} |")
    if timed:
        lines += ["", "| timed | x reference | 95 % interval |", "|:--|--:|--:|"]
        for one in timed:
            value, low, high = one["ratio"]
            lines.append(f"| {escaped(one['nodeid'])} | {value:.3f} | {low:.3f} … {high:.3f} |")
    return "\n".join(lines) + "\n"


def _benchmarks(timed: list[dict[str, Any]]) -> dict[str, Any]:
    """pytest-benchmark's document, by the same functions as a run's benchmark.json."""
    import torch

    from harness import environment
    from harness.report.benchmark_file import document, entry

    entries = [
        entry(one["nodeid"], side, one[side], extra={"ratio": one["ratio"]}, params={"side": side})
        for one in timed
        for side in ("candidate", "reference")
    ]
    return document(entries, environment.collect(torch.get_num_threads()))
