"""Writes small shards of each format. Row i of a file is ``{"id": i, "text": ...}``, counted over all files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FORMATS", "row", "write_shards"]

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "tar", "parquet", "arrow")


def row(number: int) -> dict[str, Any]:
    return {"id": number, "text": f"row {number} " + "x" * (number % 50)}


def write_shards(folder: Path, ending: str, sizes: Sequence[int]) -> list[str]:
    """Write a file of each size, in rows. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, first = [], 0
    for place, size in enumerate(sizes):
        path = folder / f"shard-{place:03d}.{ending}"
        _WRITERS[ending](path, [row(number) for number in range(first, first + size)])
        paths.append(str(path))
        first += size
    return paths


def _jsonl(rows: Sequence[dict[str, Any]]) -> bytes:
    # A blank line in between, and no newline at the end.
    return "\n\n".join(json.dumps(each) for each in rows).encode()


def _write_zstd(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import zstandard

    half = len(rows) // 2
    frames = [_jsonl(rows[:half]) + b"\n", _jsonl(rows[half:])]
    path.write_bytes(b"".join(zstandard.compress(frame) for frame in frames))


def _write_tar(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as archive:
        for each in rows:
            for name, content in (("json", json.dumps(each).encode()), ("txt", each["text"].encode())):
                member = tarfile.TarInfo(f"folder/{each['id']:06d}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)


def _write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist(list(rows))
    make = pa.ipc.new_stream if path.stem.endswith("0") else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


_WRITERS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], object]] = {
    "jsonl": lambda path, rows: path.write_bytes(_jsonl(rows)),
    "jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(_jsonl(rows))),
    "jsonl.zst": _write_zstd,
    "tar": _write_tar,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
