"""A grid of 2,000 cells on a real Ray cluster of two nodes, one of which is killed: is it the table of a local run?

    OMP_NUM_THREADS=1 python bench/ray_study.py [--cells 2000] [--kill-after 500] [--workers 1]

Prints counts and times. Exit code 1 if a cell is missing, doubled, or differs in its status or any bit of its errors.
"""

import argparse
import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil

from harness.record import Record
from harness.suite.config import load_suite
from harness.workers.job import Job
from harness.workers.local import Local
from harness.workers.ray import Ray

REGIMES = ("plain", "poison")
GRID = {
    "variant": ["mha", "mqa", "gqa", "mla"],
    "embed_dim": [16, 32],
    "heads": [4],
    "kv_heads": [2],
    "bias": [True, False],
    "mask": ["none", "causal", "padding"],
    "phase": ["prefill", "decode"],
    "dtype": ["float32", "bfloat16"],
    "kernel": ["eager", "sdpa"],
}


def make_jobs(cells: int) -> list[Job]:
    """As many sequence lengths as it takes to have that many cells."""
    for longest in itertools.count(3):
        grid = {**GRID, "seq_len": list(range(2, longest))}
        suite = load_suite({"name": "cluster", "timing": {"enabled": False}, "grid": grid})
        if len(suite.cases) >= cells:
            return [Job(case, 0, REGIMES, suite.timing, 1) for case in suite.cases]
    raise AssertionError


def on_cluster(jobs: Sequence[Job], kill_after: int) -> Iterator[Record]:
    """Two nodes of one CPU; after so many records one of them is killed with all its processes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        for done, record in enumerate(Ray(address=cluster.address).run(jobs), start=1):
            if done == kill_after:
                kill(nodes[0])
                print(f"killed one of two nodes after {done} cells", flush=True)
            yield record
    finally:
        cluster.shutdown()


def kill(node: Any) -> None:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()


def timed(what: str, records: Iterator[Record]) -> list[Record]:
    started = time.perf_counter()
    done = list(records)
    seconds = time.perf_counter() - started
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(Counter(r.status for r in done).items()))
    print(
        f"{what}: {len(done)} cells in {seconds:.1f} s ({1e3 * seconds / len(done):.1f} ms each): {statuses}",
        flush=True,
    )
    return done


def text(record: Record) -> str:
    """All but the clock's readings, floats to the last bit; as text, because NaN is not equal to itself."""
    return repr(replace(record, seconds=None, measured_seconds=None, parts_s={}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--kill-after", type=int, default=500)
    parser.add_argument("--workers", type=int, default=1, help="of the local run it is compared with")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    jobs = make_jobs(options.cells)
    local = timed(f"local, {options.workers} worker(s)", Local(options.workers).run(jobs))
    cluster = timed("ray, two nodes, one of them killed", on_cluster(jobs, options.kill_after))
    times = Counter(record.case_id for record in cluster)
    expected = {record.case_id: text(record) for record in local}
    missing = expected.keys() - times.keys()
    doubled = [name for name, count in times.items() if count > 1]
    unlike = [record.case_id for record in cluster if text(record) != expected.get(record.case_id)]
    print(f"{len(expected)} cells: {len(missing)} missing, {len(doubled)} doubled, {len(unlike)} unlike", *unlike[:5])
    return 1 if missing or doubled or unlike or len(expected) != len(jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
