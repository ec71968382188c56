"""One sample as bytes: what comes back, and that nothing else does."""

from __future__ import annotations

import datetime as dt
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hetero.batches.purity.comparison import compare, freeze
from hetero.cache.entries import DamagedEntryError, EncodedSample, read_entry
from hetero.errors import ConfigError

torch = pytest.importorskip("torch")
image_module = pytest.importorskip("PIL.Image")

FINGERPRINT = b"f" * 20


class Pair(NamedTuple):
    left: Any
    right: Any


def photo(mode: str = "RGB") -> Any:
    size = (31, 17)
    data = os.urandom(31 * 17 * len(image_module.new(mode, (1, 1)).tobytes()))
    return image_module.frombytes(mode, size, data)


VALUES = {
    "array": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "large array": np.random.default_rng(1).random((300, 200)),
    "transposed": np.arange(12.0).reshape(3, 4).T,
    "empty": np.empty((0, 3), np.float32),
    "tensor": torch.arange(5),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": torch.rand(7).bfloat16(),
    "nested": {
        "a": [np.float32(1.5), None, True],
        3: (b"bytes" * 200, "text" * 2000),
        "d": np.datetime64("2026-01-01"),
    },
    "ordered": OrderedDict(b=1, a=2),
    "named": Pair(np.ones(3), "right"),
    "numbers": list(range(1000)),
    "many arrays": [np.full(9, number) for number in range(1023)],
    "nothing": None,
}


def written(tmp_path: Path, value: Any, index: int = 3) -> tuple[int, EncodedSample]:
    sample = EncodedSample(value, index, FINGERPRINT)
    path = tmp_path / "entry"
    path.write_bytes(b"before" + b"".join(bytes(piece) for piece in sample.pieces) + b"after")
    return os.open(path, os.O_RDONLY), sample


@pytest.mark.parametrize("name", VALUES)
def test_value_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    descriptor, sample = written(tmp_path, VALUES[name])
    found = read_entry(descriptor, 6, sample.nbytes, index=3, fingerprint=FINGERPRINT)
    assert compare(freeze(VALUES[name]), found) is None
    assert compare(freeze(VALUES[name]), sample.value()) is None
    os.close(descriptor)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "I", "F", "I;16"])
def test_image_comes_back(tmp_path: Path, mode: str) -> None:
    image = photo(mode)
    image.info["dpi"] = (72, 72)
    descriptor, sample = written(tmp_path, {"image": image, "label": 3})
    for found in (read_entry(descriptor, 6, sample.nbytes, index=3, fingerprint=FINGERPRINT), sample.value()):
        assert type(found["image"]) is image_module.Image
        assert (found["image"].mode, found["image"].size, found["image"].info) == (mode, (31, 17), {"dpi": (72, 72)})
        assert found["image"].tobytes() == image.tobytes()
        found["image"].putpixel((0, 0), image.getpixel((1, 1)))  # the script may write to it
    os.close(descriptor)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff"])
def test_image_that_was_opened_comes_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"photo.{suffix}"
    photo().save(path, dpi=(72, 72))
    opened = image_module.open(path)
    descriptor, sample = written(tmp_path, Pair([opened] * 70, OrderedDict(image=opened)))
    found = read_entry(descriptor, 6, sample.nbytes, index=3, fingerprint=FINGERPRINT)
    expected = opened.convert("RGB").tobytes()
    assert len(found.left) == 70
    assert {each.convert("RGB").tobytes() for each in (*found.left, found.right["image"])} == {expected}
    assert [round(float(each)) for each in found.left[0].info["dpi"]] == [72, 72]
    os.close(descriptor)


def test_what_comes_back_is_writable_and_its_own(tmp_path: Path) -> None:
    value = np.zeros(1000)
    descriptor, sample = written(tmp_path, value)
    first = read_entry(descriptor, 6, sample.nbytes, index=3, fingerprint=FINGERPRINT)
    first += 1
    assert not read_entry(descriptor, 6, sample.nbytes, index=3, fingerprint=FINGERPRINT).any()
    own = sample.value()
    own += 1
    assert not value.any()
    os.close(descriptor)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (dt.date(2026, 1, 1), "datetime.date cannot be sent"),
        (np.array([object()]), "cannot be sent"),
        (image_module.new("P", (2, 2)), "an image of mode 'P'; convert it with .convert"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EncodedSample({"value": value}, 0, FINGERPRINT)


def test_entry_of_another_sample_or_data_set_is_not_taken(tmp_path: Path) -> None:
    descriptor, sample = written(tmp_path, VALUES["nested"])
    for index, fingerprint in ((4, FINGERPRINT), (3, b"g" * 20)):
        with pytest.raises(DamagedEntryError, match="digest"):
            read_entry(descriptor, 6, sample.nbytes, index=index, fingerprint=fingerprint)
    os.close(descriptor)


@pytest.mark.parametrize("num_files", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_damaged_files_are_never_served(tmp_path: Path, num_files: int) -> None:
    chance = random.Random(5)
    path = tmp_path / "damaged"
    values = [*VALUES.values(), photo()]
    samples = [EncodedSample(value, number, FINGERPRINT) for number, value in enumerate(values)]
    wholes = [b"".join(bytes(piece) for piece in sample.pieces) for sample in samples]
    small = [number for number, whole in enumerate(wholes) if len(whole) < 20_000]
    num_refused = 0
    for number in range(num_files):
        place = chance.choice(small) if number % 50 else chance.randrange(len(wholes))
        whole = wholes[place]
        damaged = bytearray(whole)
        kind = chance.choice(["flip", "flip", "bytes", "truncate", "zeros", "swap", "insert", "head"])
        if kind == "flip":
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        elif kind == "head":
            damaged[chance.randrange(36)] = chance.randrange(256)
        elif kind == "bytes":
            begin = chance.randrange(len(damaged))
            damaged[begin : begin + 8] = chance.randbytes(len(damaged[begin : begin + 8]))
        elif kind == "truncate":
            del damaged[chance.randrange(len(damaged)) :]
        elif kind == "zeros":
            begin = chance.randrange(len(damaged))
            damaged[begin:] = bytes(len(damaged) - begin)
        elif kind == "swap":
            damaged[:] = chance.choice(wholes)
        else:
            damaged.insert(chance.randrange(len(damaged)), chance.randrange(256))
        if damaged[: len(whole)] == whole:
            continue
        path.write_bytes(damaged)
        descriptor = os.open(path, os.O_RDONLY)
        size = chance.choice([len(whole), len(damaged), chance.randrange(1, 2**32)])
        with pytest.raises(DamagedEntryError):
            read_entry(descriptor, 0, size, index=place, fingerprint=FINGERPRINT)
        os.close(descriptor)
        num_refused += 1
    assert num_refused > 0.9 * num_files
