"""Trains nothing: its accuracy grows with its epochs, and it fails with more than a number of samples."""

from __future__ import annotations

import argparse
import os

import hetero

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--samples", type=int)
parser.add_argument("--most", type=int)
options = parser.parse_args()

rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if options.samples > options.most:
    raise ValueError(f"{options.samples} samples are too many")
for epoch in range(1, options.epochs + 1):
    hetero.log_metric("accuracy", 1 - 0.5**epoch - 0.01 * num_ranks - 0.1 * rank, step=epoch)
    print(f"loss: {0.5**epoch}", flush=True)
