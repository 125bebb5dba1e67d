"""What was found for one side of one cell, and its row in kernels.csv. A missing measurement is empty, never 0."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from bench.kernel_study.cell import Cell, Work
from bench.kernel_study.roofline import Roofline
from bench.kernel_study.targets import SIZES
from harness.cell.timing import Ratio

MEASURED, NOT_RUN, WRONG, UNSUPPORTED = "measured", "not run", "wrong", "unsupported"
BASELINES = ("sdpa", "textbook", "transformers", "torch_mha")  # of each other side the paired ratio to these
RATIOS = tuple(f"x_{name}{end}" for name in BASELINES for end in ("", "_lo", "_hi"))
ROOFLINE = ("gflops", "share_of_peak", "gbytes_per_s", "share_of_bandwidth")
COLUMNS = (*SIZES, "side", "required", "status", "reason", "ms", "baseline_ms", "blocks", *RATIOS, *ROOFLINE,
           "peak_bytes", "peak_x_textbook")  # fmt: skip
NUMBERS = ("ms", "baseline_ms", "blocks", *RATIOS, *ROOFLINE, "peak_bytes", "peak_x_textbook")


@dataclass(frozen=True)
class Result:
    cell: Cell
    side: str
    status: str
    reason: str = ""
    seconds: tuple[float, ...] = ()  # per call, one of each block
    ratios: Mapping[str, Ratio] = field(default_factory=dict)  # to each baseline that was measured beside it
    baseline_seconds: float | None = None  # median of the first baseline: which limit holds may depend on it
    work: Work | None = None
    peak_bytes: int | None = None
    peak_x_textbook: float | None = None

    def row(self, roofline: Roofline) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {name: getattr(self.cell, name) for name in (*SIZES, "required")}
        row |= {"side": self.side, "status": self.status, "reason": self.reason}
        row |= {"peak_bytes": self.peak_bytes, "peak_x_textbook": self.peak_x_textbook}
        for name, ratio in self.ratios.items():
            row |= {f"x_{name}": ratio.value, f"x_{name}_lo": ratio.lo, f"x_{name}_hi": ratio.hi}
        if self.baseline_seconds is not None:
            row["baseline_ms"] = self.baseline_seconds * 1e3
        if self.seconds:
            median = statistics.median(self.seconds)
            row |= {"ms": median * 1e3, "blocks": len(self.seconds)}
            if self.work is not None:
                flops, moved = self.work.flops / median, self.work.bytes / median
                row |= {
                    "gflops": flops / 1e9,
                    "share_of_peak": flops / roofline.flops_per_s[self.cell.dtype],
                    "gbytes_per_s": moved / 1e9,
                    "share_of_bandwidth": moved / roofline.bytes_per_s,
                }
        return row


def frame_of(results: Sequence[Result], roofline: Roofline) -> pd.DataFrame:
    frame = pd.DataFrame([result.row(roofline) for result in results], columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(NUMBERS, "float64"))
