"""Is what `harness judge` says of a wrong kernel true? Over all saboteurs as plugins, and the exam's wrong kernels.

python -m bench.diagnosis_study [--saboteurs] [--exam developed|held] [--sample N] [--scripts] [--out FILE.csv]

Saboteurs are marked by name: is the one that it is among those that give the same answer to every call? Sentences on
the exam's kernels stand beside what their authors say of them, and are marked by a reader: bench/diagnosis_marks.csv.
The half `developed` was looked at while the guesses were written, `held` was not.
"""

import argparse
import hashlib
import importlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from bench.exam_score import kernels_of
from harness.battery.session import judge
from harness.candidate.client import Process
from harness.candidate.zygote import Zygote
from harness.diagnosis.result import Diagnosis
from harness.diagnosis.session import diagnose

SEED = 3


@dataclass(frozen=True)
class Subject:
    kind: str  # saboteur, developed, held
    name: str
    spec: str
    truth: str  # in its author's words
    folder: str


@dataclass(frozen=True)
class Line:
    kind: str
    name: str
    truth: str
    status: str
    headline: str
    names: str = ""
    everywhere: bool = False
    where: str = ""
    notes: str = ""
    smallest: str = ""
    numbers_of_q: int | None = None
    has_script: bool = False
    seconds: float = 0.0  # of the diagnosis
    shrink_seconds: float = 0.0


def saboteurs() -> Iterator[Subject]:
    from bench.diagnosis_plugins import NAMES
    from harness.mutants.saboteurs.saboteur import SABOTEURS

    for number, name in enumerate(NAMES):
        words = SABOTEURS[name].stands_for
        yield Subject("saboteur", name, f"bench.diagnosis_plugins:kernel_{number}", words, str(Path.cwd()))


def exam(half: str) -> Iterator[Subject]:
    for paper in ("a", "b"):
        for kernel in kernels_of(paper):
            if half_of(kernel.name) == half:
                yield Subject(half, kernel.name, kernel.spec, _author(kernel.spec, kernel.folder), kernel.folder)


def half_of(name: str) -> str:
    return "held" if hashlib.sha256(name.encode()).digest()[0] % 2 else "developed"


def _author(spec: str, folder: str) -> str:
    module, _, function = spec.partition(":")
    sys.path.insert(0, folder)
    try:
        return " ".join((getattr(importlib.import_module(module), function).__doc__ or "").split())
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "wrong"]:
            del sys.modules[name]


def studied(subject: Subject, zygote: Zygote, *, scripts: bool) -> Line:
    process = Process(subject.spec, timeout_s=60, zygote=zygote)
    sys.path.insert(0, subject.folder)
    try:
        found = judge(process, minutes=0.5, seed=SEED)
        diagnosis = diagnose(process, found, scripts=scripts)
    finally:
        sys.path.remove(subject.folder)
        process.stop()
    return line_of(subject, found.status, diagnosis)


def line_of(subject: Subject, status: str, diagnosis: Diagnosis | None) -> Line:
    if diagnosis is None:
        return Line(subject.kind, subject.name, subject.truth, status, "")
    shrunk = diagnosis.shrunk
    return Line(
        kind=subject.kind,
        name=subject.name,
        truth=subject.truth,
        status=status,
        headline=diagnosis.headline,
        names=" | ".join(name for named in diagnosis.named for name in named.names),
        everywhere=bool(diagnosis.named) and diagnosis.named[0].everywhere,
        where=diagnosis.place.sentence if diagnosis.place else "",
        notes=" | ".join(diagnosis.notes),
        smallest=f"{shrunk.call}; needs {', '.join(shrunk.needs)}" if shrunk else "",
        numbers_of_q=shrunk.numbers_of_q if shrunk else None,
        has_script=bool(shrunk and shrunk.script),
        seconds=diagnosis.seconds,
        shrink_seconds=shrunk.seconds if shrunk else 0.0,
    )


def told(lines: list[Line]) -> list[str]:
    text = []
    for kind in dict.fromkeys(line.kind for line in lines):
        seen = [line for line in lines if line.kind == kind and line.status in ("mismatch", "error")]
        named = [line for line in seen if line.names]
        text.append(f"{kind}: {len(seen)} seen, {len(named)} named")
        if kind == "saboteur":
            right = [line for line in named if line.name in line.names.split(" | ")]
            text.append(f"  named rightly {len(right)}, by another name {len(named) - len(right)}")
            text += [f"  another: {line.name}: {line.headline}" for line in named if line not in right]
            text += [f"  not named: {line.name}: {line.headline}" for line in seen if not line.names]
        sizes = sorted(line.numbers_of_q for line in seen if line.numbers_of_q is not None)
        if sizes:
            scripts = sum(line.has_script for line in seen)
            text.append(
                f"  smallest call: median {sizes[len(sizes) // 2]} numbers of q; {scripts} scripts fail when run"
            )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saboteurs", action="store_true")
    parser.add_argument("--exam", choices=["developed", "held"])
    parser.add_argument("--sample", type=int, help="so many, at random; default: all")
    parser.add_argument("--only", nargs="+", help="these alone")
    parser.add_argument("--scripts", action="store_true", help="write each script, and run it")
    parser.add_argument("--out", type=Path, help="write a row for each kernel")
    options = parser.parse_args()
    zygote = Zygote()
    subjects = [*(saboteurs() if options.saboteurs else ()), *(exam(options.exam) if options.exam else ())]
    if options.only:
        subjects = [subject for subject in subjects if subject.name in options.only]
    if options.sample is not None:
        subjects = random.Random(0).sample(subjects, min(options.sample, len(subjects)))
    lines: list[Line] = []
    for subject in subjects:
        started = time.perf_counter()
        lines.append(line := studied(subject, zygote, scripts=options.scripts))
        print(
            f"{line.status:9} {time.perf_counter() - started:5.1f} s  {line.name}: {line.headline} [{line.names}]",
            flush=True,
        )
        if options.out is not None:
            pd.DataFrame(map(asdict, lines)).to_csv(options.out, index=False)
    print("\n".join(told(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
