"""LIBSVM's text format, read line by line, and matrices on disk that it is converted to.

A line is ``LABEL INDEX:VALUE INDEX:VALUE ...``: the label is -1 or 1, indices ascend from 1, and features that a line
leaves out are 0. The published epsilon has 2,000 features, all of them in every line: 12 GB of text. `convert` reads it
once, with one line in memory at a time, and writes float32 rows. `Matrix` maps these into memory, 3.2 GB on disk.
"""

from __future__ import annotations

import bz2
import json
import lzma
import math
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

__all__ = ["EPSILON_FEATURES", "EPSILON_FILES", "MARKER", "Matrix", "convert", "read_lines"]

EPSILON_FEATURES = 2000
EPSILON_FILES = {"train": "epsilon_normalized", "test": "epsilon_normalized.t"}
"""Published names of the two files. Endings .bz2 and .xz are read too."""
MARKER = "STAND-IN.json"
"""File beside generated data. A folder that is converted from such data has a copy."""
_LINE = re.compile(rb"[^\s:]+(?: [^\s:]+:[^\s:]+)*")
_MAX_PAIR_BYTES = 40
"""Longest ``INDEX:VALUE`` with its blank that a file may have on average over a line."""
_MAX_FEATURES = 1_000_000
_HEADER = "matrix.json"
_FORMAT = "mlbench-matrix-1"
_OPENERS = {".bz2": bz2.open, ".xz": lzma.open}
_BUFFER_BYTES = 1 << 20


