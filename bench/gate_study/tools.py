"""One night through one tool, by its own sampler and its own decision."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gate_study.decisions import NEVER, Decision, by_asv, by_pyperf, by_pytest_benchmark
from harness.case import Case

HERE = Path(__file__).parent
SPINNING = {"GOMP_SPINCOUNT": "20000"}  # as the command line sets it
ASV_ROUNDS = 2  # asv's default
PYPERF_PROCESSES = 3  # the fewest that pyperf takes itself (--fast); 20 would need more seconds than a cell has
PYTEST_OVERHEAD_S = 0.1  # of a test's seconds: building the cell and finding the iterations
OURS = "ours"


class ToolFailed(Exception):
    """A tool's process ended badly; the message holds its last words."""


@dataclass(frozen=True)
class Task:
    """What a tool is given. `seconds` are for one cell: base and head together."""

    base: Path
    head: Path
    cases: tuple[Case, ...]
    suite_seed: int
    threads: int
    seconds: float
    seed: int

    def request(self, **more: Any) -> dict[str, Any]:
        """For processes that are run by path; their `harness` is a tree's, all else comes from where ours does."""
        fields = [asdict(case) for case in self.cases]
        path = [entry for entry in sys.path if entry]
        return {"cases": fields, "suite_seed": self.suite_seed, "threads": self.threads, "path": path} | more


Found = tuple[tuple[Decision, ...], dict[str, Any]]
Tool = Callable[[Task], list[Found]]  # one per case, in their order


def ours(task: Task) -> list[Found]:
    settings = {"threads": task.threads, "suite_seed": task.suite_seed, "seed": task.seed, "seconds": task.seconds}
    request = task.request(base=str(task.base), head=str(task.head), settings=settings)
    verdicts = json.loads(run_script("ours.py", task.base, request))
    return [((_our_decision(verdict),), verdict) for verdict in verdicts]


def _our_decision(verdict: Mapping[str, Any]) -> Decision:
    """The score is the lower end of the change's interval: what must lie above the smallest effect of interest."""
    low = verdict["lo"]
    return Decision(OURS, verdict["verdict"] == "regression", NEVER if low is None else low)


def pytest_benchmark(task: Task) -> list[Found]:
    base, head = (_pytest_night(task, root) for root in (task.base, task.head))
    return [
        (tuple(by_pytest_benchmark(base[case.case_id], head[case.case_id])),
         {"base": base[case.case_id], "head": head[case.case_id]})
        for case in task.cases
    ]  # fmt: skip


def _pytest_night(task: Task, root: Path) -> dict[str, dict[str, float]]:
    """The saved JSON of one run, by cell."""
    with tempfile.TemporaryDirectory() as folder:
        saved, request = Path(folder) / "saved.json", Path(folder) / "request.json"
        request.write_text(json.dumps(task.request(root=str(root))))
        max_time = max(0.02, task.seconds / 2 - PYTEST_OVERHEAD_S)
        # --noconftest: bench/conftest.py is about other cells.
        options = ["-q", "-c", os.devnull, "--rootdir", folder, "--noconftest", "-p", "no:cacheprovider"]
        options += [f"--benchmark-max-time={max_time}", f"--benchmark-json={saved}", "--benchmark-quiet"]
        environment = _environment(task.threads) | {"PYTHONPATH": str(root), "STUDY_REQUEST": str(request)}
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            *options,
            str(root / "bench" / "gate_study" / "pytest_cells.py"),
        ]
        _finish(subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True))
        benchmarks = json.loads(saved.read_text())["benchmarks"]
    fields = ("mean", "median", "min", "rounds", "iterations")
    found = {each["param"]: {field: each["stats"][field] for field in fields} for each in benchmarks}
    if missing := [case.case_id for case in task.cases if case.case_id not in found]:
        raise ToolFailed(f"pytest-benchmark saved nothing of {missing[0]}")
    return found


