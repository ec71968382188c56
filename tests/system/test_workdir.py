"""Private folders: gone with their owner, or with the next one if that was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.system.workdir import private_folder


def test_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with private_folder("mine-", parent=str(tmp_path)) as path:
        (path / "file").write_text("x")
        assert path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_owner_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, sys; from hetero.system.workdir import private_folder\n"
        f"with private_folder('mine-', parent={str(tmp_path)!r}) as path:\n"
        "    (path / 'file').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert not left.exists()
        assert list(tmp_path.iterdir()) == [path]


def test_folder_of_an_owner_killed_before_it_was_locked_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import fcntl, os; from pathlib import Path; from hetero.system.workdir import private_folder\n"
        "fcntl.flock = lambda *_: os.kill(os.getpid(), 9)\n"
        f"private_folder('mine-', parent={str(tmp_path)!r}).__enter__()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert list(tmp_path.iterdir()) == [path]


def test_folder_that_another_process_removes_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    made: list[str] = []

    def mkdtemp(**options: Any) -> str:
        path = make(**options)
        made.append(path)
        if len(made) == 1:  # another launcher starts before this one has its lock
            with private_folder("mine-", parent=str(tmp_path)):
                pass
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert list(tmp_path.iterdir()) == [path]
        assert str(path) == made[-1] != made[0]


def test_folder_outlives_a_forked_child_of_its_owner(tmp_path: Path) -> None:
    program = (
        "import os, sys; from hetero.system.workdir import private_folder\n"
        f"folder = private_folder('mine-', parent={str(tmp_path)!r}); path = folder.__enter__()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait(); print(path.exists())"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "True\n"
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use_and_strange_folders_are_left(tmp_path: Path) -> None:
    (tmp_path / "mine-open-to-all").mkdir(mode=0o755)
    (tmp_path / "mine-link").symlink_to(tmp_path)
    with private_folder("mine-", parent=str(tmp_path)) as first:
        with private_folder("mine-", parent=str(tmp_path)) as second:
            assert first.exists()
            assert first != second
        assert first.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"mine-open-to-all", "mine-link"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_folder_is_made_where_there_are_no_locks_and_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "mine-other").mkdir(mode=0o700)
    monkeypatch.setattr(fcntl, "flock", flock)
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert path.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["mine-other"]


def test_folder_that_the_file_system_does_not_keep_private_is_refused_and_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp

    def mkdtemp(**options: Any) -> str:
        path: str = make(**options)
        Path(path).chmod(0o755)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(ConfigError, match="with mode 755, expected"), private_folder("mine-", parent=str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folder_is_made_where_folders_take_over_the_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_held", [True, False], ids=["while it removes it", "once it is gone"])
def test_folder_that_another_process_took_for_stale_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    lock = fcntl.flock
    taken: list[Path] = []

    def flock(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
            if is_held:
                raise BlockingIOError
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert list(tmp_path.iterdir()) == [path]
    assert len(taken) == 1