class Matrix:
    """Rows of features and their labels, mapped into memory. A row is read when it is asked for.

    Args:
        folder: Folder that `convert` wrote.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If its files do not fit its header.
    """

    def __init__(self, folder: Path) -> None:
        header_path = folder / _HEADER
        if not header_path.is_file():
            raise FileNotFoundError(
                f"{header_path} does not exist; convert the LIBSVM file with make_data.py convert, or make stand-in "
                "data with make_data.py epsilon"
            )
        with header_path.open("rb") as file:
            text = file.read(65_536)
        try:
            header = json.loads(text)
            kind, count, self.num_features = header["format"], header["num_samples"], header["num_features"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{header_path} is no header of a converted matrix: {error!r}") from None
        sizes = (count, self.num_features)
        if kind != _FORMAT or not all(type(size) is int and size >= 1 for size in sizes):
            raise ValueError(f"{header_path}: format {kind!r}, shape {sizes}; expected {_FORMAT!r} and at least (1, 1)")
        for name, expected in (("features.f32", 4 * count * self.num_features), ("labels.i8", count)):
            found = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if found != expected:
                raise ValueError(f"{folder / name} has {found} bytes; expected {expected}. Convert the data again")
        self.features: npt.NDArray[np.float32] = np.memmap(
            folder / "features.f32", np.dtype("<f4"), mode="r", shape=sizes
        ).view(np.ndarray)
        """Shape ``(num_samples, num_features)``."""
        self.labels: npt.NDArray[np.int8] = np.fromfile(folder / "labels.i8", np.int8)
        """-1 or 1, shape ``(num_samples,)``."""
        if not np.all(np.abs(self.labels) == 1):
            sample = int(np.argmax(np.abs(self.labels) != 1))
            raise ValueError(
                f"{folder / 'labels.i8'}, sample {sample}: label {self.labels[sample]}; expected -1 or 1. "
                "Convert the data again"
            )

    def __len__(self) -> int:
        return len(self.labels)


def read_lines(path: Path, num_features: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield label and features, shape ``(num_features,)``, of each line. At most one line is in memory.

    Args:
        path: LIBSVM file. Endings .bz2 and .xz are decompressed.
        num_features: Features of a sample, 1 to 1,000,000.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If a line is malformed, or the file is damaged or ends inside a line. The message has the number of
            the line.
    """
    if not 1 <= num_features <= _MAX_FEATURES:
        raise ValueError(f"{num_features} features; expected 1 to {_MAX_FEATURES}")
    max_bytes = _MAX_PAIR_BYTES * (num_features + 1)
    with _open(path) as file:
        number = 0
        while line := _read_line(file, max_bytes + 1, f"{path}, line {number + 1}"):
            number += 1
            if len(line) > max_bytes:
                raise ValueError(
                    f"{path}, line {number}: longer than {max_bytes} bytes, the bound for {num_features} features"
                )
            if not line.endswith(b"\n"):
                raise ValueError(
                    f"{path}, line {number}: the file ends inside this line. Is the copy complete? "
                    "If it is, add a line end"
                )
            try:
                yield _parse(line, num_features)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def convert(source: Path, target: Path, num_features: int = EPSILON_FEATURES) -> int:
    """Write a LIBSVM file as a folder for `Matrix`, and return the number of samples.

    The memory is bounded by one line. The folder appears as a whole or not at all. If the source is stand-in data, so a
    `MARKER` lies beside it, the folder gets a copy of the marker.

    Args:
        source: LIBSVM file.
        target: Folder to write. It must not exist.
        num_features: Features of a sample, 1 to 1,000,000.

    Raises:
        FileExistsError: If the folder exists.
        FileNotFoundError: If the source does not exist.
        ValueError: If the source is malformed or empty.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it to convert {source} again")
    draft = target.with_name(f"{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    count = 0
    try:
        with (
            (draft / "features.f32").open("wb", buffering=_BUFFER_BYTES) as features,
            (draft / "labels.i8").open("wb") as labels,
        ):
            for label, row in read_lines(source, num_features):
                features.write(row.astype("<f4", copy=False).data)
                labels.write(label.to_bytes(1, "little", signed=True))
                count += 1
        if count == 0:
            raise ValueError(f"{source} is empty; expected a line for each sample")
        header = {"format": _FORMAT, "num_samples": count, "num_features": num_features, "source": source.name}
        (draft / _HEADER).write_text(json.dumps(header) + "\n", encoding="utf-8")
        if (source.parent / MARKER).is_file():
            shutil.copyfile(source.parent / MARKER, draft / MARKER)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return count


def _open(path: Path) -> BinaryIO:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a LIBSVM file, for example {EPSILON_FILES['train']}")
    opener = _OPENERS.get(path.suffix)
    return cast(BinaryIO, opener(path, "rb") if opener else path.open("rb", buffering=_BUFFER_BYTES))


def _read_line(file: BinaryIO, max_bytes: int, place: str) -> bytes:
    """Return the next line, cut after ``max_bytes``."""
    try:
        return file.readline(max_bytes)
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{place}: the compressed file is damaged or incomplete: {error}") from None
    except OSError as error:
        if error.errno is not None:  # bz2 raises an OSError without a number for damaged data
            raise
        raise ValueError(f"{place}: the compressed file is damaged or incomplete: {error}") from None


def _parse(line: bytes, num_features: int) -> tuple[int, npt.NDArray[np.float32]]:
    """Return label and features of one line."""
    line = line.rstrip()
    if not _LINE.fullmatch(line):
        raise ValueError(f"found {_shown(line)}; expected LABEL INDEX:VALUE INDEX:VALUE ..., with single blanks")
    first, _, rest = line.partition(b" ")
    label = _number(first)
    if label not in (-1.0, 1.0):
        raise ValueError(f"label {_shown(first)}; expected -1 or 1")
    row = np.zeros(num_features, np.float32)
    if rest:
        numbers = _numbers(rest.replace(b":", b" "), 2 * (rest.count(b":")))
        indices, values = numbers[::2], numbers[1::2]
        # The comparisons are false for NaN, so NaN is rejected too.
        if not (indices[0] >= 1 and indices[-1] <= num_features and np.all(np.diff(indices) > 0)):
            raise ValueError(f"indices are not ascending from 1 to at most {num_features}: {_shown(rest)}")
        if np.any(indices != np.floor(indices)):
            raise ValueError(f"an index is not a whole number: {_shown(rest)}")
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        if not np.all(np.isfinite(single)):
            raise ValueError(f"feature {int(indices[~np.isfinite(single)][0])} is not finite as float32")
        row[indices.astype(np.intp) - 1] = single
    return int(label), row


def _numbers(text: bytes, count: int) -> npt.NDArray[np.float64]:
    """Return ``count`` numbers in ASCII, separated by blanks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # numpy gives this warning if it stops before the end
        try:
            numbers = np.fromstring(text, np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            numbers = np.empty(0)
    if len(numbers) != count:
        raise ValueError(f"an index or a value is not a number: {_shown(text)}")
    return numbers


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shown(text: bytes) -> str:
    """Return the beginning of a text, for a message."""
    return repr(text[:40].decode("ascii", errors="replace")) + ("..." if len(text) > 40 else "")