def asv(task: Task) -> list[Found]:
    """`asv continuous`: two rounds over all cells, the order of the versions turned round in the second."""
    base: list[list[float]] = [[] for _ in task.cases]
    head: list[list[float]] = [[] for _ in task.cases]
    numbers: dict[str, list[int]] = {"base": [1] * len(task.cases), "head": [1] * len(task.cases)}
    with sampler(task, task.base) as ask_base, sampler(task, task.head) as ask_head:
        # asv counts its rounds down and turns the even ones: of two, the first runs head before base.
        for number in range(ASV_ROUNDS, 0, -1):
            sides = [("base", ask_base, base), ("head", ask_head, head)]
            for name, ask, samples in sides if number % 2 else sides[::-1]:
                for at, case in enumerate(task.cases):
                    found = ask("asv", case, task.seconds / (2 * ASV_ROUNDS))
                    samples[at] += found["samples"]
                    numbers[name][at] = found["number"]
    return [
        (tuple(by_asv(one, other, (numbers["base"][at], numbers["head"][at]))), {"samples": [len(one), len(other)]})
        for at, (one, other) in enumerate(zip(base, head, strict=True))
    ]


def pyperf(task: Task) -> list[Found]:
    """All cells in the base, then all in the head, as two files for `pyperf compare_to`."""
    base, head = (_pyperf_night(task, root) for root in (task.base, task.head))
    return [
        (tuple(by_pyperf(one, other)), {"samples": [len(one), len(other)]})
        for one, other in zip(base, head, strict=True)
    ]


def _pyperf_night(task: Task, root: Path) -> list[list[float]]:
    seconds = task.seconds / 2 / (PYPERF_PROCESSES + 1)  # one more process finds the loops
    values: list[list[float]] = []
    with sampler(task, root) as ask:
        for case in task.cases:
            loops = ask("pyperf", case, seconds)["number"]
            values.append([])
            for _ in range(PYPERF_PROCESSES):
                values[-1] += ask("pyperf", case, seconds, loops=loops)["samples"]
    return values


TOOLS: dict[str, Tool] = {OURS: ours, "pytest-benchmark": pytest_benchmark, "asv": asv, "pyperf": pyperf}


@contextlib.contextmanager
def sampler(task: Task, root: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """`ask(tool, case, seconds)` of a server of this version."""
    command = [sys.executable, "-P", str(root / "bench" / "gate_study" / "sampler.py"), str(root)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env=_environment(task.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        sending, receiving = process.stdin, process.stdout

        def exchange(message: Mapping[str, Any]) -> dict[str, Any]:
            try:
                print(json.dumps(message), file=sending, flush=True)
                answer: dict[str, Any] = json.loads(receiving.readline() or "{}")
            except BrokenPipeError:
                answer = {}
            if "failed" in answer or not answer:
                errors.seek(0)
                raise ToolFailed(answer.get("failed") or f"a sampler ended: {errors.read()[-500:]}")
            return answer

        def ask(tool: str, case: Case, seconds: float, **more: Any) -> dict[str, Any]:
            request = {"tool": tool, "case": asdict(case), "seconds": seconds, "threads": task.threads}
            return exchange(request | {"suite_seed": task.suite_seed} | more)

        try:
            exchange({"path": task.request()["path"]})
            yield ask
        except BaseException:
            process.kill()
            raise


def run_script(name: str, root: Path, request: Mapping[str, Any]) -> str:
    """A file of this package, run by path with the tree's `harness`; what it wrote."""
    command = [sys.executable, "-P", str(root / "bench" / "gate_study" / name), str(root)]
    environment = _environment(int(request["threads"]))
    return _finish(subprocess.run(command, env=environment, input=json.dumps(request), capture_output=True, text=True))


def _environment(threads: int) -> dict[str, str]:
    # pytest-benchmark does not time in a worker of xdist, nor in what such a worker starts.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return inherited | SPINNING | {"OMP_NUM_THREADS": str(threads)}


def _finish(done: "subprocess.CompletedProcess[str]") -> str:
    if done.returncode != 0:
        raise ToolFailed(
            f"{' '.join(map(str, done.args[:4]))} gave {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout
