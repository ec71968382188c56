"""What the control group of a process has used of memory, and may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MemoryUse", "memory_use"]

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


def _figures(process: Path) -> list[MemoryUse | None]:
    """Return the figures of a process's group and of those above it; None for those that cannot be read."""
    try:
        version, group = _group(_read(process / "cgroup"))
        folders = _folders(_read(process / "mountinfo"), version, group)
    except (OSError, LookupError, ValueError):
        return []
    found: list[MemoryUse | None] = []
    for folder in folders:
        peak, limit = (_read_number(folder / name) for name in _FILES[version])
        if peak is None or (folder / _OF_THE_MACHINE).exists():
            found.append(None)
        else:
            bound = limit if limit is not None and limit < _UNBOUNDED else None
            found.append(MemoryUse(peak_bytes=peak, limit_bytes=bound, is_own=not found))
    return found


def _group(listing: str) -> tuple[str, str]:
    """Return the version of control groups that counts memory, and the process's group in it.

    Raises:
        LookupError: If none does.
    """
    fields = [line.split(":", 2) for line in listing.splitlines()]
    groups = {controllers: path for _, controllers, path in fields}
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            return "cgroup", path
    return "cgroup2", groups[""]


def _folders(mounts: str, version: str, group: str) -> list[Path]:
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
        if file_system != version or (version == "cgroup" and "memory" not in options.split(",")):
            continue
        names = PurePosixPath(group).parts
        hidden = PurePosixPath(root).parts
        if names[: len(hidden)] != hidden or ".." in names:
            continue
        below = names[len(hidden) :]
        return [Path(top).joinpath(*below[:length]) for length in range(len(below), -1, -1)]
    raise LookupError(group)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _read_number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return None
