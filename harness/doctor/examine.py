"""All probes, on this machine."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import psutil

from harness import environment
from harness.doctor import machine, noise, software
from harness.doctor import machine as system_files
from harness.doctor.finding import Examination, Finding

RESULTS = Path("results")


def examine(*, seconds: float, root: Path = Path("/"), results: Path = RESULTS) -> Examination:
    """`seconds` of A/A timing. What is asked of the machine first, so that the timing itself is not seen as load."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = system_files.cpu_quota(root)
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
        machine.memory(virtual.available, virtual.total, swapped.used, system_files.memory_limit(root)),
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
        cpuinfo = system_files.read(root / "proc/cpuinfo") or ""
        findings[1:1] = [
            software.torch_build(torch.__config__.show()),
            machine.processor(cpuinfo, torch.backends.cpu.get_cpu_capability()),
            software.threads(torch.get_num_threads(), usable, os.environ),
        ]
        stat = root / "proc/stat"
        before = system_files.read(stat)
        measured = noise.study(list(noise.attention_calls()), seconds=seconds)
        findings += [machine.steal(before, system_files.read(stat)), noise_level(measured)]
    return Examination(tuple(findings), measured)


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def noise_level(measured: noise.Noise) -> Finding:
    paired, in_turn = 100 * measured.paired(), 100 * measured.sequential()
    text = (
        f"{len(measured.trials)} A/A ratios: 95 % within ±{paired:.1f} % as pairs, "
        f"±{in_turn:.1f} % one after the other; the smallest effect to trust is {100 * measured.smallest_effect:.1f} %"
    )
    if not measured.smallest_effect <= 0.1:
        return Finding("noise", "bad", text, "see load, steal time and threads above; then examine again")
    if not measured.smallest_effect <= 0.03:
        return Finding("noise", "warn", text, "a longer `timing: {budget_s: 2, max_blocks: 401}` narrows it")
    return Finding("noise", "ok", text)
