"""False alarms: correct kernels over a grid of cells. Every run must be ok.

python -m bench.sensitivity.alarms [--seeds N] [--processes N] [--config FILE] [--exam [--sample N]]

The kernels are those of honest.py over a grid of small cells; `--exam`: those of bench/exam/right, whose author had not
seen the judge; `--config`: another grid.
"""

import argparse
import functools
import importlib
import multiprocessing
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import pandas as pd
import torch

from bench.exam_score import PAPERS, kernels_of
from bench.sensitivity.honest import HONEST
from harness.case import Case
from harness.cell.rule import SEVERITY, Equivalence
from harness.kernels.call import ContractBroken, Kernel
from harness.kernels.plugin import from_function
from harness.mutants.study import StudiedCell
from harness.suite.config import load_suite
from harness.suite.schema import REGIMES
from harness.variants import masks

SMALL = {"embed_dim": 32, "heads": 4, "kv_heads": 2, "batch": 2}
FOUR = ["mha", "mqa", "gqa", "mla"]
PHASES = ["prefill", "decode", "train"]
# Every mask in every phase; 33 = two tiles of 16 and one key more. Then the other dtypes, lengths beyond the tiles of
# 64 and 100, both ways of MLA, and whole blocks.
GRID: Mapping[str, Any] = {
    "name": "alarms",
    "grid": SMALL | {"variant": FOUR, "seq_len": 33, "mask": list(masks.MASKS), "phase": PHASES},
    "include": [
        SMALL
        | {
            "variant": ["gqa", "mla"],
            "seq_len": 33,
            "mask": ["causal", "padding", "float_bias", "dead_rows"],
            "phase": PHASES,
            "dtype": ["float64", "bfloat16", "float16"],
        },
        SMALL | {"variant": "gqa", "seq_len": [64, 101, 130], "mask": ["causal", "sliding_window"], "phase": PHASES},
        # Where keys are wider than values the reference's own way has no flash kernel, whose backward pass rounds more.
        SMALL
        | {
            "variant": ["mla", "block_mla"],
            "heads": 8,
            "seq_len": 101,
            "mask": ["causal", "padding"],
            "phase": "train",
            "dtype": ["float32", "bfloat16", "float16"],
        },
        SMALL | {"variant": ["mla_naive", "mla_absorbed"], "seq_len": 33, "mask": "causal", "phase": "decode"},
        SMALL
        | {
            "variant": ["block_post_ln", "block_pre_ln", "block_mla"],
            "seq_len": 33,
            "mask": "padding",
            "phase": ["prefill", "train"],
        },
    ],
}
# exp(s - logsumexp(s)) rounds the logarithm at the size of the scores, |s| u / 2, and the weights take that as a
# relative error; the usual way subtracts the largest score first, which is exact, and rounds at 1. So where logits are
# large this kernel really is worse than its reference, which is what `degraded` means.
EXPECTED_DEGRADED = frozenset({"log_space"})
OF_THE_EXAM = "exam:"


@dataclass(frozen=True)
class Run:
    kernel: str
    case_id: str
    variant: str
    mask: str
    phase: str
    dtype: str
    seed: int
    status: str  # the rule's, or unsupported
    err_ratio: float | None = None
    tensor: str = ""
    regime: str = ""
    reason: str = ""

    @property
    def is_expected(self) -> bool:
        return self.kernel in EXPECTED_DEGRADED and self.status == "degraded"


def alarms(
    seeds: Sequence[int] = (0,),
    *,
    config: Mapping[str, Any] | str = GRID,
    kernels: Sequence[Kernel | str] | None = None,
    processes: int = 1,
) -> pd.DataFrame:
    """One row per (kernel, cell, seed); `expected` marks what `EXPECTED_DEGRADED` explains.

    `kernels`: by themselves, names of honest ones, or `exam:NAME`; None: all honest ones.
    """
    cells = list(product(load_suite(config).cases, seeds))
    chosen = None if kernels is None else tuple(kernels)
    if processes == 1:
        found = []
        for number, (case, seed) in enumerate(cells, start=1):
            found.append(_cell_runs(case, seed, chosen))
            _tell(number, len(cells))
    else:
        context = multiprocessing.get_context("spawn")  # a forked torch waits for threads that it does not have
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            found = list(pool.map(_cell_runs, *zip(*cells, strict=True), [chosen] * len(cells), chunksize=8))
    runs = [run for cell in found for run in cell]
    return pd.DataFrame([asdict(run) | {"expected": run.is_expected} for run in runs])


