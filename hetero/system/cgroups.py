"""What the control group of a process has used of memory, and what it may use of memory and CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MemoryUse", "cpu_quota", "memory_use"]

_FILES = {
    "cgroup2": ("memory.peak", "memory.max"),
    "cgroup": ("memory.max_usage_in_bytes", "memory.limit_in_bytes"),
}
_OF_THE_MACHINE = "release_agent"
"""A file that of all groups of version 1 only the topmost one has. In version 2 that one has no figures of memory."""
_UNBOUNDED = 2**60
"""Bytes; version 1 has no word for no limit, but a number close to 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of one control group."""

    peak_bytes: int
    limit_bytes: int | None
    """None: it has no limit."""
    is_own: bool
    """Whether it is the process's own group; else one above it."""


def memory_use(process: Path = Path("/proc/self")) -> MemoryUse | None:
    """Return the figures of the control group whose limit a process meets first.

    That is its own group or, if one above allows less, that one. The group of the whole machine is none: what it has
    used is no matter of one process. Children are in their parent's group unless somebody moves them; a process that
    has ended is in none, so it is the parent that has to ask.

    Args:
        process: Its folder under ``/proc``.

    Returns:
        None if there are no such figures, or they cannot be read.
    """
    own, *above = _figures(process) or [None]
    bounded = [use for use in (own, *above) if use is not None and use.limit_bytes is not None]
    return min(bounded, key=lambda use: use.limit_bytes or 0, default=own)


def cpu_quota(process: Path = Path("/proc/self")) -> float | None:
    """Return how many CPUs a process may use at a time by the quota of its control group.

    Those above it share theirs among all that is below them: the smallest counts.

    Args:
        process: Its folder under ``/proc``.

    Returns:
        None if none of the groups that are to be seen has a quota, or they cannot be read.
    """
    version, folders = _groups(process, "cpu")
    read = _read_quota if version == "cgroup2" else _read_old_quota
    quotas = [quota for folder in folders if (quota := read(folder)) is not None]
    return min(quotas, default=None)


def _figures(process: Path) -> list[MemoryUse | None]:
    """Return the figures of a process's group and of those above it; None for those that cannot be read."""
    version, folders = _groups(process, "memory")
    found: list[MemoryUse | None] = []
    for folder in folders:
        peak, limit = (_read_number(folder / name) for name in _FILES[version])
        if peak is None or (folder / _OF_THE_MACHINE).exists():
            found.append(None)
        else:
            bound = limit if limit is not None and limit < _UNBOUNDED else None
            found.append(MemoryUse(peak_bytes=peak, limit_bytes=bound, is_own=not found))
    return found


def _groups(process: Path, controller: str) -> tuple[str, list[Path]]:
    """Return the version of control groups that has a controller, and the folders of a process's group and those above.

    There are none if they cannot be read.
    """
    try:
        version, group = _group(_read(process / "cgroup"), controller)
        return version, _folders(_read(process / "mountinfo"), version, group, controller)
    except (OSError, LookupError, ValueError):
        return "", []


def _group(listing: str, controller: str) -> tuple[str, str]:
    """Return the version of control groups that has a controller, and the process's group in it.

    Raises:
        LookupError: If none does.
    """
    fields = [line.split(":", 2) for line in listing.splitlines()]
    groups = {controllers: path for _, controllers, path in fields}
    for controllers, path in groups.items():
        if controller in controllers.split(","):
            return "cgroup", path
    return "cgroup2", groups[""]


def _folders(mounts: str, version: str, group: str, controller: str) -> list[Path]:
    """Return the folders of a group and of those above it, as far as they are mounted.

    A container may see its own group where the machine has that of all: what is mounted there does not begin at the
    top, and the group's name does.

    Raises:
        LookupError: If the group is nowhere to be seen.
    """
    for line in reversed(mounts.splitlines()):  # the last mount of a place hides those before
        place, _, kind = line.partition(" - ")
        root, top = place.split(" ")[3:5]
        file_system, _, options = kind.split(" ")[:3]
        if file_system != version or (version == "cgroup" and controller not in options.split(",")):
            continue
        names = PurePosixPath(group).parts
        hidden = PurePosixPath(root).parts
        if names[: len(hidden)] != hidden or ".." in names:
            continue
        below = names[len(hidden) :]
        return [Path(top).joinpath(*below[:length]) for length in range(len(below), -1, -1)]
    raise LookupError(group)


def _read_quota(folder: Path) -> float | None:
    """Return the CPUs of one group of version 2."""
    try:
        quota, period = _read(folder / "cpu.max").split()
        return int(quota) / int(period) if quota != "max" else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _read_old_quota(folder: Path) -> float | None:
    """Return the CPUs of one group of version 1, which says -1 for no quota."""
    quota, period = (_read_number(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _read_number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return None
