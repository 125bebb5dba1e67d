"""Every verdict of `harness doctor`, from made-up machines."""

import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.__main__ import main
from harness.doctor import Diagnosis, machine, noise, software
from harness.doctor.examine import Examination, examine, noise_level
from harness.doctor.machine import cpu_quota, memory_limit
from harness.doctor.noise import NoiseStudy, Trial, spread, study
from harness.report.doctor import print_examination
from harness.suite.schema import Timing
from tests.support import printed, python

GIB = 2**30
QUIET = NoiseStudy(tuple(Trial("L=64", ratio, True, 1.2) for ratio in (0.995, 1.005, 1.0)))


def write(root: Path, path: str, text: str) -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")
    return root


# ---- software --------------------------------------------------------------------------------------------------------


def test_versions_are_listed():
    found = software.versions("3.11.7", {"torch": "2.13.0", "numpy": "2.4", "pandas": "3", "ray": "2.6"}.get)
    assert (found.level, found.found) == ("ok", "python 3.11.7, torch 2.13.0, numpy 2.4, pandas 3, ray 2.6")


@pytest.mark.parametrize("missing", ["torch", "numpy", "pandas"])
def test_a_missing_package_prevents_runs(missing):
    found = software.versions("3.11.7", lambda name: None if name == missing else "1")
    assert found.level == "bad" and found.prevents_runs and missing in found.todo


@pytest.mark.parametrize(
    ("config", "level", "says"),
    [
        ("USE_MKL=ON, USE_MKLDNN=ON, USE_OPENMP=ON", "ok", "MKL, oneDNN, OpenMP"),
        ("USE_MKL=OFF, USE_MKLDNN=ON, USE_OPENMP=ON", "ok", "with oneDNN, OpenMP"),
        ("USE_MKL=ON, USE_MKLDNN=ON, USE_OPENMP=OFF", "warn", "one core"),
        ("USE_MKL=OFF, USE_MKLDNN=OFF, USE_OPENMP=ON", "warn", "MKL or oneDNN"),
    ],
)
def test_the_build_of_torch(config, level, says):
    found = software.torch_build(config)
    assert found.level == level and says in found.found + found.todo


def test_the_build_of_this_torch():
    assert software.torch_build(torch.__config__.show()).found.startswith("built with ")


def test_a_torch_that_cannot_be_imported_prevents_runs():
    found = software.torch_build(None, "OSError: libgomp.so.1")
    assert found.prevents_runs and "libgomp" in found.found


@pytest.mark.parametrize(
    ("commit", "dirty", "level"), [("a" * 40, False, "ok"), ("a" * 40, True, "warn"), (None, None, "warn")]
)
def test_the_tree(commit, dirty, level):
    assert software.tree(commit, dirty).level == level


@pytest.mark.parametrize(
    ("number", "usable", "environment", "level", "says"),
    [
        (4, 4, {"OMP_NUM_THREADS": "4", "HOME": "/"}, "ok", "4 of torch for 4 usable cores, OMP_NUM_THREADS=4"),
        (8, 4, {}, "bad", "OMP_NUM_THREADS=4"),
        (1, 4, {}, "warn", "OMP_NUM_THREADS=4"),
        (4, 4, {"OMP_DYNAMIC": "TRUE"}, "warn", "unset OMP_DYNAMIC"),
        (4, 4, {"MKL_DYNAMIC": "1"}, "warn", "unset MKL_DYNAMIC"),
        (4, 4, {"MKL_DYNAMIC": "FALSE", "GOMP_CPU_AFFINITY": "0-3"}, "ok", "GOMP_CPU_AFFINITY=0-3"),
    ],
)
def test_threads(number, usable, environment, level, says):
    found = software.threads(number, usable, environment)
    assert found.level == level and says in (found.todo or found.found)


