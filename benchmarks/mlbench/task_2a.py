"""MLBench task 2a: logistic regression on epsilon, trained by synchronous SGD as the closed division prescribes.

README.md in this folder has the readings of the prescription, the metrics, and the studies that run this script. One
worker, alone, on small stand-in data that it makes::

    python benchmarks/mlbench/task_2a.py --data data/mlbench/rows --stand-in 2000 500 --epochs 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks.course import Course, evaluate, log_skip, log_start, timed_waits
from tasks.exchange import Timed, check_agreement, synchronous
from tasks.libsvm import Matrix
from tasks.linear import LogisticRegression, regularized_loss
from tasks.prescription import LINEAR, linear_alpha, linear_rate
from tasks.rows import RowDataset
from tasks.standin import data_name, make_epsilon, once
from tasks.workers import Skipped, joined
from torch import Tensor
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader


@hetero.dataset
def epsilon(folder: str, split: str) -> Dataset[tuple[Tensor, Tensor]]:
    """Build the data set wherever it is needed."""
    return RowDataset(os.path.expandvars(folder), split)  # $SM_CHANNEL_..., each host's own


def main(argv: Sequence[str] | None = None) -> None:
    """Train until the target, the end of the time or the last epoch."""
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    try:
        with joined(network_mbit=args.network_mbit) as device:
            train(args, device)
    except Skipped as reason:
        log_skip(str(reason))


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train one model and log its metrics."""
    folder = Path(os.path.expandvars(args.data))
    if args.stand_in:
        num_train, num_test = args.stand_in
        once(folder, lambda draft: make_epsilon(draft, num_train=num_train, num_test=num_test))
    name = data_name(folder, "epsilon")
    network = LogisticRegression(Matrix(folder / "train").num_features).to(device)
    timed = Timed(device)
    model = synchronous(network, timed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.0,  # set at each step
        momentum=LINEAR.momentum,
        weight_decay=LINEAR.weight_decay,
    )
    options: dict[str, Any] = {"batch_size": LINEAR.batch_size, "num_workers": args.num_workers}
    batches: DataLoader[Any] = DataLoader(
        epsilon(args.data, "train"), shuffle=True, seed=args.seed, drop_last=True, **options
    )
    test_batches: DataLoader[Any] = DataLoader(epsilon(args.data, "test"), padding=False, **options)
    num_workers = dist.get_world_size()
    alpha = linear_alpha(num_workers) if args.alpha is None else args.alpha
    if len(batches) == 0:
        raise SystemExit(f"{folder} has fewer training samples than one batch of {num_workers} workers")
    if dist.get_rank() == 0:
        print(f"data: {name}; {num_workers} workers, {len(batches)} steps per epoch, alpha {alpha:g}", flush=True)
        log_start(is_stand_in=name != "epsilon")
    course = Course(
        target_accuracy=args.target_accuracy, duration_s=args.duration_s, stops_at_target=args.stop_at_target
    )

    def judge(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # The sum over samples, each with the regularisation, so that their mean is the regularised loss.
        correct = ((scores > 0) == (labels > 0)).sum()
        return correct, len(labels) * regularized_loss(scores, labels, network.weights, LINEAR.regularization)

    step = epoch = 0
    is_over = False
    while epoch < args.epochs and not is_over:
        batches.set_epoch(epoch)
        course.start()
        for features, labels in timed_waits(batches, timed.times):
            step += 1
            optimizer.param_groups[0]["lr"] = linear_rate(step, alpha=alpha)
            with timed:
                optimizer.zero_grad()
                scores = model(features.to(device))
                loss = regularized_loss(scores, labels.to(device), network.weights, LINEAR.regularization)
                loss.backward()
                optimizer.step()
            course.took_step(loss)
            if step % args.evaluate_every == 0 or step >= args.max_steps:
                course.pause()
                course.evaluated(step, *evaluate(network, test_batches, device, judge))
                is_over = course.is_over() or step >= args.max_steps
                if is_over:
                    break
                course.start()
        course.pause()
        epoch += 1
    course.ended(step, timed.times)
    check_agreement(network)
    if args.save is not None and dist.get_rank() == 0:
        torch.save(network.state_dict(), args.save)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="MLBench task 2a.", allow_abbrev=False)
    parser.add_argument("--data", required=True, help="folder with converted splits (may name a $VARIABLE)")
    parser.add_argument(
        "--stand-in",
        nargs=2,
        type=int,
        metavar=("TRAIN", "TEST"),
        help="make the folder with so many generated samples if it does not exist",
    )
    parser.add_argument("--alpha", type=float, help="default: the prescribed one for the number of workers")
    parser.add_argument("--epochs", type=int, default=1000, help="at most (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=10**9, help="end after so many steps")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--target-accuracy", type=float, default=LINEAR.target_accuracy, help="(%(default)s)")
    parser.add_argument("--duration-s", type=float, default=LINEAR.duration_s, help="of the training (%(default)s)")
    parser.add_argument("--stop-at-target", action="store_true", help="end at the target accuracy")
    parser.add_argument("--network-mbit", type=float, default=0.0, help="of each worker's interface; 0 for no limit")
    parser.add_argument("--threads", type=int, default=1, help="of a worker's computation (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes per worker (%(default)s)")
    parser.add_argument("--save", type=Path, help="file for the parameters")
    parser.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
