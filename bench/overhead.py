"""What worker processes cost and bring: milliseconds per case beyond its own work, and two workers against one.

python -m bench.overhead [--cases 200] [--rounds 3]
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median

from rich.console import Console
from rich.table import Table

from harness.case import Case
from harness.suite.schema import Timing
from harness.workers.job import Job
from harness.workers.local import Local

TARGET_MS, TARGET_SPEEDUP = 5.0, 1.6


def jobs(count: int, *, embed_dim: int, seq_len: int) -> list[Job]:
    """Equivalence only, one thread; lengths differ, so that no two cases are the same."""
    found = []
    for at in range(count):
        case = Case(
            variant="mha",
            kernel="eager",
            embed_dim=embed_dim,
            heads=2,
            kv_heads=2,
            head_dim=embed_dim // 2,
            seq_len=seq_len + at % 50,
            batch=1 + at // 50,
            mask="causal",
            dtype="float32",
            phase="prefill",
        )
        found.append(Job(case, seed=0, regimes=("plain",), timing=Timing(enabled=False), threads=1))
    return found


def drained(executor: Local, work: list[Job]) -> tuple[float, float, float]:
    """Wall seconds, the cases' own seconds, and the parent's CPU seconds."""
    started, cpu = time.perf_counter(), time.process_time()
    own = sum(record.seconds or 0.0 for record in executor.run(work))
    return time.perf_counter() - started, own, time.process_time() - cpu


def ready(workers: int) -> Local:
    executor = Local(workers)
    drained(executor, jobs(4 * workers, embed_dim=8, seq_len=2))  # the start does not count
    return executor


def overheads(cases: int, rounds: int) -> Iterator[tuple[float, float]]:
    """Milliseconds per case, and the share of a core that the parent takes."""
    executor = ready(1)
    for _ in range(rounds):
        wall, own, cpu = drained(executor, jobs(cases, embed_dim=8, seq_len=2))
        yield 1e3 * (wall - own) / cases, cpu / wall
    executor.close()


def speedups(cases: int, rounds: int) -> Iterator[float]:
    """Interleaved, because the machine's speed drifts."""
    one, two = ready(1), ready(2)
    work = jobs(cases, embed_dim=64, seq_len=64)
    for _ in range(rounds):
        yield drained(one, work)[0] / drained(two, work)[0]
    one.close()
    two.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table("measured", "lowest", "median", "highest", "target")
    spent = list(overheads(options.cases, options.rounds))
    for name, values, target in (
        ("ms per case beyond its own work", [ms for ms, _ in spent], f"< {TARGET_MS:g}"),
        ("parent's share of a core", [share for _, share in spent], ""),
        ("two workers against one", list(speedups(options.cases, options.rounds)), f">= {TARGET_SPEEDUP:g}"),
    ):
        table.add_row(name, *(f"{value:.3g}" for value in (min(values), median(values), max(values))), target)
    Console().print(table)


if __name__ == "__main__":
    main()
