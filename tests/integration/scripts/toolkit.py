"""Says what SageMaker's toolkit tells every process of a job that runs this, and reads what it is given."""

from __future__ import annotations

import argparse
import json
import os
import uuid
from pathlib import Path

import numpy as np

import hetero
from hetero.loaders.pipeline import LoaderOptions
from hetero.tf.feed import Feed


def write_facts(folder: Path, what: str, **facts: object) -> None:
    """Write what this process sees, one file per process."""
    if "SM_CURRENT_INSTANCE_GROUP" in os.environ:  # the toolkit has started this
        from sagemaker_training import environment

        found = environment.Environment()
        names = (
            "current_host",
            "current_instance_group",
            "current_instance_group_hosts",
            "instance_groups",
            "is_hetero",
        )
        facts |= {name: getattr(found, name) for name in (*names, "hosts", "channel_input_dirs", "hyperparameters")}
    (folder / f"{what}-{uuid.uuid4().hex}.json").write_text(json.dumps(facts))


@hetero.dataset(collate_fn=hetero.collate_arrays)
def numbers(folder: str) -> list[np.ndarray]:
    """Return the data set. The process that builds it writes its variables."""
    write_facts(Path(folder), "data")
    return [np.array(index) for index in range(32)]


def main() -> None:
    """Run one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    args, _ = parser.parse_known_args()
    ranks = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size", "local_rank")}
    options = LoaderOptions(batch_size=4, shuffle=True)
    feed = Feed(numbers(str(args.output)), options, num_workers=1, prefetch_factor=None)
    total = sum(int(batch.sum()) for batch in feed.produce())
    piped = []
    if "SM_CHANNEL_STREAM" in os.environ:
        piped = [Path(f"{os.environ['SM_CHANNEL_STREAM']}_{epoch}").read_text() for epoch in (0, 1)]
    write_facts(args.output, "rank", **ranks, total=total, piped=piped)


if __name__ == "__main__":
    main()
