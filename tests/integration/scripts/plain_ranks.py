"""Trains on nothing, without a framework. Writes variables and batches of each rank. The first time it fails."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import hetero
from hetero.loaders.pipeline import LoaderOptions
from hetero.tf.feed import Feed


class Numbers:
    """Samples that are their indices."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


@hetero.dataset(collate_fn=hetero.collate_arrays)
def plain_numbers(num_samples: int) -> Numbers:
    """Return the data set."""
    return Numbers(num_samples)


def main() -> None:
    """Take one epoch and write what came. Then, if the group has not been restarted yet, fail in the last rank."""
    output, num_samples = Path(sys.argv[1]), int(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restarts = int(os.environ["HETERO_RESTART_COUNT"])
    options = LoaderOptions(batch_size=4, shuffle=True, seed=17)
    feed = Feed(plain_numbers(num_samples), options, num_workers=1, prefetch_factor=None)
    indices = [int(index) for batch in feed.produce() for index in batch]
    heavy = [name for name in ("tensorflow", "torch") if name in sys.modules]
    result = {"config": json.loads(os.environ["TF_CONFIG"]), "indices": indices, "heavy": heavy}
    partial = output / f"partial-{rank}"
    partial.write_text(json.dumps(result))
    partial.rename(output / f"rank-{rank}-{restarts}.json")
    if restarts == 0:
        while rank < world_size - 1 or not all((output / f"rank-{other}-0.json").exists() for other in range(rank)):
            time.sleep(0.02)
        raise RuntimeError("training fails on purpose")


if __name__ == "__main__":
    main()
