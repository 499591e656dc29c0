"""Memory and processors that this process may use: of the machine, and within its control groups.

Control groups are of the unified kind (version 2) or of the older one; a group's limits apply to
the groups below it, too.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_host_bytes() -> int:
    """Bytes of memory that can still be allocated."""
    return min((_machine_bytes(), *control_group_bytes()))


def usable_cpus() -> int:
    """The processors that this process may use; at least one, however small its quota is."""
    return min((len(os.sched_getaffinity(0)), *(max(1, int(quota)) for quota in cpu_quotas())))


def control_group_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Iterator[int]:
    """Bytes left under each limit that applies to this process; file cache counts as free."""
    for group, unified in _groups("memory", root, membership):
        limit = _text(group / ("memory.max" if unified else "memory.limit_in_bytes"))
        if limit is None or not limit.isdigit():  # absent here, or "max"
            continue
        usage = _text(group / ("memory.current" if unified else "memory.usage_in_bytes"))
        prefix = "" if unified else "total_"
        statistics = _numbers(group / "memory.stat")
        reclaimable = (statistics.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        yield max(0, int(limit) - (int(usage or 0) - sum(reclaimable)))


def cpu_quotas(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Iterator[float]:
    """Each limit of processor time that applies to this process, in processors."""
    for group, unified in _groups("cpu", root, membership):
        if unified:
            quota, _, period = (_text(group / "cpu.max") or "").partition(" ")
        else:
            quota = _text(group / "cpu.cfs_quota_us") or ""
            period = _text(group / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit():  # not "max" or -1
            yield int(quota) / int(period)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, bool]]:
    """The groups of this process that may have files of the controller, and their ancestors, each
    with whether it is of the unified hierarchy (v2)."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((group, True) for group in _upwards(root, path))
        elif controller in controllers.split(","):
            yield from ((group, False) for group in _upwards(root / controller, path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    group = root / path.lstrip("/")
    return (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _machine_bytes() -> int:
    fields = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _text(path: Path) -> str | None:
    return path.read_text().strip() if path.is_file() else None


def _numbers(path: Path) -> dict[str, int]:
    """Parses lines of "name number ..."."""
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
