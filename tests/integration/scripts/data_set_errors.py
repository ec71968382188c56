"""Meets the errors of torch_chain.py's data set one after the other, prints each, and ends with the last one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch_chain import augmented

import hetero
from hetero.torch import DataLoader

NUM_SAMPLES = 101


def deliver(faults: str) -> None:
    """Request all batches of the data set with these faults."""
    spec = augmented(Path("100") if faults == "not_json" else NUM_SAMPLES, faults)
    order = {"sampler": [3, NUM_SAMPLES]} if faults == "out_of_range=1" else {"shuffle": True}
    list(DataLoader(spec, batch_size=8, seed=17, shard=(0, 1), **order))


def main() -> None:
    """Request batches with each of the faults that the command line names."""
    *caught, last = sys.argv[1:]
    for faults in caught:
        try:
            deliver(faults)
        except hetero.HeteroError as error:
            print(json.dumps({"faults": faults, "code": error.exit_code, "text": str(error)}), flush=True)
    deliver(last)


if __name__ == "__main__":
    main()
