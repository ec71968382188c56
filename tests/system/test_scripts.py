"""Where a training script is, as a path or as the name of a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.system.scripts import find_script, script_label, script_words


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder. An import from it fails."""
    for name in ("package/__init__", "package/train", "package/__main__", "bare/inner/train", "alone", "folder/fit"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alone", "alone.py"),
        ("package", "package/__main__.py"),
        ("package.train", "package/train.py"),
        ("bare.inner.train", "bare/inner/train.py"),
    ],
)
def test_module_is_found_without_an_import(here: Path, name: str, expected: str) -> None:
    assert find_script(name, is_module=True) == here / expected
    assert name not in sys.modules


def test_module_on_pythons_path_is_found() -> None:
    assert find_script("json.tool", is_module=True).name == "tool.py"


@pytest.mark.parametrize("name", ["absent", "package.absent", "alone.train", "sys"])
def test_module_that_is_not_there_says_where_it_was_looked_for(here: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no module '{name}' with Python source in {here}"):
        find_script(name, is_module=True)
    with pytest.raises(ConfigError, match="source on algo-1"):
        find_script(name, is_module=True, host="algo-1")


def test_path_after_the_flag_of_a_module_is_said_to_be_a_file() -> None:
    with pytest.raises(ConfigError, match=r"is not the name of a module; .*leave out -m"):
        find_script("package/train.py", is_module=True)


def test_file_after_the_flag_of_a_module_is_said_to_be_one(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"no module 'alone.py' in .*; alone.py is a file: leave out -m"):
        find_script("alone.py", is_module=True)


@pytest.mark.parametrize(
    ("package", "module"), [("bare", "bare.train"), ("bare.inner", "bare.inner.train"), ("folder", "folder.fit")]
)
def test_package_without_a_main_names_a_module_in_it(package: str, module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_script(package, is_module=True)
    hint = f"{package} is a package without __main__.py; name a module in it, for example {module}"
    assert str(caught.value) == hint


def test_script_is_its_path(here: Path) -> None:
    assert find_script("package/train.py") == Path("package/train.py")
    assert find_script(str(here / "alone.py")) == here / "alone.py"


def test_script_that_is_a_module_says_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"'package.train' does not exist in .*put -m before it"):
        find_script("package.train")


@pytest.mark.parametrize(
    ("script", "expected"),
    [("folder/", "for example folder/fit.py"), ("package", r"-m package\), or name package/__main__.py")],
)
def test_folder_as_script_says_which_file(script: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"is a folder; expected a file\n  to do: .*{expected}"):
        find_script(script)


def test_words_and_label_of_a_script() -> None:
    assert script_words("a/train.py", is_module=False) == ["a/train.py"]
    assert script_words("a.train", is_module=True) == ["-m", "a.train"]
    assert script_label("a/train.py", is_module=False) == script_label("a.train", is_module=True) == "train"
