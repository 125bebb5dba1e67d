"""Processor, clock, load, memory and disk.

The first half reads small text files of /proc and /sys. What cannot be read is absent: containers and other systems
hide much of it.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from harness.doctor import Diagnosis, bad, ok, warn
from harness.text import percent

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "asimd", "sve", "bf16")
GIB = 2**30
HIDDEN = "not visible here"


def read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdecimal() else None  # "max" and -1 are no limit


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Of this process, innermost first, in version 2 and in version 1; a limit anywhere above holds too."""
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def cpu_quota(root: Path) -> float | None:
    """Processors' worth of time that the cgroup allows; None without a limit."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        limit, _, period = (read(folder / "cpu.max") or "").partition(" ")
        if limit.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(limit) / int(period))
        old, old_period = (read_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if old and old_period:
            quotas.append(old / old_period)
    return min(quotas, default=None)


def memory_limit(root: Path) -> int | None:
    limits = []
    for folder in cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_number(folder / name)
            if limit is not None and limit < 2**60:  # version 1 writes "no limit" as a huge number
                limits.append(limit)
    return min(limits, default=None)


def steal_and_total(stat: str) -> tuple[int, int] | None:
    """Ticks since boot from /proc/stat's first line: user nice system idle iowait irq softirq steal [guest ...]."""
    fields = stat.splitlines()[0].split() if stat else []
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    ticks = [int(field) for field in fields[1:9]]
    return ticks[7], sum(ticks)


def processor(cpuinfo: str, capability: str) -> Diagnosis:
    """`capability` is the instruction set that torch chose: AVX512, AVX2, DEFAULT, ..."""
    model = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", cpuinfo, re.MULTILINE | re.IGNORECASE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    has = [feature for feature in FEATURES if flags and feature in flags[1].split()]
    text = f"{model[1].strip() if model else 'unknown model'}: {' '.join(has) or HIDDEN}; torch uses {capability}"
    if has and not any("bf16" in feature for feature in has):
        text += "; no bf16 instructions, so that half precision is timed as emulated"
    if capability in ("DEFAULT", "NO AVX") and "avx2" in has:
        return warn("processor", text, "unset ATEN_CPU_CAPABILITY: torch does not use the AVX2 that is here")
    if capability == "AVX2" and "avx512f" in has:
        return warn("processor", text, "unset ATEN_CPU_CAPABILITY, unless AVX2 is meant")
    if capability in ("DEFAULT", "NO AVX") and "asimd" not in has:
        return warn("processor", text, "time on a machine with AVX2: speeds without it tell nothing of others")
    return ok("processor", text)


def cores(total: int, affinity: int, quota: float | None) -> Diagnosis:
    limit = "no cgroup quota" if quota is None else f"cgroup quota {quota:g}"
    text = f"{total} in all, {affinity} by affinity, {limit}"
    if quota is not None and quota < 1:
        return bad("cores", text, "raise the cgroup's cpu quota: below one core every call is cut in pieces")
    if quota is not None and quota < affinity:
        todo = f"pin to {int(quota)} cores (taskset) or raise the quota: beyond it all threads stop at once"
        return warn("cores", text, todo)
    return ok("cores", text)


def governor(root: Path) -> Diagnosis:
    files = sorted(root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"))
    kinds = sorted({text for file in files if (text := read(file))})
    if not kinds:
        return ok("governor", HIDDEN)
    if kinds == ["performance"]:
        return ok("governor", "performance")
    return warn("governor", ", ".join(kinds), "cpupower frequency-set -g performance: the clock moves with load")


def turbo(root: Path) -> Diagnosis:
    cpu = root / "sys/devices/system/cpu"
    # Intel's file says when it is off, the others' when it is on.
    off, on = read(cpu / "intel_pstate/no_turbo"), read(cpu / "cpufreq/boost")
    if off is None and on is None:
        return ok("turbo", HIDDEN)
    if off == "0" or (off is None and on == "1"):
        file = "/sys/devices/system/cpu/" + ("cpufreq/boost" if off is None else "intel_pstate/no_turbo")
        todo = f"echo {0 if off is None else 1} > {file}: the clock falls as the machine warms up"
        return warn("turbo", "on", todo)
    return ok("turbo", "off")


def steal(before: str | None, after: str | None) -> Diagnosis:
    """Two readings of /proc/stat, taken around work: a processor can only be stolen from one who wants it."""
    first, last = (steal_and_total(stat or "") for stat in (before, after))
    if first is None or last is None or last[1] <= first[1]:
        return ok("steal time", HIDDEN)
    share = (last[0] - first[0]) / (last[1] - first[1])
    text = f"{percent(share, 1)} of the time while measuring"
    if share > 0.05:
        return bad("steal time", text, "use a machine of its own: the host gives this one's cores to others")
    if share > 0.005:
        return warn("steal time", text, "expect wider intervals, or use a machine of its own")
    return ok("steal time", text)


def load(average: float | None, usable: int) -> Diagnosis:
    """The minute before the examination; its own work is not in it."""
    if average is None:
        return ok("load", HIDDEN)
    text = f"{average:.2f} over the last minute, for {usable} cores"
    if average >= usable:
        return bad("load", text, "stop what else is running (top shows it): calls wait for a core")
    if average >= 0.5:
        return warn("load", text, "stop what else is running, or wait for it")
    return ok("load", text)


def memory(available: int, total: int, swap_used: int, limit: int | None) -> Diagnosis:
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available, {swap_used / GIB:.1f} GiB swapped out"
    text += ", no cgroup limit" if limit is None else f", cgroup limit {limit / GIB:.1f} GiB"
    least = min(available, limit if limit is not None else available)
    if least < GIB // 2:
        return bad("memory", text, "free some or raise the limit: torch alone needs half a GiB")
    if least < 2 * GIB:
        return warn("memory", text, "free some or raise the limit: long sequences will end as oom")
    if swap_used > GIB // 4:
        return warn("memory", text, "swapoff -a && swapon -a: pages that come back from disk are timed too")
    return ok("memory", text)


def disk(folder: Path, free: int) -> Diagnosis:
    text = f"{free / GIB:.1f} GiB free for {folder}"
    if free < 2**20:
        return bad("disk", text, "make room: not even one record fits", prevents_runs=True)
    if free < GIB:
        return warn("disk", text, "make room: a nightly run writes hundreds of MB")
    return ok("disk", text)


def results_folder(
    folder: Path, *, fsync: Callable[[int], None] = os.fsync, clock: Callable[[], float] = time.perf_counter
) -> Diagnosis:
    """Writes and syncs one record's worth there, as every finished case does; leaves nothing behind."""
    place = nearest(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            started = clock()
            fsync(file.fileno())
            seconds = clock() - started
    except OSError as error:
        reason = error.strerror or str(error)
        todo = "make it writable, or run from another folder: every finished case is written and synced there"
        return bad("results", f"{place}: {reason}", todo, prevents_runs=True)
    text = f"{folder} can be written; a sync takes {1e3 * seconds:.1f} ms"
    if seconds > 0.1:
        return warn("results", text, "put results on a local disk: every finished case waits for a sync")
    return ok("results", text)


def nearest(folder: Path) -> Path:
    """The folder itself or, before the first run, where it would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def usable_cores(affinity: Collection[int], quota: float | None) -> int:
    return max(1, len(affinity) if quota is None else min(len(affinity), int(quota)))
