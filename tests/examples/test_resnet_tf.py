from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
)

Script = Callable[[str], ModuleType]
FLAGS = ["--image-size=32", "--batch-size=12", "--rounds=1", "--log-every=1"]


@pytest.fixture(scope="session")
def resnet_tf(script: Script) -> ModuleType:
    return script("resnet_tf/train.py")


def test_photos_have_the_class_of_their_folder(resnet_tf: ModuleType, photos_folder: Path) -> None:
    paths, labels = resnet_tf.list_photos(str(photos_folder), "train")
    assert len(paths) == 108
    classes = sorted(path.name for path in (photos_folder / "train").iterdir())
    assert [classes[label] for label in labels] == [Path(path).parent.name for path in paths]
    assert len(classes) == resnet_tf.NUM_CLASSES


def test_photos_that_are_missing_are_said_how_to_make(resnet_tf: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make_data\.py"):
        resnet_tf.list_photos(str(tmp_path), "train")


def test_augmented_photo_has_its_size_and_varies(resnet_tf: ModuleType, photos_folder: Path) -> None:
    path = resnet_tf.list_photos(str(photos_folder), "train")[0][0]
    images = [resnet_tf.augmented(path, 24, 2).numpy() for _ in range(4)]
    assert {(image.shape, str(image.dtype)) for image in images} == {((24, 24, 3), "uint8")}
    assert len({image.tobytes() for image in images}) > 1
    assert resnet_tf.plain(path, 24).numpy().tobytes() == resnet_tf.plain(path, 24).numpy().tobytes()


def test_blur_keeps_what_is_even(resnet_tf: ModuleType) -> None:
    even: Any = resnet_tf.tf.fill([9, 9, 3], 0.5)
    blurred = resnet_tf.blurred(even).numpy()
    assert blurred.shape == (9, 9, 3)
    assert blurred[2:7, 2:7] == pytest.approx(0.5)


def test_trained_alone_learns_and_validates_every_photo(
    resnet_tf: ModuleType, photos_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resnet_tf.main([*FLAGS, f"--data={photos_folder}", "--epochs=2"])
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 18
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert re.search(r"^step 18 validation accuracy [01]\.\d{3}$", output, re.MULTILINE)
