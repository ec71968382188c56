"""The choice of files: proportional in bytes, in folders, and different for each replicate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.decide.canary.files import DataFile, LinkedFolder, choose_files, data_files, link_files
from hetero.documents.files import evict
from hetero.errors import ConfigError


def files(number: int, *, folders: int = 1, spread: float = 1.0, seed: int = 0) -> list[DataFile]:
    draw = random.Random(seed)
    return [DataFile(f"c{i % folders}/{i:05d}", int(1000 * draw.lognormvariate(3, spread))) for i in range(number)]


def share(chosen: list[DataFile], all_files: list[DataFile]) -> float:
    return sum(file.num_bytes for file in chosen) / sum(file.num_bytes for file in all_files)


@pytest.mark.parametrize("fraction", [0.01, 0.02, 0.03, 0.1])
@pytest.mark.parametrize("number", [300, 5000])
def test_bytes_are_in_proportion(number: int, fraction: float) -> None:
    whole = files(number)
    for replicate in range(4):
        chosen = choose_files(whole, fraction, seed=1, replicate=replicate)
        assert len(set(chosen)) == len(chosen)
        assert share(chosen, whole) == pytest.approx(fraction, rel=0.15)


def test_replicates_have_different_files_as_long_as_there_are_enough() -> None:
    whole = files(132)
    chosen = [set(choose_files(whole, 0.02, seed=0, replicate=replicate)) for replicate in range(3)]
    assert sum(map(len, chosen)) == len(set.union(*chosen))


def test_every_folder_is_in_it() -> None:
    whole = files(2000, folders=10)
    assert {file.folder for file in choose_files(whole, 0.02, seed=0)} == {f"c{i}" for i in range(10)}


def test_choice_depends_on_its_arguments_alone() -> None:
    whole = files(500)
    assert choose_files(whole, 0.02, seed=3) == choose_files(list(reversed(whole)), 0.02, seed=3)
    assert choose_files(whole, 0.02, seed=3) != choose_files(whole, 0.02, seed=4)


def test_few_files_give_at_least_one_and_hosts_one_each() -> None:
    whole = files(20)
    assert len(choose_files(whole, 0.01, seed=0)) == 1
    assert len(choose_files(whole, 0.01, seed=0, min_files=6)) == 6
    assert choose_files(whole, 1.0, seed=0) == sorted(whole)


def test_links_lead_to_the_files_in_their_folders(tmp_path: Path) -> None:
    for name in ("a/1.csv", "b/2.csv", "labels.json"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    found, kept = data_files(tmp_path / "data", keep=("*.json",))
    assert [file.name for file in found] == ["a/1.csv", "b/2.csv"]
    assert [file.name for file in kept] == ["labels.json"]
    for _ in range(2):  # the second time replaces the first
        linked = LinkedFolder(source=tmp_path / "data", target=tmp_path / "part", files=(found[1], *kept))
        link_files(linked, within=tmp_path)
    assert linked.paths == [tmp_path / "data" / "b" / "2.csv", tmp_path / "data" / "labels.json"]
    assert sorted(path.relative_to(tmp_path / "part").as_posix() for path in (tmp_path / "part").rglob("*.*")) == [
        "b/2.csv",
        "labels.json",
    ]
    assert (tmp_path / "part" / "b" / "2.csv").read_text() == "b/2.csv"
    evict([tmp_path / "data" / "a" / "1.csv", tmp_path / "missing"])


def test_folder_outside_of_the_study_is_not_replaced(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.txt").write_text("do not delete")
    for target in (own, tmp_path / "out" / "data" / ".." / ".." / "own", tmp_path / "out" / "data"):
        with pytest.raises(ConfigError, match="expected a folder below"):
            link_files(LinkedFolder(source=own, target=target, files=()), within=tmp_path / "out" / "data")
    assert (own / "thesis.txt").read_text() == "do not delete"


def test_folder_with_something_else_than_links_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "part"
    (target / "deep").mkdir(parents=True)
    (target / "deep" / "cache.bin").write_text("1")
    with pytest.raises(ConfigError, match=r"cache.bin is no link of the study"):
        link_files(LinkedFolder(source=tmp_path, target=target, files=()), within=tmp_path)
    assert (target / "deep" / "cache.bin").is_file()


def test_pattern_with_a_folder_is_compared_with_the_whole_name(tmp_path: Path) -> None:
    for name in ("a/x.csv", "b/x.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    assert [file.name for file in data_files(tmp_path, keep=("a/*",))[0]] == ["b/x.csv"]


def test_folder_without_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no files to divide"):
        data_files(tmp_path)


def test_link_to_a_folder_around_it_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.csv").write_text("1")
    (tmp_path / "b").symlink_to("a")  # the same folder twice is data twice
    (tmp_path / "a" / "self").symlink_to(".")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "nothing").symlink_to("missing")
    found, _ = data_files(tmp_path)
    assert [file.name for file in found] == ["a/x.csv", "b/x.csv"]


def test_link_that_leads_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1")
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(ConfigError, match=rf"cannot read {tmp_path}/a: Too many levels of symbolic links"):
        data_files(tmp_path)


def test_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "x.csv").write_text("1")

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "secret":  # root may read all, so permissions do not show it
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    original = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ConfigError, match="secret: Permission denied"):
        data_files(tmp_path)
