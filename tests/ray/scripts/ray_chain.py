"""Trains on nothing, but writes what it was fed: for each batch of a rank, a line with its SHA-256 and the data wait.

Ray Train runs `train`. Without Ray Train it is a script, whose argument is the configuration as JSON. The script saves
the state of its loader when it is asked to stop, and the next run in the same folder begins with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hetero

if TYPE_CHECKING:  # data hosts run this script too, and the import of torch costs more than what they do
    from hetero.torch import DataLoader


class Augmented:
    """Samples that depend on their index and on both global generators that need no torch."""

    def __init__(self, num_samples: int, sleep_s: float) -> None:
        self.num_samples = num_samples
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return {"index": np.array(index), "image": np.random.rand(8) + random.random() + index}


@hetero.dataset(collate_fn=hetero.collate_arrays)
def augmented(num_samples: int, sleep_s: float = 0.0) -> Augmented:
    """Return the data set."""
    return Augmented(num_samples, sleep_s)


class Part:
    """Every n-th sample, without an index."""

    def __init__(self, samples: Augmented, first: int = 0, stride: int = 1) -> None:
        self.samples, self.first, self.stride = samples, first, stride

    def hetero_split(self, lane: int, num_lanes: int) -> Part:
        return Part(self.samples, lane, num_lanes)

    def hetero_iterate(self, position: int) -> Iterator[dict[str, np.ndarray]]:
        numbers = range(self.first, len(self.samples), self.stride)
        return (self.samples[number] for number in numbers[position:])


@hetero.dataset(collate_fn=hetero.collate_arrays)
def iterated(num_samples: int, sleep_s: float = 0.0) -> Part:
    """Return the iterable."""
    return Part(Augmented(num_samples, sleep_s))


def line_of(batch: dict[str, Any]) -> str:
    """Return the SHA-256 of a batch."""
    content = repr(batch["index"].tolist()).encode() + batch["image"].tobytes()
    return hashlib.sha256(content).hexdigest()


def chain(
    config: dict[str, Any],
    *,
    rank: int,
    world_size: int,
    state: Any = None,
    report: Any = None,
    prepare: Callable[[Any], Any] = iter,
) -> None:
    """Run the epochs.

    Args:
        config: Settings of the run.
        rank: This rank.
        world_size: Number of ranks.
        state: State of the loader to begin with.
        report: Called after each step with the loader and the number of steps of this process.
        prepare: What the loop iterates over, made of the loader.
    """
    from hetero.torch import DataLoader

    arguments = (config["num_samples"], config.get("sleep_s", 0.0))
    if "lanes" in config:
        spec, options = iterated(*arguments), {"lanes": config["lanes"], "guarantee": "exactly-once"}
    else:
        spec, options = augmented(*arguments), {"shuffle": True, "shard": (rank, world_size)}
    loader = DataLoader(spec, batch_size=8, seed=17, **options)
    if state is not None:
        loader.load_state_dict(state)
    folder = Path(config["folder"])
    step = 0
    for _ in range(config.get("epochs", 1)):
        asked_s = time.monotonic()
        for batch in prepare(loader):
            wait_s = time.monotonic() - asked_s if step else 0.0  # the first batch waits until endpoints have started
            step += 1
            with (folder / f"batches-{rank}").open("a") as file:
                file.write(f"{line_of(batch)} {wait_s}\n")
            if report is not None:
                report(loader, step)
            if (folder / "fail").exists():
                raise RuntimeError("training fails on purpose")
            if step == config.get("stop_at") or (folder / "stop").exists():
                return
            time.sleep(config["slow_step_s"] if (folder / "slow").exists() else config.get("step_s", 0.0))
            asked_s = time.monotonic()


def train(config: dict[str, Any]) -> None:
    """Run as ``train_loop_per_worker``."""
    import ray.train.torch

    config["service"].connect()
    context = ray.train.get_context()
    rank = context.get_world_rank()
    checkpoint, state = ray.train.get_checkpoint() or config.get("checkpoint"), None
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            state = json.loads((Path(path) / "loader.json").read_text())

    def report(loader: DataLoader[Any], step: int) -> None:
        if step % config.get("save_every", 10**9) == 0:
            with tempfile.TemporaryDirectory() as path:
                (Path(path) / "loader.json").write_text(json.dumps(loader.state_dict()))
                saved = ray.train.Checkpoint.from_directory(path) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=saved)
        if rank == 0 and step == config.get("fail_at") and state is None:
            raise RuntimeError("training fails on purpose")

    prepare = ray.train.torch.prepare_data_loader  # which takes a batch ahead of the loop
    chain(config, rank=rank, world_size=context.get_world_size(), state=state, report=report, prepare=prepare)


def main(config: dict[str, Any]) -> None:
    """Run as a script."""
    rank = int(os.environ["RANK"])
    saved = Path(config["folder"]) / f"loader-{rank}.json"
    loaders: list[DataLoader[Any]] = []
    hetero.on_stop(lambda: saved.write_text(json.dumps(loaders[-1].state_dict())))
    chain(
        config,
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        state=json.loads(saved.read_text()) if saved.exists() else None,
        report=lambda loader, _: loaders.__setitem__(slice(None), [loader]),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
