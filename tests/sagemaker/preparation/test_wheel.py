"""The wheel of hetero that goes with a job, beside the one that pip makes."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import hetero
from hetero.errors import ConfigError
from hetero.sagemaker.preparation import wheel as wheel_module
from hetero.sagemaker.preparation.wheel import build_wheel

TREE = Path(hetero.__file__).parents[1]
INFO = f"hetero-{hetero.__version__}.dist-info"


def metadata_of(path: Path) -> Message:
    with zipfile.ZipFile(path) as archive:
        return message_from_bytes(archive.read(f"{INFO}/METADATA"))


def requirements_of(metadata: Message) -> set[str]:
    """Return what is required, in one spelling."""
    packaging = pytest.importorskip("packaging.requirements")
    return {str(packaging.Requirement(text)) for text in metadata.get_all("Requires-Dist", [])}


@pytest.fixture(scope="module")
def pips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that pip makes of the source tree."""
    if importlib.util.find_spec("setuptools") is None:  # an import would patch this process
        pytest.skip("pip needs setuptools to build the wheel")
    folder = tmp_path_factory.mktemp("pip")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("hetero", "launchers"):
        shutil.copytree(TREE / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(TREE / name, tree)
    command = [
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        str(folder),
        str(tree),
    ]
    subprocess.run([sys.executable, *command], check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    return next(folder.glob("*.whl"))


def test_wheel_has_the_files_and_requirements_of_the_one_that_pip_makes(tmp_path: Path, pips: Path) -> None:
    ours = build_wheel(tmp_path)
    assert ours.name == pips.name
    with zipfile.ZipFile(ours) as own, zipfile.ZipFile(pips) as expected:
        names = {name for name in expected.namelist() if not name.endswith("/top_level.txt")}
        assert set(own.namelist()) == names
        assert all(own.read(name) == expected.read(name) for name in names if name.startswith("hetero/"))
        assert own.read(f"{INFO}/entry_points.txt").split() == expected.read(f"{INFO}/entry_points.txt").split()
    found, expected_metadata = metadata_of(ours), metadata_of(pips)
    assert requirements_of(found) == requirements_of(expected_metadata)
    for name in ("Name", "Version", "Requires-Python", "Provides-Extra"):
        assert found.get_all(name) == expected_metadata.get_all(name)


def test_record_names_every_file_with_its_digest(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        rows = list(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))
        assert sorted(name for name, _, _ in rows) == sorted(archive.namelist())
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(content)))
        assert rows[-1] == [f"{INFO}/RECORD", "", ""]
        assert archive.testzip() is None


def test_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    assert build_wheel(tmp_path).read_bytes() == build_wheel(tmp_path / "again").read_bytes()


def test_installed_package_says_itself_what_it_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Message()
    for name, value in (
        ("Requires-Python", ">=3.10"),
        ("Requires-Dist", "grpcio>=1.49"),
        ("Requires-Dist", "numpy>=1.24"),
    ):
        installed[name] = value
    monkeypatch.setattr(wheel_module, "_read_project", lambda path: None)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: installed)
    found = metadata_of(build_wheel(tmp_path))
    assert found.get_all("Requires-Dist") == ["grpcio>=1.49", "numpy>=1.24"]
    assert found["Requires-Python"] == ">=3.10"


def test_source_tree_that_nobody_can_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> Message:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wheel_module, "_read_project", lambda path: None)
    monkeypatch.setattr(importlib.metadata, "metadata", not_found)
    with pytest.raises(ConfigError, match="hetero runs from .* and is not installed.*\n.*pip install -e"):
        build_wheel(tmp_path)


def test_project_of_another_name_around_the_package_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "vendors"\n')
    assert wheel_module._read_project(tmp_path / "pyproject.toml") is None
    assert wheel_module._read_project(tmp_path / "none.toml") is None
