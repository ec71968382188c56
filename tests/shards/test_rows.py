"""Rows of shards of each format, and shards that are damaged or have changed."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from hetero import cli
from hetero.errors import ConfigError
from hetero.shards import Rows, indexing, jsonl, tar
from hetero.shards.files import INDEX_NAME
from hetero.shards.formats import format_of
from hetero.shards.index import load_index
from tests.support.shards import FORMATS, row, write_shards

pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")

SIZES = (40, 1, 23, 36)


def made(folder: Path, ending: str, **options: Any) -> Rows:
    """Return the rows of new shards, indexed by the command."""
    paths = write_shards(folder, ending, SIZES)
    assert cli.main(["index", *paths, "--processes=1"]) == 0
    return Rows(format_of(paths[0]), paths, scratch=folder / "scratch", **options)


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a row in the form of `row`. A row of a tar file has the bytes of its members."""
    return json.loads(sample["json"]) if "__key__" in sample else sample


@pytest.mark.parametrize("ending", FORMATS)
def test_rows_of_all_files_in_order_at_random_and_in_another_process(tmp_path: Path, ending: str) -> None:
    rows = made(tmp_path, ending)
    assert len(rows) == sum(SIZES)
    assert [plain(rows[number]) for number in range(len(rows))] == [row(number) for number in range(100)]
    order = random.Random(1).sample(range(100), 100)
    # With room for one block, each row in random order reads its block again.
    small = Rows(format_of(f"a.{ending}"), str(tmp_path / f"*.{ending}"), memory_bytes=1, scratch=tmp_path / "scratch")
    assert [plain(small[number]) for number in order] == [row(number) for number in order]
    assert plain(pickle.loads(pickle.dumps(rows))[-1]) == row(99)
    with pytest.raises(IndexError, match="row 100 is out of range"):
        rows[100]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_formats_with_a_table_of_contents_need_no_index(tmp_path: Path, ending: str) -> None:
    paths = write_shards(tmp_path, ending, SIZES)
    rows = Rows(ending, paths, columns=["id"])
    assert [rows[number] for number in (0, 40, 99)] == [{"id": 0}, {"id": 40}, {"id": 99}]


def test_json_lines_are_read_as_json_reads_their_bytes(tmp_path: Path) -> None:
    lines = [b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r', b'{"a": "\xed\xa0\x80"}', b""]  # a mark of UTF-8, and half a character
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert cli.main(["index", str(tmp_path / "a.jsonl"), "--processes=1"]) == 0
    assert [each["a"] for each in jsonl(tmp_path / "a.jsonl")] == ["\u00e9", "\ud800"]


def test_columns_and_functions(tmp_path: Path) -> None:
    rows = made(tmp_path, "tar", columns=["txt"]).map(lambda sample: sample["txt"].decode())
    assert rows[3] == row(3)["text"]
    assert made(tmp_path / "lines", "jsonl").map(lambda each: each["id"])[4] == 4


def test_forked_process_reads_with_files_of_its_own(tmp_path: Path) -> None:
    rows = made(tmp_path, "parquet")
    assert rows[0] == row(0)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, json.dumps(rows[64]).encode())
        os._exit(0)
    os.close(writing)
    assert json.loads(os.read(reading, 4096)) == row(64)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("ending", FORMATS)
def test_shard_that_was_cut_off_or_changed_is_named(tmp_path: Path, ending: str) -> None:
    rows = made(tmp_path, ending)
    shard = tmp_path / f"shard-002.{ending}"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="shard-002.*has changed since it was indexed: it has .* bytes, expected"):
        rows[41]
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ConfigError, match="shard-002.*other bytes at its ends"):
        pickle.loads(pickle.dumps(rows))[41]


@pytest.mark.parametrize("ending", FORMATS)
def test_index_names_shards_that_are_cut_off_or_empty(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_shards(tmp_path, ending, SIZES)
    if ending != "jsonl":  # a text may end anywhere
        content = Path(paths[2]).read_bytes()
        # The end of a tar file is padding.
        Path(paths[2]).write_bytes(content[: len(content) // 3])
        assert cli.main(["index", *paths, "--processes=1"]) == 2
        assert "1 of 4 files could not be indexed" in (found := capsys.readouterr().err)
        assert "shard-002" in found
    Path(paths[2]).write_bytes(b"")
    assert cli.main(["index", *paths, "--processes=1"]) == 2
    assert "shard-002" in capsys.readouterr().err
    # The other shards are in the index.
    assert cli.main(["index", paths[0], paths[1], paths[3]]) == 0
    assert "0 shards read now" in capsys.readouterr().out


def test_index_of_new_files_keeps_the_old_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shards(tmp_path, "jsonl", SIZES)
    assert cli.main(["index", *paths[:2], "--processes=1"]) == 0
    assert cli.main(["index", *paths, "--processes=2"]) == 0
    assert "4 shards, 100 rows" in (found := capsys.readouterr().out)
    assert "2 shards read now" in found
    # The data set may have a part of the files, in an order of its own.
    rows = jsonl([paths[3], paths[0]])
    assert [len(rows), rows[0], rows[36]] == [76, row(64), row(0)]
    assert jsonl(paths).hetero_fingerprint != rows.hetero_fingerprint


def test_index_of_several_folders_is_named_to_a_reader_of_one(tmp_path: Path) -> None:
    paths = [*write_shards(tmp_path / "a", "jsonl", [3]), *write_shards(tmp_path / "b", "jsonl", [5])]
    assert cli.main(["index", *paths]) == 0
    whole = str(tmp_path / INDEX_NAME)
    with pytest.raises(ConfigError, match=f"no index {tmp_path}/b/.*\n.* Pass index='{whole}'"):
        jsonl(paths[1])
    assert len(jsonl(paths[1], index=whole)) == 5


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_index_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    paths = write_shards(tmp_path, ending, SIZES)
    assert cli.main(["index", *paths]) == 0
    read: list[str] = []
    monkeypatch.setattr(indexing, "load_index", lambda path: (read.append(path), load_index(path))[1])
    assert len(Rows(ending, paths)) == sum(SIZES)
    assert read == [str(tmp_path / INDEX_NAME)]


def test_missing_unfitting_and_damaged_indexes_are_explained(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "jsonl", SIZES)
    with pytest.raises(ConfigError, match=f"hetero index {paths[0]} ..."):
        jsonl(paths)
    assert cli.main(["index", *paths[:2]]) == 0
    with pytest.raises(ConfigError, match="lacks 2 of 4 shards, the first is shard-002.jsonl"):
        jsonl(paths)
    with pytest.raises(ConfigError, match="is for jsonl files, expected tar"):
        tar(paths[:2], index=tmp_path / INDEX_NAME)
    index = (tmp_path / INDEX_NAME).read_bytes()
    (tmp_path / INDEX_NAME).write_bytes(index[: len(index) // 2])
    with pytest.raises(ConfigError, match="is not an index of hetero"):
        jsonl(paths[:2])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "the list of shards is empty"),
        ("*.jsonl", "no file matches"),
        (["a.jsonl", "a-{0..1}.jsonl", "a.jsonl"], "a.jsonl is named twice"),
    ],
)
def test_lists_of_files_that_cannot_be_meant(
    files: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        jsonl(files)
