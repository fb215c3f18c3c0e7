"""What a container, or a service, may take of its machine: CPU time and memory of its control group, on Linux.

Files of version 2 (`cpu.max`, `memory.max`) and of version 1 are read, of this process's group and of all around it:
the tightest limit holds. In most containers, the group is its own root.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from .files import text_of

__all__ = ["cpu_quota", "memory_limit_bytes"]

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_quota() -> float:
    """Seconds of CPU time that the group has in a second, on all cores together; `inf` without a limit."""
    quotas = [math.inf]
    for group in _groups("cpu"):
        quota, _, period = text_of(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # else "max", or -1
            quotas.append(int(quota) / int(period))
    return min(quotas)


def memory_limit_bytes() -> float:
    """Bytes that the group may have; `inf` without a limit. Version 1 says so by more than any machine has."""
    limits = [text_of(group / name) for group in _groups("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    return min((float(limit) for limit in limits if limit.isdecimal()), default=math.inf)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's group of either version, and of those that it is in."""
    for line in text_of(MEMBERSHIP).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")  # of version 2, no controllers are named
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controller if controllers else ROOT
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
