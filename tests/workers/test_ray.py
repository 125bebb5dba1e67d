"""A real cluster on this machine, a head without CPUs and two worker nodes: same records, a node killed, timings."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from harness.__main__ import main
from harness.errors import BadInput
from harness.record import Record
from harness.suite.config import load_suite
from harness.suite.schema import Timing
from harness.workers import node_check
from harness.workers import ray as executor
from harness.workers.job import Here, Job, failed
from harness.workers.ray import ClusterNode, NodeShare, Ray, demand

# Ray's processes need not find this file: what they are to do goes along by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

UNTIMED = Timing(enabled=False)
CONFIG = {
    "name": "cluster",
    "timing": {"enabled": False},
    "battery": {"enabled": False},
    "regimes": ["plain", "poison"],
    "grid": {
        "variant": ["mha", "gqa"],
        "embed_dim": 16,
        "heads": 4,
        "kv_heads": 2,
        "seq_len": [3, 5],
        "mask": ["none", "causal"],
        "phase": ["prefill", "decode"],
        "kernel": ["eager"],
    },
}
CRASHING = """
import os
def crash(*args, **kwargs):
    os._exit(3)
"""

HANGING = """
import os, time
def hang(*args, **kwargs):
    with open({pids!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n{{os.getppid()}}\\n")
    time.sleep(300)
"""


def make_jobs(kernels: tuple[str, ...] = ("eager",), *, timing: Timing = UNTIMED, times: int = 1) -> list[Job]:
    cases = load_suite(CONFIG, kernels=kernels).cases
    numbered = [replace(case, embed_dim=16 + 4 * at) for at in range(times) for case in cases]
    return [Job(case, 0, ("plain", "poison"), timing, 1) for case in numbered]


def comparable(record: Record) -> Record:
    """Less what the clock says. repr, because NaN is not equal to itself."""
    return replace(record, seconds=None, measured_seconds=None, parts_s={})


class Slow:
    """In place of a measurement: takes its time, and notes in a side file when and on which node it ran."""

    def __init__(self, notes: Path, seconds: float) -> None:
        self.notes, self.seconds = notes, seconds

    def __call__(self, job: Job) -> Record:
        start = time.monotonic()
        time.sleep(self.seconds)
        node = ray.get_runtime_context().get_node_id()
        with self.notes.open("a") as file:  # one short write in append mode: lines do not mix
            file.write(f"{node} {start} {time.monotonic()} {job.case.case_id}\n")
        return failed(job, "ok", "", 0.0)

    def spans(self) -> dict[str, list[tuple[float, float]]]:
        """Node -> its (start, end)s, in order."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for line in self.notes.read_text().splitlines():
            node, start, end, _ = line.split()
            found[node].append((float(start), float(end)))
        return {node: sorted(spans) for node, spans in found.items()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 6}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, wait=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def alone(cluster: Cluster) -> str:
    """The cluster's address, for a test that connects by itself."""
    ray.shutdown()
    return cluster.address


@pytest.fixture
def connected(cluster: Cluster) -> None:
    """One connection for many tests: Ray's processes and their workers need not start anew for each."""
    if not ray.is_initialized():
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)


def test_same_records_as_in_this_process(alone: str, tmp_path: Path):
    """Bitwise, and a kernel that kills its process is a row of its own."""
    plugin = tmp_path / "crashing.py"
    plugin.write_text(CRASHING)
    crash = f"{plugin}:crash"
    jobs = make_jobs(("eager", "sdpa"))
    doomed = make_jobs((crash,))[0]
    remote = Ray(address=alone)
    assert remote.origins(["eager", crash]) == Here().origins(["eager", crash])
    records = list(remote.run([doomed, *jobs]))
    assert not ray.is_initialized()
    by_id = {record.case_id: record for record in records}
    assert len(records) == len(by_id) == len(jobs) + 1 == 33
    row = by_id.pop(doomed.case.case_id)
    assert (row.status, row.kernel) == ("error", crash)
    assert row.error == "the kernel's process left with exit code 3"
    assert row.params_formula
    expected = {record.case_id: record for record in Here().run(jobs)}
    assert {record.status for record in expected.values()} == {"ok"}
    for name, record in by_id.items():
        assert repr(comparable(record)) == repr(comparable(expected[name]))


@pytest.mark.parametrize("token", ["f" * 64, None])
def test_a_wrong_token_and_none_are_told_in_one_line(alone: str, token: str | None, tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CONFIG))
    given = {"RAY_ADDRESS": alone, "HOME": str(tmp_path)} | ({"RAY_AUTH_TOKEN": token} if token else {})
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"} | given
    command = [sys.executable, "-m", "harness", "run", "cluster.yaml", "--executor", "ray"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"the cluster at {alone} does not take this machine's token (wrong, or none)" in line
    assert "RAY_AUTH_TOKEN" in line


def test_ten_lines_of_ray_become_one():
    said = b"".join(b"[2026-11-18 19:30:%02d,1 W 1 1] gcs.cc:1: Timed out\n" % second for second in range(10))
    why = executor._why_not("here:1", ConnectionError("Failed to connect\nat all"), said)
    assert why == "no cluster at here:1: Failed to connect (10 lines like: gcs.cc:1: Timed out)"


def test_a_killed_node_loses_nothing(cluster: Cluster, alone: str, tmp_path: Path, monkeypatch, caplog):
    depths = []

    def watched(refs: Any, real: Any = executor.finished) -> Any:
        depths.append(len(refs))
        return real(refs)

    monkeypatch.setattr(executor, "finished", watched)
    slow = Slow(tmp_path / "notes", 0.2)
    jobs = make_jobs(times=4)
    seen = []
    for record in Ray(address=alone, perform=slow).run(jobs):
        seen.append(record)
        if len(seen) >= 10 and len(slow.spans()) == 2 and cluster.worker_nodes:  # both nodes have worked
            kill(victim := next(iter(cluster.worker_nodes)))
            monkeypatch.setattr(cluster, "worker_nodes", set())
    monkeypatch.undo()
    cluster.remove_node(victim, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    assert Counter(record.case_id for record in seen) == Counter(job.case.case_id for job in jobs)
    assert {record.status for record in seen} == {"ok"}
    assert "lost on the cluster, tried again" in caplog.text
    assert max(depths) <= 4 * 2  # nor is the whole grid given to the cluster at once


def kill(node: Any) -> None:
    """As if the power were gone: the node's own process, and all that it has started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()


@pytest.mark.usefixtures("connected")
def test_timed_jobs_have_their_node_to_themselves(cluster: Cluster, tmp_path: Path):
    """The declared node has room for two."""
    declared = cluster.add_node(num_cpus=2, resources={executor.TIMING: 1})
    started = tmp_path / "started"
    started.mkdir()

    def together(job: Job) -> Record:
        (started / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(started.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        return failed(job, "ok", "", 0.0)

    try:
        list(Ray(perform=together).run(make_jobs()[:4]))
        assert len(list(started.iterdir())) == 4  # untimed ones run on all cores at once, two of them on that node
        slow = Slow(tmp_path / "notes", 0.1)
        assert len(list(Ray(perform=slow).run(make_jobs(timing=Timing())[:8]))) == 8
        ((only, spans),) = slow.spans().items()
        assert only == declared.node_id
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    finally:
        cluster.remove_node(declared)


@pytest.mark.parametrize(
    ("timed", "threads", "nodes", "expected"),
    [
        (False, 1, [ClusterNode("a", 8), ClusterNode("b", 2)], NodeShare(1)),
        (False, 4, [ClusterNode("a", 8), ClusterNode("b", 2)], NodeShare(4)),
        (False, 4, [ClusterNode("a", 2)], NodeShare(2)),  # fewer cores than threads: slow, but never stuck
        (True, 1, [ClusterNode("a", 8), ClusterNode("b", 8)], NodeShare(8)),
        (True, 1, [ClusterNode("a", 8), ClusterNode("b", 2)], NodeShare(8)),
        (True, 1, [ClusterNode("a", 8), ClusterNode("b", 2, timing=1)], NodeShare(2, timing=1)),
        (True, 1, [ClusterNode("a", 8, timing=1), ClusterNode("b", 2, timing=1)], NodeShare(2, timing=1)),
    ],
)
def test_what_a_job_asks_for(timed: bool, threads: int, nodes: list[ClusterNode], expected: NodeShare):
    job = replace(make_jobs()[0], timing=Timing(enabled=timed), threads=threads)
    assert demand(job, nodes) == expected
    assert sum(map(expected.places, nodes)) >= 1


@pytest.mark.parametrize(
    ("asks", "node", "places"),
    [
        (NodeShare(1), ClusterNode("a", 8), 8),
        (NodeShare(3), ClusterNode("a", 8), 2),
        (NodeShare(2, timing=1), ClusterNode("a", 8, timing=1), 1),
        (NodeShare(2, timing=1), ClusterNode("a", 8), 0),
        (NodeShare(8), ClusterNode("a", 4), 0),
    ],
)
def test_places(asks: NodeShare, node: ClusterNode, places: int):
    assert asks.places(node) == places


def test_a_timed_job_asks_ray_for_the_resource():
    assert NodeShare(2, timing=1).options() == {"num_cpus": 2, "resources": {"harness_timing": 1}}
    assert NodeShare(3).options() == {"num_cpus": 3, "resources": {}}


@pytest.mark.usefixtures("connected")
def test_the_command_writes_the_same_table(tmp_path: Path):
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    for name in ("here", "ray"):
        assert main(["run", str(config), "--executor", name, "--quiet", "--out", str(tmp_path / name)]) == 0
    tables = [(tmp_path / name / "results.csv").read_text() for name in ("here", "ray")]
    assert len(tables[0].splitlines()) == 17
    assert tables[1] == tables[0]


@pytest.mark.usefixtures("connected")
def test_a_job_that_keeps_losing_its_process_is_given_up(tmp_path: Path):
    jobs = make_jobs()[:6]
    bad = jobs[2].case.case_id
    notes = tmp_path / "notes"

    def perform(job: Job) -> Record:
        if job.case.case_id == bad:
            with notes.open("a") as file:
                file.write("x")
            os._exit(1)
        return failed(job, "ok", "", 0.0)

    records = {r.case_id: r for r in Ray(perform=perform, attempts=2).run(jobs)}
    assert len(records) == 6
    lost = records.pop(bad)
    assert lost.status == "error"
    assert lost.error is not None and lost.error.startswith("lost on the cluster 2 times: WorkerCrashedError")
    assert notes.read_text() == "xx"
    assert {record.status for record in records.values()} == {"ok"}


@pytest.mark.usefixtures("connected")
def test_what_perform_raises_is_a_row():
    def perform(job: Job) -> Record:
        raise ArithmeticError("one and one is three")

    (record,) = Ray(perform=perform).run(make_jobs()[:1])
    assert (record.status, record.error) == ("error", "ArithmeticError: one and one is three")


@pytest.mark.usefixtures("connected")
def test_ctrl_c_stops_what_is_under_way(tmp_path: Path):
    """Also a kernel that hangs, in the worker process of Ray's process."""
    pids, plugin = tmp_path / "pids", tmp_path / "hanging.py"
    plugin.write_text(HANGING.format(pids=str(pids)))

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        next(Ray().run(make_jobs((f"{plugin}:hang",))))
    assert ray.is_initialized()
    working = [int(pid) for pid in pids.read_text().split()]
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, working)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, working))


