"""Tar files of samples, as WebDataset reads them. A block is a run of samples.

The members of a sample follow each other and have the same key: their path up to the first dot of the file name. The
rest of the name, after this dot, is the key of the member's bytes in the row. As in WebDataset, members whose name
begins with a dot or lacks a dot, and those in a folder ``__NAME__``, are left out.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, overload

from hetero.shards.files import ShardFile
from hetero.shards.formats.format import Block, BlockRows, Scanned
from hetero.shards.stores import facts_of, open_binary

__all__ = ["Tar"]

# A sample costs the reading of its block if samples come in no order. Images have 10 to 200 kB each.
_BLOCK_BYTES = 64 * 1024
_ZEROS = bytes(tarfile.BLOCKSIZE)


class Tar:
    """Each sample is a row: ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``.

    Args:
        columns: Names of members to keep, such as ``jpg``. None for all.
    """

    needs_scan = True

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = columns

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the blocks. Check that members of a sample follow each other, and that the file has its end mark."""
        size = facts_of(path).size
        begin = end = num_rows = 0
        keys: set[str] = set()
        names: set[str] = set()
        key = ""
        with open_binary(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                # The archive keeps all members that it has read. A shard may have millions.
                archive.members = []  # type: ignore[attr-defined]
                if (named := _key_of(member)) is None:
                    continue
                if named[0] != key or not num_rows:
                    key, names = named[0], set()
                    # A new sample begins with this member, so a full block ends before it.
                    if num_rows and member.offset - begin >= _BLOCK_BYTES:
                        yield Scanned(num_rows, member.offset, member.offset - begin)
                        num_rows, begin, keys = 0, member.offset, set()
                    if key in keys:
                        raise ValueError(f"the members of sample {key} do not follow each other")
                    keys.add(key)
                    num_rows += 1
                if named[1] in names:
                    raise ValueError(f"sample {key} has two members {named[1]}")
                names.add(named[1])
                end = member.offset_data + member.size
                if end > size:
                    raise ValueError(f"the file ends at byte {size}, within {member.name}")
            # tarfile ends without an error at a damaged head.
            _check_end(file, archive.offset)
        if num_rows:
            end = min(size, -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
            yield Scanned(num_rows, end, end - begin)

    def open(self, file: ShardFile) -> _OpenTar:
        """Open a shard."""
        return _OpenTar(file, self._columns)


class _OpenTar:
    def __init__(self, file: ShardFile, columns: Sequence[str] | None) -> None:
        self._file = file
        self._columns = columns

    def block(self, number: int, begin: int, end: int) -> Block:
        content = self._file.read(begin, end)
        samples: dict[str, dict[str, slice]] = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                if (named := _key_of(member)) is not None:
                    place = slice(member.offset_data, member.offset_data + member.size)
                    samples.setdefault(named[0], {})[named[1]] = place
        return Block(_Samples(content, list(samples.items()), self._columns), len(content))


class _Samples(BlockRows):
    """The rows of a run of samples, each made when it is indexed."""

    def __init__(
        self, content: bytes, samples: list[tuple[str, dict[str, slice]]], columns: Sequence[str] | None
    ) -> None:
        self._content = content
        self._samples = samples
        self._columns = columns

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        key, members = self._samples[place]
        names = members if self._columns is None else self._columns
        return {"__key__": key, **{name: self._content[members[name]] for name in names}}


def _key_of(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the key of a member's sample, and the name of the member in it: ``a/b.seg.png`` is (a/b, seg.png).

    Returns:
        None if the member belongs to no sample.

    Raises:
        ValueError: If its bytes are not one piece of the file.
    """
    folder, name = os.path.split(member.name)
    stem, dot, ending = name.partition(".")
    top = member.name.partition("/")[0]
    if member.isdir() or not stem or not dot or (top.startswith("__") and top.endswith("__")):
        return None
    if member.issparse() or not member.isfile():
        raise ValueError(f"member {member.name} is a link, a device or a sparse file; expected a plain file")
    return os.path.join(folder, stem), ending.lower()


def _check_end(file: IO[bytes], begin: int) -> None:
    """Raise an error unless all bytes from ``begin`` on are 0, and at least a block of them."""
    num_zeros = 0
    file.seek(begin)
    while content := file.read(len(_ZEROS)):
        if content.strip(b"\0"):
            raise ValueError(f"the head of the member at byte {begin} is damaged")
        num_zeros += len(content)
    if num_zeros < len(_ZEROS):
        raise ValueError(f"the file ends at byte {begin} without the mark of its end, so it was cut off")
