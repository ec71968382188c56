"""Trains on nothing, and writes a SHA-256 chain over every batch that a rank got.

It needs neither torch nor TensorFlow, because their imports cost more than such a job. `torch_chain.py` does the same
with torch. `arrays.py` is a script of one file, which tests copy.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import chained
import numpy as np

import hetero
from hetero.loaders.pipeline import LoaderOptions
from hetero.tf.feed import Feed


class Augmented:
    """Samples that depend on their index and on both global generators."""

    def __init__(self, num_samples: int, faults: str) -> None:
        self.num_samples = num_samples
        self.faults = chained.faults_in(faults)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, object]:
        chained.check_sample(self.faults, index)
        return {"index": index, "image": np.random.rand(8) + random.random() + index, "name": f"sample {index}"}


def collate(samples: list[dict[str, Any]]) -> dict[str, object]:
    """Stack numbers and arrays, and list names."""
    return {
        "index": np.array([sample["index"] for sample in samples]),
        "image": np.stack([sample["image"] for sample in samples]),
        "name": [sample["name"] for sample in samples],
    }


@hetero.dataset(collate_fn=collate)
def augmented(num_samples: int, faults: str = "") -> Augmented:
    """Return the data set, with the faults of a list like ``raise_at=17,sleep_s=0.1``."""
    if "by_host" in faults:  # a data set that is not the same everywhere
        num_samples += chained.host_number()
    return Augmented(num_samples, faults)


def main() -> None:
    """Run the epochs."""
    args = chained.arguments().parse_args()
    options = LoaderOptions(
        batch_size=args.batch_size,
        shuffle=True,
        seed=17,
        on_sample_error=args.on_sample_error,
        max_skips=args.max_skips,
    )
    feed = Feed(augmented(args.num_samples, args.faults), options, num_workers=1, prefetch_factor=None)

    def batches() -> Iterator[dict[str, Any]]:
        for _ in range(args.epochs):
            produced = feed.produce()
            while (batch := feed.deliver(functools.partial(next, produced, None), 1)) is not None:
                yield batch

    chained.train(args, batches(), num_per_epoch=feed.num_batches())


if __name__ == "__main__":
    main()
