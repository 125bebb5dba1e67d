"""A noisy neighbour: bursts of matrix products and of memory traffic, with pauses between, at random but seeded.

`python -P neighbour.py SEED PARENT`: run by path, one process for each core; ends when its parent is gone.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

BURST_S = (0.005, 0.4)
PAUSE_S = (0.005, 0.6)
SIDE = 256  # of the matrices: in the cache
TRAFFIC_BYTES = 32 << 20  # beyond any cache


def disturb(seed: int, *, until: float = float("inf"), parent: int | None = None) -> dict[str, int]:
    """How many bursts of each kind there were."""
    chance = random.Random(seed)
    matrix = np.random.default_rng(seed).standard_normal((SIDE, SIDE))
    source, target = np.ones(TRAFFIC_BYTES, np.uint8), np.empty(TRAFFIC_BYTES, np.uint8)
    bursts = {"products": 0, "traffic": 0}
    while time.monotonic() < until and (parent is None or os.getppid() == parent):
        kind = chance.choice(sorted(bursts))
        end = min(until, time.monotonic() + chance.uniform(*BURST_S))
        while time.monotonic() < end:
            if kind == "products":
                np.matmul(matrix, matrix)
            else:
                np.copyto(target, source)
        bursts[kind] += 1
        time.sleep(chance.uniform(*PAUSE_S))
    return bursts


@contextlib.contextmanager
def neighbours(number: int, seed: int) -> Iterator[list[int]]:
    """So many at once, each with a rhythm of its own; their process ids."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for each in range(number):
            command = [sys.executable, "-P", __file__, str(1000 * seed + each), str(os.getpid())]
            processes.append(subprocess.Popen(command, env=os.environ | one_thread, stdin=subprocess.DEVNULL))
        yield [process.pid for process in processes]
        if ended := [process.returncode for process in processes if process.poll() is not None]:
            raise RuntimeError(f"a neighbour ended while the night ran, with exit codes {ended}: it was not noisy")
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    disturb(int(sys.argv[1]), parent=int(sys.argv[2]))
