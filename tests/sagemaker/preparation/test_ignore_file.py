"""Files of the source folder that stay on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.sagemaker.preparation.ignore_file import IGNORE_FILE, ignored_files

FILES = (
    ".git/config",
    ".venv/bin/python",
    "__pycache__/train.pyc",
    "data/photo.jpg",
    "lib/__pycache__/model.pyc",
    "lib/data/labels.csv",
    "lib/model.py",
    "last.ckpt",
    "pretrained.ckpt",
    "train.py",
)
CODE = {"data/photo.jpg", "lib/data/labels.csv", "lib/model.py", "last.ckpt", "pretrained.ckpt", "train.py"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def copied(source: Path, patterns: str | None = None) -> set[str]:
    if patterns is not None:
        (source / IGNORE_FILE).write_text(patterns)
    target = source.parent / "copy"
    shutil.copytree(source, target, ignore=ignored_files(source))
    return {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("patterns", "left_out"),
    [
        (None, set()),
        ("", set()),
        ("# no pattern\n\n", set()),
        ("data\n", {"data/photo.jpg", "lib/data/labels.csv"}),
        ("data/\n", {"data/photo.jpg", "lib/data/labels.csv"}),
        ("train.py/\n", set()),
        ("/data/\n", {"data/photo.jpg"}),
        ("lib/data\n", {"lib/data/labels.csv"}),
        ("*.ckpt\n!pretrained.ckpt\n", {"last.ckpt"}),
        ("**/*.csv\r\n", {"lib/data/labels.csv"}),
        ("lib/*\n!lib/model.py\n", {"lib/data/labels.csv"}),
    ],
)
def test_patterns_have_the_meaning_of_a_gitignore(source: Path, patterns: str | None, left_out: set[str]) -> None:
    assert copied(source, patterns) == CODE - left_out


def test_folder_that_is_always_left_out_can_be_included(source: Path) -> None:
    assert copied(source, "!.venv\n") == CODE | {".venv/bin/python"}


@pytest.mark.parametrize(("content", "words"), [(b"!\n", "'!'"), (b"\xff", "decode"), (b"x" * 2**21, "too large")])
def test_broken_file_is_an_error_that_names_it(source: Path, content: bytes, words: str) -> None:
    (source / IGNORE_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"code/\.heteroignore.*{words}"):
        ignored_files(source)


def test_file_without_pathspec_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pathspec", None)
    assert copied(source) == CODE
    (source / IGNORE_FILE).touch()
    with pytest.raises(ConfigError, match="pip install pathspec"):
        ignored_files(source)
