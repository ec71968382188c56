"""The training script of price_performance.py. It does no work, so steps cost only the emulated time.

Ranks meet once a step, as they would to exchange gradients. The slowest sets the pace.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader


class Blank(Dataset[np.ndarray]):
    """Samples that cost next to nothing: their emulated time is waited out on the endpoint."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(16, index % 251, dtype=np.uint8)


@hetero.dataset
def blank(num_samples: int) -> Dataset[np.ndarray]:
    """Return the data set."""
    return Blank(num_samples)


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description="Take steps that only load.", allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    parser.add_argument("--steps", type=int, required=True, help="steps to take")
    args = parser.parse_args()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    loader: DataLoader[torch.Tensor] = DataLoader(
        blank(args.steps * args.batch_size * num_ranks), batch_size=args.batch_size, shuffle=True
    )
    for _ in loader:
        if num_ranks > 1:
            dist.barrier()
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
