"""Trains on nothing with MultiWorkerMirroredStrategy, whose steps need every rank, and writes the batches."""

from __future__ import annotations

import argparse
import json
import os
import sys
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

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}


@hetero.dataset(collate_fn=hetero.collate_arrays)
def tf_numbers(num_samples: int) -> Numbers:
    """Return the data set."""
    return Numbers(num_samples)


def main() -> None:
    """Take one epoch and write what came."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--fail-rank", type=int, default=-1)
    args = parser.parse_args()
    sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))  # Keras would import them: half its time
    rank = int(os.environ["RANK"])
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow's
    data = hetero.tf.from_dataset(tf_numbers(args.num_samples), batch_size=4, shuffle=True, seed=17)
    with strategy.scope():
        total = tf.Variable(float(rank), aggregation=tf.VariableAggregation.SUM)  # begins everywhere as rank 0's

    @tf.function
    def train_step(batch: Any) -> None:
        def of_replica(batch: Any) -> None:
            total.assign_add(tf.cast(tf.reduce_sum(batch["index"]), tf.float32))

        strategy.run(of_replica, args=(batch,))

    indices: list[int] = []
    batches = strategy.distribute_datasets_from_function(lambda _: data)
    for num_steps, batch in enumerate(data.measure(batches), start=1):
        train_step(batch)
        for part in strategy.experimental_local_results(batch["index"]):
            indices += part.numpy().tolist()
        print(f"rank {rank} step {num_steps}", flush=True)
        if rank == args.fail_rank and num_steps == 3:
            raise RuntimeError("training fails on purpose")
    result = {
        "indices": indices,
        "total": float(strategy.experimental_local_results(total)[0].numpy()),
        "state": data.state_dict(),
        "has_torch": "torch" in sys.modules,
    }
    (args.output / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
