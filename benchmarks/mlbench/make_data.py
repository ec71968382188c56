"""Make data for MLBench's tasks: stand-in data in the published formats, or a published LIBSVM file converted.

    python benchmarks/mlbench/make_data.py cifar --train 800 --test 200 data/mlbench/images
    python benchmarks/mlbench/make_data.py epsilon --train 4000 --test 1000 data/mlbench/rows
    python benchmarks/mlbench/make_data.py convert epsilon_normalized.bz2 data/epsilon/train
    python benchmarks/mlbench/make_data.py convert epsilon_normalized.t.bz2 data/epsilon/test

Without sizes, stand-in data has those of the published data sets. That is 12 GB of text for epsilon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.libsvm import EPSILON_FEATURES, convert
from tasks.standin import make_cifar, make_epsilon


def main(argv: Sequence[str] | None = None) -> int:
    """Make one folder, and return the exit status."""
    args = parse_arguments(argv)
    try:
        if args.command == "cifar":
            make_cifar(args.folder, num_train=args.train, num_test=args.test, seed=args.seed)
            print(f"{args.folder}: stand-in for CIFAR-10, {args.train} and {args.test} samples")
        elif args.command == "epsilon":
            make_epsilon(args.folder, num_train=args.train, num_test=args.test, seed=args.seed)
            print(f"{args.folder}: stand-in for epsilon, {args.train} and {args.test} samples")
        else:
            print(f"{args.folder}: {convert(args.file, args.folder, args.features)} samples")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make data for MLBench's tasks.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, published, train, test in (
        ("cifar", "CIFAR-10", 50_000, 10_000),
        ("epsilon", "epsilon", 400_000, 100_000),
    ):
        command = commands.add_parser(name, allow_abbrev=False, help=f"stand-in data in the format of {published}")
        command.add_argument("--train", type=int, default=train, help="training samples (%(default)s)")
        command.add_argument("--test", type=int, default=test, help="test samples (%(default)s)")
        command.add_argument("--seed", type=int, default=1, help="of all draws (%(default)s)")
        command.add_argument("folder", type=Path, help="folder to write")
    command = commands.add_parser("convert", allow_abbrev=False, help="convert one LIBSVM file, also .bz2 or .xz")
    command.add_argument("file", type=Path, help="the LIBSVM file")
    command.add_argument("folder", type=Path, help="folder to write, ending in /train or /test")
    command.add_argument("--features", type=int, default=EPSILON_FEATURES, help="of a sample (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
