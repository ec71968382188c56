"""The training script of bench_baseline.py: heavy imports, then short passes over the data, with either loader.

torchrun --nproc-per-node 1 scripts/train_passes.py --loader torch
hetero launch scripts/train_passes.py --loader hetero
"""

from __future__ import annotations

import argparse
import importlib

import lightning  # noqa: F401 - a heavy import is what this script is about
import numpy as np
import slow_import  # noqa: F401
import torch
import torch.utils.data
from torch import nn

import hetero

NUM_SAMPLES = 512
BATCH_SIZE = 32


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images that cost about a millisecond each."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = np.random.default_rng(index).random((3, 96, 96), dtype=np.float32)
        for _ in range(4):
            pixels = np.sqrt(pixels * pixels + 0.1)
        return torch.from_numpy(pixels), index % 10


@hetero.dataset
def images() -> Images:
    """Return the data set."""
    return Images()


def main() -> None:
    """Train for some passes."""
    parser = argparse.ArgumentParser(description="Train for some passes.", allow_abbrev=False)
    parser.add_argument("--loader", choices=("torch", "hetero"), required=True)
    parser.add_argument("--passes", type=int, default=5, help="over the data (%(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    module = importlib.import_module("torch.utils.data" if args.loader == "torch" else "hetero.torch")
    dataset = Images() if args.loader == "torch" else images()
    loader = module.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.passes):
        for pixels, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
