"""CIFAR-10's binary version: files of records of 3,073 bytes.

A record is the label, one byte from 0 to 9, then 3,072 bytes: the red, green and blue plane of an image of 32 x 32
pixels, each row by row. The published training set has five files of 10,000 records, the test set has one. Files with
fewer records are accepted too, because stand-in data is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["CLASSES", "IMAGE_SHAPE", "RECORD_BYTES", "TEST_FILES", "TRAIN_FILES", "Records", "open_split"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the labels, in order, as in ``batches.meta.txt``."""
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
_MAX_RECORDS = 10_000
"""Records of a file as published."""
_CHUNK = 1000
"""Records that are read at once to check labels or compute statistics: 3 MB, or 25 MB as float64."""


class Records:
    """The records of several files, mapped into memory. A record is read when it is asked for.

    Args:
        paths: The files, at least one. Their records are numbered in this order.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is empty, has an incomplete record, more than 10,000 records, or a label above 9.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [_open(path) for path in paths]
        self._ends = np.cumsum([len(file) for file in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Return the image, shape ``(3, 32, 32)``, and the label of one record. The image is a view of the file.

        Raises:
            IndexError: If the record does not exist.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        record = self._files[number][index - (int(self._ends[number - 1]) if number else 0)]
        return record[1:].reshape(IMAGE_SHAPE), int(record[0])

    def statistics(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return mean and standard deviation of each colour over all pixels, as float32 of shape ``(3,)``, in 0 to 255.

        The memory is bounded: the records are read 1,000 at a time. Sums of integers are exact, so the result does not
        depend on that number.
        """
        sums, squares = np.zeros(3, np.int64), np.zeros(3, np.int64)
        for file in self._files:
            for start in range(0, len(file), _CHUNK):
                pixels = file[start : start + _CHUNK, 1:].reshape(-1, 3, 32 * 32).astype(np.int64)
                sums += pixels.sum(axis=(0, 2))
                squares += (pixels * pixels).sum(axis=(0, 2))
        count = len(self) * 32 * 32
        mean = sums / count
        deviation = np.sqrt(np.maximum(squares / count - mean * mean, 0))
        return mean.astype(np.float32), deviation.astype(np.float32)


def open_split(folder: Path, split: str) -> Records:
    """Open the training or the test set of a folder with CIFAR-10's binary files.

    Args:
        folder: Folder with ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``.
        split: ``"train"`` or ``"test"``.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is malformed, or the split does not exist.
    """
    files = {"train": TRAIN_FILES, "test": TEST_FILES}.get(split)
    if files is None:
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    return Records([folder / name for name in files])


def _open(path: Path) -> npt.NDArray[np.uint8]:
    """Map one file and check its size and its labels."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; expected CIFAR-10's binary version there, or stand-in data of make_data.py"
        )
    size = path.stat().st_size
    count, rest = divmod(size, RECORD_BYTES)
    if rest or not 1 <= count <= _MAX_RECORDS:
        raise ValueError(
            f"{path} has {size} bytes: {count} records of {RECORD_BYTES} bytes and {rest} bytes more; expected 1 to "
            f"{_MAX_RECORDS} whole records. Is this the binary version, and is the copy complete?"
        )
    # np.memmap keeps no descriptor open. A plain array view of it makes no subclass of every record.
    file = np.memmap(path, np.uint8, mode="r", shape=(count, RECORD_BYTES)).view(np.ndarray)
    labels = file[:, 0]
    if (highest := int(labels.max())) >= len(CLASSES):
        record = int(labels.argmax())
        raise ValueError(f"{path}, record {record}: label {highest}; expected 0 to {len(CLASSES) - 1}")
    return file
