"""The gate's study: counts, intervals, other tools' decisions, real extra work, and a study that survives a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gate_study import __main__ as gate_study
from bench.gate_study import night as nights
from bench.gate_study import report, roc, tools
from bench.gate_study.calibrate import Injection, slowdown
from bench.gate_study.decisions import NEVER, Decision, by_asv, by_pyperf, by_pytest_benchmark
from bench.gate_study.extra_work import COUNTS, PIECE
from bench.gate_study.neighbour import neighbours
from bench.gate_study.night import EVERY, SHARES, CellResult, Night, NightResult
from bench.gate_study.run import CONFIG, Plan, left_to_do, run, seconds_needed
from bench.gate_study.tally import Rate, frame_of, smallest_borne_out, tally
from bench.gate_study.targets import MISSED, NOT_MEASURED, REACHED, all_reached, judge
from bench.gate_study.trees import SOURCE, make_trees
from harness.case import Case
from harness.errors import BadInput
from harness.suite.config import load_suite

TINY = Case("mha", "eager", 16, 2, 2, 8, 8, 1, "none", "float32", "prefill")
IDS = [f"cell{n}" for n in range(29)]


# ---- counts and intervals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 5 (Clopper-Pearson); the last by its closed form.
    [(81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0.0, 0.1684), (1, 29, 0.0009, 0.1776),
     (0, 1015, 0.0, 1 - 0.025 ** (1 / 1015))],
)  # fmt: skip
def test_intervals_are_the_published_ones(count, total, low, high):
    found = Rate(count, total)
    assert found.interval == pytest.approx((low, high), abs=5e-5)
    assert found.value == count / total


def test_nothing_counted_is_no_rate():
    assert Rate(0, 0).value is None
    assert Rate(0, 0).interval is None


# ---- the other tools' decisions, by their own commands ---------------------------------------------------------------

PYTEST_FILE = """
import itertools, os, pytest

def clock(scale):
    # Five rounds of 1, 2, 3, 4 and 10 s times the scale, and no time between them.
    at, steps = 0.0, itertools.cycle([0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0, 10.0])
    def now():
        nonlocal at
        at += scale * next(steps)
        return at
    return now

@pytest.mark.parametrize("scale", [1.0, 1.04, 1.06, 0.9])
def test_it(benchmark, scale):
    benchmark._timer = clock(scale if os.environ["HEAD"] == "1" else 1.0)
    benchmark.pedantic(lambda: None, rounds=5, iterations=1)
