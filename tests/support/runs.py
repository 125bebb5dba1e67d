"""Runs without torch: an executor that makes its records up, for tests of what becomes of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.case import CASE_FIELDS, Case
from harness.record import Record
from harness.workers.job import Job

CONFIG = """\
name: tiny
threads: 1
timing: {enabled: false}
grid: {variant: [mha, mqa], embed_dim: 16, heads: 2, seq_len: [4, 6, 8], mask: causal}
battery: {enabled: false}
"""


def made_up(case: Case, status: str = "ok") -> Record:
    axes = {name: getattr(case, name) for name in CASE_FIELDS}
    error = case.seed(0) % 1000 / 1000
    return Record(
        case_id=case.case_id, reference="none", kv_len=case.kv_len, status=status, err_ratio=error, seconds=0.5, **axes
    )


@dataclass
class MadeUp:
    """An Executor. After `stop_after` records it is interrupted; `statuses` are by variant."""

    stop_after: int | None = None
    statuses: Mapping[str, str] = field(default_factory=dict)
    backwards: bool = False
    origin: str = "mine.py sha256:1111"
    done: list[str] = field(default_factory=list)

    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(kernels, self.origin)

    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        for count, job in enumerate(reversed(jobs) if self.backwards else jobs):
            if count == self.stop_after:
                raise KeyboardInterrupt
            self.done.append(job.case.case_id)
            yield made_up(job.case, self.statuses.get(job.case.variant, "ok"))
