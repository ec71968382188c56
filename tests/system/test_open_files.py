"""What a process has open, and what a forked process gets of it."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from hetero.system import open_files as module
from hetero.system.open_files import close_filesystems, names_for_message, open_files, opened_since, reopen_files


@pytest.mark.parametrize(
    ("mode", "access", "is_open"),
    [("rb", mmap.ACCESS_READ, False), ("r+b", mmap.ACCESS_READ, True), ("r+b", mmap.ACCESS_WRITE, True)],
)
def test_mapped_file_counts_as_open_if_it_can_be_written_to(
    tmp_path: Path, mode: str, access: int, is_open: bool
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(10))
    before = open_files()
    with path.open(mode) as file, mmap.mmap(file.fileno(), 0, access=access):
        assert set(opened_since(before).values()) == ({str(path)} if is_open else set())


def test_open_files_are_those_that_processes_must_not_share(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("data")
    before = open_files()
    reads, writes = os.pipe()
    with path.open() as read, (tmp_path / "log").open("a"), Path("/dev/null").open(), socket.socket() as connection:
        found = {descriptor: name for descriptor, name in open_files().items() if descriptor not in before}
        assert found[read.fileno()] == str(path)
        assert found.keys() == {read.fileno(), connection.fileno(), reads}
        assert names_for_message(found.values()) == {str(path), "a connection", "a pipe"}
        assert opened_since(before) == found
    for descriptor in (reads, writes):
        os.close(descriptor)
    assert open_files() == before
    assert not opened_since(before)


def test_mapped_file_whose_name_has_a_line_separator_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "da\u2028ta\x0b\x85a"
    path.write_bytes(bytes(10))
    before = open_files()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert not opened_since(before)


def passes_in_child(check: Callable[[], bool]) -> bool:
    """Return whether a check is true in a forked process."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def position_after_child(file: IO[bytes], prepare: Callable[[], object]) -> int:
    """Return the position of a file after a forked process has read from it."""
    assert passes_in_child(lambda: (prepare(), os.read(file.fileno(), 3))[1] == b"efg")
    return os.lseek(file.fileno(), 0, os.SEEK_CUR)


@pytest.mark.parametrize("kind", ["read", "removed", "written", "written and removed", "temporary"])
def test_forked_process_that_reopens_files_has_its_own_positions(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abcdefgh")
    mode = "r+b" if "written" in kind else "rb"
    before = open_files()
    with tempfile.TemporaryFile(buffering=0) if kind == "temporary" else path.open(mode, buffering=0) as file:
        if kind == "temporary":
            file.write(b"abcdefgh")
        own = opened_since(before) if "written" in kind or kind == "temporary" else None
        if "removed" in kind:
            path.unlink()
        file.seek(4)
        assert position_after_child(file, lambda: reopen_files(own)) == 4
        assert position_after_child(file, lambda: None) == 7


def test_another_connection_with_the_same_descriptor_is_new() -> None:
    with socket.socket() as connection:
        before, descriptor = open_files(), connection.fileno()
        connection.close()
        with socket.socket() as other:
            assert other.fileno() == descriptor
            assert names_for_message(opened_since(before).values()) == {"a connection"}


def test_another_file_with_the_same_descriptor_is_not_the_own_one(tmp_path: Path) -> None:
    for name in ("own", "log"):
        (tmp_path / name).write_bytes(b"abcdefgh")
    before = open_files()
    with (tmp_path / "own").open("r+b") as file:
        own, descriptor = opened_since(before), file.fileno()
    with (tmp_path / "log").open("r+b", buffering=0) as log:
        assert own == {descriptor: str(tmp_path / "own")}
        assert log.fileno() == descriptor
        log.seek(4)
        assert position_after_child(log, lambda: reopen_files(own)) == 7


@pytest.mark.parametrize("is_removed", [False, True])
def test_files_that_others_write_to_keep_their_shared_position(tmp_path: Path, is_removed: bool) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abcdefgh")
    with path.open("r+b", buffering=0) as file:
        if is_removed:
            path.unlink()
        file.seek(4)
        assert position_after_child(file, reopen_files) == 7


def test_standard_streams_keep_their_shared_position(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"abcdefgh")
    with path.open("rb", buffering=0) as file, open(os.dup(0), closefd=True) as standard_input:  # noqa: PTH123
        os.dup2(file.fileno(), 0)
        try:
            assert passes_in_child(lambda: (reopen_files(open_files()), os.read(0, 4))[1] == b"abcd")
            assert os.lseek(0, 0, os.SEEK_CUR) == 4
        finally:
            os.dup2(standard_input.fileno(), 0)


@pytest.mark.parametrize("flags", [os.O_RDONLY | os.O_NONBLOCK, os.O_RDWR | os.O_APPEND])
def test_reopened_descriptor_has_the_same_flags(tmp_path: Path, flags: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abcdefgh")
    descriptor = os.open(path, flags)
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    assert passes_in_child(lambda: (reopen_files(open_files()), fcntl.fcntl(descriptor, fcntl.F_GETFL))[1] == before)
    os.close(descriptor)


def test_file_that_cannot_be_opened_again_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abcdefgh")

    def is_named() -> bool:
        if not os.geteuid():  # the superuser may open all files
            os.seteuid(65_534)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE keeps /proc/self readable
        reopen_files()
        return f"cannot open {path} again (Permission denied)" in caplog.text

    with path.open("rb"):
        path.chmod(0)
        assert passes_in_child(is_named)


def test_reopened_descriptors_have_the_same_inheritance_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abcdefgh")
    with path.open("rb") as own, path.open("rb") as inherited, socket.socket() as connection:
        os.set_inheritable(inherited.fileno(), True)
        before = open_files()

        def keeps_all() -> bool:
            reopen_files()
            found, descriptors = open_files(), [each.fileno() for each in (own, inherited, connection)]
            is_same = all(found[descriptor] == before[descriptor] for descriptor in descriptors)
            return is_same and not os.get_inheritable(own.fileno()) and os.get_inheritable(inherited.fileno())

        assert passes_in_child(keeps_all)


def test_loop_of_fsspec_that_does_not_end_in_time_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asyn = pytest.importorskip("fsspec.asyn")
    may_go_on = threading.Event()
    loop, thread = asyncio.new_event_loop(), threading.Thread(target=lambda: loop.run_forever())
    monkeypatch.setattr(asyn, "loop", [loop])
    monkeypatch.setattr(asyn, "iothread", [thread])
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.01)
    thread.start()
    loop.call_soon_threadsafe(may_go_on.wait)
    close_filesystems()
    assert asyn.iothread[0] is thread
    may_go_on.set()
    monkeypatch.undo()
    thread.join()
    loop.close()


def test_threads_that_look_up_names_for_fsspec_end_with_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asyn = pytest.importorskip("fsspec.asyn")
    loop, has_begun = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    monkeypatch.setattr(asyn, "loop", [loop])
    monkeypatch.setattr(asyn, "iothread", [thread])
    thread.start()
    # The sleep is a look-up that goes on for longer than it takes to close the loop.
    loop.call_soon_threadsafe(loop.run_in_executor, None, lambda: (has_begun.set(), time.sleep(0.3)))
    assert has_begun.wait(100)
    close_filesystems()
    assert [each.name for each in threading.enumerate() if each.name.startswith("asyncio")] == []
