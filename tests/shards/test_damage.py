"""Files that are cut off, damaged or not of their format: named when they are indexed, never read in part."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import cli
from hetero.errors import ConfigError
from hetero.shards import arrow, jsonl, parquet, tar
from hetero.shards.files import INDEX_NAME, expand
from hetero.shards.index import load_index
from hetero.shards.indexing import scan_shards
from tests.support.shards import write_shards

pytest.importorskip("pyarrow")


def lines(number: int) -> bytes:
    return b"".join(json.dumps({"id": each, "text": f"{each:x}" * 20}).encode() + b"\n" for each in range(number))


def tar_of(*members: tuple[str, bytes], **attributes: Any) -> bytes:
    """Return a tar file. The attributes are those of the last member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for place, (name, content) in enumerate(members):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for attribute, value in attributes.items() if place == len(members) - 1 else ():
                setattr(member, attribute, value)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


SAMPLES = [(f"{number:04d}.txt", b"x" * 700) for number in range(100)]
WHOLE_TAR = tar_of(*SAMPLES)


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        # A frame of many blocks, of which the last ones are missing.
        ("cut.jsonl.zst", lambda: zstd(lines(20_000))[:-4000], "ends within a frame"),
        ("cut.jsonl.gz", lambda: gzip.compress(lines(20_000))[:-4000], "EOFError"),
        ("C.JSONL.GZ", lambda: gzip.compress(lines(20_000))[:-4000], "EOFError"),
        ("pretty.jsonl", lambda: json.dumps([{"a": 1}], indent=2).encode(), "line at byte 0 is not JSON"),
        ("list.jsonl", lambda: b"[1, 2]\n", "is a list, expected an object"),
        ("parquet.jsonl", lambda: b"PAR1\0\1\2\n\3\4", "is not JSON"),
        ("head.tar", lambda: WHOLE_TAR[: 50 * 1536] + b"garbage!" * 64 + WHOLE_TAR[50 * 1536 + 512 :], "is damaged"),
        ("boundary.tar", lambda: WHOLE_TAR[: 30 * 1536], "without the mark of its end"),
        ("inside.tar", lambda: WHOLE_TAR[: 30 * 1536 + 600], "unexpected end of data|within"),
        ("two.tar", lambda: WHOLE_TAR + WHOLE_TAR, "is damaged"),
        ("twice.tar", lambda: tar_of(("a.JPG", b"1"), ("a.jpg", b"2")), "sample a has two members jpg"),
        ("mixed.tar", lambda: tar_of(("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3")), "do not follow each other"),
        ("link.tar", lambda: tar_of(("a.x", b""), type=tarfile.LNKTYPE, linkname="b.x"), "is a link"),
    ],
)
def test_damaged_file_is_named_when_it_is_indexed(
    name: str, make: Callable[[], bytes], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(make())
    form = "tar" if name.endswith("tar") else "jsonl"
    assert cli.main(["index", str(path), "--processes=1", "--format", form]) == 2
    found = capsys.readouterr().err
    assert name in found
    assert pytest.importorskip("re").search(message, found), found


def test_members_that_are_no_samples_are_left_out(tmp_path: Path) -> None:
    members = [("._a.jpg", b"0"), ("README", b"1"), ("__meta__/a.json", b"2"), ("d/a.jpg", b"3"), ("d/.DS_Store", b"4")]
    (tmp_path / "a.tar").write_bytes(tar_of(*members, ("d/a.cls", b"5")))
    assert cli.main(["index", str(tmp_path / "a.tar"), "--processes=1"]) == 0
    assert list(tar(tmp_path / "a.tar")) == [{"__key__": "d/a", "jpg": b"3", "cls": b"5"}]


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_file_that_was_cut_at_a_batch_is_refused(tmp_path: Path, form: str) -> None:
    import pyarrow as pa

    table = pa.table({"a": list(range(20))})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, getattr(pa.ipc, f"new_{form}")(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (record, blocks) = next(scan_shards([str(path)], "arrow").parts())
    assert record.num_rows == 20
    path.write_bytes(path.read_bytes()[: int(blocks.ends[1])])
    with pytest.raises(ConfigError, match="without the mark of its end"):
        arrow(path)


def test_columns_must_exist(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, "parquet", [5])
    with pytest.raises(ConfigError, match="no column 'nope'; it has id, text"):
        parquet(path, columns=["id", "nope"])[0]
    with pytest.raises(ConfigError, match="columns is the text 'text'"):
        parquet(path, columns="text")
    with pytest.raises(ConfigError, match="lanes is 0, expected an integer of at least 1"):
        parquet(path, lanes=0)


def test_large_column_in_several_pieces_keeps_all_rows() -> None:
    import pyarrow as pa

    from hetero.shards.formats.tables import TableRows

    # As pyarrow gives a column of more than 2 GiB.
    rows = TableRows(pa.table({"a": pa.chunked_array([["x"] * 3, ["y"] * 2])}))
    assert [row["a"] for row in rows] == ["x", "x", "x", "y", "y"]


def test_row_that_is_not_json_names_its_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(3) + b"{broken\n" + lines(2))
    assert cli.main(["index", str(path), "--processes=1"]) == 0
    with pytest.raises(ConfigError, match=r"a.jsonl, block 0, row 3: JSONDecodeError"):
        jsonl(path)[3]


def test_file_that_is_written_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, "parquet", [30])
    rows = parquet(path)
    assert rows[0]["id"] == 0
    Path(path).write_bytes(b"")
    with pytest.raises(ConfigError, match="has changed while it was open"):
        rows[29]


