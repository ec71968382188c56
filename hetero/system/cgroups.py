"""Memory use, free memory, memory limit, kills and CPU quota of a process's control group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MemoryUse", "cpu_quota", "free_memory", "memory_use", "oom_kills", "usable_cpus"]

_FILES = {
    "cgroup2": ("memory.peak", "memory.max"),
    "cgroup": ("memory.max_usage_in_bytes", "memory.limit_in_bytes"),
}
_CURRENT_FILES = {"cgroup2": "memory.current", "cgroup": "memory.usage_in_bytes"}
_EVENT_FILES = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}
_CACHED = {
    "cgroup2": ("inactive_file", "active_file"),
    "cgroup": ("total_inactive_file", "total_active_file"),
}
"""Lines of ``memory.stat`` with the cached files, which the kernel gives up if a process needs the memory."""
_FILE_OF_TOPMOST_GROUP = "release_agent"
"""A file that only the topmost group of version 1 has. In version 2 the topmost group lacks memory figures."""
_UNBOUNDED = 2**60
"""Limits of this many bytes or more count as unlimited. Version 1 reports a number close to 2^63 for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of one control group."""

    peak_bytes: int
    limit_bytes: int | None
    """Limit in bytes. None without a limit."""
    is_own: bool
    """Whether this is the process's own group, and not one above it."""


def memory_use(process: Path = Path("/proc/self")) -> MemoryUse | None:
    """Return the figures of the control group whose limit a process reaches first.

    That is the process's own group, unless a group above it allows less. The group of the whole machine does not count,
    because its use says nothing about one process. A process that has ended is in no group. Its parent can explain the
    end with the figures of the parent's own group. Both had the same group, unless one of them was moved.

    Args:
        process: The process's folder under ``/proc``.

    Returns:
        The figures, or None if they do not exist or cannot be read.
    """
    groups = _figures(process)
    limited = [use for use in groups if use.limit_bytes is not None]
    own = next((use for use in groups if use.is_own), None)
    # The group with the lowest limit, or the process's own group without any limit. All of `limited` have a limit, so
    # `or 0` is only for the type checker.
    return min(limited, key=lambda use: use.limit_bytes or 0, default=own)


def free_memory(process: Path = Path("/proc/self")) -> int | None:
    """Return the bytes that a process can still use under the limits of its control groups.

    Cached files count as free. A group shares its limit with all groups below it. Therefore the smallest result counts.

    Args:
        process: The process's folder under ``/proc``.

    Returns:
        Bytes, or None if no visible group has a limit or the groups cannot be read.
    """
    version, folders = _groups(process, "memory")
    found = [_read_free(folder, version) for folder in folders]
    return min((free for free in found if free is not None), default=None)


