"""Trains on nothing, without torch and TensorFlow, whose imports cost more than such a job. Otherwise as chain.py.

It can go on until a file exists: a test then does what it has to while the job trains, however long that takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hetero
from hetero.loaders.pipeline import LoaderOptions
from hetero.tf.feed import Feed

TOLD = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "SAGEMAKER_BASE_DIR")
"""Variables whose values a rank writes down."""


class Augmented:
    """Samples that depend on their index and on both global generators."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"index": np.array(index), "image": np.random.rand(8) + random.random() + index}


@hetero.dataset(collate_fn=hetero.collate_arrays)
def arrays(num_samples: int) -> Augmented:
    """Return the data set."""
    return Augmented(num_samples)


def batches_of(feed: Feed) -> Iterator[Any]:
    """Yield the batches of one pass. The job may end at each."""
    batches = feed.produce()
    while (batch := feed.deliver(lambda: next(batches, None), 1)) is not None:
        yield batch


def next_link(link: bytes, batch: dict[str, np.ndarray]) -> bytes:
    """Return the digest of a chain and its next batch."""
    return hashlib.sha256(link + batch["index"].tobytes() + batch["image"].tobytes()).digest()


def make_feed(args: argparse.Namespace) -> Feed:
    """Return the loader."""
    options = LoaderOptions(batch_size=8, shuffle=True, seed=17)
    return Feed(arrays(args.num_samples), options, num_workers=1, prefetch_factor=None)


def train(args: argparse.Namespace, rank: int) -> None:
    """Run the epochs. At the end, and if the job is asked to stop, write what this rank was fed."""
    feed = make_feed(args)
    link, step, epoch = bytes(32), 0, 0
    checkpoint = args.output / f"checkpoint-{rank}.json"
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        link, step, epoch = bytes.fromhex(saved["link"]), saved["step"], saved["epoch"]
        feed.load_state(saved["feed"])
        print(f"rank {rank} goes on after step {step}", flush=True)

    def write() -> None:
        result = {"chain": link.hex(), "steps": step, "told": {name: os.environ.get(name) for name in TOLD}}
        (args.output / f"rank-{rank}.json").write_text(json.dumps(result))

    hetero.on_stop(write)
    while epoch < args.epochs or (args.until is not None and not args.until.exists()):
        for batch in batches_of(feed):
            step += 1
            link = next_link(link, batch)
            print(f"rank {rank} epoch {epoch} step {step}", flush=True)
            time.sleep(args.step_s)
            if step % args.save_every == 0:
                partial = checkpoint.with_suffix(".partial")
                state = {"feed": feed.state().to_dict(), "link": link.hex(), "step": step, "epoch": epoch}
                partial.write_text(json.dumps(state))
                partial.rename(checkpoint)
            if rank == 0 and step == args.fail_at:
                raise RuntimeError("training fails on purpose")
        epoch += 1
    write()


def chains_alone(args: argparse.Namespace) -> list[str]:
    """Return the chain of each rank after its number of steps, without a job."""
    chains = []
    for rank, num_steps in enumerate(args.alone):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(args.alone))}
        feed, link, step = make_feed(args), bytes(32), 0
        while step < num_steps:
            for batch in batches_of(feed):
                link, step = next_link(link, batch), step + 1
                if step == num_steps:
                    break
        chains.append(link.hex())
    return chains


def main() -> None:
    """Train, or compute what the ranks of such a job are fed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=101)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--until", type=Path, help="run more epochs until this file exists")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--save-every", type=int, default=1_000_000, help="write a checkpoint after so many steps")
    parser.add_argument("--alone", type=int, nargs="+", help="number of steps of each rank: write their chains only")
    args = parser.parse_args()
    if args.alone:
        (args.output / "alone.json").write_text(json.dumps(chains_alone(args)))
    else:
        train(args, int(os.environ.get("RANK", "0")))


if __name__ == "__main__":
    main()
