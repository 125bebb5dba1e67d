"""Small text files of /proc and /sys. What cannot be read is absent: containers and other systems hide much of it."""

from collections.abc import Iterator
from pathlib import Path


def read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    text = read(path)
    try:
        return None if text is None else int(text)
    except ValueError:  # "max"
        return None


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
        old, old_period = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
        if old is not None and old > 0 and old_period:
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