def test_deleted_file_is_named_if_the_pattern_would_match_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_shards(tmp_path, "jsonl", [3, 4, 5])
    assert cli.main(["index", str(tmp_path / "*.jsonl")]) == 0
    assert len(jsonl(tmp_path / "*.jsonl")) == 12
    assert len(jsonl(files[:2])) == 7
    assert caplog.text == ""
    Path(files[1]).unlink()
    assert len(jsonl(tmp_path / "*.jsonl")) == 8
    assert f"has files that match and do not exist: 1, the first is {Path(files[1]).name}" in caplog.text


def test_names_with_brackets_and_links(tmp_path: Path) -> None:
    for name in ("x[1].jsonl", "x1.jsonl"):
        (tmp_path / name).write_bytes(lines(1))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "x1.jsonl")
    (tmp_path / INDEX_NAME).write_bytes(b"")
    assert expand(tmp_path / "x[1].jsonl") == [str(tmp_path / "x[1].jsonl")]
    assert expand([tmp_path / "x1.jsonl", "nowhere.jsonl"])[1].startswith("/")
    with pytest.raises(ConfigError, match="named twice"):
        expand(str(tmp_path / "*"))
    with pytest.raises(ConfigError, match="the first one is the larger one"):
        expand("b-{5..3}.jsonl")


def _with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the head of an index."""
    with np.load(path) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    document = json.loads(found["header"].tobytes())
    change(document)
    found["header"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **found)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["shards"][0].update(num_blocks="1"),
        lambda document: document["shards"][0].update(num_rows=7),
        lambda document: document["shards"].append(document["shards"][0]),
        lambda document: document.pop("shards"),
        lambda document: document.update(shards=[[]]),
    ],
)
def test_hostile_index_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    (path,) = write_shards(tmp_path, "jsonl", [5])
    assert cli.main(["index", path, "--processes=1"]) == 0
    _with_header(tmp_path / INDEX_NAME, change)
    with pytest.raises(ConfigError, match="is not an index of hetero, or is damaged"):
        load_index(str(tmp_path / INDEX_NAME))


def test_index_that_would_take_much_memory_is_refused(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, "jsonl", [5])
    assert cli.main(["index", path, "--processes=1"]) == 0
    with np.load(tmp_path / INDEX_NAME) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    with (tmp_path / INDEX_NAME).open("wb") as file:
        np.savez_compressed(file, **found | {"rows": np.zeros(10**7, np.int64)})
    with pytest.raises(ConfigError, match="is compressed"):
        load_index(str(tmp_path / INDEX_NAME))


def test_content_of_compressed_files_is_bounded_and_checked(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "jsonl.gz", [50, 50, 50])
    assert cli.main(["index", *paths, "--processes=1"]) == 0
    scratch = tmp_path / "scratch"
    rows = jsonl(paths, scratch=scratch, scratch_bytes=5000)
    assert [rows[number]["id"] for number in (0, 60, 120, 149, 1)] == [0, 60, 120, 149, 1]
    assert len(list(scratch.glob("*.content"))) == 1
    scratch.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by other users"):
        jsonl(paths, scratch=scratch)[0]


def test_content_of_a_compressed_file_may_be_opened_by_another_process_meanwhile(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "jsonl.gz", [50, 50])
    assert cli.main(["index", *paths, "--processes=1"]) == 0
    first, second = (jsonl(paths, scratch=tmp_path / "scratch", memory_bytes=1) for _ in range(2))
    assert first[0] == second[0]
    assert [first[number]["id"] for number in (60, 0)] == [60, 0]  # block 0 is read from the open file again


def test_index_of_files_of_two_formats_is_refused_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(tmp_path, "jsonl", [3])
    write_shards(tmp_path, "tar", [3])
    assert cli.main(["index", str(tmp_path / "*")]) == 2
    assert "Index each format alone" in capsys.readouterr().err
    assert not (tmp_path / "hetero-index.npz").exists()
