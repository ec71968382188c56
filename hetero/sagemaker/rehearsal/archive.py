"""Safely unpacks the source archive that the SDK uploads."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from hetero.errors import ConfigError

__all__ = ["MAX_BYTES", "unpack"]

MAX_BYTES = 1 << 30
"""Maximum size of all unpacked files together."""
_MAX_MEMBERS = 100_000


def unpack(content: bytes, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the regular files and folders of a ``.tar.gz``.

    Args:
        content: The archive.
        folder: Target folder, which must exist.
        max_bytes: Maximum size of all files together.

    Raises:
        ConfigError: If the content is not such an archive, exceeds ``max_bytes`` or 100,000 members, or contains a
            link, a device or a path outside the folder.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r|gz") as archive:
            _unpack(archive, folder, max_bytes)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"the source archive cannot be unpacked: {str(error)[:200]}; expected a .tar.gz") from error


def _unpack(archive: tarfile.TarFile, folder: Path, max_bytes: int) -> None:
    left = max_bytes
    for number, member in enumerate(archive):
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"the source archive has the path {member.name!r:.100}; expected relative paths without '..'"
            )
        if number >= _MAX_MEMBERS or member.size > left:
            raise ConfigError(
                f"the source archive unpacks to more than {max_bytes} bytes or {_MAX_MEMBERS} files; "
                "expected a source_dir without data"
            )
        target = folder / path
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        source = archive.extractfile(member) if member.isreg() else None
        if source is None:
            raise ConfigError(
                f"the source archive has {member.name!r:.100}, which is a link or a device; "
                "expected files and folders: put a copy into the source_dir"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            shutil.copyfileobj(source, file)
        target.chmod(member.mode & 0o755 | 0o600)  # keeps private files private, as the toolkit does
        left -= member.size
