"""Trains on nothing, as a process of MPI: what Horovod does, with the communicator that ``mpirun`` gave this rank."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hetero
from hetero.loaders.pipeline import LoaderOptions
from hetero.tf.feed import Feed


@hetero.dataset(collate_fn=hetero.collate_arrays)
def numbers(num_samples: int) -> list[np.ndarray]:
    """Return numbers."""
    return list(np.arange(num_samples))


def main() -> None:
    """Run two epochs and write one JSON file per rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=42)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gloo", type=int, default=0, help="1: make a process group of torch's, too")
    args = parser.parse_args()
    from mpi4py import MPI  # its import is what makes this process a rank

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    group = []
    if args.gloo:  # scripts that use torch's own meet at the host of rank 0
        import torch

        torch.distributed.init_process_group("gloo")
        torch.distributed.all_reduce(torch.ones(1))
        group = [torch.distributed.get_rank(), torch.distributed.get_world_size()]
        torch.distributed.destroy_process_group()
    options = LoaderOptions(batch_size=2, shuffle=True, seed=17)
    feed = Feed(numbers(args.num_samples), options, num_workers=1, prefetch_factor=None)
    found, step = [], 0
    hetero.on_stop(lambda: (args.output / f"stopped-{rank}").write_text(str(step)))
    for _ in range(args.epochs):
        batches = feed.produce()
        while (batch := feed.deliver(lambda batches=batches: next(batches, None), 1)) is not None:
            step += 1
            found += batch.tolist()
            world.allreduce(1)
            print(f"rank {rank} step {step}", flush=True)
            time.sleep(args.step_s)
            if step == 5 and rank == args.kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
    result = {
        "arguments": sys.argv[1:],
        "host": os.environ["SM_CURRENT_HOST"],
        "mpi": [rank, world.Get_size(), world.allreduce(rank)],
        "numbers": found,
        "ranks": [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "torch": group,
    }
    (args.output / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
