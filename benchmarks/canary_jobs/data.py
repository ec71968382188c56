"""Makes the data of the jobs, equal on every machine.

A maker writes its files into ``folder``. ``scale`` multiplies the amount of data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["binary_files", "csv_files", "float_files", "jpeg_files", "text_files", "uneven_files"]


def _scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


def csv_files(folder: Path, scale: float, *, number: int, rows: int, columns: int) -> None:
    """Write CSV files, whose first column depends on the others."""
    for index in range(number):
        random = np.random.default_rng(index)
        features = random.normal(size=(_scaled(rows, scale), columns - 1))
        target = 2 * features[:, 0] + np.sin(features[:, 1]) + random.normal(size=len(features))
        table = np.column_stack([target, features])
        np.savetxt(folder / f"{index:04d}.csv", table, fmt="%.4f", delimiter=",")


def float_files(folder: Path, scale: float, *, number: int, rows: int, columns: int) -> None:
    """Write files of 32-bit floats. The first column is the sign of a sum of the others, with noise."""
    weights = np.random.default_rng(0).normal(size=columns - 1)
    for index in range(number):
        random = np.random.default_rng(index + 1)
        features = random.normal(size=(_scaled(rows, scale), columns - 1))
        target = np.sign(features @ weights + random.normal(size=len(features)))
        np.column_stack([target, features]).astype(np.float32).tofile(folder / f"{index:04d}.f32")


def uneven_files(folder: Path, scale: float, *, number: int, values: int) -> None:
    """Write files of equal size, whose first number varies widely (lognormal)."""
    random = np.random.default_rng(0)
    amounts = np.maximum(1, np.exp(random.normal(np.log(60 * scale), 1.4, number))).astype(np.float32)
    for index, amount in enumerate(amounts):
        content = np.random.default_rng(index).random(values, dtype=np.float32)
        content[0] = amount
        content.tofile(folder / f"{index:04d}.f32")


def jpeg_files(folder: Path, scale: float, *, number: int, side: int) -> None:
    """Write JPEG files. The first letter of a name is the label."""
    from PIL import Image

    for index in range(_scaled(number, scale)):
        random = np.random.default_rng(index)
        label = index % 10
        small = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        small[label % 8, label // 8] = 255
        Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / f"{label}-{index:06d}.jpg", quality=85
        )


def text_files(folder: Path, scale: float, *, number: int, lines: int) -> None:
    """Write text files of lines of made-up words. Their lengths vary."""
    for index in range(number):
        random = np.random.default_rng(index)
        count = _scaled(int(lines * random.uniform(0.6, 1.4)), scale)
        words = random.integers(0, 997, (count, 24))
        text = "\n".join(" ".join(f"wo{word}rd{word % 13}" for word in line) for line in words)
        (folder / f"{index:04d}.txt").write_text(text, encoding="utf-8")


def binary_files(folder: Path, scale: float, *, number: int, num_bytes: int) -> None:
    """Write files of random bytes."""
    for index in range(number):
        content = np.random.default_rng(index).bytes(_scaled(num_bytes, scale))
        (folder / f"{index:04d}.bin").write_bytes(content)
