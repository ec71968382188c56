"""Stop callbacks: all of them run, and one that fails is a failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hetero.control.rank import callbacks
from hetero.control.rank.callbacks import run_callbacks


def raising(error: BaseException) -> object:
    def callback() -> None:
        raise error

    return callback


def test_callbacks_all_run_and_what_failed_is_returned() -> None:
    ran: list[int] = []
    failures = run_callbacks(
        [
            lambda: ran.append(1),
            raising(ValueError("on purpose")),  # type: ignore[list-item]
            raising(SystemExit(0)),  # type: ignore[list-item]  # done, as it says
            raising(SystemExit(3)),  # type: ignore[list-item]
            lambda: ran.append(2),
        ]
    )
    assert ran == [1, 2]
    assert [failure.summary for failure in failures] == [
        "a stop callback raised ValueError: on purpose",
        "a stop callback raised SystemExit: 3",
    ]
    assert "raise error" in failures[0].detail


@pytest.mark.fault("F27")
def test_full_disk_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save() -> None:
        Path("/dev/full").write_text("checkpoint")

    monkeypatch.setattr(callbacks, "_disks", lambda: [str(tmp_path), "/"])
    monkeypatch.setattr(callbacks, "_free_bytes", lambda path: 123 if path == str(tmp_path) else 2**40)
    words = "a stop callback raised OSError: [Errno 28] No space left on device"
    named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "checkpoint"))
    failures = run_callbacks([save, raising(named)])  # type: ignore[list-item]
    assert [failure.summary for failure in failures] == [
        f"{words} ({tmp_path}: 123 bytes free)",
        f"{words}: '{tmp_path}/checkpoint' ({tmp_path}: 123 bytes free)",
    ]


def test_disks_are_those_that_can_be_written_to() -> None:
    found = callbacks._disks()
    assert "/proc" not in found
    assert any(os.path.ismount(path) for path in found)


@pytest.mark.fault("F27")
def test_disks_that_may_be_on_servers_that_are_gone_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ["ext4", "xfs", "tmpfs", "overlay"]
    remote = ["lustre", "nfs4", "ceph", "glusterfs", "fuse.glusterfs", "beegfs", "gpfs", "cifs", "9p", "autofs"]
    for kind in local + remote:
        (tmp_path / kind).mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text("".join(f"server:/a {tmp_path / kind} {kind} rw,relatime 0 0\n" for kind in remote + local))
    asked: list[str] = []

    def num_bytes(path: str) -> int:
        asked.append(path)
        return 2**40

    monkeypatch.setattr(callbacks, "_num_bytes", num_bytes)
    expected = [str(tmp_path / kind) for kind in local]
    assert callbacks._disks(str(mounts)) == expected
    assert asked == expected
