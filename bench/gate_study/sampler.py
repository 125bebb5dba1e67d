"""The samplers of asv and pyperf in processes of one version: a server imports torch once and forks for each cell.

`python -P sampler.py ROOT`: run by path; `harness` is ROOT's. Reads one JSON request a line, answers one a line. asv's
own fork server works the same way; pyperf would start Python and torch anew for each process, seconds for each cell.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ASV_WARM_UP_S = 0.1  # asv's default
ASV_MOST_SAMPLES = 100_000  # its own limit is 5 a process, which would leave most of the seconds unused
PYPERF_VALUES, PYPERF_WARM_UPS = 3, 1  # its defaults
PYPERF_ROUND = (
    PYPERF_VALUES + PYPERF_WARM_UPS + 1
)  # spans of min_time in a process: up to 2 while it looks for the loops


def sample_with_asv(call: Callable[[], object], *, left_s: float, **_: object) -> dict[str, Any]:
    """One process of one round: warm up, choose the number of calls of a 10 ms sample, take samples."""
    from asv_runner.benchmarks.time import TimeBenchmark  # type: ignore[import-untyped]

    repeat = (2, ASV_MOST_SAMPLES, max(0.0, left_s - ASV_WARM_UP_S))

    def time_cell() -> None:
        call()

    benchmark = TimeBenchmark("time_cell", time_cell, [SimpleNamespace(repeat=repeat)])
    benchmark.do_setup()
    return dict(benchmark.run())


def sample_with_pyperf(call: Callable[[], object], *, left_s: float, loops: int | None, **_: object) -> dict[str, Any]:
    """One of its worker processes: without `loops` the one that finds them, otherwise a warm-up and three values."""
    import pyperf  # type: ignore[import-untyped]

    runner = pyperf.Runner(values=PYPERF_VALUES, warmups=PYPERF_WARM_UPS, min_time=max(1e-3, left_s / PYPERF_ROUND))
    runner.parse_args(["--worker", "--quiet", *(["--calibrate-loops"] if loops is None else [f"--loops={loops}"])])
    benchmark = runner.bench_func("cell", call)
    run = benchmark.get_runs()[0]
    return {"samples": list(run.values), "number": run.get_loops()}


SAMPLERS: dict[str, Callable[..., dict[str, Any]]] = {"asv": sample_with_asv, "pyperf": sample_with_pyperf}


def sample(request: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    import torch

    from harness.case import Case
    from harness.cell.build import build_pair
    from harness.cell.measure import timed_call
    from harness.kernels.front import find_kernel

    torch.set_num_threads(request["threads"])
    case = Case(**request["case"])
    pair = build_pair(case, find_kernel(case.kernel), case.seed(request["suite_seed"]))
    pair.watch.checking = False
    call = timed_call(pair, pair.candidate, case.seed(request["suite_seed"]))
    left_s = request["seconds"] - (time.perf_counter() - began)
    found = SAMPLERS[request["tool"]](call, left_s=left_s, loops=request.get("loops"))
    return found | {"seconds": time.perf_counter() - began}


def in_a_child(request: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own found: nothing of a cell outlives it."""
    from bench.gate_study.orphans import die_with_parent

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            die_with_parent()
            answer = sample(request)
        except BaseException as failure:
            answer = {"failed": f"{type(failure).__name__}: {failure}"}
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"failed": "the process died"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the tools print what they find
    hello = json.loads(sys.stdin.readline())
    sys.path[:] = [sys.argv[1], *hello["path"]]
    # Before the first fork, but nothing is computed: the threads of OpenMP would not survive it.
    import asv_runner.benchmarks.time  # type: ignore[import-untyped]  # noqa: F401
    import pyperf  # noqa: F401
    import torch  # noqa: F401

    import harness.cell.measure
    from bench.gate_study.orphans import die_with_parent

    die_with_parent()
    assert str(harness.cell.measure.__file__).startswith(sys.argv[1]), harness.cell.measure.__file__
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(in_a_child(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
