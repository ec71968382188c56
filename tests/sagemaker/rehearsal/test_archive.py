"""Archives of code: unpacked if they stay in their folder."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.sagemaker.rehearsal.rehearse import unpack


def archive(*members: tuple[str, bytes, bytes]) -> bytes:
    """Return a ``.tar.gz`` of members: name, type, content or where a link leads."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o600 if name.endswith("token") else 0o777
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
            else:
                info.linkname = content.decode()
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_archive_is_unpacked(tmp_path: Path) -> None:
    files = (("package/a.py", tarfile.REGTYPE, b"1"), ("token", tarfile.REGTYPE, b"secret"))
    unpack(archive(("./package", tarfile.DIRTYPE, b""), *files), tmp_path)
    assert (tmp_path / "package" / "a.py").read_bytes() == b"1"
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name, *_ in files]
    assert modes == [0o755, 0o600]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(("../out.py", tarfile.REGTYPE, b"1")), "expected relative paths"),
        (archive(("/out.py", tarfile.REGTYPE, b"1")), "expected relative paths"),
        (archive(("a", tarfile.SYMTYPE, b"/etc")), "is a link or a device"),
        (archive(("a", tarfile.LNKTYPE, b"b")), "is a link or a device"),
        (archive(("a", tarfile.FIFOTYPE, b"")), "is a link or a device"),
        (archive(("a", tarfile.REGTYPE, bytes(1000)), ("b", tarfile.REGTYPE, bytes(1000))), "more than 1500 bytes"),
        (archive(("a", tarfile.REGTYPE, bytes(100)))[:60], "cannot be unpacked"),
        (b"no archive", "cannot be unpacked"),
    ],
)
def test_archive_that_is_not_to_be_trusted_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=message):
        unpack(content, folder, max_bytes=1500)
    assert not (tmp_path / "out.py").exists()
