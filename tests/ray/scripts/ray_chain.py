"""Trains on nothing in Ray Train, but says exactly what it was fed: a SHA-256 chain per rank over every batch."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hetero
from hetero.torch import DataLoader


class Augmented(torch.utils.data.Dataset):
    """Samples that depend on their index and on all three global generators."""

    def __init__(self, num_samples: int, sleep_s: float) -> None:
        self.num_samples = num_samples
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, object]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        return {"index": index, "image": noise + index}


@hetero.dataset
def augmented(num_samples: int, sleep_s: float = 0.0) -> torch.utils.data.Dataset:
    """Return the data set."""
    return Augmented(num_samples, sleep_s)


def chain(
    config: dict[str, Any], *, rank: int, world_size: int, state: Any = None, report: Any = None
) -> dict[str, Any]:
    """Run the epochs and return what the rank was fed.

    Args:
        config: Settings of the run.
        rank: This rank.
        world_size: Number of ranks.
        state: State of the loader to begin with.
        report: Called after each step with the loader and the number of steps of this process.
    """
    spec = augmented(config["num_samples"], config.get("sleep_s", 0.0))
    loader = DataLoader(spec, batch_size=8, shuffle=True, seed=17, shard=(rank, world_size))
    if state is not None:
        loader.load_state_dict(state)
    digest, batches, longest_s = hashlib.sha256(), [], 0.0
    for _ in range(config.get("epochs", 1)):
        asked_s = time.monotonic()
        for batch in loader:
            if batches:  # the first batch waits until endpoints have started
                longest_s = max(longest_s, time.monotonic() - asked_s)
            content = repr(batch["index"].tolist()).encode() + batch["image"].numpy().tobytes()
            digest.update(content)
            batches.append(hashlib.sha256(content).hexdigest())
            if report is not None:
                report(loader, len(batches))
            is_over = len(batches) == config.get("stop_at") or (Path(config.get("folder", "/")) / "stop").exists()
            if is_over:
                break
            time.sleep(config.get("step_s", 0.0))
            asked_s = time.monotonic()
    return {"chain": digest.hexdigest(), "batches": batches, "longest_wait_s": longest_s}


def train(config: dict[str, Any]) -> None:
    """Run as ``train_loop_per_worker``. Write what the rank was fed into a file."""
    import ray.train

    config["service"].connect()
    context = ray.train.get_context()
    rank = context.get_world_rank()
    folder = Path(config["folder"])
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
        partial = folder / f"step-{rank}.partial"
        partial.write_text(str(step))
        partial.rename(folder / f"step-{rank}")

    result = chain(config, rank=rank, world_size=context.get_world_size(), state=state, report=report)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
