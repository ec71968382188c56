"""Trains on nothing in Ray Train, but says exactly what it was fed: a SHA-256 chain per rank over every batch."""

from __future__ import annotations

import hashlib
import json
import random
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


def chain(config: dict[str, Any], *, rank: int, world_size: int, report: Any = None) -> dict[str, Any]:
    """Run the epochs and return what the rank was fed.

    Args:
        config: Settings of the run.
        rank: This rank.
        world_size: Number of ranks.
        report: Called after each step with the loader and the number of the step.
    """
    spec = augmented(config["num_samples"], config.get("sleep_s", 0.0))
    loader = DataLoader(spec, batch_size=8, shuffle=True, seed=17, shard=(rank, world_size))
    if config.get("state") is not None:
        loader.load_state_dict(config["state"])
    digest, indices, step, longest_s = hashlib.sha256(), [], 0, 0.0
    for _ in range(config.get("epochs", 1)):
        asked_s = time.monotonic()
        for batch in loader:
            if step:  # the first batch waits until endpoints have started
                longest_s = max(longest_s, time.monotonic() - asked_s)
            step += 1
            digest.update(batch["image"].numpy().tobytes())
            indices.append(batch["index"].tolist())
            if report is not None:
                report(loader, step)
            time.sleep(config.get("step_s", 0.0))
            asked_s = time.monotonic()
    return {"chain": digest.hexdigest(), "indices": indices, "steps": step, "longest_wait_s": longest_s}


def train(config: dict[str, Any]) -> None:
    """Run as ``train_loop_per_worker``. Write what the rank was fed into a file."""
    import ray.train

    config["service"].connect()
    context = ray.train.get_context()
    rank = context.get_world_rank()
    folder = Path(config["folder"])

    def report(loader: DataLoader[Any], step: int) -> None:
        (folder / f"step-{rank}").write_text(str(step))
        if rank == 0 and step == config.get("save_at"):
            (folder / "state.json").write_text(json.dumps(loader.state_dict()))
        if config.get("fail_once_at") == step and not (folder / "failed").exists() and rank == 0:
            (folder / "failed").touch()
            raise RuntimeError("training fails on purpose")

    result = chain(config, rank=rank, world_size=context.get_world_size(), report=report)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
