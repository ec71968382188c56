"""Chunks of LitData, and shards of Mosaic Streaming (MDS), read with the package ``litdata``.

Both have an ``index.json`` beside their files. A block is a run of samples.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from hetero.errors import ConfigError
from hetero.shards.files import ShardFile
from hetero.shards.formats.format import Block, BlockRows, Scanned
from hetero.shards.stores import is_url, open_binary

__all__ = ["Chunks", "files_of"]

_BLOCK_ROWS = 256
_UNSAFE = ("pickle", "pkl")
"""Leaves whose decoding runs code of the file."""
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Leaves of MDS that the library can decode, if it is told to."""


def files_of(folder: str) -> list[str]:
    """Return the files that the ``index.json`` of a folder names, in its order.

    Raises:
        ConfigError: If the index is missing.
    """
    return [os.path.join(folder, name) for name in _read_index(folder).files]


class Chunks:
    """Each row is what ``litdata.StreamingDataset`` gives: a dictionary, a tuple, or a single value.

    Args:
        columns: Keys to keep, if rows are dictionaries. None for all.
    """

    needs_scan = False

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = columns

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the blocks, from the index of the folder."""
        if is_url(path):
            raise ConfigError(f"{path}: files of LitData and MDS must lie on the host, because the library reads paths")
        size = os.stat(path).st_size
        info = _read_index(os.path.dirname(path)).files[os.path.basename(path)]
        if "samples" in info:
            num_rows, stated_bytes = info["samples"], info["zip_data"]["bytes"]
        else:
            num_rows, stated_bytes = info["chunk_size"], info["chunk_bytes"]
        if size != stated_bytes:
            raise ValueError(f"it has {size} bytes, and its index.json states {stated_bytes}")
        for first in range(0, num_rows, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, num_rows - first)
            # The library itself knows where samples are.
            yield Scanned(rows, size, size * rows // num_rows)

    def open(self, file: ShardFile) -> _OpenChunk:
        """Open a shard."""
        return _OpenChunk(file, self._columns)


class _OpenChunk:
    def __init__(self, file: ShardFile, columns: Sequence[str] | None) -> None:
        self._file = file
        self._columns = columns
        self._loader, self._num_rows = _loader_of(file.path)

    def block(self, number: int, begin: int, end: int) -> Block:
        first = number * _BLOCK_ROWS
        places = range(first, min(first + _BLOCK_ROWS, self._num_rows))
        # The library maps the file, so the rows take no memory until they are decoded.
        return Block(_Decoded(places, self._loader, self._file, self._columns), 0)


class _Decoded(BlockRows):
    """The rows of a run of samples, each decoded when it is indexed."""

    def __init__(self, places: range, loader: Any, file: ShardFile, columns: Sequence[str] | None) -> None:
        self._places = places
        self._loader = loader
        self._file = file
        self._columns = columns

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        row = self._loader.load_item_from_chunk(
            index=self._places[place],
            chunk_index=0,
            chunk_filepath=self._file.path,
            begin=0,
            filesize_bytes=self._file.size,
        )
        return row if self._columns is None else {name: row[name] for name in self._columns}


class _FolderIndex(NamedTuple):
    """The ``index.json`` of a folder. It is shared, so it must not be changed."""

    document: Any
    files: dict[str, Any]
    """The entry of each file, by the name of the file."""


def _read_index(folder: str) -> _FolderIndex:
    path = os.path.join(folder, "index.json")
    try:
        stat = os.stat(path)
        return _parsed(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; expected the index of LitData or MDS") from error


@functools.lru_cache
def _parsed(path: str, _mtime_ns: int, _size: int) -> _FolderIndex:
    """Return an index, which is parsed again if its time or size has changed.

    When each file parsed it, a data set of 2,000 files took 38 s to make instead of 0.1 s.
    """
    with open_binary(path) as file:
        document = json.loads(file.read())
    if "shards" not in document:
        return _FolderIndex(document, {chunk["filename"]: chunk for chunk in document["chunks"]})
    for shard in document["shards"]:
        # litdata reads this entry of shards without compression too.
        shard["zip_data"] = shard["zip_data"] or shard["raw_data"]
    return _FolderIndex(document, {shard["zip_data"]["basename"]: shard for shard in document["shards"]})


def _loader_of(path: str) -> tuple[Any, int]:
    """Return the decoder of a file, and the number of its samples.

    Raises:
        ConfigError: If the package is missing, or decoding would run code of the file.
    """
    try:
        from litdata.streaming.item_loader import PyTreeLoader
        from litdata.streaming.serializers import NumericSerializer, Serializer, _get_serializers
        from litdata.utilities._pytree import treespec_loads
        from litdata.utilities.dataset_utilities import adapt_mds_shards_to_chunks
    except ImportError as error:
        raise ConfigError(f"{path} needs the package litdata: pip install hetero[litdata]") from error

    class Number(NumericSerializer, Serializer):  # type: ignore[misc]
        def can_serialize(self, data: Any) -> bool:
            return False

    document, files = _read_index(os.path.dirname(path))
    # The library gets an index of this file alone. With all files, it takes 7 ms for 2,000 of them.
    document = {**document, "shards" if "shards" in document else "chunks": [files[os.path.basename(path)]]}
    if "shards" in document:
        document = adapt_mds_shards_to_chunks(document)
    config, chunks = {**document["config"]}, document["chunks"]
    if unsafe := [each for each in config["data_format"] if each.partition(":")[0] in _UNSAFE]:
        raise ConfigError(f"{path} has {unsafe[0]} leaves, whose decoding runs code of the file; write it without them")
    kinds = _get_serializers({name: Number(np.dtype(name).type) for name in _NUMBERS})
    if unknown := [each for each in config["data_format"] if each.partition(":")[0] not in kinds]:
        raise ConfigError(f"{path} has {unknown[0]} leaves, expected one of {', '.join(kinds)}; write it with these")
    if config["data_spec"] is not None:
        config["data_spec"] = treespec_loads(config["data_spec"])
    loader = PyTreeLoader()
    loader.setup(config, chunks, kinds)
    # Each row alone, from a map of the file. Else the library reads the whole file and decodes 255 rows for a row that
    # is not among the last 255. This takes 100 times as long in windows (bench_shards).
    loader.set_batch_decode(0)
    loader.set_mmap_allowed_chunks({0})
    return loader, chunks[0]["chunk_size"]
