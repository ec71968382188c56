"""The training script of bench_auto_hybrid.py: steps that wait, longer while endpoints work on the same host.

The emulated slowdown is what endpoints do to a step whose own code needs CPUs. With all vCPUs of the host
preprocessing, a step takes ``1 + slowdown`` times as long.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from train_emulated import blank

from hetero.control.rank.session import current
from hetero.torch import DataLoader


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description="Take steps that load and wait.", allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    parser.add_argument("--steps", type=int, required=True, help="steps to take")
    parser.add_argument("--step-s", type=float, required=True, help="seconds of a step without endpoints beside it")
    parser.add_argument("--slowdown", type=float, default=0.0, help="with every vCPU preprocessing (%(default)s)")
    parser.add_argument("--vcpus", type=int, default=8, help="of a trainer host (%(default)s)")
    args = parser.parse_args()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    loader: DataLoader[torch.Tensor] = DataLoader(
        blank(args.steps * args.batch_size * num_ranks), batch_size=args.batch_size, shuffle=True
    )
    session, host = current(), os.environ["SM_CURRENT_HOST"]
    assert session is not None, "this script runs in a job"
    for _ in loader:
        busy = sum(record.num_slots for record in session.directory.records() if record.host == host)
        time.sleep(args.step_s * (1 + args.slowdown * busy / args.vcpus))
        if num_ranks > 1:
            dist.barrier()
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
