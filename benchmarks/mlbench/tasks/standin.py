"""Stand-in data in the published file formats, for machines without CIFAR-10 and epsilon.

The generators are documented here. Accuracies on their data say nothing about the published data sets. Every folder has
a marker file, `MARKER`, which `origin_of` reads, so each result names its data.

The same seed gives the same samples. Last digits of epsilon's features may differ between CPUs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks.cifar import CLASSES, IMAGE_SHAPE, RECORD_BYTES, TEST_FILES, TRAIN_FILES
from tasks.libsvm import EPSILON_FEATURES, EPSILON_FILES, MARKER, convert

__all__ = ["MARKER", "PUBLISHED_SIZES", "Origin", "make_cifar", "make_epsilon", "once", "origin_of", "require_stand_in"]

PUBLISHED_SIZES = {"CIFAR-10": (50_000, 10_000), "epsilon": (400_000, 100_000, EPSILON_FEATURES)}
"""Training samples, test samples and, for epsilon, features of the published data sets."""
NUM_FACTORS = 32
"""Hidden variables behind the features of the stand-in for epsilon."""
SHARE = 0.85
"""Part of a feature's variance that comes from the hidden variables."""
DECLINE = 0.85
"""The j-th hidden variable is multiplied by j to the power of minus this. The last ones are learned slowly."""
SHARPNESS = 7.5
"""Standard deviation of the logit of a label. The best possible accuracy is then about 93 %."""
CONTRAST, NOISE = 26.0, 42.0
"""Standard deviations, in levels of 0 to 255, of the pattern and the noise of an image in the stand-in for CIFAR-10."""
_CHUNK = 500


