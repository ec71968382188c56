"""Private folders: gone with their owner, or with the next one if that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hetero.launch.workdir import private_folder


def test_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with private_folder("mine-", parent=str(tmp_path)) as path:
        (path / "file").write_text("x")
        assert path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_owner_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, sys; from hetero.launch.workdir import private_folder\n"
        f"with private_folder('mine-', parent={str(tmp_path)!r}) as path:\n"
        "    (path / 'file').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    with private_folder("mine-", parent=str(tmp_path)) as path:
        assert not left.exists()
        assert list(tmp_path.iterdir()) == [path]


def test_folder_in_use_and_strange_folders_are_left(tmp_path: Path) -> None:
    (tmp_path / "mine-open-to-all").mkdir(mode=0o755)
    (tmp_path / "mine-link").symlink_to(tmp_path)
    with private_folder("mine-", parent=str(tmp_path)) as first:
        with private_folder("mine-", parent=str(tmp_path)) as second:
            assert first.exists()
            assert first != second
        assert first.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"mine-open-to-all", "mine-link"}
