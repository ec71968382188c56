"""The training script of bench_plan_runs.py: steps that wait, and samples of any size that may wait for storage."""

from __future__ import annotations

import argparse
import itertools
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader


class Waiting(Dataset[np.ndarray]):
    """Samples that use next to no CPU. Each waits as it would for storage."""

    def __init__(self, num_samples: int, num_bytes: int, wait_s: float, sigma: float) -> None:
        self.num_samples = num_samples
        self.num_bytes = num_bytes
        random = np.random.default_rng(0)
        # The mean of this lognormal distribution is `wait_s` for each sigma.
        self.waits_s = wait_s * np.exp(sigma * random.standard_normal(num_samples) - sigma**2 / 2)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        if self.waits_s[index] > 0:
            time.sleep(float(self.waits_s[index]))
        return np.full(self.num_bytes, index % 251, dtype=np.uint8)


@hetero.dataset
def waiting(num_samples: int, num_bytes: int, wait_s: float, sigma: float) -> Dataset[np.ndarray]:
    """Return the data set."""
    return Waiting(num_samples, num_bytes, wait_s, sigma)


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description="Take steps that load and wait.", allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    parser.add_argument("--steps", type=int, required=True, help="steps to take")
    parser.add_argument("--steps-per-epoch", type=int, required=True, help="steps until the loader starts anew")
    parser.add_argument("--sample-bytes", type=int, default=16, help="bytes of a sample (%(default)s)")
    parser.add_argument("--wait-s", type=float, default=0.0, help="mean wait of a sample (%(default)s)")
    parser.add_argument("--sigma", type=float, default=0.0, help="spread of its logarithm (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes without endpoints (%(default)s)")
    args = parser.parse_args()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    num_samples = args.steps_per_epoch * args.batch_size * num_ranks
    loader: DataLoader[torch.Tensor] = DataLoader(
        waiting(num_samples, args.sample_bytes, args.wait_s, args.sigma),
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        shuffle=True,
    )
    num_steps = 0
    while num_steps < args.steps:
        # An epoch that ends with the script would have its last batches faster, because nothing is fetched after them.
        for _ in itertools.islice(loader, args.steps - num_steps):
            num_steps += 1
            if num_ranks > 1:
                dist.barrier()
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