def make_cifar(folder: Path, *, num_train: int = 50_000, num_test: int = 10_000, seed: int = 1) -> None:
    """Write generated images as CIFAR-10's binary version.

    An image of class c shows waves. Their direction, one of five from 9 to 81 degrees, and their length, 10 or 5
    pixels, are those of the class. Phase and colour are random. Gaussian noise covers them. Classes are equally
    frequent, and their order is random. A mirrored image belongs to the same class, because half of the images of
    either set are mirrored.

    Args:
        folder: Folder to write. It must not exist.
        num_train: Training images, a multiple of 50: five files with equally many of each class.
        num_test: Test images, a multiple of 10.
        seed: Seed of all draws, >= 0.

    Raises:
        FileExistsError: If the folder exists.
        ValueError: If a count is not such a multiple, or above that of CIFAR-10.
    """
    for name, count, multiple, highest in (("num_train", num_train, 50, 50_000), ("num_test", num_test, 10, 10_000)):
        if count % multiple or not multiple <= count <= highest:
            raise ValueError(f"{name} is {count}; expected a multiple of {multiple} from {multiple} to {highest}")

    def fill(draft: Path) -> None:
        counts = {**dict.fromkeys(TRAIN_FILES, num_train // len(TRAIN_FILES)), TEST_FILES[0]: num_test}
        for number, (name, count) in enumerate(counts.items()):
            generator = np.random.default_rng((seed, number))
            labels = generator.permutation(np.arange(count) % len(CLASSES)).astype(np.uint8)
            with (draft / name).open("wb") as file:
                for start in range(0, count, _CHUNK):
                    file.write(_image_records(labels[start : start + _CHUNK], generator).tobytes())
        (draft / "batches.meta.txt").write_text("".join(f"{name}\n" for name in CLASSES), encoding="ascii")

    _make(folder, fill, {"stands_in_for": "CIFAR-10", "train": num_train, "test": num_test, "seed": seed})


def make_epsilon(
    folder: Path,
    *,
    num_train: int = 400_000,
    num_test: int = 100_000,
    num_features: int = EPSILON_FEATURES,
    seed: int = 1,
) -> None:
    """Write generated samples as epsilon's two LIBSVM files, and the matrices that they are converted to.

    A sample has 32 hidden normal variables. Each feature is a random mixture of them, 85 % of its variance, and of
    noise. The j-th variable has the share ``j ** -1.7`` of the first one's variance. The sample is then scaled to
    length 1, as in epsilon. The label is 1 with probability ``sigmoid(s)``, where s is a random mixture of the hidden
    variables, all with equal weight, and has standard deviation 7.5.

    Args:
        folder: Folder to write. It must not exist.
        num_train: Training samples, >= 1. The 400,000 of epsilon are 12 GB of text.
        num_test: Test samples, >= 1.
        num_features: Features, >= 1.
        seed: Seed of all draws, >= 0.

    Raises:
        FileExistsError: If the folder exists.
        ValueError: If a count is less than 1.
    """
    if min(num_train, num_test, num_features) < 1:
        raise ValueError(f"{num_train} + {num_test} samples of {num_features} features; expected at least 1 of each")

    def fill(draft: Path) -> None:
        common = np.random.default_rng((seed, 0))
        loads = np.arange(1.0, NUM_FACTORS + 1) ** -DECLINE
        loads *= (SHARE / (loads @ loads)) ** 0.5
        mixture = common.standard_normal((NUM_FACTORS, num_features)) * loads[:, None]
        direction = common.standard_normal(NUM_FACTORS)
        direction *= SHARPNESS / np.linalg.norm(direction)
        for number, (split, count) in enumerate({"train": num_train, "test": num_test}.items(), start=1):
            generator = np.random.default_rng((seed, number))
            with (draft / EPSILON_FILES[split]).open("w", encoding="ascii") as file:
                for start in range(0, count, _CHUNK):
                    file.writelines(_epsilon_lines(min(_CHUNK, count - start), mixture, direction, generator))
            convert(draft / EPSILON_FILES[split], draft / split, num_features)

    sizes = {"train": num_train, "test": num_test, "features": num_features}
    _make(folder, fill, {"stands_in_for": "epsilon", **sizes, "seed": seed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the data of a folder comes from, for results."""

    name: str
    """The published data set, a stand-in with its sizes and seed, or ``unknown`` with its size."""
    is_stand_in: bool | None
    """None if the data is neither marked as generated nor of the published size."""
    num_samples: int
    """Training samples."""


def origin_of(folder: Path, published: str, sizes: Sequence[int]) -> Origin:
    """Return where a folder's data comes from. Data without a marker is the published data if it has all its samples.

    Args:
        folder: Folder of the data.
        published: Name of the data set whose format it has.
        sizes: What was found, in the order of `PUBLISHED_SIZES`.

    Raises:
        ValueError: If the folder has a stand-in for another data set.
    """
    for path in (folder / MARKER, folder / "train" / MARKER, folder / "test" / MARKER):
        if path.is_file():
            about = json.loads(path.read_text(encoding="utf-8"))
            if about["stands_in_for"] != published:
                raise ValueError(f"{path} is for {about['stands_in_for']}; expected a stand-in for {published}")
            found = ", ".join(f"{name} {value}" for name, value in about.items() if name != "stands_in_for")
            return Origin(name=f"stand-in for {published} ({found})", is_stand_in=True, num_samples=sizes[0])
    if tuple(sizes) == PUBLISHED_SIZES[published]:
        return Origin(name=published, is_stand_in=False, num_samples=sizes[0])
    return Origin(
        name=f"unknown, {sizes[0]} training and {sizes[1]} test samples", is_stand_in=None, num_samples=sizes[0]
    )


def require_stand_in(folder: Path, *, num_train: int, num_test: int) -> None:
    """Check that a folder has stand-in data of these sizes, not data that was there before.

    Raises:
        ValueError: If the folder has other data.
    """
    path = folder / MARKER
    about = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if (about.get("train"), about.get("test")) != (num_train, num_test):
        found = f"stand-in data with {about['train']} and {about['test']}" if about else "no stand-in data"
        raise ValueError(
            f"--stand-in asks for {num_train} training and {num_test} test samples, but {folder} has {found}; name "
            "another folder, or remove it"
        )


def once(folder: Path, make: Callable[[Path], None]) -> None:
    """Call ``make(folder)`` unless the folder exists. Other processes wait for the first one that makes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not folder.exists():
            make(folder)
    finally:
        os.close(descriptor)


def _make(folder: Path, fill: Callable[[Path], None], about: dict[str, object]) -> None:
    """Make a folder with a marker, as a whole or not at all."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; remove it, or name another folder")
    draft = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        fill(draft)
        (draft / MARKER).write_text(json.dumps(about) + "\n", encoding="utf-8")
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _image_records(labels: npt.NDArray[np.uint8], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return one record for each label, shape ``(len(labels), 3073)``."""
    count = len(labels)
    angles = np.deg2rad(9 + 18.0 * (labels % 5))
    lengths = np.where(labels < 5, 10.0, 5.0)
    phases = generator.uniform(0, 2 * np.pi, count)
    mirrored = np.where(generator.random(count) < 0.5, -1.0, 1.0)
    colours = generator.standard_normal((count, 3))
    colours /= np.linalg.norm(colours, axis=1, keepdims=True) / 3**0.5
    row, column = np.mgrid[:32, :32]
    across, along = (np.cos(angles) * mirrored)[:, None, None] * column, np.sin(angles)[:, None, None] * row
    waves = 2**0.5 * np.sin(2 * np.pi * (across + along) / lengths[:, None, None] + phases[:, None, None])
    pixels = 128 + CONTRAST * colours[:, :, None, None] * waves[:, None]
    pixels += NOISE * generator.standard_normal((count, *IMAGE_SHAPE))
    records = np.empty((count, RECORD_BYTES), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = np.clip(np.rint(pixels), 0, 255).reshape(count, -1)
    return records


def _epsilon_lines(
    count: int,
    mixture: npt.NDArray[np.float64],
    direction: npt.NDArray[np.float64],
    generator: np.random.Generator,
) -> Iterator[str]:
    num_features = mixture.shape[1]
    hidden = generator.standard_normal((count, NUM_FACTORS))
    features = hidden @ mixture + (1 - SHARE) ** 0.5 * generator.standard_normal((count, num_features))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    positive = generator.random(count) < 1 / (1 + np.exp(-hidden @ direction))
    pairs = " ".join(f"{index}:%.7g" for index in range(1, num_features + 1))
    for is_positive, row in zip(positive, features, strict=True):
        yield f"{'1' if is_positive else '-1'} {pairs % tuple(row)}\n"
