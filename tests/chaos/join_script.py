"""Trains on nothing until a file appears, and says what it was fed: a SHA-256 chain over every batch, in order.

Data hosts import it without torch, which is quicker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import hetero

LOG = os.environ.get("HETERO_JOINS_LOG", "")
"""Beginning of the files where processes list the samples that they have computed. Empty: nothing is listed."""


class Noise:
    """Samples that depend on their index and on the global generator."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> np.ndarray:
        if LOG:  # the process that computes a sample writes it down
            with Path(f"{LOG}-{os.getpid()}").open("a") as file:
                file.write(f"{index}\n")
        time.sleep(0.001)
        return np.random.rand(256) + index


@hetero.dataset
def noise() -> Noise:
    """Return the data set."""
    return Noise()


def steps(enough: Path, limit: int) -> Iterator[int]:
    """Yield until the file is there, or so often."""
    step = 0
    while step < limit and not enough.exists():
        step += 1
        yield step


def main() -> None:
    """Train, and write the chain and the number of steps."""
    from hetero.torch import DataLoader

    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--enough", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--step-s", type=float, default=0.02)
    args = parser.parse_args()
    loader = iter(DataLoader(noise(), batch_size=8, shuffle=True, seed=5))
    chain, number = hashlib.sha256(), 0
    for number in steps(args.enough, args.limit):
        chain.update(next(loader).numpy().tobytes())
        time.sleep(args.step_s)
        if number % 100 == 0:
            print(f"step {number}", flush=True)
    args.output.write_text(json.dumps({"chain": chain.hexdigest(), "steps": number}))


if __name__ == "__main__":
    main()