"""


def test_pytest_benchmark_decides_as_its_command_does(tmp_path):
    (tmp_path / "test_it.py").write_text(PYTEST_FILE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "test_it.py",
               "-p", "no:cacheprovider", "-p", "no:xdist", f"--benchmark-storage={tmp_path / 'saved'}"]  # fmt: skip

    def run_pytest(head: str, *options: str) -> str:
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True,
                              env=tools._environment(1) | {"HEAD": head})  # fmt: skip
        return done.stdout + done.stderr

    run_pytest("0", "--benchmark-save=base", f"--benchmark-json={tmp_path / 'base.json'}")
    fails = ["--benchmark-compare-fail", *(f"{field}:5%" for field in ("mean", "median", "min"))]
    told = run_pytest("1", "--benchmark-compare", *fails, f"--benchmark-json={tmp_path / 'head.json'}")
    theirs = set(re.findall(r"test_it\[(\S+)\].*Field '(\w+)' has failed", told))
    stats = {
        side: {
            each["param"]: each["stats"] for each in json.loads((tmp_path / f"{side}.json").read_text())["benchmarks"]
        }
        for side in ("base", "head")
    }
    ours = {
        (scale, each.name.split()[-1])
        for scale in stats["base"]
        for each in by_pytest_benchmark(stats["base"][scale], stats["head"][scale])
        if each.flagged
    }
    assert {scale for scale, _ in ours} == {"1.06"}
    assert len(ours) == 3
    assert ours == theirs


def samples_of(seed: int, factor: float, spread: float, number: int = 20) -> tuple[list[float], list[float]]:
    draw = np.random.default_rng(seed)
    base, head = draw.normal(1e-3, spread * 1e-3, (2, number)).clip(1e-4)
    return base.tolist(), (factor * head).tolist()


MADE_UP = [(0, 1.0, 0.01), (1, 1.08, 0.01), (2, 1.2, 0.01), (3, 1.2, 0.5), (4, 0.8, 0.01), (5, 1.03, 0.001)]


@pytest.mark.parametrize(("seed", "factor", "spread"), MADE_UP)
def test_asv_decides_as_its_command_does(monkeypatch, capsys, seed, factor, spread):
    from asv.commands import compare  # type: ignore[import-untyped]
    from asv_runner.statistics import compute_stats  # type: ignore[import-untyped]

    base, head = samples_of(seed, factor, spread)
    monkeypatch.setattr(compare.Benchmarks, "load", lambda conf: {})

    def results(samples):
        value, stats = compute_stats(samples, 1)
        yield "cell", [], [value], [stats], [samples], "1", "machine", "environment"

    for decision, threshold in zip(by_asv(base, head), (1.1, 1.05), strict=True):
        worse, _ = compare.Compare.print_table(
            None, "a", "b", threshold, False, results(base), results(head), machine="machine"
        )
        assert decision.flagged == worse, decision
    capsys.readouterr()


def test_asv_is_told_of_both_kinds_on_these_samples():
    flagged = [tuple(each.flagged for each in by_asv(*samples_of(*row))) for row in MADE_UP]
    assert flagged == [(False, False), (False, True), (True, True), (False, False), (False, False), (False, False)]
    assert by_asv(*samples_of(0, 1.0, 0.01))[0].score == NEVER


def test_pyperf_decides_as_its_command_does(tmp_path):
    import pyperf  # type: ignore[import-untyped]

    suites: dict[str, list] = {"base": [], "head": []}
    for seed, factor, spread in MADE_UP:
        for side, values in zip(suites, samples_of(seed, factor, spread, 9), strict=True):
            metadata = {"name": f"cell{seed}", "unit": "second"}
            suites[side].append(pyperf.Benchmark([pyperf.Run(values, metadata=metadata, collect_metadata=False)]))
    for side, benchmarks in suites.items():
        pyperf.BenchmarkSuite(benchmarks).dump(str(tmp_path / f"{side}.json"))
    for at, options in enumerate(([], ["--min-speed=5"])):
        command = [sys.executable, "-m", "pyperf", "compare_to", *options, "-v"]
        done = subprocess.run([*command, "base.json", "head.json"], cwd=tmp_path, capture_output=True, text=True)
        paragraphs = re.split(r"^(?=cell\d)", done.stdout.split("Geometric mean")[0], flags=re.MULTILINE)
        theirs = {
            int(found[1])
            for each in paragraphs
            if (found := re.search(r"cell(\d)", each)) and "slower" in each and "Not significant" not in each
        }
        ours = {s for s, f, r in MADE_UP if by_pyperf(*samples_of(s, f, r, 9))[at].flagged}
        assert ours == theirs, done.stdout
        assert ours == ({1, 2, 5} if at == 0 else {1, 2})


def by_stats(base: list[float], head: list[float]) -> list[Decision]:
    named = [{"mean": float(np.mean(x)), "median": float(np.median(x)), "min": min(x)} for x in (base, head)]
    return by_pytest_benchmark(*named)


@pytest.mark.parametrize("decide", [by_stats, by_asv, by_pyperf])
def test_every_score_orders_by_slowness(decide):
    for scores in zip(
        *([each.score for each in decide(*samples_of(7, x, 0.001))] for x in (0.8, 1.1, 1.3)), strict=True
    ):
        assert scores[0] < 0 < scores[1] < scores[2]


# ---- real extra work -------------------------------------------------------------------------------------------------

COUNT_PRODUCTS = """
import json, sys
sys.path[:] = [sys.argv[1], *sys.path]
import torch
from harness.cell import measure
from harness.cell.build import build_pair
from harness.case import Case
from harness.kernels.front import find_kernel

