"""Readers of the published formats: files made in them, stand-in data, and malformed files."""

from __future__ import annotations

import bz2
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

Load = Callable[[str], ModuleType]


def write_cifar(folder: Path, labels: bytes = bytes(range(10))) -> None:
    """Write six files. Byte p of record r in file f is ``(f + r + p) % 256``."""
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        records = [
            bytes([label]) + bytes((number + record + place) % 256 for place in range(3072))
            for record, label in enumerate(labels)
        ]
        (folder / name).write_bytes(b"".join(records))


def test_cifar_records_are_label_then_planes_in_the_order_of_the_files(load: Load, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    train, test = (load("tasks.cifar").open_split(tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (50, 10)
    image, label = train[27]  # record 7 of the third file
    assert label == 7
    assert image.shape == (3, 32, 32)
    assert image.dtype == np.uint8
    for plane, row, column in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (2, 31, 31)):
        assert image[plane, row, column] == (2 + 7 + 1024 * plane + 32 * row + column) % 256
    with pytest.raises(IndexError, match="record 50 of 50"):
        train[50]


def test_cifar_statistics_are_those_of_all_pixels(load: Load, tmp_path: Path) -> None:
    write_cifar(tmp_path, labels=bytes(3))
    records = load("tasks.cifar").open_split(tmp_path, "train")
    pixels = np.stack([records[index][0] for index in range(len(records))]).astype(np.float64)
    mean, deviation = records.statistics()
    np.testing.assert_allclose(mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(deviation, pixels.std(axis=(0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has 0 bytes: 0 records of 3073 bytes and 0 bytes more; expected 1 to 10000 whole records"),
        (bytes(3072), r"0 records of 3073 bytes and 3072 bytes more"),
        (bytes(3074), r"1 records of 3073 bytes and 1 bytes more"),
        (bytes(3073) + b"\x0a" + bytes(3072), r"record 1: label 10; expected 0 to 9"),
        (bytes(3073 * 10_001), r"10001 records .* expected 1 to 10000"),
    ],
    ids=["empty", "short", "long", "label", "many"],
)
def test_malformed_cifar_file_is_rejected_with_what_was_found(
    load: Load, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("tasks.cifar").open_split(tmp_path, "test")


def test_missing_cifar_file_is_named(load: Load, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"test_batch.bin does not exist; expected CIFAR-10's binary version"):
        load("tasks.cifar").open_split(tmp_path, "test")
    with pytest.raises(ValueError, match="split is 'validation'; expected 'train' or 'test'"):
        load("tasks.cifar").open_split(tmp_path, "validation")


def test_crop_and_flip_equals_indexing_the_padded_image(load: Load) -> None:
    images = load("tasks.images")
    image = np.arange(3 * 32 * 32, dtype=np.float32).reshape(3, 32, 32) + 1
    centre = images.crop_and_flip(image, top=4, left=4, flips=False)
    np.testing.assert_array_equal(centre, image)
    np.testing.assert_array_equal(images.crop_and_flip(image, top=4, left=4, flips=True), image[:, :, ::-1])
    corner = images.crop_and_flip(image, top=0, left=8, flips=False)
    assert not corner[:, :4].any()
    assert not corner[:, :, 28:].any()
    np.testing.assert_array_equal(corner[:, 4:, :28], image[:, :28, 4:])


def test_training_images_are_augmented_and_test_images_only_normalised(load: Load, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    images = load("tasks.images")
    train, test = images.ImageDataset(str(tmp_path), "train"), images.ImageDataset(str(tmp_path), "test")
    mean, deviation = train.records.statistics()
    plain = (test.records[3][0] - mean.reshape(3, 1, 1)) / deviation.reshape(3, 1, 1)
    torch.testing.assert_close(test[3][0], torch.from_numpy(plain.astype(np.float32)))
    random.seed(5)
    found = train[3][0]
    random.seed(5)
    top, left, flips = random.randint(0, 8), random.randint(0, 8), random.random() < 0.5
    whole = ((train.records[3][0] - mean.reshape(3, 1, 1)) / deviation.reshape(3, 1, 1)).astype(np.float32)
    expected = images.crop_and_flip(whole, top=top, left=left, flips=flips)
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_libsvm_lines_become_rows_with_zeros_for_features_left_out(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("1 1:0.5 2:-1e-3 4:2\n-1 3:7\n+1\n-1.0 1:1 2:2 3:3 4:4 \n")
    found = list(load("tasks.libsvm").read_lines(path, 4))
    assert [label for label, _ in found] == [1, -1, 1, -1]
    np.testing.assert_array_equal(
        np.stack([row for _, row in found]),
        np.array([[0.5, -1e-3, 0, 2], [0, 0, 7, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.float32),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 1:1", r"label '2'; expected -1 or 1"),
        ("one 1:1", r"label 'one'; expected -1 or 1"),
        ("nan 1:1", r"label 'nan'; expected -1 or 1"),
        ("", r"found ''; expected LABEL INDEX:VALUE"),
        ("1 1", r"found '1 1'; expected LABEL"),
        ("1 1:2:3", r"expected LABEL INDEX:VALUE"),
        ("1  1:2", r"with single blanks"),
        ("1 1:2 # a comment", r"expected LABEL"),
        ("1 0:2", r"indices are not ascending from 1 to at most 4"),
        ("1 5:2", r"indices are not ascending from 1 to at most 4"),
        ("1 2:2 1:2", r"indices are not ascending"),
        ("1 2:2 2:2", r"indices are not ascending"),
        ("1 nan:2", r"indices are not ascending"),
        ("1 1.5:2", r"an index is not a whole number"),
        ("1 1:x", r"an index or a value is not a number"),
        ("1 1:0x10", r"an index or a value is not a number"),
        ("1 1:inf", r"feature 1 is not finite"),
        ("1 1:2 2:1e39", r"feature 2 is not finite as float32"),
        ("1 1:1 3:nan", r"feature 3 is not finite"),
        ("1 " + "1:1" + "0" * 400, r"longer than 200 bytes, the bound for 4 features"),
    ],
)
def test_malformed_libsvm_line_is_rejected_with_its_number(load: Load, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows"
    path.write_text(f"1 1:1\n{line}\n")
    with pytest.raises(ValueError, match=rf"rows, line 2: .*{message}"):
        list(load("tasks.libsvm").read_lines(path, 4))


@pytest.mark.parametrize(("ending", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("damage", ["incomplete", "other bytes"])
def test_damaged_compressed_file_is_rejected_without_a_traceback(
    load: Load,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ending: str,
    compress: Callable[[bytes], bytes],
    damage: str,
) -> None:
    content = compress(b"1 1:0.5\n" * 100)
    (tmp_path / f"rows{ending}").write_bytes(content[:-5] if damage == "incomplete" else b"no archive" + content)
    arguments = ["convert", str(tmp_path / f"rows{ending}"), str(tmp_path / "train"), "--features", "2"]
    assert load("make_data").main(arguments) == 2
    assert "the compressed file is damaged or incomplete" in capsys.readouterr().err


def test_file_that_ends_inside_a_line_is_rejected(load: Load, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("1 1:0.5\n1 1:0.2")  # the copy of 1 1:0.25 3:1
    with pytest.raises(ValueError, match=r"rows, line 2: the file ends inside this line. Is the copy complete"):
        list(load("tasks.libsvm").read_lines(tmp_path / "rows", 4))


def test_endless_line_is_rejected_before_it_is_in_memory(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of zeros, none of it on the disk
    with pytest.raises(ValueError, match="line 1: longer than 200 bytes"):
        list(load("tasks.libsvm").read_lines(path, 4))


def test_converted_file_has_the_rows_of_the_text_also_if_it_is_compressed(load: Load, tmp_path: Path) -> None:
    libsvm = load("tasks.libsvm")
    text = "".join(f"{1 if row % 3 else -1} 1:{row} 3:{row / 8}\n" for row in range(20))
    (tmp_path / "rows.bz2").write_bytes(bz2.compress(text.encode()))
    assert libsvm.convert(tmp_path / "rows.bz2", tmp_path / "matrix", 3) == 20
    matrix = libsvm.Matrix(tmp_path / "matrix")
    assert len(matrix) == 20
    np.testing.assert_array_equal(matrix.features, [[row, 0, row / 8] for row in range(20)])
    np.testing.assert_array_equal(matrix.labels, [1 if row % 3 else -1 for row in range(20)])
    with pytest.raises(FileExistsError, match="remove it to convert"):
        libsvm.convert(tmp_path / "rows.bz2", tmp_path / "matrix", 3)


@pytest.mark.parametrize(("text", "message"), [("1 1:1\n1 9:1\n", "line 2"), ("", "is empty")])
def test_conversion_that_fails_leaves_nothing(load: Load, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows").write_text(text)
    with pytest.raises(ValueError, match=message):
        load("tasks.libsvm").convert(tmp_path / "rows", tmp_path / "matrix", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format 'other', shape"),
        ({"num_samples": 3}, r"features.f32 has 24 bytes; expected 36"),
        ({"num_samples": 0}, r"expected 'mlbench-matrix-1' and at least \(1, 1\)"),
        ({"num_features": 1.5}, "expected 'mlbench-matrix-1'"),
        ({"num_features": None}, "expected 'mlbench-matrix-1'"),
    ],
)
def test_damaged_matrix_is_rejected(load: Load, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    libsvm = load("tasks.libsvm")
    (tmp_path / "rows").write_text("1 1:1\n-1 2:1\n")
    libsvm.convert(tmp_path / "rows", tmp_path / "matrix", 3)
    header = tmp_path / "matrix" / "matrix.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        libsvm.Matrix(tmp_path / "matrix")
    header.write_text("[]")
    with pytest.raises(ValueError, match="is no header of a converted matrix"):
        libsvm.Matrix(tmp_path / "matrix")
    header.unlink()
    with pytest.raises(FileNotFoundError, match="convert the LIBSVM file with make_data.py"):
        libsvm.Matrix(tmp_path / "matrix")


def test_labels_of_a_damaged_matrix_are_rejected(load: Load, tmp_path: Path) -> None:
    libsvm = load("tasks.libsvm")
    (tmp_path / "rows").write_text("1 1:1\n-1 2:1\n")
    libsvm.convert(tmp_path / "rows", tmp_path / "matrix", 3)
    (tmp_path / "matrix" / "labels.i8").write_bytes(b"\x01\x00")
    with pytest.raises(ValueError, match=r"labels\.i8, sample 1: label 0; expected -1 or 1. Convert the data again"):
        libsvm.Matrix(tmp_path / "matrix")


def test_stand_in_for_cifar_is_in_the_published_format_and_named(load: Load, tmp_path: Path) -> None:
    standin, cifar = load("tasks.standin"), load("tasks.cifar")
    folder = tmp_path / "images"
    standin.make_cifar(folder, num_train=100, num_test=20, seed=3)
    assert (folder / "data_batch_5.bin").stat().st_size == 20 * 3073
    assert (folder / "batches.meta.txt").read_text().split()[:2] == ["airplane", "automobile"]
    labels = [cifar.open_split(folder, "train")[index][1] for index in range(100)]
    assert np.bincount(labels).tolist() == [10] * 10
    origin = standin.origin_of(folder, "CIFAR-10", (100, 20))
    assert origin.name == "stand-in for CIFAR-10 (train 100, test 20, seed 3)"
    with pytest.raises(ValueError, match="is for CIFAR-10; expected a stand-in for epsilon"):
        standin.origin_of(folder, "epsilon", (100, 20, 2000))
    other = tmp_path / "again"
    standin.make_cifar(other, num_train=100, num_test=20, seed=3)
    assert (other / "test_batch.bin").read_bytes() == (folder / "test_batch.bin").read_bytes()
    assert (other / "data_batch_1.bin").read_bytes() != (folder / "data_batch_2.bin").read_bytes()


def test_stand_in_for_epsilon_is_in_the_published_format_and_named(load: Load, tmp_path: Path) -> None:
    standin, rows = load("tasks.standin"), load("tasks.rows")
    folder = tmp_path / "rows"
    standin.once(folder, lambda draft: standin.make_epsilon(draft, num_train=30, num_test=10, num_features=50))
    standin.once(folder, lambda draft: pytest.fail("the folder exists"))
    (first, *_) = (folder / "epsilon_normalized").read_text().splitlines()
    assert first.split()[0] in {"1", "-1"}
    assert [pair.partition(":")[0] for pair in first.split()[1:]] == [str(index) for index in range(1, 51)]
    found = rows.RowDataset(str(folder), "train")
    assert (len(found), len(rows.RowDataset(str(folder), "test"))) == (30, 10)
    assert found[0][0].norm().item() == pytest.approx(1, abs=1e-5)  # rows have length 1, as epsilon's have
    assert {found[index][1].item() for index in range(30)} == {1.0, -1.0}
    expected = "stand-in for epsilon (train 30, test 10, features 50, seed 1)"
    assert standin.origin_of(folder, "epsilon", (30, 10, 50)).name == expected


@pytest.mark.parametrize(
    ("published", "sizes", "name", "is_stand_in"),
    [
        ("CIFAR-10", (50_000, 10_000), "CIFAR-10", False),
        ("CIFAR-10", (49_999, 10_000), "unknown, 49999 training and 10000 test samples", None),
        ("epsilon", (400_000, 100_000, 2000), "epsilon", False),
        ("epsilon", (400_000, 99_999, 2000), "unknown, 400000 training and 99999 test samples", None),
        ("epsilon", (400_000, 100_000, 1999), "unknown, 400000 training and 100000 test samples", None),
    ],
)
def test_data_without_a_marker_is_the_published_data_only_if_it_is_complete(
    load: Load, tmp_path: Path, published: str, sizes: tuple[int, ...], name: str, is_stand_in: bool | None
) -> None:
    origin = load("tasks.standin").origin_of(tmp_path, published, sizes)
    assert (origin.name, origin.is_stand_in) == (name, is_stand_in)


def test_converted_stand_in_data_stays_stand_in_data(load: Load, tmp_path: Path) -> None:
    standin, libsvm = load("tasks.standin"), load("tasks.libsvm")
    standin.make_epsilon(tmp_path / "made", num_train=3, num_test=2, num_features=4)
    libsvm.convert(tmp_path / "made" / "epsilon_normalized", tmp_path / "converted" / "train", 4)
    origin = standin.origin_of(tmp_path / "converted", "epsilon", (400_000, 100_000, 2000))
    assert origin.is_stand_in is True


def test_stand_in_of_other_sizes_in_the_folder_is_refused(load: Load, tmp_path: Path) -> None:
    standin = load("tasks.standin")
    standin.make_epsilon(tmp_path / "rows", num_train=3, num_test=2, num_features=4)
    standin.require_stand_in(tmp_path / "rows", num_train=3, num_test=2)
    with pytest.raises(
        ValueError, match=r"asks for 6 training and 2 test samples, but .* has stand-in data with 3 and"
    ):
        standin.require_stand_in(tmp_path / "rows", num_train=6, num_test=2)
    with pytest.raises(ValueError, match="has no stand-in data; name another folder"):
        standin.require_stand_in(tmp_path, num_train=6, num_test=2)


def test_stand_in_of_unequal_classes_is_rejected_and_leaves_nothing(load: Load, tmp_path: Path) -> None:
    standin = load("tasks.standin")
    with pytest.raises(ValueError, match="num_train is 120; expected a multiple of 50 from 50 to 50000"):
        standin.make_cifar(tmp_path / "images", num_train=120, num_test=20)
    assert list(tmp_path.iterdir()) == []


def test_make_data_converts_and_reports_errors(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = load("make_data").main
    (tmp_path / "rows").write_text("1 1:1\n")
    arguments = ["convert", str(tmp_path / "rows"), str(tmp_path / "train"), "--features", "2"]
    assert main(arguments) == 0
    assert "1 samples" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "error: " in capsys.readouterr().err
