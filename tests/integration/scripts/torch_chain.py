"""Trains on nothing with torch, and writes the same kind of chain as `chain.py`."""

from __future__ import annotations

import functools
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chained
import numpy as np
import torch

import hetero
from hetero.torch import DataLoader


class Augmented(torch.utils.data.Dataset):
    """Samples that depend on their index and on all three global generators."""

    def __init__(self, num_samples: int, faults: str) -> None:
        self.num_samples = num_samples
        self.faults = chained.faults_in(faults)
        self.descriptors: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, object]:
        if index >= len(self):
            raise IndexError("no such sample")
        chained.check_sample(self.faults, index)
        if "descriptors" in self.faults:
            self.descriptors.append(os.open("/dev/null", os.O_RDONLY))  # and never closes it
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        sample: dict[str, object] = {"index": index, "image": noise + index, "name": f"sample {index}"}
        if "unsupported" in self.faults:
            sample["path"] = Path("photo.jpg")
        return sample


def collate(samples: list[dict[str, object]]) -> dict[str, object]:
    """Collate everything but paths, which stay as they are."""
    paths = [sample.pop("path", None) for sample in samples]
    batch: dict[str, object] = torch.utils.data.default_collate(samples)
    return batch if paths == [None] * len(paths) else {**batch, "path": paths}


@hetero.dataset(collate_fn=collate)
def augmented(num_samples: int, faults: str = "") -> torch.utils.data.Dataset:
    """Return the data set, with the faults of a list like ``raise_at=17,sleep_s=0.1``."""
    if "factory" in faults:
        raise RuntimeError("the factory fails on purpose")
    if "descriptors" in faults:  # left for connections, and for the first samples
        limit = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 24
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if "by_host" in faults:  # a data set that is not the same everywhere
        num_samples += chained.host_number()
    if "listing" in faults:
        order = np.roll(range(num_samples), chained.host_number()).tolist()
        return torch.utils.data.Subset(Augmented(num_samples, faults), order)
    return Augmented(num_samples, faults)


def main() -> None:
    """Run the epochs."""
    parser = chained.arguments()
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--gloo", action="store_true")
    args = parser.parse_args()
    on_step = None
    if args.gloo:
        torch.distributed.init_process_group("gloo")
        on_step = functools.partial(torch.distributed.all_reduce, torch.ones(1))
    loader = DataLoader(
        augmented(args.num_samples, args.faults),
        batch_size=args.batch_size,
        shuffle=True,
        seed=17,
        num_workers=args.num_workers,
        on_sample_error=args.on_sample_error,
        max_skips=args.max_skips,
        shard=(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))),  # perhaps without a group
    )

    def batches() -> Iterator[dict[str, Any]]:
        for epoch in range(args.epochs):
            loader.set_epoch(epoch)
            yield from loader

    chained.train(args, batches(), num_per_epoch=len(loader), on_step=on_step)


if __name__ == "__main__":
    main()