assert measure.__file__.startswith(sys.argv[1]), measure.__file__
rows, real = [], torch.mm
torch.mm = lambda a, b, out: (rows.append(len(a)), real(a, b, out=out))
found = {}
for name, fields in json.loads(sys.argv[2]).items():
    pair = build_pair(Case(**fields), find_kernel("eager"), 0)
    for side in ("candidate", "reference"):
        call = measure.timed_call(pair, getattr(pair, side), 0)
        rows.clear(), call(), call()
        found[name + " " + side] = list(rows)
print(json.dumps(found))
"""


def test_a_slowed_tree_really_does_more_work(tmp_path):
    trees = make_trees(tmp_path)
    other = replace(TINY, seq_len=9)
    trees.slow_down({TINY.case_id: 2 * PIECE + 5})
    cases = json.dumps({"slowed": asdict(TINY), "other": asdict(other)})
    command = [sys.executable, "-P", "-c", COUNT_PRODUCTS, str(trees.slowed), cases]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("slowed candidate") == [PIECE, PIECE, 5] * 2
    assert found == {"slowed reference": [], "other candidate": [], "other reference": []}
    # And the others are the plain code.
    for tree in (trees.base, trees.same):
        assert (tree / "harness/cell/measure.py").read_bytes() == (SOURCE / "harness/cell/measure.py").read_bytes()
        assert not (tree / "harness" / COUNTS).exists()


def test_trees_are_made_once(tmp_path):
    source = tmp_path / "source"
    (source / "harness/cell").mkdir(parents=True)
    (source / "bench").mkdir()
    (source / "harness/cell/measure.py").write_text("first = 1\n")
    make_trees(tmp_path / "trees", source)
    (source / "harness/cell/measure.py").write_text("second = 2\n")
    trees = make_trees(tmp_path / "trees", source)
    assert (trees.base / "harness/cell/measure.py").read_text() == "first = 1\n"
    assert (trees.slowed / "harness/cell/measure.py").read_text().startswith("first = 1\n")
    assert "_slowed(timed_call" in (trees.slowed / "harness/cell/measure.py").read_text()


def test_the_measured_slowdown_leaves_out_disturbed_blocks():
    draw = np.random.default_rng(0)
    plain, slowed = draw.normal(1.0, 0.005, (2, 400)) * [[1.0], [1.05]]
    plain[:100] *= 4  # others were at work
    value, low, high = slowdown(slowed, plain)
    assert low < value < high
    assert value == pytest.approx(0.05, abs=0.005)


# ---- nights ----------------------------------------------------------------------------------------------------------


def test_half_the_cells_of_a_slowed_night_are_slowed_and_each_share_is_dealt_equally_often():
    dealt = [share for n in range(200) for share in Night("slowed", "quiet", n).shares(IDS).values()]
    for share in SHARES:
        assert dealt.count(share) / len(dealt) == pytest.approx(1 / EVERY, rel=0.05)
    assert dealt.count(0.0) / len(dealt) == pytest.approx(0.5, abs=0.01)


def test_a_night_is_the_same_whenever_it_is_asked_for_and_unlike_the_others():
    one, same = (Night("slowed", "quiet", 3).shares(IDS) for _ in range(2))
    assert one == same
    assert one != Night("slowed", "quiet", 4).shares(IDS)
    assert one != Night("slowed", "noisy", 3).shares(IDS)
    assert set(Night("same", "quiet", 3).shares(IDS).values()) == {0.0}
    assert any(Night("slowed", "quiet", 0).shares(IDS[:2]).values())  # even the quick study slows something


def result_of(night: Night, tool: str = "ours", *, flagged=(), verdict="pass", ids=IDS, **details) -> NightResult:
    shares = night.shares(ids)
    cells = tuple(
        CellResult(
            name, shares[name], (Decision(tool, name in flagged, shares[name] + 0.001 * at),),
            {"verdict": "regression" if name in flagged else verdict, "smallest": 0.04, "change": 0.0} | details,
        )
        for at, name in enumerate(ids)
    )  # fmt: skip
    return NightResult(night, tool, "2026-01-01T00:00:00+00:00", 2.0 * len(ids), 0.1, cells)


def test_nights_are_read_as_they_were_written(tmp_path):
    written = [result_of(Night("slowed", "noisy", n), flagged=IDS[:n]) for n in range(3)]
    for each in written:
        nights.append(tmp_path, each)
    assert nights.read(tmp_path) == written


def test_half_a_line_is_dropped_and_a_foreign_one_is_an_error(tmp_path):
    nights.append(tmp_path, first := result_of(Night("same", "quiet", 0)))
    path = tmp_path / nights.NIGHTS
    path.write_bytes(path.read_bytes() + b'{"night": {"kind": "sa')
    assert nights.read(tmp_path) == [first]
    nights.append(tmp_path, second := result_of(Night("same", "quiet", 1)))
    assert nights.read(tmp_path) == [first, second]
    path.write_text('{"night": 1}\n')
    with pytest.raises(BadInput, match=r"nights\.jsonl:1 is no night"):
        nights.read(tmp_path)


def test_tools_come_in_random_order_and_rivals_have_fewer_nights():
    plan = Plan(same=20, slowed=0, rival_same=10, rival_slowed=0, modes=("quiet",))
    work = left_to_do(plan, [])
    orders = {n: tuple(w.tool for w in work if w.night.number == n) for n in range(20)}
    assert len(work) == 20 + 3 * 10
    assert len({orders[n] for n in range(10)}) > 3
    assert all(orders[n] == ("ours",) for n in range(10, 20))


def test_the_estimate_follows_the_nights_so_far():
    plan = Plan(same=3, slowed=0, modes=("quiet",), tools=("ours",))
    done = [result_of(Night("same", "quiet", 0))]
    work = left_to_do(plan, done)
    assert [each.night.number for each in work] == [1, 2]
    assert seconds_needed(plan, work, done, 29) == pytest.approx(2 * 58.0)


STUB_STUDY = """
import sys, time
from pathlib import Path
from rich.console import Console
from bench.gate_study import run as study, tools
from bench.gate_study.calibrate import Injection
from bench.gate_study.decisions import Decision

