"""All probes on this machine, and what they say together."""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import environment
from harness.doctor import Diagnosis, Level, bad, machine, noise, ok, software, warn
from harness.text import percent


@dataclass(frozen=True)
class Examination:
    findings: tuple[Diagnosis, ...]
    noise: noise.NoiseStudy | None  # None where it could not be measured

    @property
    def can_run(self) -> bool:
        return not any(finding.prevents_runs for finding in self.findings)

    @property
    def verdict(self) -> str:
        if not self.can_run:
            return f"runs are impossible here; fix these first: {self._names('bad', prevents_runs=True)}"
        if any(finding.level == "bad" for finding in self.findings) or self.noise is None:
            return f"do not trust timings yet; fix these first: {self._names('bad')}"
        trusted = f"timings can be trusted to ±{percent(self.noise.smallest_effect, 1)}"
        warned = self._names("warn")
        return f"{trusted}; better still without: {warned}" if warned else trusted

    def _names(self, level: Level, *, prevents_runs: bool = False) -> str:
        return ", ".join(f.name for f in self.findings if f.level == level and f.prevents_runs >= prevents_runs)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "can_run": self.can_run,
            "findings": [asdict(finding) for finding in self.findings],
            "noise": None if self.noise is None else self.noise.to_json(),
        }


def examine(*, seconds: float, root: Path = Path("/"), results: Path = Path("results")) -> Examination:
    """`seconds` of A/A timing. What is asked of the machine first, so that the timing itself is not seen as load."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = machine.cpu_quota(root)
    usable = machine.usable_cores(affinity, quota)
    virtual, swapped = psutil.virtual_memory(), psutil.swap_memory()
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    there = environment.collect(usable)
    findings = [
        software.versions(platform.python_version(), installed),
        machine.cores(os.cpu_count() or 1, len(affinity), quota),
        machine.governor(root),
        machine.turbo(root),
        machine.load(average, usable),
        machine.memory(virtual.available, virtual.total, swapped.used, machine.memory_limit(root)),
        machine.disk(results, shutil.disk_usage(machine.nearest(results)).free),
        machine.results_folder(results),
        software.tree(there.commit, there.dirty),
    ]
    measured = None
    try:
        import torch
    except Exception as error:  # a missing package, or a library that its build wants
        findings.insert(1, software.torch_build(None, f"{type(error).__name__}: {error}"))
    else:
        cpuinfo = machine.read(root / "proc/cpuinfo") or ""
        findings[1:1] = [
            software.torch_build(torch.__config__.show()),
            machine.processor(cpuinfo, torch.backends.cpu.get_cpu_capability()),
            software.threads(torch.get_num_threads(), usable, os.environ),
        ]
        stat = root / "proc/stat"
        before = machine.read(stat)
        measured = noise.study(list(noise.attention_calls()), seconds=seconds)
        findings += [machine.steal(before, machine.read(stat)), noise_level(measured)]
    return Examination(tuple(findings), measured)


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def noise_level(measured: noise.NoiseStudy) -> Diagnosis:
    paired, in_turn = percent(measured.paired(), 1), percent(measured.sequential(), 1)
    text = (
        f"{len(measured.trials)} A/A ratios: 95 % within ±{paired} as pairs, ±{in_turn} one after the other; "
        f"the smallest effect to trust is {percent(measured.smallest_effect, 1)}"
    )
    if not measured.smallest_effect <= 0.1:
        return bad("noise", text, "see load, steal time and threads above; then examine again")
    if not measured.smallest_effect <= 0.03:
        return warn("noise", text, "a longer `timing: {budget_s: 2, max_blocks: 401}` narrows it")
    return ok("noise", text)
