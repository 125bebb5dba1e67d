"""How many of the wrong kernels in bench/exam does `harness judge` see, how soon, and which not? Which right ones fail?

python -m bench.exam_score [--paper a|b|right ...] [--sample N] [--seed N] [--minutes M] [--out FILE.csv]

Wrong kernels are seen if they end as anything but ok; right ones must not end as mismatch or error.
"""

import argparse
import importlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from harness.battery.call import generator_of, make_call
from harness.battery.conduct import conduct_steps
from harness.battery.design import covering
from harness.battery.plan import big_calls, first_calls
from harness.battery.rare import half_steps, rare_steps, traced_steps
from harness.battery.result import SEVERITY, Finding
from harness.battery.session import judge
from harness.battery.steps import found_in
from harness.candidate.client import Process
from harness.candidate.examinee import InProcess
from harness.candidate.zygote import Zygote
from harness.cell.bare import Held, Unanswered
from harness.cell.draws import torch_threads

PAPERS = Path(__file__).parent / "exam"
SEEN = ("mismatch", "error", "degraded")
FALSE_ALARM = ("mismatch", "error")


@dataclass(frozen=True)
class ExamKernel:
    paper: str
    name: str
    spec: str  # as a user would name it
    kind: str  # exact (wrong in exact arithmetic), rounding (wrong by rounding alone), right
    where: str  # it shows

    @property
    def folder(self) -> str:
        """From which its own imports are made."""
        return str(PAPERS if self.paper == "right" else PAPERS / self.paper)


@dataclass(frozen=True)
class Mark:
    paper: str
    name: str
    kind: str
    status: str
    seconds: float
    checks: int
    reason: str


def kernels_of(paper: str) -> list[ExamKernel]:
    """Read from the paper's own list."""
    package = "right" if paper == "right" else "wrong"
    folder = str(PAPERS if paper == "right" else PAPERS / paper)
    sys.path.insert(0, folder)
    try:
        return [_exam_kernel(paper, kernel) for kernel in importlib.import_module(package).KERNELS]
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def _exam_kernel(paper: str, kernel: object) -> ExamKernel:
    name, function = kernel.name, kernel.function  # type: ignore[attr-defined]
    spec = f"{function.__module__}:{function.__name__}"
    if paper == "right":
        return ExamKernel(paper, name, spec, "right", "")
    kind = "exact" if kernel.exact else "rounding"  # type: ignore[attr-defined]
    return ExamKernel(paper, name, spec, kind, kernel.where)  # type: ignore[attr-defined]


def mark(kernel: ExamKernel, minutes: float, zygote: Zygote) -> Mark:
    process = Process(kernel.spec, timeout_s=60, zygote=zygote)
    sys.path.insert(0, kernel.folder)
    try:
        found = judge(process, minutes=minutes)
    finally:
        sys.path.remove(kernel.folder)
        process.stop()
    first = found.first_failure
    reason = kernel.where if first is None else f"{first.check}: {first.reason} ({first.call})"
    return Mark(
        kernel.paper, kernel.name, kernel.kind, found.status, found.seconds, len(found.findings), reason.splitlines()[0]
    )


def mark_right(kernels: Sequence[ExamKernel], seed: int) -> list[Mark]:
    """Everything that one minute's battery asks, of all of them side by side: what they are held to is made once."""
    sys.path.insert(0, str(PAPERS))
    examinees = {}
    for kernel in kernels:
        module, _, name = kernel.spec.partition(":")
        examinees[kernel.name] = InProcess(getattr(importlib.import_module(module), name), kernel.name)
    findings: dict[str, list[Finding]] = {name: [] for name in examinees}
    started = time.perf_counter()
    with torch_threads(1):
        points = [*first_calls(), *covering(seed).points, *big_calls()] if kernels else []
        for number, point in enumerate(points, start=1):
            call = make_call(point, seed)
            try:
                held = Held.of(call.request, generator_of(seed, call.words), rows=call.rows)
            except Unanswered:
                continue
            for name, examinee in examinees.items():
                findings[name].append(found_in(examinee.ask(call.request), held, call, None))
            if number % 20 == 0:
                print(f"{number} of {len(points)} calls, {time.perf_counter() - started:.0f} s", flush=True)
        for name, examinee in examinees.items():
            steps = [*conduct_steps(seed), *half_steps(seed), *rare_steps(seed), *traced_steps(seed)]
            findings[name] += [step.done(examinee) for step in steps]
    marks = []
    for name, found in findings.items():
        worst = max(found, key=lambda finding: SEVERITY.index(finding.status))
        reason = "" if worst.status == "ok" else f"{worst.check}: {worst.reason} ({worst.call})"
        marks.append(Mark("right", name, "right", worst.status, 0.0, len(found), reason))
    return marks


def told(marks: Sequence[Mark]) -> list[str]:
    lines = []
    for kind, words in (("exact", "wrong in exact arithmetic"), ("rounding", "wrong by rounding alone")):
        own = [each for each in marks if each.kind == kind]
        seen = [each for each in own if each.status in SEEN]
        if own:
            share = 100 * len(seen) / len(own)
            after = f", after {statistics.median(each.seconds for each in seen):.1f} s (median)" if seen else ""
            lines.append(f"{words}: {len(seen)} of {len(own)} seen ({share:.1f} %){after}")
            lines += [f"  not seen: {each.paper} {each.name}: {each.reason}" for each in own if each not in seen]
    right = [each for each in marks if each.kind == "right"]
    if right:
        alarms = [each for each in right if each.status in FALSE_ALARM]
        worse = sum(each.status == "degraded" for each in right)
        checks = sum(each.checks for each in right)
        lines.append(f"right: {len(alarms)} false alarms of {len(right)}, {worse} degraded, {checks:,} checks")
        lines += [f"  false alarm: {each.name}: {each.reason}" for each in alarms]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=["a", "b", "right"], nargs="+", default=["a", "b", "right"])
    parser.add_argument("--sample", type=int, help="so many of them, at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each kernel (1)")
    parser.add_argument("--out", type=Path, help="write a row for each kernel")
    options = parser.parse_args()
    zygote = Zygote()  # before torch has made a thread: a process takes 2.7 s to start, a fork of this nothing
    kernels = [kernel for paper in options.paper for kernel in kernels_of(paper)]
    if options.sample is not None:
        kernels = random.Random(options.seed).sample(kernels, min(options.sample, len(kernels)))
    marks = mark_right([kernel for kernel in kernels if kernel.kind == "right"], options.seed)
    for kernel in (kernel for kernel in kernels if kernel.kind != "right"):
        marks.append(one := mark(kernel, options.minutes, zygote))
        print(f"{one.status:11} {one.seconds:5.1f} s  {one.kind:8} {one.paper} {one.name}: {one.reason}", flush=True)
        if options.out is not None:
            pd.DataFrame(map(asdict, marks)).to_csv(options.out, index=False)
    print("\n".join(told(marks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
