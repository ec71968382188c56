"""`Rows`: a map-style data set of the rows of many files."""

from __future__ import annotations

import bisect
import copy
import functools
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hetero.documents.files import evict
from hetero.errors import ConfigError
from hetero.metrics.reading import SHARD_WAITS_S, off_cpu_s, wait_clock_s
from hetero.plans.plan import Source
from hetero.plans.windows import WindowLayout
from hetero.shards.copies import Scratch, problems_of
from hetero.shards.files import ShardFile, expand, is_compressed, patterns_of
from hetero.shards.formats import make_format
from hetero.shards.formats.chunks import files_of
from hetero.shards.formats.format import Block, BlockRows, Format, OpenShard
from hetero.shards.index import Index
from hetero.shards.indexing import index_of

__all__ = ["Rows", "array_record", "arrow", "jsonl", "litdata", "mds", "parquet", "tar"]

logger = logging.getLogger(__name__)

Files: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

_UNIT_BYTES = 16 * 2**20
"""Least size of a unit, which is read together. A disk or an object store gives 16 MiB in one go at its full rate."""
_MAX_UNITS = 2**19
"""Half the limit of a `WindowLayout`, because the end of a file makes a unit too."""
_WINDOW_BYTES = 64 * 2**20
_MAX_LANES = 8
_WINDOWS_BYTES = 2**30
"""What the windows of all lanes take, with the units that they share with the next windows."""
_MEMORY_BYTES = 2 * _WINDOWS_BYTES
"""Twice the windows, because the sizes of Parquet's footers are smaller than those in memory."""
_CHUNK_ROWS = 64
"""With these windows and lanes, a batch of 256 rows has rows of 18 of 60 units (tests/plans/shuffle_quality.py)."""
_MAX_OPEN_SHARDS = 64
"""Shards that a process holds open. A process may have 1,024 files open by default."""
_SCRATCH_BYTES = 100 * 2**30
_MANY_AGAIN = 1000
"""Blocks that were read again before a warning. Purity checks and endpoints that help others repeat some."""


def parquet(files: Files, **options: Any) -> Rows:
    """Return the rows of Parquet files as dictionaries. Needs pyarrow. See `Rows` for the options."""
    return Rows("parquet", files, **options)


def arrow(files: Files, **options: Any) -> Rows:
    """Return the rows of Arrow files or streams as dictionaries. Needs pyarrow. See `Rows` for the options.

    Hugging Face's ``save_to_disk`` writes such files.
    """
    return Rows("arrow", files, **options)


def jsonl(files: Files, **options: Any) -> Rows:
    """Return the objects of JSON Lines files, plain or compressed (``.gz``, ``.zst``). See `Rows` for the options.

    The files need an index, which ``hetero index`` writes.
    """
    return Rows("jsonl", files, **options)


def tar(files: Files, **options: Any) -> Rows:
    """Return the samples of tar files in WebDataset's form. See `Rows` for the options.

    The members of a sample follow each other, and their names are equal up to the first dot of the file name. A row is
    ``{"__key__": "a/0001", "jpg": bytes, "cls": bytes}``. The files need an index, which ``hetero index`` writes.
    """
    return Rows("tar", files, **options)


def array_record(files: Files, **options: Any) -> Rows:
    """Return the records of ArrayRecord files as bytes. Needs array-record. See `Rows` for the options."""
    return Rows("array_record", files, **options)


def litdata(folder: str | os.PathLike[str], **options: Any) -> Rows:
    """Return the samples of a folder that ``litdata.optimize`` wrote. Needs litdata. See `Rows` for the options."""
    return Rows("chunks", files_of(os.path.abspath(folder)), **options)


def mds(folder: str | os.PathLike[str], **options: Any) -> Rows:
    """Return the samples of a folder of Mosaic Streaming, without compression. Needs litdata, which decodes them too.

    See `Rows` for the options.
    """
    return Rows("chunks", files_of(os.path.abspath(folder)), **options)


