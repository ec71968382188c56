"""Trains on a data set without and with a cache, and writes a digest of all batches of each."""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hetero
from hetero.torch import DataLoader


class Photos(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.augment(self.load(index))

    def load(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, 256, (16, 16, 3), np.uint8), index

    def augment(self, sample: Any) -> Any:
        pixels, label = sample
        time.sleep(0.02)  # endpoints report their counts every second, and must do so before the end of the job
        begin = random.randrange(8)
        return torch.from_numpy(pixels[begin : begin + 8].copy()), label + torch.rand(1)


@hetero.dataset
def plain() -> Photos:
    return Photos()


@hetero.dataset(cache="20 MB")
def kept() -> Photos:
    return Photos()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for name, dataset in (("plain", plain()), ("kept", kept())):
        digest = hashlib.sha256()
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
        for _ in range(3):
            for pixels, labels in loader:
                digest.update(pixels.numpy().tobytes() + labels.numpy().tobytes())
        (args.output / name).write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
