"""Options that both tasks have, and the checks of their values."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

__all__ = ["add_options", "check_options", "ends_without_traceback"]

_LOWEST = {"epochs": 1, "max_steps": 1, "evaluate_every": 1, "threads": 1, "num_workers": 0, "seed": 0}


def add_options(parser: argparse.ArgumentParser, *, max_epochs: int, target_accuracy: float, duration_s: float) -> None:
    """Add the options that both tasks have, with the task's numbers as defaults."""
    parser.add_argument(
        "--stand-in",
        nargs=2,
        type=int,
        metavar=("TRAIN", "TEST"),
        help="make the folder with so many generated samples if it does not exist",
    )
    parser.add_argument("--epochs", type=int, default=max_epochs, help="at most (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=10**9, help="end after so many steps")
    parser.add_argument("--target-accuracy", type=float, default=target_accuracy, help="share (%(default)s)")
    parser.add_argument("--duration-s", type=float, default=duration_s, help="of the training (%(default)s)")
    parser.add_argument("--stop-at-target", action="store_true", help="end at the target accuracy")
    parser.add_argument("--network-mbit", type=float, default=0.0, help="of each worker's interface; 0 for no limit")
    parser.add_argument("--threads", type=int, default=1, help="of a worker's computation (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes per worker (%(default)s)")
    parser.add_argument("--save", type=Path, help="file for the parameters")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (%(default)s)")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message if a value is out of range."""
    for name, lowest in _LOWEST.items():
        found = getattr(args, name, None)
        if found is not None and found < lowest:
            parser.error(f"--{name.replace('_', '-')} is {found}, expected at least {lowest}")
    if not 0 < args.target_accuracy <= 1:
        parser.error(f"--target-accuracy is {args.target_accuracy}, expected a share above 0, at most 1")
    if not args.duration_s > 0:
        parser.error(f"--duration-s is {args.duration_s}, expected more than 0")
    if not 0 <= args.network_mbit < math.inf:
        parser.error(f"--network-mbit is {args.network_mbit}, expected at least 0")


@contextlib.contextmanager
def ends_without_traceback() -> Iterator[None]:
    """End the program with the message of an error in the data or in an option."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
