"""Trains on samples that cost CPU time, for tests of profiles."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import hetero
from hetero.torch import DataLoader


class Images(torch.utils.data.Dataset):
    """Images of whole numbers as float32. Each takes some CPU time."""

    def __init__(self, num_samples: int, cpu_s: float) -> None:
        self.num_samples = num_samples
        self.cpu_s = cpu_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        begin_s = time.process_time()
        while time.process_time() - begin_s < self.cpu_s:
            pass
        return torch.full((3, 8, 8), float(index % 256)), index % 10


@hetero.dataset
def images(num_samples: int, cpu_s: float) -> Any:
    """Return the data set."""
    return Images(num_samples, cpu_s)


def main() -> None:
    """Train, and write to each batch in place."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=100_000)
    parser.add_argument("--cpu-s", type=float, default=0.004)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--object", action="store_true", help="pass the data set itself")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    hetero.on_stop(lambda: (args.output / "checkpoint").write_text("saved"))
    dataset = Images(args.num_samples, args.cpu_s) if args.object else images(args.num_samples, args.cpu_s)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, seed=3, num_workers=args.num_workers)
    validation = DataLoader(images(32, 0.0), batch_size=16, name="validation")
    steps = 0
    for pixels, labels in loader:
        assert pixels.min() >= 0
        assert labels.max() < 10
        pixels.sub_(300)  # a batch that is repeated must not have this
        labels.add_(10)
        time.sleep(args.step_s)
        if world_size > 1:
            torch.distributed.all_reduce(torch.ones(1))
        steps += 1
        if steps % 40 == 0:
            assert sum(len(batch[0]) for batch in validation) == 32 // world_size
        if steps == args.max_steps:
            break
    (args.output / "finished").write_text(str(steps))


if __name__ == "__main__":
    main()
