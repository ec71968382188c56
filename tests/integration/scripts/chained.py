"""The parts that the scripts `chain.py` and `torch_chain.py` share: faults of samples, and the training loop."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hetero


def faults_in(text: str) -> dict[str, str]:
    """Return the value of each fault in a list of them."""
    return dict(part.split("=", 1) for part in text.split(",") if part)


def check_sample(faults: dict[str, str], index: int) -> None:
    """Raise or sleep if the faults name this sample."""
    if str(index) in faults.get("poison", "").split(";"):
        raise ValueError(f"sample {index} is poison, says {random.random():.2f}")
    if int(faults.get("raise_at", -1)) == index:
        raise ValueError(f"sample {index} is broken on purpose")
    if "sleep_s" in faults:
        time.sleep(float(faults["sleep_s"]))  # the work of a sample


def host_number() -> int:
    """Return the number of this host, 0 without a job."""
    return int(os.environ.get("SM_CURRENT_HOST", "algo-0").rpartition("-")[2])


def arguments() -> argparse.ArgumentParser:
    """Return a parser with the arguments of both scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=101)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--faults", default="")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--save-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--on-sample-error", default="raise")
    parser.add_argument("--max-skips", type=int, default=100)
    return parser


def train(
    args: argparse.Namespace,
    batches: Iterator[dict[str, Any]],
    *,
    num_per_epoch: int,
    on_step: Callable[[], object] | None = None,
) -> None:
    """Consume the batches of all epochs and write one JSON file per rank."""
    rank = int(os.environ.get("RANK", "0"))
    chain, indices, step = hashlib.sha256(), [], 0

    def save() -> None:
        stopped_at = args.output / f"stopped-{rank}"
        partial = stopped_at.with_suffix(".partial")
        partial.write_text(str(step))
        time.sleep(args.save_s)  # the writing of a large checkpoint
        partial.rename(stopped_at)  # whole or not at all

    hetero.on_stop(save)
    for batch in batches:
        step += 1
        chain.update(repr(sorted(batch)).encode())
        chain.update(np.asarray(batch["image"]).tobytes())
        chain.update(repr(batch["name"]).encode())
        indices.append(batch["index"].tolist())
        print(f"rank {rank} step {step}", flush=True)
        if args.step_s:
            time.sleep(args.step_s)  # the work of a step
        if on_step is not None:
            on_step()
        if rank == args.fail_rank and step == args.fail_at:
            (args.output / "failed-at").write_text(str(time.monotonic()))
            raise RuntimeError("training fails on purpose")
        if rank == args.fail_rank and step == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    result = {"chain": chain.hexdigest(), "indices": indices, "len": num_per_epoch, "steps": step}
    (args.output / f"rank-{rank}.json").write_text(json.dumps(result))