def oom_kills(process: Path = Path("/proc/self")) -> int | None:
    """Return how many processes of a process's control group the kernel has killed for lack of memory.

    Args:
        process: The process's folder under ``/proc``.

    Returns:
        The number. It includes kills when the whole machine lacked memory. None if no visible group counts kills.
    """
    version, folders = _groups(process, "memory")
    for folder in folders:
        try:
            lines = (line.split() for line in _read(folder / _EVENT_FILES[version]).splitlines())
            return next(int(value) for name, value in lines if name == "oom_kill")
        except (OSError, ValueError, StopIteration):  # this group does not count memory, or the kernel is old
            continue
    return None


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, from its affinity and the quotas of its control groups."""
    count = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return count if quota is None else min(count, max(1, int(quota)))


def cpu_quota(process: Path = Path("/proc/self")) -> float | None:
    """Return how many CPUs a process may use at a time by the quota of its control group.

    A group shares its quota with all groups below it. Therefore the smallest quota counts.

    Args:
        process: The process's folder under ``/proc``.

    Returns:
        The number of CPUs, or None if no visible group has a quota or the groups cannot be read.
    """
    version, folders = _groups(process, "cpu")
    read = _read_quota if version == "cgroup2" else _read_old_quota
    quotas = [quota for folder in folders if (quota := read(folder)) is not None]
    return min(quotas, default=None)


def _figures(process: Path) -> list[MemoryUse]:
    """Return the figures of a process's group and of the groups above it.

    Unreadable groups are left out. So is the group of the whole machine, because its use says nothing about one
    process.
    """
    version, folders = _groups(process, "memory")
    found: list[MemoryUse] = []
    for folder in folders:
        peak, limit = (_read_number(folder / name) for name in _FILES[version])
        if peak is not None and not (folder / _FILE_OF_TOPMOST_GROUP).exists():
            limit = limit if limit is not None and limit < _UNBOUNDED else None
            found.append(MemoryUse(peak_bytes=peak, limit_bytes=limit, is_own=folder == folders[0]))
    return found


def _groups(process: Path, controller: str) -> tuple[str, list[Path]]:
    """Return the version of control groups that has a controller, and the folders of a process's groups.

    The first folder is that of the process's own group. The others belong to the groups above it, the nearest group
    first. The list is empty if the groups cannot be read. The version is the name of its file system: ``cgroup`` or
    ``cgroup2``.
    """
    try:
        version, group = _group(_read(process / "cgroup"), controller)
        return version, _folders(_read(process / "mountinfo"), version, group, controller)
    except (OSError, LookupError, ValueError):
        return "", []


def _group(listing: str, controller: str) -> tuple[str, str]:
    """Return the version of control groups that has a controller, and the name of the process's group.

    Args:
        listing: Content of ``/proc/PID/cgroup``: lines ``ID:CONTROLLERS:GROUP``.
        controller: ``cpu`` or ``memory``.

    Raises:
        LookupError: If no version has the controller.
    """
    fields = [line.split(":", 2) for line in listing.splitlines()]
    groups = {controllers: path for _, controllers, path in fields}
    for controllers, path in groups.items():
        if controller in controllers.split(","):
            return "cgroup", path
    # The line of version 2 names no controllers.
    return "cgroup2", groups[""]


def _folders(mounts: str, version: str, group: str, controller: str) -> list[Path]:
    """Return the mounted folders of a group and of the groups above it.

    In a container, the mount may begin at the container's own group. The group's name still begins at the topmost group
    of the machine.

    Args:
        mounts: Content of ``/proc/PID/mountinfo``, see proc(5).
        version: Name of the file system: ``cgroup`` or ``cgroup2``.
        group: Name of the group, a path from the topmost group.
        controller: ``cpu`` or ``memory``. In version 1 each controller may have its own mount.

    Returns:
        The folder of the group first, the folder of the topmost visible group last.

    Raises:
        LookupError: If no mount shows the group.
    """
    # The last mount on a folder hides earlier ones.
    for line in reversed(mounts.splitlines()):
        # The fields up to a variable part, and the fields after the separator.
        mount_fields, _, file_system_fields = line.partition(" - ")
        mounted_group, mount_point = mount_fields.split(" ")[3:5]
        file_system, _, options = file_system_fields.split(" ")[:3]
        if file_system != version or (version == "cgroup" and controller not in options.split(",")):
            continue
        names = PurePosixPath(group).parts
        hidden_names = PurePosixPath(mounted_group).parts
        # A group outside of this process's namespace begins with `..` (cgroup_namespaces(7)).
        if names[: len(hidden_names)] != hidden_names or ".." in names:
            continue
        visible_names = names[len(hidden_names) :]
        return [Path(mount_point).joinpath(*visible_names[:depth]) for depth in range(len(visible_names), -1, -1)]
    raise LookupError(group)


def _read_free(folder: Path, version: str) -> int | None:
    """Return the bytes that a group may still use, None without a limit. Cached files count as free."""
    # The second of the `_FILES` has the limit.
    limit, current = (_read_number(folder / name) for name in (_FILES[version][1], _CURRENT_FILES[version]))
    if limit is None or current is None or limit >= _UNBOUNDED:
        return None
    try:
        lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
        cached = sum(int(value) for name, value in lines if name in _CACHED[version])
    except (OSError, ValueError):
        cached = 0
    return max(0, limit - current + cached)


def _read_quota(folder: Path) -> float | None:
    """Return the number of CPUs that a group of version 2 allows."""
    try:
        # The file has the CPU microseconds in each period, or ``max`` for no quota, and the microseconds of a period.
        quota, period = _read(folder / "cpu.max").split()
        return int(quota) / int(period) if quota != "max" else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _read_old_quota(folder: Path) -> float | None:
    """Return the number of CPUs that a group of version 1 allows. Without a quota, the file holds -1."""
    quota, period = (_read_number(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _read_number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return None
