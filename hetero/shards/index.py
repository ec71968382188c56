"""The index of shards: how many rows and which blocks each file has, and marks that tell changed files."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hetero.documents.arrays import array_of
from hetero.documents.records import decode
from hetero.errors import ConfigError
from hetero.shards.formats.format import Scanned
from hetero.shards.stores import facts_of, open_binary, write_file

__all__ = ["Index", "ShardRecord", "Table", "load_index", "save_index"]

_VERSION = 1
# 10 TB in blocks of 64 KiB have 160 million blocks, so their index has 4 GB.
_MAX_INDEX_BYTES = 1 << 33
_ARRAYS = ("header", "rows", "ends", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """What the index knows of one file."""

    path: str
    """Path below the folder of the index, or the whole path of a file that lies elsewhere."""
    size: int
    """Length of the file in bytes."""
    digest: str
    """Digest of the first and last bytes of the file, see `hetero.shards.files.digest_of_ends`."""
    mark: str
    """What `hetero.shards.stores.facts_of` says of the file. Only `hetero index` compares it, because copies differ."""
    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The blocks of one or several shards, in their order. The arrays are those of `Scanned`."""

    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    memory_bytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, blocks: Iterable[Scanned]) -> Table:
        """Return the table of scanned blocks."""
        numbers = np.array(list(blocks), dtype=np.int64).reshape(-1, 3)
        return cls(*(numbers[:, column].copy() for column in range(3)))

    def __getitem__(self, places: Any) -> Table:
        """Return the table of some blocks: a slice or an array of their numbers."""
        return Table(self.rows[places], self.ends[places], self.memory_bytes[places])


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The shards of one format."""

    format: str
    shards: tuple[ShardRecord, ...]
    table: Table
    """The blocks of all shards, one after the other."""

    @classmethod
    def join(cls, parts: Mapping[ShardRecord, Table], format_name: str) -> Index:
        """Return the index of shards that were indexed one by one."""
        tables = [Table.of([]), *parts.values()]
        whole = Table(*(np.concatenate([getattr(table, name) for table in tables]) for name in _ARRAYS[1:]))
        return cls(format_name, tuple(parts), whole)

    def parts(self) -> Iterator[tuple[ShardRecord, Table]]:
        """Yield each shard with its blocks."""
        end = 0
        for shard in self.shards:
            begin, end = end, end + shard.num_blocks
            yield shard, self.table[begin:end]

    def select(self, paths: Sequence[str], source: str) -> Index:
        """Return the index of some of the shards, in the order of ``paths``.

        Args:
            paths: Paths as in `ShardRecord.path`, each once.
            source: Name of this index for messages.

        Raises:
            ConfigError: If the index lacks a path.
        """
        parts = {shard.path: (shard, table) for shard, table in self.parts()}
        if missing := [path for path in paths if path not in parts]:
            raise ConfigError(
                f"{source} lacks {len(missing)} of {len(paths)} shards, the first is {missing[0]}\n"
                "  Run hetero index again with all files. It reads only those that the index lacks. Leave out files "
                "that it refuses, such as those without rows."
            )
        return Index.join(dict(parts[path] for path in paths), self.format)

    def digest(self) -> str:
        """Return a digest of everything but the folders and times of the files. Hosts with the same shards agree."""
        names = [(shard.path.rpartition("/")[2], shard.size, shard.digest, shard.num_rows) for shard in self.shards]
        hasher = xxhash.xxh3_128(json.dumps([self.format, names]).encode())
        for array in (self.table.rows, self.table.ends):
            hasher.update(array.tobytes())
        return hasher.hexdigest()


def save_index(path: str, index: Index) -> None:
    """Write an index to a path or URL. A reader sees the whole file or the one before it.

    Raises:
        ConfigError: If the file cannot be written.
    """
    shards = [asdict(shard) for shard in index.shards]
    header = json.dumps({"version": _VERSION, "format": index.format, "shards": shards})
    columns = {name: getattr(index.table, name) for name in _ARRAYS[1:]}
    file = io.BytesIO()
    np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **columns)
    try:
        write_file(path, file.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write the index {path}: {error.strerror or error}") from error


def load_index(path: str) -> Index:
    """Return an index from its path or URL.

    Raises:
        ConfigError: If the file cannot be read, is not an index, or contradicts itself.
    """
    source = f"index {path}"
    size = facts_of(path).size
    if size > _MAX_INDEX_BYTES:
        raise ConfigError(f"{source} has {size} bytes, expected at most {_MAX_INDEX_BYTES}; index fewer shards")
    try:
        with open_binary(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror or error}") from error
    try:
        header, *columns = _arrays_of(content)
        document = json.loads(header.tobytes())
        if document.get("version") != _VERSION:
            raise ConfigError(f"{source} has another version than {_VERSION}; delete it and run hetero index again")
        shards = tuple(decode(ShardRecord, each, path="shard") for each in document["shards"])
        index = Index(str(document["format"]), shards, Table(*columns))
        _check(index)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{source} is not an index of hetero, or is damaged: {error}\n  Write it again with hetero index."
        ) from error
    return index


def _arrays_of(content: bytes) -> list[npt.NDArray[Any]]:
    """Return the arrays of a file of NumPy. They take no more memory than the file."""
    found = []
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in _ARRAYS:
            entry = archive.getinfo(f"{name}.npy")
            # A compressed entry could have any size.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(content):
                raise ValueError(f"{name} is compressed")
            array = array_of(archive.read(entry))
            if array.dtype != (np.uint8 if name == "header" else np.int64):
                raise ValueError(f"{name} is {array.dtype}")
            found.append(array)
    return found


def _check(index: Index) -> None:
    """Raise an error if the numbers of an index contradict each other."""
    table = index.table
    num_blocks = sum(shard.num_blocks for shard in index.shards)
    if not len(table.rows) == len(table.ends) == len(table.memory_bytes) == num_blocks:
        raise ValueError("its shards and blocks do not fit together")
    if len({shard.path for shard in index.shards}) < len(index.shards):
        raise ValueError("it has a shard twice")
    for shard, own in index.parts():
        is_ascending = (np.diff(own.ends, prepend=0) >= 0).all()
        if not is_ascending or (own.rows < 0).any() or int(own.rows.sum()) != shard.num_rows:
            raise ValueError(f"the blocks of {shard.path} contradict each other")
