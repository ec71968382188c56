"""Trains on nothing with TensorFlow, fed by tf.data.service or by our endpoints, and says what came.

The iterator is left running at the end, with batches that TensorFlow has requested ahead. A job must end beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hetero
import hetero.tf


class Numbers:
    """Samples that are their indices."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


@hetero.dataset(collate_fn=hetero.collate_arrays)
def tf_job_numbers(num_samples: int) -> Numbers:
    """Return the data set."""
    return Numbers(num_samples)


def batches_of_service(num_elements: int, batch_size: int, *, is_repeated: bool) -> Iterator[Any]:
    """Yield the batches that tf.data workers make of a range, without end if it is repeated."""
    import tensorflow as tf

    numbers = tf.data.Dataset.range(num_elements).map(lambda number: number * 1)
    # At the end of a pass each worker has a batch that is not full. A repeated range has no such batch.
    numbers = numbers.batch(batch_size, drop_remainder=is_repeated)
    if not is_repeated:
        yield from hetero.tf.distribute(numbers)
        return
    data = hetero.tf.distribute(numbers.repeat())
    yield from data.measure(data.prefetch(4))


def batches_of_endpoints(num_elements: int, batch_size: int, *, is_repeated: bool) -> Iterator[Any]:
    """Yield the batches that endpoints make, without end if the data set is repeated."""
    data = hetero.tf.from_dataset(tf_job_numbers(num_elements), batch_size=batch_size, shuffle=True, seed=17)
    if not is_repeated:
        yield from data
        return
    for batch in data.repeat().prefetch(4):
        yield batch
        data.mark_taken()


def main() -> None:
    """Take the steps and write which elements came."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--service", choices=("grpc", "tf"), required=True)
    parser.add_argument("--num-elements", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--repeated", action="store_true")
    parser.add_argument("--steps", type=int, help="of each rank. Default: to the end of the data")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--fail-rank", type=int, default=-1)
    parser.add_argument("--fail-step", type=int, default=0)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    make = batches_of_service if args.service == "tf" else batches_of_endpoints
    batches = make(args.num_elements, args.batch_size, is_repeated=args.repeated)
    elements: list[int] = []
    for step in itertools.count():
        if rank == args.fail_rank and step == args.fail_step:
            (args.output / f"failing-{rank}").touch()
            raise RuntimeError("training fails on purpose")
        batch = next(batches, None) if step != args.steps else None
        if batch is None:
            break
        elements += batch.numpy().tolist()
        print(f"rank {rank} step {step + 1}", flush=True)
        time.sleep(args.step_s)
    partial = args.output / f"partial-{rank}"
    partial.write_text(json.dumps(elements))
    partial.rename(args.output / f"rank-{rank}.json")


if __name__ == "__main__":
    main()