# ---- machine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "capability", "level", "says"),
    [
        ("fpu avx2", "AVX2", "ok", "no bf16 instructions"),
        ("avx2 avx512f avx512_bf16 amx_bf16", "AVX512", "ok", "avx2 avx512f avx512_bf16 amx_bf16; torch uses AVX512"),
        ("avx2 avx512f", "AVX2", "warn", "unless AVX2 is meant"),
        ("avx2", "DEFAULT", "warn", "unset ATEN_CPU_CAPABILITY: "),
        ("sse4_2", "DEFAULT", "warn", "with AVX2"),
        ("fp asimd bf16", "DEFAULT", "ok", "asimd bf16"),
    ],
)
def test_the_processor(flags, capability, level, says):
    found = machine.processor(f"processor : 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n", capability)
    assert found.level == level and "Some CPU" in found.found and says in found.found + found.todo
    assert ("no bf16" in found.found) == ("bf16" not in flags and found.found.count("not visible here") == 0)


def test_a_processor_that_cannot_be_seen():
    assert machine.processor("", "AVX2").found.startswith("unknown model: not visible here")


@pytest.mark.parametrize(
    ("affinity", "quota", "level"),
    [(4, None, "ok"), (2, None, "ok"), (4, 4.0, "ok"), (4, 2.5, "warn"), (4, 0.5, "bad")],
)
def test_cores(affinity, quota, level):
    assert machine.cores(4, affinity, quota).level == level


@pytest.mark.parametrize(("quota", "usable"), [(None, 3), (2.5, 2), (0.5, 1), (9.0, 3)])
def test_usable_cores(quota, usable):
    assert machine.usable_cores({0, 2, 5}, quota) == usable


def test_a_quota_of_version_two_holds_from_above(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/pod/box")
    assert cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/pod/box/cpu.max", "max 100000")
    assert cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "150000 100000")
    assert cpu_quota(tmp_path) == 1.5


def test_a_quota_of_version_one(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/box\n1:cpu,cpuacct:/box")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1")
    assert cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "50000")
    assert cpu_quota(tmp_path) == 0.5


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [("0::/box", "sys/fs/cgroup/box/memory.max"), ("4:memory:/box", "sys/fs/cgroup/memory/box/memory.limit_in_bytes")],
)
def test_a_memory_limit(tmp_path, cgroup, file):
    write(tmp_path, "proc/self/cgroup", cgroup)
    for text, limit in (("max", None), ("9223372036854771712", None), (str(GIB), GIB)):
        write(tmp_path, file, text)
        assert memory_limit(tmp_path) == limit


def test_governors(tmp_path):
    assert machine.governor(tmp_path).found == "not visible here"
    path = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    write(tmp_path, path.format(0), "performance")
    assert machine.governor(tmp_path) == Diagnosis("governor", "ok", "performance")
    write(tmp_path, path.format(1), "powersave")
    found = machine.governor(tmp_path)
    assert (found.level, found.found) == ("warn", "performance, powersave")


@pytest.mark.parametrize(
    ("file", "text", "level", "says"),
    [
        ("intel_pstate/no_turbo", "0", "warn", "echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo"),
        ("intel_pstate/no_turbo", "1", "ok", "off"),
        ("cpufreq/boost", "1", "warn", "echo 0 > /sys/devices/system/cpu/cpufreq/boost"),
        ("cpufreq/boost", "0", "ok", "off"),
        ("nothing", "0", "ok", "not visible here"),
    ],
)
def test_turbo(tmp_path, file, text, level, says):
    found = machine.turbo(write(tmp_path, f"sys/devices/system/cpu/{file}", text))
    assert found.level == level and says in found.found + found.todo


@pytest.mark.parametrize(
    ("stolen", "level"), [(0, "ok"), (4, "ok"), (10, "warn"), (40, "warn"), (60, "bad")]
)  # of 1000 ticks
def test_steal_time(stolen, level):
    before, after = "cpu 1000 0 0 1000 0 0 0 100 0 0\ncpu0 1", f"cpu {2000 - stolen} 0 0 1000 0 0 0 {100 + stolen} 0 0"
    found = machine.steal(before, after)
    assert found.level == level and found.found.startswith(f"{stolen / 10:.1f} %")