def stub(task):
    assert task.base.is_absolute()  # tools run in other folders
    time.sleep(0.05)
    return [((Decision("ours", False, 0.0),), {"verdict": "pass"}) for _ in task.cases]

study.TOOLS["ours"] = stub
study.make_trees = lambda folder: type("Trees", (), {"base": folder, "same": folder, "slowed": folder,
                                                     "slow_down": lambda self, rows: None})()
study.calibrated = lambda folder, trees, suite, cases, *rest: {
    case.case_id: {x: Injection(x, 1, x, x, x, x) for x in study.SHARES} for case in cases}
plan = study.Plan(tools=("ours",), modes=("quiet",), same=8, slowed=4)
study.run(plan, Path(sys.argv[1]), console=Console(stderr=True))
"""


def test_a_killed_study_goes_on_where_it_stopped(tmp_path):
    command = [sys.executable, "-c", STUB_STUDY, os.path.relpath(tmp_path, SOURCE)]
    process = subprocess.Popen(command, cwd=SOURCE, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(nights.read(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = nights.read(tmp_path)
    assert 3 <= len(before) < 12
    done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = nights.read(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == len({each.night for each in after}) == 12
    assert f"{12 - len(before)} turns" in done.stderr


def test_a_study_of_another_config_is_refused(tmp_path):
    config = tmp_path / "other.yaml"
    config.write_text(CONFIG.read_text() + "\n")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG.read_text())
    with pytest.raises(BadInput, match="another config"):
        run(Plan(config=config), folder, console=None)  # type: ignore[arg-type]
    config.write_text(CONFIG.read_text().replace("threads: 1", "threads: 2"))
    with pytest.raises(BadInput, match="threads: 1"):
        run(Plan(config=config), folder, console=None)  # type: ignore[arg-type]


def test_the_studys_cells_are_many_enough():
    assert len(load_suite(CONFIG).cases) * Plan().same >= 1000


# ---- tools' nights ---------------------------------------------------------------------------------------------------


def task_of(tmp_path: Path) -> tools.Task:
    return tools.Task(tmp_path / "base", tmp_path / "head", (TINY, replace(TINY, seq_len=9)), 0, 1, 2.0, 0)


def test_asv_turns_the_versions_round_and_pyperf_does_not(monkeypatch, tmp_path):
    asked: list[tuple[str, float]] = []

    class Stub:
        def __init__(self, task, root):
            self.name = root.name

        def __enter__(self):
            def ask(tool, case, seconds, loops=None):
                asked.append((self.name, seconds))
                slow = 1.5 if self.name == "head" else 1.0
                return {
                    "samples": [factor * slow for factor in (1, 1.01, 0.99, 1.02)[: 4 if tool == "asv" else 3]],
                    "number": 4,
                }

            return ask

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(tools, "sampler", Stub)
    found = tools.asv(task_of(tmp_path))
    assert [name for name, _ in asked] == ["head", "head", "base", "base", "base", "base", "head", "head"]
    assert sum(seconds for _, seconds in asked) == pytest.approx(2 * 2.0)  # both cells' budget, no more
    assert [each.flagged for decisions, _ in found for each in decisions] == [True] * 4
    asked.clear()
    found = tools.pyperf(task_of(tmp_path))
    assert [name for name, _ in asked] == ["base"] * 8 + ["head"] * 8
    assert sum(seconds for _, seconds in asked) == pytest.approx(2 * 2.0)
    assert [each.flagged for decisions, _ in found for each in decisions] == [True] * 4
    assert found[0][1] == {"samples": [9, 9]}


def test_the_real_samplers_sample(tmp_path):
    task = replace(task_of(tmp_path), base=SOURCE)
    with tools.sampler(task, SOURCE) as ask:
        by_asv_ = ask("asv", TINY, 0.3)
        loops = ask("pyperf", TINY, 0.1)["number"]
        by_pyperf_ = ask("pyperf", TINY, 0.1, loops=loops)
        with pytest.raises(tools.ToolFailed, match="nonsense"):
            ask("nonsense", TINY, 0.1)
    assert len(by_asv_["samples"]) >= 2
    assert len(by_pyperf_["samples"]) == 3
    assert all(0 < each < 1 for each in by_asv_["samples"] + by_pyperf_["samples"])


def test_pytest_benchmarks_night_is_its_own_run(monkeypatch, tmp_path):
    task = replace(task_of(tmp_path), base=SOURCE, head=SOURCE, seconds=0.3)
    once = tools._pytest_night(task, SOURCE)
    assert list(once) == [case.case_id for case in task.cases]
    assert all(each["rounds"] >= 5 and 0 < each["min"] <= each["median"] for each in once.values())
    slower = {name: {field: 1.1 * value for field, value in each.items()} for name, each in once.items()}
    for head, flagged in ((once, False), (slower, True)):
        runs = iter([once, head])
        monkeypatch.setattr(tools, "_pytest_night", lambda task, root, runs=runs: next(runs))
        assert [each.flagged for decisions, _ in tools.pytest_benchmark(task) for each in decisions] == [flagged] * 6


def test_our_night_is_judged_by_the_gate(monkeypatch, tmp_path):
    verdicts = [{"verdict": v, "lo": low} for v, low in (("regression", 0.03), ("inconclusive", None))]
    sent: dict = {}

    def stub(name, root, request):
        sent.update(request, name=name, root=root)
        return json.dumps(verdicts)

    monkeypatch.setattr(tools, "run_script", stub)
    found = tools.ours(task_of(tmp_path))
    assert [(each[0][0].flagged, each[0][0].score) for each in found] == [(True, 0.03), (False, NEVER)]
    assert sent["root"] == tmp_path / "base"
    assert (sent["base"], sent["head"]) == (str(tmp_path / "base"), str(tmp_path / "head"))
    assert sent["settings"]["seconds"] == 2.0


def test_a_neighbour_that_ends_spoils_the_night():
    def night():
        with neighbours(2, 0) as pids:
            os.kill(pids[0], signal.SIGKILL)
            time.sleep(0.2)

    with pytest.raises(RuntimeError, match="not noisy"):
        night()


def test_neighbours_work_and_are_gone_afterwards():
    import psutil

    with neighbours(1, 0) as pids:
        process = psutil.Process(pids[0])
        deadline = time.monotonic() + 20
        while process.cpu_times().user < 0.6 and time.monotonic() < deadline:  # numpy's import takes less
            time.sleep(0.05)
        assert process.cpu_times().user >= 0.6
    assert not psutil.pid_exists(pids[0])


# ---- ROC -------------------------------------------------------------------------------------------------------------

SCORES = st.lists(
    st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 0.5, NEVER, float("nan")])), min_size=1, max_size=30
)


@given(unchanged=SCORES, changed=SCORES)
def test_curves_rise_from_nothing_to_everything(unchanged, changed):
    from scipy.stats import mannwhitneyu

    scores = np.array([*unchanged, *changed])
    is_changed = np.arange(len(scores)) >= len(unchanged)
    curve = roc.points(scores, is_changed)
    assert (curve[0], curve[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(curve))
    # The area is Mann and Whitney's statistic; ranks, because infinite scores are scores too.
    ranks = pd.Series(np.where(np.isnan(scores), NEVER, scores)).rank().to_numpy()
    expected = mannwhitneyu(ranks[is_changed], ranks[~is_changed]).statistic / (len(unchanged) * len(changed))
    assert roc.area(curve) == pytest.approx(expected)


def test_no_curve_of_one_kind_alone():
    assert roc.points(np.array([1.0, 2.0]), np.array([True, True])) == []
    assert roc.area([]) is None


# ---- tables, targets, report -----------------------------------------------------------------------------------------

INJECTIONS = {name: {x: Injection(x, 10, x, 0.9 * x, 1.1 * x, x) for x in SHARES} for name in IDS}


def good_nights() -> list[NightResult]:
    found = []
    for mode in ("quiet", "noisy"):
        found += [result_of(Night("same", mode, n)) for n in range(35)]
        for n in range(8):
            night = Night("slowed", mode, n)
            found.append(result_of(night, flagged=[name for name, x in night.shares(IDS).items() if x >= 0.05]))
    return found


def judged(results: list[NightResult]) -> dict[str, str]:
    frame = frame_of(results, INJECTIONS)
    return {each.title: each.status for each in judge(tally(frame), frame)}


def test_a_good_study_reaches_every_target():
    found = judged(good_nights())
    assert set(found.values()) == {REACHED}
    assert len(found) == 11


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        # 6 of 1,015 cells in one of 35 nights: both too many.
        (lambda r: replace_cells(r, Night("same", "noisy", 5), IDS[:6]),
         {"false alarms, cells, noisy", "false alarms, nights, noisy"}),
        (lambda r: replace_cells(r, Night("same", "quiet", 5), IDS[:1]), {"false alarms, nights, quiet"}),
        (lambda r: [each if each.night.kind == "same" else unflag(each, 0.10) for each in r],
         {"detection at +10%, quiet"}),
        (lambda r: [each if each.night.kind == "same" else unflag(each, 0.05) for each in r],
         {"detection at +5%, quiet", "effects of 1 to 1.3 times the printed smallest are seen, quiet"}),
        (lambda r: [replace(each, seconds=6.5 * 29) if each.night.mode == "noisy" else each for each in r],
         {"seconds per cell, noisy"}),
    ],
)  # fmt: skip
def test_a_missed_target_is_named(change, missed):
    found = judged(change(good_nights()))
    assert {title for title, status in found.items() if status == MISSED} == missed
    assert NOT_MEASURED not in found.values()


def replace_cells(results, night, flagged):
    return [result_of(night, flagged=flagged) if each.night == night else each for each in results]


def unflag(result, share):
    return replace(
        result,
        cells=tuple(
            replace(
                cell, decisions=tuple(replace(d, flagged=d.flagged and cell.share != share) for d in cell.decisions)
            )
            for cell in result.cells
        ),
    )


def test_what_was_not_measured_is_not_reached():
    found = judged([each for each in good_nights() if each.night.mode == "quiet" and each.night.number < 30])
    assert found["comparisons of unchanged cells, quiet"] == NOT_MEASURED  # 870 and those beside slowed ones
    assert found["false alarms, cells, noisy"] == NOT_MEASURED
    assert not all_reached([])


def test_rates_are_counted_by_hand():
    night = Night("slowed", "quiet", 0)
    slowed = [name for name, x in night.shares(IDS).items() if x == 0.20]
    untouched = [name for name, x in night.shares(IDS).items() if x == 0.0]
    results = [
        result_of(Night("same", "quiet", 0), flagged=IDS[:3]),
        result_of(Night("same", "quiet", 1), verdict="inconclusive"),
        result_of(night, flagged=[slowed[0], untouched[0], untouched[1]]),
    ]
    (line,) = tally(frame_of(results, INJECTIONS))
    assert (line.alarms, line.alarm_nights) == (Rate(3, 58), Rate(1, 2))
    assert line.beside == Rate(2, len(untouched))
    assert line.detected[0.20] == Rate(1, len(slowed))
    assert line.detected[0.05].count == 0
    assert line.inconclusive == Rate(29, 87)
    assert line.seconds == pytest.approx(2.0)


def test_smallest_counts_only_cells_that_printed_one_and_got_as_much():
    night = Night("slowed", "quiet", 0)
    shares = night.shares(IDS)
    enough = [name for name, x in shares.items() if x == 0.05]  # of the 4 % that are printed; 10 % would prove nothing
    frame = frame_of([result_of(night, flagged=enough[:2])], INJECTIONS)
    assert smallest_borne_out(frame, "quiet") == Rate(2, len(enough))
    assert smallest_borne_out(frame_of([result_of(night, smallest=None)], INJECTIONS), "quiet") == Rate(0, 0)


def study_folder(folder: Path, results: list[NightResult]) -> Path:
    from harness import environment, store

    store.write_environment(folder, environment.collect(1))
    calibration = {name: [asdict(each) for each in found.values()] for name, found in INJECTIONS.items()}
    (folder / "calibration.json").write_text(json.dumps(calibration))
    for each in results:
        nights.append(folder, each)
    return folder


def test_the_report_names_what_was_missed_and_fails(tmp_path, capsys):
    rivals = [result_of(Night(kind, "quiet", 0), "asv", flagged=IDS[::3]) for kind in ("same", "slowed")]
    folder = study_folder(tmp_path, [*replace_cells(good_nights(), Night("same", "quiet", 2), [IDS[4]]), *rivals])
    assert gate_study.main(["--report", str(folder)]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "NOT ALL REACHED: false alarms, nights, quiet (2.9 % (1 of 35; 0.1 to 14.9), missed)" in told
    text = (folder / report.MARKDOWN).read_text()
    assert "`cell4`" in text
    assert "same 2" in text
    assert (folder / roc.PICTURE).read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(folder / report.TABLE)
    assert table["decision"].tolist() == ["ours", "asv", "ours"]
    assert table.loc[0, "false_alarms_count"] == 1
    curves = pd.read_csv(folder / report.CURVES)
    for _, own in curves.groupby(["mode", "decision", "share"]):
        assert own["detected"].is_monotonic_increasing
        assert own["false_alarms"].is_monotonic_increasing


def test_a_good_study_exits_0_and_an_empty_one_is_bad_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roc, "save", lambda frame, folder: False)
    (tmp_path / "good").mkdir()
    assert gate_study.main(["--report", str(study_folder(tmp_path / "good", good_nights()))]) == 0
    assert gate_study.main(["--report", str(tmp_path)]) == 2
    assert "holds no nights" in capsys.readouterr().err


def test_quiet_nights_that_were_not_quiet_are_told():
    loud = [replace(each, others=0.9) for each in good_nights()[:2]]
    study = SimpleNamespace(results=[*loud, *good_nights()[2:]])
    assert "2 of 43 quiet nights were not quiet" in textwrap.dedent("\n".join(report.notes(study)))  # type: ignore[arg-type]