class Rows:
    """A map-style data set of the rows of many files. Use `parquet`, `arrow`, `jsonl` or `tar` to make one.

    Return it from a function with ``@hetero.dataset``. The index of a row is its number in the files, in the order of
    ``files``. The row does not depend on the process or host that reads it.

    A block is a row group, a record batch, or 64 KiB of lines or samples, and is read as a whole. Each process keeps a
    block until it has taken all its rows, or until ``memory_bytes`` are full.

    Args:
        format_name: One of `hetero.shards.formats.FORMATS`.
        files: Paths or URLs, one or several. They may have wildcards, whose matches are sorted, and numbers:
            ``s3://bucket/a-{000..146}.tar``. URLs need fsspec, and the package of the store.
        columns: Columns, keys or members to read. None for all.
        index: The index that ``hetero index`` wrote. None for ``hetero-index.npz`` in the folder that all files have in
            common. Without one, Parquet and Arrow files are indexed when the data set is built.
        memory_bytes: Memory of each process for blocks, about.
        window_bytes: Memory of the rows that ``shuffle="window"`` shuffles together.
        lanes: How many windows ``shuffle="window"`` reads at the same time. None for as many as fit into 1 GiB, at
            most 8.
        chunk_rows: How many rows that follow each other with ``shuffle="window"`` come from one window. A batch has the
            rows of one window if this is a multiple of the batch size.
        scratch: Folder on this host for copies of files of a store, and for the content of compressed files. None for
            one in the folder of `tempfile`.
        scratch_bytes: Size of that folder.

    Raises:
        ConfigError: If no file matches, an option is not valid, or the index is missing, damaged, or does not fit.
    """

    def __init__(
        self,
        format_name: str,
        files: Files,
        *,
        columns: Sequence[str] | None = None,
        index: str | os.PathLike[str] | None = None,
        memory_bytes: int = _MEMORY_BYTES,
        window_bytes: int = _WINDOW_BYTES,
        lanes: int | None = None,
        chunk_rows: int = _CHUNK_ROWS,
        scratch: str | os.PathLike[str] | None = None,
        scratch_bytes: int = _SCRATCH_BYTES,
    ) -> None:
        numbers = {"memory_bytes": memory_bytes, "window_bytes": window_bytes, "chunk_rows": chunk_rows}
        for name, value in (numbers | {"scratch_bytes": scratch_bytes, "lanes": 1 if lanes is None else lanes}).items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1")
        if isinstance(columns, str):
            raise ConfigError(f"columns is the text {columns!r}, expected a list of names")
        self._format: Format = make_format(format_name, columns)
        self._paths = expand(files)
        self._index = index_of(self._paths, format_name, given=index, patterns=patterns_of(files))
        self._memory_bytes = memory_bytes
        self._window_bytes, self._num_lanes, self._chunk_rows = window_bytes, lanes, chunk_rows
        folder = scratch or Path(tempfile.gettempdir(), f"hetero-shards-{os.getuid()}")
        self._scratch = Scratch(Path(folder), scratch_bytes)
        self._functions: tuple[Callable[[Any], Any], ...] = ()
        self._make_views()
        self._process = _Process()

    def map(self, function: Callable[[Any], Any]) -> Rows:
        """Return the data set whose samples are ``function(row)``. May be called several times, in the order given.

        The function may draw from the global generators of `random`, NumPy and torch, as samples do.
        """
        other = Rows.__new__(Rows)
        # Both data sets share the blocks in memory.
        other.__dict__.update(self.__dict__, _functions=(*self._functions, function))
        return other

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return self._row_ends[-1] if len(self._row_ends) else 0

    def __getitem__(self, index: int) -> Any:
        """Return a row, or what the functions made of it. A negative index counts from the end.

        Raises:
            IndexError: If there is no such row.
            ConfigError: If the file has changed since it was indexed, or cannot be read.
        """
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"row {index} is out of range, the files have {len(self)} rows")
        (row,) = self._take(bisect.bisect_right(self._row_ends, place), [place])
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows. torch's loader and that of hetero call this for a batch. Raises like `__getitem__`."""
        if len(indices) == 0:
            return []
        ends, run = self._row_ends, range(indices[0], indices[-1] + 1)
        # A run of one block needs no list of places, and no copy of its part of a column.
        if run.start >= 0 and run.stop <= len(self) and len(run) == len(indices) and list(run) == list(indices):
            number = bisect.bisect_right(ends, run.start)
            if run.stop <= ends[number]:
                return self._take(number, run)
        if not 0 <= min(indices) <= max(indices) < len(self):
            return [self[index] for index in indices]
        # Lists and a dictionary, because arrays take longer for a batch with one row of each block.
        by_block: dict[int, list[int]] = {}
        for at, number in enumerate(np.searchsorted(ends, np.asarray(indices), side="right").tolist()):
            by_block.setdefault(number, []).append(at)
        found: list[Any] = [None] * len(indices)
        for number, chosen in sorted(by_block.items()):
            rows = self._take(number, [indices[at] for at in chosen])
            for at, row in zip(chosen, rows, strict=True):
                found[at] = row
        return found

    def _take(self, number: int, places: Sequence[int]) -> list[Any]:
        """Return rows of one block, by their places in all files, and what the functions make of them."""
        first = self._row_ends[number - 1] if number else 0
        rows = self._rows_of(number, len(places))
        try:
            if isinstance(places, range):
                taken = rows.take(range(places.start - first, places.stop - first))
            else:
                taken = rows.take([place - first for place in places])
        except Exception as error:
            where = f"{self._name_of(number)}, row {places[0] - first}"
            where += f" or one of {len(places) - 1} others" if len(places) > 1 else ""
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
        for function in self._functions:
            taken = [function(row) for row in taken]
        return taken

    @property
    def hetero_gains_by_batches(self) -> bool:
        """Whether ``__getitems__`` saves much time. It saves at most 3 us for a row, so no user is told to use it."""
        return False

    @property
    def hetero_fingerprint(self) -> str:
        """Digest of the files and of their layout. Hosts must agree on it."""
        return f"{self._index.digest()}.{self.layout.digest()}"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The rows as one source of a plan, with their layout."""
        return (Source(name="", num_samples=len(self), layout=self.layout),)

    def hetero_problems(self) -> list[str]:
        """Compare all files with the index. Return a text if some are missing or have changed. For `hetero check`."""
        return problems_of(self._paths, self._index.shards)

    def hetero_read_cold(self, seconds: float) -> tuple[float, float]:
        """Read some units as a new host does, with nothing of their files in memory or copied. For profiles.

        Args:
            seconds: No other unit begins after this time.

        Returns:
            Seconds that a row waited for storage, and bytes of its file.

        Raises:
            ConfigError: If a file has changed or cannot be read.
        """
        begin_s, waited_s, num_rows, num_bytes = time.perf_counter(), 0.0, 0, 0
        cold, process = copy.copy(self), _Process()
        with tempfile.TemporaryDirectory(prefix="cold-", dir=self._scratch.make_folder()) as folder:
            cold._scratch = Scratch(Path(folder), self._scratch.max_bytes)
            for unit in np.random.default_rng(0).permutation(len(self._units)).tolist():
                first, end = (self._units[unit - 1] if unit else 0), self._units[unit]
                shard = bisect.bisect_right(self._block_ends, first)
                evict([Path(self._paths[shard])])  # does nothing for a URL
                begin_wait_s = wait_clock_s()
                for number in range(first, end):
                    cold._read(process, number)
                waited_s += max(0.0, wait_clock_s() - begin_wait_s)
                if is_compressed(self._paths[shard]):  # the whole file was read
                    num_rows += self._index.shards[shard].num_rows
                    num_bytes += self._index.shards[shard].size
                else:
                    num_rows += self._row_ends[end - 1] - (self._row_ends[first - 1] if first else 0)
                    begin, stop = self._unit_of(first)
                    num_bytes += stop - begin
                if time.perf_counter() - begin_s > seconds:
                    break
        return waited_s / max(1, num_rows), num_bytes / max(1, num_rows)

    @functools.cached_property
    def layout(self) -> WindowLayout:
        """Which rows lie together, for ``shuffle="window"``. It depends on the files and the arguments alone."""
        table = self._index.table
        unit_ends = np.array(self._units, dtype=np.int64)
        unit_rows = np.diff(np.cumsum(table.rows)[unit_ends - 1], prepend=0)
        unit_bytes = np.diff(np.cumsum(table.memory_bytes)[unit_ends - 1], prepend=0)
        row_bytes = max(1, int(unit_bytes.sum()) // max(1, len(self)))
        # A window shares its first and its last unit with its neighbours.
        taken_bytes = self._window_bytes + 2 * int(unit_bytes.max(initial=0))
        return WindowLayout.of_units(
            unit_rows[unit_rows > 0],
            window_rows=max(1, self._window_bytes // row_bytes),
            num_lanes=self._num_lanes or min(_MAX_LANES, max(1, _WINDOWS_BYTES // taken_bytes)),
            chunk_rows=self._chunk_rows,
        )

    def _rows_of(self, number: int, num_taken: int) -> BlockRows:
        """Return the rows of a block, by its number in all files. The caller takes so many of them."""
        process = self._process
        # A forked process must not use the locks, and the files that a library has opened, of its parent.
        if process.pid != os.getpid():
            process = self._process = _Process()
        with process.lock:
            kept = process.blocks.get(number)
            if kept is None:
                begin_s = off_cpu_s()
                block = self._read(process, number)
                shard = bisect.bisect_right(self._block_ends, number)
                SHARD_WAITS_S[self._paths[shard]] += max(0.0, off_cpu_s() - begin_s)
                kept = process.blocks[number] = _KeptBlock(block, len(block.rows))
                process.note_read(number, block.nbytes)
                process.drop_oldest(self._memory_bytes)
            else:
                process.blocks.move_to_end(number)
            kept.num_left -= num_taken
            # A pass takes each row once. So after its last row, a block is not needed again in this pass.
            if kept.num_left <= 0 and process.blocks.pop(number, None) is not None:
                process.num_bytes -= kept.block.nbytes
            return kept.block.rows

    def _read(self, process: _Process, number: int) -> Block:
        """Read a block from its file.

        Raises:
            ConfigError: If the file has changed or cannot be read.
        """
        shard = bisect.bisect_right(self._block_ends, number)
        number_in_shard = number - (self._block_ends[shard - 1] if shard else 0)
        begin, end = (self._ends[number - 1] if number_in_shard else 0), self._ends[number]
        num_rows = self._row_ends[number] - (self._row_ends[number - 1] if number else 0)
        try:
            opened = self._open(process, shard)
            opened.file.check()
            opened.file.fetch(*self._unit_of(number))
            block = opened.shard.block(number_in_shard, begin, end)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._name_of(number)} cannot be read: {type(error).__name__}: {error}") from error
        if len(block.rows) != num_rows:
            raise ConfigError(
                f"{self._name_of(number)} has {len(block.rows)} rows, and the index has {num_rows}\n"
                "  The index is of another file, or of another version of hetero. Write it again with hetero index."
            )
        return block

    def _unit_of(self, number: int) -> tuple[int, int]:
        """Return the bytes of the unit of a block. The rows of a unit are wanted at about the same time."""
        unit = bisect.bisect_right(self._units, number)
        first = self._units[unit - 1] if unit else 0
        shard = bisect.bisect_right(self._block_ends, number)
        first_of_shard = self._block_ends[shard - 1] if shard else 0
        return (self._ends[first - 1] if first > first_of_shard else 0), self._ends[self._units[unit] - 1]

    def _name_of(self, number: int) -> str:
        """Return the name of a block for messages."""
        shard = bisect.bisect_right(self._block_ends, number)
        number_in_shard = number - (self._block_ends[shard - 1] if shard else 0)
        return f"shard {self._paths[shard]}, block {number_in_shard}"

    def _open(self, process: _Process, number: int) -> _Opened:
        """Return an open shard. Compare the file with the index when it is opened."""
        opened = process.shards.get(number)
        if opened is not None:
            process.shards.move_to_end(number)
            return opened
        content_bytes = self._ends[self._block_ends[number] - 1]
        file = self._scratch.open(self._paths[number], self._index.shards[number], content_bytes)
        # Libraries read what follows the last block when they open a file.
        file.fetch(content_bytes, max(content_bytes, file.size))
        opened = process.shards[number] = _Opened(file, self._format.open(file))
        if len(process.shards) > _MAX_OPEN_SHARDS:
            process.shards.popitem(last=False)
        return opened

    def _make_views(self) -> None:
        """Make the tables that are searched for each row."""
        table, shards = self._index.table, self._index.shards
        block_ends = np.cumsum([shard.num_blocks for shard in shards], dtype=np.int64)
        # Views of memory are searched in 2 us, arrays of NumPy in 8 us.
        self._row_ends = memoryview(np.cumsum(table.rows, dtype=np.int64))  # type: ignore[arg-type]
        self._ends = memoryview(np.ascontiguousarray(table.ends))  # type: ignore[arg-type]
        self._block_ends = memoryview(block_ends)  # type: ignore[arg-type]
        self._units = _unit_ends(self._index)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_process", "_row_ends", "_ends", "_block_ends", "_units")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=_Process())
        self._make_views()


@dataclass(slots=True)
class _KeptBlock:
    """A block in memory."""

    block: Block
    num_left: int
    """Rows that were not taken since the block was read."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open shard and its file."""

    file: ShardFile
    shard: OpenShard


