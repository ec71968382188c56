"""Formats that another library decodes: ArrayRecord, LitData, and Mosaic Streaming's shards."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.shards import array_record, litdata, mds
from hetero.shards.formats import chunks
from hetero.shards.stores import open_binary

NUM_ROWS = 600


def text(number: int) -> str:
    return f"sample {number} " + "x" * (number % 300)


def mds_shard(folder: Path, name: str, numbers: range) -> dict[str, Any]:
    """Write a shard, and return what the index has of it."""
    samples = []
    for number in numbers:
        raw, words = bytes([number % 256]) * 3, text(number).encode()
        samples.append(struct.pack("<II", len(raw), len(words)) + struct.pack("<qf", number, number / 2) + raw + words)
    head = 4 + 4 * (len(samples) + 1)
    ends = [head]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    content = struct.pack(f"<I{len(ends)}I", len(samples), *ends) + b"".join(samples)
    (folder / name).write_bytes(content)
    return {
        "column_encodings": ["int", "float32", "bytes", "str"],
        "column_names": ["id", "half", "raw", "text"],
        "column_sizes": [8, 4, None, None],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
        "samples": len(samples),
        "size_limit": 2**20,
        "version": 2,
        "zip_data": None,
    }


@pytest.fixture
def mds_folder(tmp_path: Path) -> Path:
    shards = [
        mds_shard(tmp_path, "shard.00000.mds", range(400)),
        mds_shard(tmp_path, "shard.00001.mds", range(400, NUM_ROWS)),
    ]
    (tmp_path / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return tmp_path


def test_mds_rows(mds_folder: Path) -> None:
    pytest.importorskip("litdata")
    rows = mds(mds_folder)
    assert len(rows) == NUM_ROWS
    for number in (0, 1, 399, 400, 599):
        raw = bytes([number % 256]) * 3
        assert rows[number] == {"id": number, "half": number / 2, "raw": raw, "text": text(number)}
    assert mds(mds_folder, columns=["text"])[7] == {"text": text(7)}


def test_index_of_a_folder_is_read_again_only_if_it_has_changed(
    mds_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(chunks, "open_binary", lambda path: (read.append(path), open_binary(path))[1])
    assert [len(mds(mds_folder)) for _ in range(2)] == [NUM_ROWS] * 2
    assert len(read) == 1
    index = json.loads((mds_folder / "index.json").read_text())
    index["shards"] = index["shards"][:1]
    (mds_folder / "index.json").write_text(json.dumps(index))
    assert len(mds(mds_folder)) == 400
    assert len(read) == 2


def test_mds_that_would_run_code_or_is_cut_off_is_refused(mds_folder: Path) -> None:
    index = json.loads((mds_folder / "index.json").read_text())
    shard = mds_folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"shard.00001.mds cannot be read: .*its index.json states"):
        mds(mds_folder)
    pytest.importorskip("litdata")
    index["shards"] = index["shards"][:1]
    index["shards"][0]["column_encodings"][1] = "pkl"
    (mds_folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="pkl leaves, whose decoding runs code"):
        mds(mds_folder)[0]
    with pytest.raises(ConfigError, match="expected the index of LitData or MDS"):
        mds(mds_folder / "nowhere")


def test_mds_with_leaves_that_cannot_be_decoded_is_refused(mds_folder: Path) -> None:
    pytest.importorskip("litdata")
    index = json.loads((mds_folder / "index.json").read_text())
    index["shards"][0]["column_encodings"][1] = "ndarray"
    (mds_folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="has ndarray leaves, expected one of uint8"):
        mds(mds_folder)[0]


def test_litdata_rows(tmp_path: Path) -> None:
    streaming = pytest.importorskip("litdata.streaming.writer")
    writer = streaming.BinaryWriter(str(tmp_path), chunk_size=250)
    for number in range(NUM_ROWS):
        writer[number] = {"id": number, "text": text(number)}
    writer.done()
    writer.merge()
    rows = litdata(tmp_path)
    assert [rows[number] for number in (0, 249, 250, 599)] == [
        {"id": number, "text": text(number)} for number in (0, 249, 250, 599)
    ]


def test_array_record_rows(tmp_path: Path) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    for name, numbers in (("a", range(400)), ("b", range(400, NUM_ROWS))):
        writer = module.ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:16")
        for number in numbers:
            writer.write(text(number).encode())
        writer.close()
    rows = array_record(str(tmp_path / "*.array_record"))
    assert [rows[number].decode() for number in range(NUM_ROWS)] == [text(number) for number in range(NUM_ROWS)]
    with pytest.raises(ConfigError, match="have no columns"):
        array_record(str(tmp_path / "*.array_record"), columns=["a"])
