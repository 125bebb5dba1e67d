"""Thousands of fuzzed configs through `harness run --dry-run`, and some of the valid ones through a real run.

    OMP_NUM_THREADS=1 python bench/fuzz_study.py 20000

Prints how each kind ended. Stops at the first config that breaks the promise, and leaves it beside the message.
"""

import argparse
import collections
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzzed_configs import FUZZED, PLUGIN, PLUGIN_SOURCE, Fuzzed, cells_of, plan, run_one

RUN_EVERY = 20  # of the valid kind, so many are also run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", metavar="N", type=int, nargs="?", default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    times: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        Path(PLUGIN).write_text(PLUGIN_SOURCE)
        path = folder / "fuzzed.yaml"

        @seed(options.seed)
        @settings(
            max_examples=options.configs,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(fuzzed=FUZZED)
        def study(fuzzed: Fuzzed) -> None:
            started = time.process_time()
            found = plan(path, fuzzed.data)
            times.append(time.process_time() - started)
            counts[fuzzed.kind, "planned" if found.code == 0 else "refused"] += 1
            assert not (folder / "pwned").exists()
            if fuzzed.kind == "valid" and found.code == 0 and counts["valid", "planned"] % RUN_EVERY == 0:
                cells = len(cells_of(path))
                with tempfile.TemporaryDirectory() as out:
                    ran = run_one(path, Path(out) / "run", cell=len(times) % cells, cells=cells)
                assert ran.code in (0, 1), ran
                counts["valid", f"ran, exit {ran.code}"] += 1
            if len(times) % 1000 == 0:
                print(f"{len(times):,} ...", file=sys.stderr, flush=True)

        started = time.perf_counter()
        try:
            study()
        except BaseException:
            kept = Path(tempfile.gettempdir()) / "broken-promise.yaml"
            kept.write_bytes(path.read_bytes())
            print(f"the config that broke the promise is in {kept}", file=sys.stderr)
            raise
    seconds = time.perf_counter() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ends = sorted({end for _, end in counts})
    print(f"{'kind':18}" + "".join(f"{end:>14}" for end in ends))
    for kind in dict.fromkeys(kind for kind, _ in counts):
        print(f"{kind:18}" + "".join(f"{counts[kind, end] or '-':>14}" for end in ends))
    print(f"{len(times):,} configs in {seconds:.0f} s; slowest {max(times):.2f} s of CPU time; memory +{grown:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
