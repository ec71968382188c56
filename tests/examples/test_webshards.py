"""The classifier on tar shards: alone, as a simulated job, and stopped."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.example_runs import ExampleRuns

pytest.importorskip("PIL")

Script = Callable[[str], ModuleType]
OPTIONS = ("--batch-size=16", "--epochs=3", "--log-every=1")
PATTERNS = ("data/webshards/train/*.tar", "data/webshards/validation/*.tar")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ExampleRuns:
    """Return the runs of the example, with its data."""
    runs = ExampleRuns(name="webshards", folder=tmp_path_factory.mktemp("webshards"), options=OPTIONS)
    runs.make_data("--shards=4", "--samples-per-shard=100", patterns=PATTERNS)
    return runs


@pytest.fixture(scope="module")
def lines_alone(runs: ExampleRuns) -> list[str]:
    """Return what the script prints alone, without a stop."""
    return runs.alone()


@pytest.mark.integration
def test_loss_falls(lines_alone: list[str]) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", "\n".join(lines_alone))]
    assert len(losses) == 75
    assert sum(losses[-10:]) < sum(losses[:10])
    assert len(lines_alone) == 78


@pytest.mark.integration
def test_script_alone_resumes_the_simulated_job(runs: ExampleRuns, lines_alone: list[str]) -> None:
    first = runs.simulated_until(10, "--checkpoint=checkpoint.pt")
    assert 10 <= len(first) < 78
    assert first + runs.alone("--checkpoint=checkpoint.pt") == lines_alone


def test_shard_is_the_same_in_every_run_and_other_by_its_path(script: Script, tmp_path: Path) -> None:
    make_data = script("webshards/make_data.py")
    contents = []
    for folder, name in (("a", "000"), ("b", "000"), ("b", "001")):
        path = tmp_path / folder / "train" / f"{name}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_data.write_shard(path, 3)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_decoded_picture_has_planes_of_bytes(script: Script, tmp_path: Path) -> None:
    make_data, train = script("webshards/make_data.py"), script("webshards/train.py")
    path = tmp_path / "000.tar"
    make_data.write_shard(path, 1)
    with tarfile.open(path) as archive:
        row = {member.name.partition(".")[2]: archive.extractfile(member).read() for member in archive}
    image, label = train.decode(row)
    assert image.shape == (3, make_data.SIZE, make_data.SIZE)
    assert str(image.dtype) == "torch.uint8"
    assert label in range(train.NUM_CLASSES)
    assert len(make_data.CLASSES) == train.NUM_CLASSES
