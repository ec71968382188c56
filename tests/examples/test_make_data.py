from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cv2
import pytest

Script = Callable[[str], ModuleType]


@pytest.fixture
def make_data(script: Script) -> ModuleType:
    return script("photos/make_data.py")


def digest(folder: Path) -> str:
    """Return a digest of every name and byte in a folder."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        hasher.update(str(path.relative_to(folder)).encode())
        hasher.update(path.read_bytes() if path.is_file() else b"")
    return hasher.hexdigest()


def run(make_data: ModuleType, output: Path, *flags: str) -> int:
    return int(make_data.main(["--output", str(output), "--count", "30", "--size", "40x30", *flags]))


def test_data_set_same_flags_has_same_bytes(make_data: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(make_data, tmp_path / "under" / name) == 0
    assert digest(tmp_path / "under" / "a") == digest(tmp_path / "under" / "b")


def test_data_set_other_seed_has_other_bytes(make_data: ModuleType, tmp_path: Path) -> None:
    run(make_data, tmp_path / "a")
    run(make_data, tmp_path / "b", "--seed", "1")
    assert digest(tmp_path / "a") != digest(tmp_path / "b")


def test_data_set_has_every_class_in_both_splits_and_about_the_asked_size(
    make_data: ModuleType, photos_folder: Path
) -> None:
    for split, count in (("train", 108), ("validation", 12)):
        assert len(list((photos_folder / split).iterdir())) == 8
        images = sorted((photos_folder / split).glob("*/*.jpg"))
        assert len(images) == count
        for path in images:
            pixels = cv2.imread(str(path))
            assert pixels is not None
            height, width = pixels.shape[:2]
            assert abs(height - 36) <= 4
            assert abs(width - 48) <= 5


def test_data_set_complete_is_reused(make_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(make_data, tmp_path / "photos")
    before = (tmp_path / "photos").stat().st_ino
    run(make_data, tmp_path / "photos")
    assert (tmp_path / "photos").stat().st_ino == before
    assert capsys.readouterr().out.splitlines() == [
        f"made 30 images in {tmp_path / 'photos'}",
        f"found 30 images in {tmp_path / 'photos'}",
    ]


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_data_set_damaged_is_made_again(make_data: ModuleType, tmp_path: Path, damage: str) -> None:
    output = tmp_path / "photos"
    run(make_data, output)
    whole = digest(output)
    image = next(output.glob("train/*/*.jpg"))
    if damage == "truncated":
        image.write_bytes(image.read_bytes()[:100])
    elif damage == "missing":
        image.unlink()
    else:
        (output / "manifest.json").write_text("{")
    run(make_data, output)
    assert digest(output) == whole


def test_data_set_foreign_folder_is_refused(
    make_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit, match="2"):
        run(make_data, tmp_path)
    assert "thesis" not in capsys.readouterr().out
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_data_set_failure_leaves_nothing(
    make_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(cv2, "imencode", fail)
    with pytest.raises(OSError, match="disk full"):
        run(make_data, tmp_path / "photos")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "500"], "'500' is not a size: expected WIDTHxHEIGHT"),
        (["--size", "8x8"], "size is 8x8, expected at least 16x16"),
        (["--count", "9"], "count is 9, expected at least 10"),
        (["--seed", "-1"], "seed is -1, expected at least 0"),
    ],
)
def test_command_line_bad_value_is_named(
    make_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(make_data, tmp_path / "photos", *flags)
    assert message in capsys.readouterr().err
