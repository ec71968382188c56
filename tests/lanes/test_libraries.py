"""Iterables of Hugging Face, WebDataset and Energon: each one keeps its guarantee, or is refused with the reason."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import HeteroError

pytest.importorskip("torch")

from hetero.torch import DataLoader

# Both libraries leave the closing of files to the garbage collector, if an iterator is not read to its end.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_SHARDS, SHARD_SAMPLES = 8, 100
NUM_SAMPLES = NUM_SHARDS * SHARD_SAMPLES
Make = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same samples as lines of JSON and as archives."""
    path = tmp_path_factory.mktemp("shards")
    for shard in range(NUM_SHARDS):
        rows = [json.dumps({"id": shard * SHARD_SAMPLES + number}) for number in range(SHARD_SAMPLES)]
        (path / f"{shard}.jsonl").write_text("\n".join(rows))
        with tarfile.open(path / f"{shard}.tar", "w") as archive:
            for number, row in enumerate(rows):
                member = tarfile.TarInfo(f"{shard * SHARD_SAMPLES + number:06d}.json")
                member.size = len(row)
                archive.addfile(member, io.BytesIO(row.encode()))
    return path


def streamed(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    files = [str(folder / f"{shard}.jsonl") for shard in range(NUM_SHARDS)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "x"))


def mapped(folder: Path) -> Any:
    return streamed(folder).map(lambda row: {"id": row["id"] + 1}).filter(lambda row: row["id"] % 3)


def shuffled(folder: Path) -> Any:
    return streamed(folder).shuffle(seed=1, buffer_size=50)


def in_memory(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"id": list(range(NUM_SAMPLES))}).to_iterable_dataset(num_shards=NUM_SHARDS)


