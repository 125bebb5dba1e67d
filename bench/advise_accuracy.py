"""How good `harness advise` predicts: decode steps of real layers, predicted and measured, side by side.

    python bench/advise_accuracy.py                    float32, about a minute on a quiet machine
    python bench/advise_accuracy.py --dtype bfloat16

Probes and steps of a layer are sampled in turn, because the speed of a machine drifts within seconds; what `harness
advise` says of a minute ago holds for that minute.

Exit codes: 0 every prediction within 30 % of the measurement, 1 not all.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file, python puts bench/ there instead

from harness.advise import work
from harness.advise.candidates import Candidate, Model, candidates
from harness.advise.roofline import Roofline, span_of
from harness.advise.work import Figure
from harness.case import DTYPES
from harness.commands import positive
from harness.errors import EQUAL, NOT_EQUAL
from harness.report.table import Column, Table
from harness.text import plural, terminal

if TYPE_CHECKING:
    from harness.advise.probes import Layer

WITHIN = 0.30
# E, heads; head_dim is 64 up to a width of 1024 and 128 beyond, as in models of these widths.
WIDTHS = ((512, 8), (1024, 16), (2048, 16), (4096, 32))
LENGTHS = (512, 2048, 8192, 16384)
BATCHES = (1, 4)
LABELS = ("mha", "gqa-4", "mqa", "mla")
CACHE_LIMIT = 2**30  # bytes: larger caches would only measure the memory once more


@dataclass(frozen=True)
class Point:
    candidate: Candidate
    batch: int
    keys: int

    @property
    def step(self) -> work.DecodeStep:
        return work.decode_step(self.candidate, batch=self.batch, keys=self.keys)


def points(dtype: str, lengths: Sequence[int], labels: Sequence[str] = LABELS) -> Iterator[Point]:
    for width, heads in WIDTHS:
        model = Model("layer", width, 1, heads, width // heads, existing=False)
        known = {candidate.label: candidate for candidate in candidates(model, dtype)}
        for label in labels:
            for batch in BATCHES:
                for keys in lengths:
                    point = Point(known[label], batch, keys)
                    if batch * keys * point.candidate.bytes_per_token_layer <= CACHE_LIMIT:
                        yield point


def build(candidate: Candidate) -> "Layer":
    import torch

    from harness.advise.probes import KERNEL
    from harness.variants.gqa import GroupedQueryAttention
    from harness.variants.mla import MultiHeadLatentAttention

    case = candidate.case
    kind = getattr(torch, case.dtype)
    if case.kv_heads is not None:
        return GroupedQueryAttention(
            case.embed_dim, case.heads, case.kv_heads, head_dim=case.head_dim, kernel=KERNEL, dtype=kind
        )
    assert case.kv_lora_rank is not None and case.rope_head_dim is not None and case.v_head_dim is not None
    return MultiHeadLatentAttention(
        case.embed_dim, case.heads, kv_lora_rank=case.kv_lora_rank, nope_head_dim=case.head_dim,
        rope_head_dim=case.rope_head_dim, v_head_dim=case.v_head_dim, mode="absorbed", kernel=KERNEL, dtype=kind,
    )  # fmt: skip


def compared(point: Point) -> tuple[Figure, Figure]:
    """Predicted and measured, sampled in turn: the speed of a machine drifts within seconds."""
    import torch

    from harness.advise.probes import TimedCall, decode_step, probe_of, take

    with torch.inference_mode():
        real = decode_step(build(point.candidate), batch=point.batch, keys=point.keys)
        span = span_of(point.step)
        probes: dict[work.StepPart | None, TimedCall] = {part: probe_of(part, span) for part in point.step.parts}
        found = take({**probes, None: TimedCall(real, real)})
    parts = {(part, span): seconds for part, seconds in found.items() if part is not None}
    return Roofline({}, parts, torch.get_num_threads()).seconds(point.step), found[None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # before torch is loaded
    import torch
    from rich.console import Console

    torch.set_num_threads(options.threads)
    chosen = list(points(options.dtype, options.keys, options.variant))[:: options.every]
    status = Console(stderr=True).status("")
    with status:
        rows = []
        for point in chosen:
            status.update(f"{point.candidate.label} E {point.candidate.case.embed_dim} S {point.keys} B {point.batch}")
            rows.append((point, *compared(point)))
    console = terminal()
    console.print(table(rows))
    ratios = [predicted.value / real.value for _, predicted, real in rows]
    good = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    covered = sum(predicted.lo <= real.value <= predicted.hi for _, predicted, real in rows)
    threads = plural(options.threads, "thread", "threads")
    console.print(
        f"{good} of {len(rows)} within {WITHIN:.0%} of the measurement, {covered} within their ±; "
        f"{options.dtype}, {threads}",
        highlight=False,
        soft_wrap=True,
    )
    return EQUAL if good == len(rows) else NOT_EQUAL


def table(rows: Sequence[tuple[Point, Figure, Figure]]) -> Table:
    """A row is a point, what was predicted of it and what was measured."""
    columns = [
        Column("variant", lambda row: row[0].candidate.label, left=True),
        Column("E", lambda row: f"{row[0].candidate.case.embed_dim:,}"),
        Column("heads", lambda row: row[0].candidate.case.heads),
        Column("S", lambda row: f"{row[0].keys:,}"),
        Column("batch", lambda row: row[0].batch),
        Column("predicted ms", lambda row: f"{1e3 * row[1].value:.3f} ±{row[1].error:.0%}"),
        Column("measured ms", lambda row: f"{1e3 * row[2].value:.3f} ±{row[2].error:.0%}"),
        Column("ratio", lambda row: f"{row[1].value / row[2].value:.2f}"),
    ]
    return Table(columns, rows)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--variant", choices=LABELS, nargs="+", default=LABELS, help="default: all")
    parser.add_argument("--keys", type=int, nargs="+", default=LENGTHS, metavar="S", help="default: 512 to 16384")
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="only every N-th layer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