@dataclass(slots=True)
class _Process:
    """What belongs to one process."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: OrderedDict[int, _KeptBlock] = field(default_factory=OrderedDict)
    """Blocks by their number in all files, the one used last at the end."""
    num_bytes: int = 0
    """Memory of the blocks."""
    shards: OrderedDict[int, _Opened] = field(default_factory=OrderedDict)
    """Open shards by their number, the one used last at the end."""
    dropped: set[int] = field(default_factory=set)
    """Blocks that were dropped although not all their rows were taken."""
    num_again: int = 0
    """How many of them were read again."""

    def note_read(self, number: int, nbytes: int) -> None:
        """Record that a block was read. Warn if many are read again and again."""
        self.num_bytes += nbytes
        if number in self.dropped:
            self.dropped.discard(number)
            self.num_again += 1
            if self.num_again == _MANY_AGAIN:
                logger.warning(
                    "%d blocks of shards were read again, because memory_bytes is too small for the rows that come "
                    'together. Raise it, pass shuffle="window", or write files with smaller row groups',
                    self.num_again,
                )

    def drop_oldest(self, max_bytes: int) -> None:
        """Drop the blocks used longest ago. Keep the newest one, even if it is too large alone."""
        while self.num_bytes > max_bytes and len(self.blocks) > 1:
            number, kept = self.blocks.popitem(last=False)
            self.num_bytes -= kept.block.nbytes
            self.dropped.add(number)


def _unit_ends(index: Index) -> list[int]:
    """Return the block after each unit: blocks of one shard that follow each other, of `_UNIT_BYTES` or more."""
    # Larger units if there would be too many of them.
    least_bytes = max(_UNIT_BYTES, int(index.table.memory_bytes.sum()) // _MAX_UNITS)
    unit_ends: list[int] = []
    first = 0
    for shard, table in index.parts():
        unit_bytes = 0
        for number, nbytes in enumerate(table.memory_bytes.tolist(), 1):
            unit_bytes += nbytes
            if unit_bytes >= least_bytes or number == shard.num_blocks:
                unit_ends.append(first + number)
                unit_bytes = 0
        first += shard.num_blocks
    return unit_ends
