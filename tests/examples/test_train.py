from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import Dataset

Script = Callable[[str], ModuleType]
Capture = pytest.CaptureFixture[str]

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTOS = ["--image-size=32", "--batch-size=12", "--num-workers=0", "--log-every=1"]
MNIST = ["--rounds=1", "--batch-size=16", "--steps-per-epoch=12", "--num-workers=0", "--log-every=1"]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", output)]


def assert_learnt(output: str, num_steps: int) -> None:
    values = losses(output)
    assert len(values) == num_steps
    assert all(math.isfinite(value) for value in values)
    third = num_steps // 3
    assert sum(values[-third:]) < sum(values[:third])


@pytest.mark.parametrize("name", ["train", "train_homogeneous"])
def test_photos_trained_alone_learns(script: Script, photos_folder: Path, capsys: Capture, name: str) -> None:
    script(f"photos/{name}.py").main([*PHOTOS, f"--data={photos_folder}", "--epochs=2"])
    output = capsys.readouterr().out
    assert_learnt(output, num_steps=18)
    assert len(re.findall(r"^epoch \d step \d+ validation accuracy [01]\.\d{3}$", output, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", ["train", "train_homogeneous"])
def test_mnist_trained_alone_learns(script: Script, capsys: Capture, name: str) -> None:
    script(f"mnist/{name}.py").main([*MNIST, "--epochs=2"])
    assert_learnt(capsys.readouterr().out, num_steps=24)


@pytest.mark.parametrize("name", ["train", "train_homogeneous"])
def test_photos_checkpoint_after_an_epoch_is_resumed(
    script: Script, photos_folder: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    main = script(f"photos/{name}.py").main
    flags = [*PHOTOS, f"--data={photos_folder}", f"--checkpoint={tmp_path / 'checkpoint.pt'}"]
    main([*flags, "--epochs=1"])
    capsys.readouterr()
    main([*flags, "--epochs=2"])
    steps = [int(step) for step in re.findall(r"epoch 1 step (\d+) loss", capsys.readouterr().out)]
    assert steps == list(range(10, 19))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_photos_stopped_within_an_epoch_resumes_at_the_next_step(
    script: Script, photos_folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = script("photos/train.py")
    flags = [*PHOTOS, f"--data={photos_folder}", "--epochs=1"]
    train.main(flags)
    whole = capsys.readouterr().out

    callbacks: list[Callable[[], object]] = []

    def register(callback: Callable[[], object]) -> Callable[[], object]:
        callbacks.append(callback)
        return callback

    def stop(*_: object) -> float:
        callbacks[0]()
        raise SystemExit(143)

    # What a job that is asked to stop does after its third step.
    flags.append(f"--checkpoint={tmp_path / 'checkpoint.pt'}")
    with monkeypatch.context() as patch:
        patch.setattr("hetero.on_stop", register)
        patch.setattr(train, "evaluate", stop)
        with pytest.raises(SystemExit, match="143"):
            train.main([*flags, "--steps-per-epoch=3"])
    torch.distributed.destroy_process_group()
    train.main(flags)

    assert capsys.readouterr().out == whole


@pytest.mark.parametrize("example", ["keras", "mnist", "photos"])
def test_readme_shows_the_difference_of_the_scripts(example: str) -> None:
    folder = EXAMPLES / example
    before, after = ((folder / name).read_text().splitlines() for name in ("train_homogeneous.py", "train.py"))
    difference = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    shown = re.search(r"```diff\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == [line for line in difference if not line.startswith("@@")]


@pytest.mark.parametrize("name", ["train", "train_homogeneous"])
def test_photo_dataset_validation_sample_never_varies(script: Script, photos_folder: Path, name: str) -> None:
    module = script(f"photos/{name}.py")
    dataset: Dataset[tuple[torch.Tensor, int]] = module.PhotoDataset(str(photos_folder), "validation", 24)
    image, label = dataset[3]
    assert image.shape == (3, 24, 24)
    assert image.dtype == torch.uint8
    assert label in range(module.NUM_CLASSES)
    assert torch.equal(image, dataset[3][0])


def test_photo_dataset_train_sample_varies_with_the_global_generator(
    script: Script, photos_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("photos/train_homogeneous.py")
    dataset = module.PhotoDataset(str(photos_folder), "train", 24)

    def draw(seed: int) -> torch.Tensor:
        module.random.seed(seed)
        image: torch.Tensor = dataset[0][0]
        return image

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_photo_dataset_empty_folder_says_how_to_fill_it(script: Script, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make_data\.py"):
        script("photos/train_homogeneous.py").PhotoDataset(str(tmp_path), "train", 24)


def test_photo_dataset_broken_image_is_named(script: Script, tmp_path: Path) -> None:
    image = tmp_path / "train" / "china-0" / "000000.jpg"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"no image")
    dataset = script("photos/train_homogeneous.py").PhotoDataset(str(tmp_path), "train", 24)
    with pytest.raises(ValueError, match=r"000000\.jpg is not an image"):
        dataset[0]


def test_digit_dataset_splits_are_disjoint_and_balanced(script: Script) -> None:
    module = script("mnist/train_homogeneous.py")
    train, validation = (module.DigitDataset(split, 1) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (4500, 500)
    assert all(validation.labels.count(digit) == 50 for digit in range(10))
    image, _ = train[0]
    assert image.shape == (1, 28, 28)
    assert image.dtype == torch.uint8
