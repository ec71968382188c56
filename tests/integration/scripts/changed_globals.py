"""Trains on a data set that reads a global, which main() changes."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import time
from typing import Any

import torch

import hetero
from hetero.torch import DataLoader

SCALE = 1.0
SIZE = 3

# Innocent ones that the data set's code reads as well.
LOG = logging.getLogger("train")
DEVICE = torch.device("cpu")
STARTED_S = time.time()
PID = os.getpid()
PATTERN = re.compile(r"\d+")
Rows = dict[int, torch.Tensor]
CACHE: Rows = {}
ARGS: argparse.Namespace | None = None  # filled in main(), and read by nothing else


class Scaled(torch.utils.data.Dataset[Any]):
    """Multiplies by a global, or by its argument."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in CACHE:
            CACHE[index] = torch.full((SIZE,), float(index), device=DEVICE)
        LOG.debug("%s %s %s", PATTERN.match("1"), STARTED_S, PID)
        return CACHE[index] * self.factor()

    def factor(self) -> float:
        """Return what samples are multiplied with."""
        return one() if self.scale is None else self.scale


class Constant(Scaled):
    """Reads no global that changes."""

    def factor(self) -> float:
        """Return what samples are multiplied with."""
        assert self.scale is not None
        return self.scale


@functools.lru_cache
def one() -> float:
    """Return the global."""
    return SCALE


@hetero.dataset
def by_global() -> Any:
    """Return the data set that reads the global."""
    return Scaled(None)


@hetero.dataset
def by_argument(scale: float) -> Any:
    """Return the data set that is given the value."""
    return Constant(scale)


def main() -> None:
    """Run two epochs of each data set that the command line names."""
    global ARGS, SCALE
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=("by_argument", "by_global"))
    parser.add_argument("--num-workers", type=int, default=0)
    ARGS = parser.parse_args()
    SCALE = 0.5
    context = "forkserver" if ARGS.num_workers else None
    for name in ARGS.names:
        dataset = by_argument(SCALE) if name == "by_argument" else by_global()
        loader = DataLoader(dataset, batch_size=4, num_workers=ARGS.num_workers, multiprocessing_context=context)
        for _ in range(2):
            total = sum(float(batch.sum()) for batch in loader)
            print(f"{name}: the sum is {total:g}", flush=True)
        print(f"{name} is done", flush=True)


if __name__ == "__main__":
    main()