@pytest.mark.usefixtures("connected")
def test_a_node_with_another_plugin_file_is_refused(tmp_path: Path, monkeypatch):
    plugin = tmp_path / "mine.py"
    plugin.write_text("def f(*args, **kwargs): ...")
    monkeypatch.setattr(node_check, "content", lambda place: "sha256:another")  # here, not on the nodes
    refused = rf"node \S+ \(\w+\): unlike this machine: {plugin} is sha256:\w{{16}} there and sha256:another here"
    with pytest.raises(BadInput, match=refused):
        Ray().origins([f"{plugin}:f"])
    with pytest.raises(BadInput, match=refused):
        list(Ray(perform=Slow(tmp_path / "notes", 0)).run(make_jobs((f"{plugin}:f",))))
    assert not (tmp_path / "notes").exists()


@pytest.mark.usefixtures("connected")
def test_a_plugin_that_cannot_be_loaded_is_bad_input(tmp_path: Path):
    (tmp_path / "broken.py").write_text("raise OSError('no such luck')")
    with pytest.raises(BadInput, match=r"broken.py: importing it raised OSError: no such luck"):
        Ray().origins([f"{tmp_path}/broken.py:f"])
    assert ray.is_initialized()  # the caller's connection is left open


def test_likeness_is_of_versions_and_files(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("x = 1")
    home = node_check.describe_home(["eager", "mine.py:f", "mine.py:g", "some.module:f"])
    assert [place for place, _ in home.files] == ["mine.py"]
    assert {name for name, _ in home.versions} == {"python", "torch", "numpy", "harness's source"}
    node_check.settle(home)
    older = replace(home, versions=tuple((name, "0.1" if name == "torch" else value) for name, value in home.versions))
    with pytest.raises(BadInput, match=r"^unlike this machine: torch is 2\S+ there and 0.1 here \("):
        node_check.settle(older)
    Path("mine.py").unlink()
    node_check.settle.cache_clear()
    with pytest.raises(BadInput, match=r"mine.py is unreadable \(No such file or directory\) there and sha256:"):
        node_check.settle(home)


def test_without_ray_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'attention-harness\[ray\]'"):
        Ray().origins(["eager"])
    with pytest.raises(BadInput, match=r"pip install 'attention-harness\[ray\]'"):
        next(Ray().run(make_jobs()))