def false_alarms(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[~runs["status"].isin(["ok", "unsupported"]) & ~runs["expected"]]


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Per kernel: judged runs, each status, and the worst err_ratio."""
    counts = pd.crosstab(runs["kernel"], runs["status"])
    counts = counts.reindex(columns=[*SEVERITY[::-1], "unsupported"], fill_value=0)
    counts["worst_ratio"] = runs.groupby("kernel")["err_ratio"].max()
    return counts.reindex(list(dict.fromkeys(runs["kernel"])))


def _tell(done: int, of: int) -> None:
    if sys.stderr.isatty() or done % 20 == 0:
        print(f"{done} of {of} cells", file=sys.stderr, flush=True)


def _cell_runs(case: Case, seed: int, kernels: Sequence[Kernel | str] | None) -> list[Run]:
    torch.set_num_threads(1)
    cell = StudiedCell(case, seed=seed, regimes=REGIMES)
    return [_run(cell, seed, _kernel(each)) for each in (HONEST if kernels is None else kernels)]


@functools.cache
def _kernel(name: Kernel | str) -> Kernel:
    if isinstance(name, Kernel):
        return name
    if not name.startswith(OF_THE_EXAM):
        return HONEST[name]
    sys.path.insert(0, str(PAPERS))
    try:
        module, _, function = _specs()[name.removeprefix(OF_THE_EXAM)].partition(":")
        return from_function(
            getattr(importlib.import_module(module), function), name, shielded=False, origin="bench/exam"
        )
    finally:
        sys.path.remove(str(PAPERS))


@functools.cache
def _specs() -> dict[str, str]:
    return {kernel.name: kernel.spec for kernel in kernels_of("right")}


def _run(cell: StudiedCell, seed: int, kernel: Kernel) -> Run:
    case = cell.case
    blank = Run(kernel.name, case.case_id, case.variant, case.mask, case.phase, case.dtype, seed, "unsupported")
    try:
        equivalence = Equivalence(tuple(cell.examine(cell.pair_with(kernel))))
    except NotImplementedError as refusal:  # Unsupported, or in a kernel's own words
        return replace(blank, reason=str(refusal))
    except ContractBroken as broken:
        return replace(blank, status="mismatch", reason=str(broken))
    worst = equivalence.worst
    return replace(
        blank,
        status=equivalence.judged,  # as a run says of its cell
        err_ratio=worst.err_ratio,
        tensor=worst.tensor,
        regime=worst.regime,
        reason=worst.reason,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="of the cells' numbers (1)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--config", default=None, help="a grid; default: one of small cells")
    parser.add_argument("--exam", action="store_true", help="the right kernels of bench/exam")
    parser.add_argument("--sample", type=int, help="so many of them, at random")
    options = parser.parse_args()
    names = [f"{OF_THE_EXAM}{name}" for name in _specs()] if options.exam else list(HONEST)
    if options.sample is not None:
        names = random.Random(0).sample(names, options.sample)
    started = time.perf_counter()
    runs = alarms(range(options.seeds), config=options.config or GRID, kernels=names, processes=options.processes)
    judged = runs[runs["status"] != "unsupported"]
    wrong = false_alarms(runs)
    print(summary(runs).to_string(float_format="{:.2f}".format))
    kernels, cells = judged["kernel"].nunique(), judged["case_id"].nunique()
    print(f"\n{len(judged)} runs: {kernels} correct kernels, {cells} cells, {options.seeds} seeds")
    print(f"{runs['expected'].sum()} degraded as expected, {len(wrong)} false alarms")
    print(f"{time.perf_counter() - started:.0f} s")
    shown = ["kernel", "case_id", "seed", "status", "err_ratio", "tensor", "regime", "reason"]
    print(runs.loc[runs["expected"] | runs.index.isin(wrong.index), shown].to_string())
    return 1 if len(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