@pytest.mark.parametrize("stat", [None, "", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9"])
def test_steal_time_that_cannot_be_seen(stat):
    assert machine.steal(stat, stat).found == "not visible here"


@pytest.mark.parametrize(("average", "level"), [(None, "ok"), (0.1, "ok"), (0.6, "warn"), (4.0, "bad")])
def test_load(average, level):
    assert machine.load(average, 4).level == level


@pytest.mark.parametrize(
    ("available", "swapped", "limit", "level"),
    [
        (8 * GIB, 0, None, "ok"),
        (8 * GIB, 0, 4 * GIB, "ok"),
        (8 * GIB, GIB, None, "warn"),
        (GIB, 0, None, "warn"),
        (8 * GIB, 0, GIB, "warn"),
        (GIB // 4, 0, None, "bad"),
        (8 * GIB, 0, GIB // 4, "bad"),
    ],
)
def test_memory(available, swapped, limit, level):
    assert machine.memory(available, 16 * GIB, swapped, limit).level == level


@pytest.mark.parametrize(
    ("free", "level", "prevents"), [(9 * GIB, "ok", False), (2**25, "warn", False), (2**10, "bad", True)]
)
def test_disk_space(free, level, prevents):
    found = machine.disk(Path("results"), free)
    assert (found.level, found.prevents_runs) == (level, prevents)


def test_results_that_can_be_written(tmp_path):
    assert machine.results_folder(tmp_path / "not" / "yet").level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_slow_sync_is_said(tmp_path):
    ticks = iter([0.0, 0.3])
    found = machine.results_folder(tmp_path, clock=lambda: next(ticks))
    assert found.level == "warn" and "300.0 ms" in found.found


def test_results_that_cannot_be_written(tmp_path):
    (tmp_path / "results").write_text("a file")
    found = machine.results_folder(tmp_path / "results")
    assert found.prevents_runs and "Not a directory" in found.found


def test_results_that_cannot_be_synced(tmp_path):
    def fsync(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    found = machine.results_folder(tmp_path, fsync=fsync)
    assert found.prevents_runs and "Input/output error" in found.found


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_the_spread_is_symmetric_and_never_below_what_was_seen():
    assert spread([1.0, 1.0]) == 0.0
    assert spread([1.1, 1 / 1.1]) == pytest.approx(1.1**1.96 - 1)
    assert spread([2.0, 2.0]) == pytest.approx(spread([0.5, 0.5]))


def test_the_noise_of_each_size_is_its_own():
    found = NoiseStudy((Trial("a", 1.01, True, 1.5), Trial("b", 1.03, False, 1.1)))
    assert found.paired("a") < found.paired() < found.paired("b")
    assert found.sequential("a") > found.sequential("b")
    assert found.coverage == 0.5
    assert found.smallest_effect == pytest.approx(found.paired("b") * (1.96 + 1.645) / 1.96)


def test_the_study_makes_rounds_until_the_time_is_up():
    now = iter(range(100))
    timing = Timing(budget_s=0.001, min_blocks=3, max_blocks=3)
    found = study(
        [("a", lambda: None), ("b", lambda: sum(range(50)))], seconds=5, timing=timing, clock=lambda: next(now)
    )
    assert found.sizes == ("a", "b") and len(found.trials) == 2 * (noise.MIN_ROUNDS + 4)
    assert all(trial.paired > 0 and trial.sequential > 0 for trial in found.trials)


def test_a_drift_between_the_series_is_not_in_the_pairs(monkeypatch):
    """Sides that become slower together: pairs cancel most of it, one series after the other does not."""
    now, lasts = 0.0, 0.01

    def slower_and_slower() -> None:
        nonlocal now, lasts
        now, lasts = now + lasts, lasts * 1.001

    monkeypatch.setattr("harness.cell.timing.time", SimpleNamespace(perf_counter=lambda: now))
    timing = Timing(budget_s=0.001, min_blocks=15, max_blocks=15)
    found = study([("a", slower_and_slower)], seconds=0, timing=timing)
    assert found.paired() < 0.0025 and found.sequential() > 0.015


@pytest.mark.parametrize(("ratio", "level"), [(1.001, "ok"), (1.02, "warn"), (1.2, "bad"), (float("nan"), "bad")])
def test_the_noise_level(ratio, level):
    found = noise_level(NoiseStudy(tuple(Trial("a", r, True, 1.3) for r in (ratio, 1 / ratio))))
    assert found.level == level and "one after the other" in found.found


# ---- all of it -------------------------------------------------------------------------------------------------------


def test_what_is_not_ok_says_what_to_do():
    with pytest.raises(ValueError, match="must say what to do"):
        Diagnosis("x", "warn", "something")
    with pytest.raises(ValueError, match="is bad"):
        Diagnosis("x", "warn", "something", "do", prevents_runs=True)


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([Diagnosis("a", "ok", "fine")], "timings can be trusted to ±1.5 %"),
        ([Diagnosis("a", "warn", "so", "do")], "timings can be trusted to ±1.5 %; better still without: a"),
        ([Diagnosis("a", "bad", "so", "do"), Diagnosis("b", "warn", "so", "do")], "fix these first: a"),
        (
            [Diagnosis("a", "bad", "so", "do"), Diagnosis("b", "bad", "so", "do", True)],
            "impossible here; fix these first: b",
        ),
    ],
)
def test_the_verdict(findings, verdict):
    found = Examination(tuple(findings), QUIET)
    assert found.verdict.endswith(verdict)
    assert found.can_run == ("impossible" not in verdict)


def test_the_report_fits_eighty_columns():
    findings = (
        Diagnosis("processor", "ok", "word " * 40),
        Diagnosis("results", "bad", "/a/very/long/path" * 20 + "\x1b[31m[/red]", "do this " * 30, prevents_runs=True),
    )
    text = printed(lambda console: print_examination(Examination(findings, QUIET), console))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "-> do this" in text and "runs are impossible" in text.splitlines()[-1] and "\x1b" not in text
    assert "one after the other" in text


@pytest.fixture
def short(monkeypatch):
    calls = [("a", lambda: sum(range(100)))]
    monkeypatch.setattr(noise, "attention_calls", lambda: iter(calls))
    monkeypatch.setattr(noise, "QUICK_S", 0.0)
    monkeypatch.setattr(noise, "MIN_ROUNDS", 1)


def test_the_command(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in found["findings"]]
    assert names == [
        *("versions", "torch", "processor", "threads", "cores", "governor", "turbo", "load", "memory", "disk"),
        *("results", "git", "steal time", "noise"),
    ]
    assert found["can_run"] and found["noise"]["sizes"]["a"]["paired"] > 0
    assert main(["doctor", "--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip()
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_impossible_exit_with_one(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("results").write_text("a file, not a folder")
    assert main(["doctor", "--quick"]) == 1
    assert "runs are impossible here; fix these first: results" in " ".join(capsys.readouterr().out.split())


def test_without_torch_the_rest_is_still_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    found = examine(seconds=0, results=tmp_path)
    assert not found.can_run and found.noise is None
    assert [f.name for f in found.findings if f.prevents_runs] == ["torch"]
    json.dumps(found.to_json())


def test_the_real_calls_are_attention():
    for size, call in noise.attention_calls():
        out = call()
        assert isinstance(out, torch.Tensor) and size == f"L={out.shape[2]}"


def test_help_does_not_load_torch():
    command = "from harness.__main__ import main\ntry: main(['doctor', '--help'])\n"
    code = f"import sys\n{command}finally: print('torch' in sys.modules)"
    done = python("-c", code)
    assert done.code == 0 and done.out.splitlines()[-1] == "False"
