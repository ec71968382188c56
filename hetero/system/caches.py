"""The caches of the CPUs."""

from __future__ import annotations

from pathlib import Path

__all__ = ["level_2_bytes"]

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def level_2_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> float | None:
    """Return the size of the level 2 caches of all CPUs together, or None if the system does not say.

    Level 3 caches do not count, because a virtual machine often sees that of its host.

    Args:
        folder: The folder in which the kernel describes the CPUs.
    """
    sizes: dict[str, int] = {}
    try:
        for path in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
            if (path / "level").read_text(encoding="ascii").strip() != "2":
                continue
            text = (path / "size").read_text(encoding="ascii").strip()
            # CPUs that share a cache name the same CPUs.
            shared = (path / "shared_cpu_list").read_text(encoding="ascii").strip()
            sizes[shared] = int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1)
    except (OSError, ValueError):
        return None
    return float(sum(sizes.values())) or None