def of_one_rank(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets.distributed")
    return datasets.split_dataset_by_node(streamed(folder), rank=0, world_size=2)


def archives(folder: Path, **options: Any) -> Any:
    wds = pytest.importorskip("webdataset")
    files = [str(folder / f"{shard}.tar") for shard in range(NUM_SHARDS)]
    return wds.WebDataset(files, **{"shardshuffle": False, **options})


def plain_archives(folder: Path) -> Any:
    return archives(folder).decode()


def shuffled_archives(folder: Path) -> Any:
    wds = pytest.importorskip("webdataset")
    made = archives(folder, shardshuffle=8, nodesplitter=wds.split_by_node, detshuffle=True, seed=3)
    return made.shuffle(100, rng=random).decode()


def unseeded_archives(folder: Path) -> Any:
    return archives(folder).shuffle(100).decode()


class EnergonLane:
    """The part of a lane as docs/streams.md shows it. It yields the rows as the other libraries do."""

    def __init__(self, rows: Any) -> None:
        energon = pytest.importorskip("megatron.energon")
        self.loader = energon.get_savable_loader(rows, gc_collect_every_n_steps=0, watchdog_timeout_seconds=None)
        self.loader.pin_memory = False

    def __iter__(self) -> Iterator[Any]:
        return (sample.text for sample in self.loader)

    def state_dict(self) -> dict[str, Any]:
        return {"energon": pickle.dumps(self.loader.save_state_rank())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.restore_state_rank(pickle.loads(state["energon"]))


class Energon:
    def __init__(self, path: Path, repeat: bool) -> None:
        self.path, self.repeat = path, repeat

    def hetero_split(self, lane: int, num_lanes: int) -> EnergonLane:
        energon = pytest.importorskip("megatron.energon")
        seed = random.getrandbits(32)
        config = energon.WorkerConfig(rank=lane, world_size=num_lanes, num_workers=0, seed_offset=seed)
        sizes = {"batch_size": None, "shuffle_buffer_size": 50, "max_samples_per_sequence": 20}
        return EnergonLane(energon.get_train_dataset(self.path, worker_config=config, repeat=self.repeat, **sizes))


def energon(folder: Path, repeat: bool = False) -> Energon:
    pytest.importorskip("megatron.energon")
    if not (folder / ".nv-meta").exists():
        words = ["--non-interactive", "--split-parts", "train:.*", "--sample-type", "TextSample", "--num-workers", "1"]
        command = [Path(sys.executable).with_name("energon"), "prepare", *words, "--field-map", '{"text": "json"}']
        subprocess.run([*command, folder], check=True, stdin=subprocess.DEVNULL)
    return Energon(folder, repeat)


def loader(source: Any, guarantee: str, **options: Any) -> Any:
    return DataLoader(
        source, guarantee=guarantee, **{"batch_size": 10, "lanes": 4, "end": "rest", "collate_fn": list, **options}
    )


def ids(batches: Any) -> list[list[int]]:
    return [[sample["json"]["id"] if "json" in sample else sample["id"] for sample in batch] for batch in batches]


KEPT: list[tuple[str, Make]] = [
    ("exactly-once", streamed),
    ("exactly-once", mapped),
    ("exactly-once", in_memory),
    ("replay", streamed),
    ("replay", shuffled),
    ("replay", plain_archives),
    ("replay", shuffled_archives),
    ("replay", energon),
]


@pytest.mark.parametrize(("guarantee", "make"), KEPT)
def test_each_sample_comes_once_also_from_workers(guarantee: str, make: Make, folder: Path) -> None:
    batches = ids(loader(make(folder), guarantee))
    expected = [number for number in range(1, NUM_SAMPLES + 1) if number % 3] if make is mapped else range(NUM_SAMPLES)
    assert sorted(itertools.chain(*batches)) == list(expected)
    assert ids(loader(make(folder), guarantee, num_workers=2)) == batches


@pytest.mark.parametrize("end", ["stop", "rest"])
@pytest.mark.parametrize(("guarantee", "make"), KEPT)
def test_pass_resumes_twice(guarantee: str, make: Make, end: str, folder: Path) -> None:
    expected = ids(loader(make(folder), guarantee, end=end))
    found: list[list[int]] = []
    state = None
    for num_batches, num_workers in ((15, 0), (10, 2), (None, 0)):
        made = loader(make(folder), guarantee, end=end, num_workers=num_workers)
        if state is not None:
            made.load_state_dict(json.loads(state))
        found += ids(itertools.islice(made, num_batches))
        state = json.dumps(made.state_dict())
    assert found == expected


def test_energon_resumes_from_its_states_in_any_round(folder: Path) -> None:
    expected = ids(itertools.islice(loader(energon(folder, repeat=True), "exactly-once", end="wrap"), 200))
    found: list[list[int]] = []
    state = None
    for num_batches, num_workers in ((15, 0), (62, 2), (123, 0)):  # 80 batches are a round
        made = loader(energon(folder, repeat=True), "exactly-once", end="wrap", num_workers=num_workers)
        if state is not None:
            made.load_state_dict(json.loads(state))
        found += ids(itertools.islice(made, num_batches))
        state = json.dumps(made.state_dict())
    assert found == expected


def test_energon_state_that_repeats_samples_is_refused(folder: Path) -> None:
    # With repeat=False, its state begins the data anew while the buffer of the shuffle becomes empty.
    made = loader(energon(folder), "exactly-once")
    list(itertools.islice(made, 78))
    resumed = loader(energon(folder), "exactly-once")
    resumed.load_state_dict(made.state_dict())
    with pytest.raises(HeteroError, match="gave other samples before sample"):
        list(resumed)


@pytest.mark.parametrize("make", [shuffled, shuffled_archives, energon])
def test_epochs_have_other_orders(make: Make, folder: Path) -> None:
    made = loader(make(folder), "replay")
    first, second = ids(made), ids(made)
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    made = loader(make(folder), "replay")
    made.set_epoch(1)
    assert ids(made) == second


@pytest.mark.parametrize(
    ("guarantee", "make", "lanes", "message"),
    [
        ("exactly-once", shuffled, 4, "lane 0 (gives other samples|cannot go on) after its state at sample 10 is"),
        ("exactly-once", plain_archives, 4, "needs a state, and the iterator of WebDataset has no state_dict"),
        ("replay", unseeded_archives, 4, "lane 0 gave other samples before sample .* cannot be replayed"),
        ("exactly-once", of_one_rank, 4, "a part for one rank already \\(split_dataset_by_node\\)"),
        ("exactly-once", streamed, 16, "lane 8 of 16 yields nothing: .*fewer shards than there are lanes"),
        ("replay", plain_archives, 16, "lane 8 of 16 yields nothing|No samples found"),
    ],
)
def test_source_that_does_not_keep_the_guarantee_is_refused(
    guarantee: str, make: Make, lanes: int, message: str, folder: Path
) -> None:
    with pytest.raises(HeteroError, match=message):
        list(loader(make(folder), guarantee, lanes=lanes, end="stop"))


@pytest.mark.parametrize("make", [streamed, plain_archives])
def test_rank_in_the_environment_does_not_divide_a_lane_again(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sorted(itertools.chain(*ids(loader(make(folder), "replay")))) == list(range(NUM_SAMPLES))
