"""Trains, logs everything it can, and looks for the token where a script might write it by accident."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import time
from pathlib import Path

import torch

import hetero
from hetero.torch import DataLoader

logging.basicConfig()
logging.getLogger().setLevel(logging.DEBUG)


class Noisy(torch.utils.data.Dataset):
    """Fails at the given place, and writes all that its process knows."""

    def __init__(self, raise_at: int, kill_at: int) -> None:
        self.raise_at, self.kill_at = raise_at, kill_at

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        if index == self.raise_at:
            raise ValueError(f"broken on purpose with {sorted(os.environ.items())} and {sys.argv}")
        if index == self.kill_at:
            faulthandler.dump_traceback(all_threads=True)
            os.abort()
        time.sleep(0.002)
        return index


@hetero.dataset(fingerprint="noisy")
def noisy(raise_at: int, kill_at: int) -> torch.utils.data.Dataset:
    """Return the data set."""
    print("environment of an endpoint", sorted(os.environ.items()), flush=True)
    return Noisy(raise_at, kill_at)


def loader_of(raise_at: int, kill_at: int) -> DataLoader:
    """Return a loader of a data set that fails there."""
    shard = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return DataLoader(noisy(raise_at, kill_at), batch_size=4, shuffle=False, seed=1, shard=shard)


def main() -> None:
    """Meet the failures of the data set, then run one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--hold", type=Path, required=True, help="wait after step 5 until there is this file")
    args = parser.parse_args()
    print("environment of a rank", sorted(os.environ.items()), sys.argv, flush=True)
    for faults in ((args.raise_at, -1), (-1, args.kill_at)):
        if max(faults) >= 0:
            try:
                list(loader_of(*faults))
            except hetero.DatasetError:
                logging.getLogger("train").exception("the data set failed")
    loader = loader_of(-1, -1)
    print("the loader's state", loader.state_dict(), repr(loader), flush=True)
    for step, _ in enumerate(loader):
        print(f"step {step}", flush=True)
        while step == 5 and not args.hold.exists():
            time.sleep(0.02)
        if step == args.fail_at:
            from hetero.control.rank import session

            current = session.current()
            print("what a rank holds", current, vars(current), flush=True)
            raise RuntimeError(f"training fails on purpose with {current} {vars(current)} {sorted(os.environ.items())}")


if __name__ == "__main__":
    main()
