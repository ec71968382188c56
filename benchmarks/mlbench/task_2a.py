"""MLBench task 2a: logistic regression on epsilon, trained by synchronous SGD as the closed division prescribes.

README.md in this folder has the readings of the prescription, the metrics, and the studies that run this script. One
worker, alone, on small stand-in data that it makes::

    python benchmarks/mlbench/task_2a.py --data data/mlbench/rows --stand-in 2000 500 --epochs 2
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks.course import Course, evaluate, log_skip, log_start, next_evaluation, timed_waits
from tasks.exchange import Timed, check_agreement, synchronous
from tasks.libsvm import Matrix
from tasks.linear import LogisticRegression, regularized_loss
from tasks.options import add_options, check_options, ends_without_traceback
from tasks.prescription import LINEAR, linear_alpha, linear_rate
from tasks.rows import RowDataset
from tasks.standin import make_epsilon, once, origin_of, require_stand_in
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
    with ends_without_traceback():
        if args.stand_in:
            num_train, num_test = args.stand_in
            once(folder, lambda draft: make_epsilon(draft, num_train=num_train, num_test=num_test))
            require_stand_in(folder, num_train=num_train, num_test=num_test)
        rows, test_rows = (Matrix(folder / split) for split in ("train", "test"))
        origin = origin_of(folder, "epsilon", (len(rows), len(test_rows), rows.num_features))
        alpha = linear_alpha(dist.get_world_size()) if args.alpha is None else args.alpha
    network = LogisticRegression(rows.num_features).to(device)
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
    if len(batches) == 0:
        raise SystemExit(f"{folder} has fewer training samples than one batch of {num_workers} workers")
    if dist.get_rank() == 0:
        print(
            f"data: {origin.name}; {num_workers} workers, {len(batches)} steps per epoch, alpha {alpha:g}", flush=True
        )
        log_start(origin)
    course = Course(
        target_accuracy=args.target_accuracy, duration_s=args.duration_s, stops_at_target=args.stop_at_target
    )

    def judge(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # The sum over samples, each with the regularisation, so their mean is the regularised loss.
        correct = ((scores > 0) == (labels > 0)).sum()
        return correct, len(labels) * regularized_loss(scores, labels, network.weights, LINEAR.regularization)

    step = epoch = evaluated_at = 0
    evaluate_at = next_evaluation(0, args.evaluate_every)
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
                is_over = course.is_over() or step >= args.max_steps
                if is_over or step >= evaluate_at:
                    course.evaluated(step, *evaluate(network, test_batches, device, judge))
                    evaluated_at, evaluate_at = step, next_evaluation(step, args.evaluate_every)
                    is_over = is_over or course.is_over()
                if is_over:
                    break
                course.start()
        course.pause()
        epoch += 1
    if step > evaluated_at:  # the steps of the last epoch after its last evaluation
        course.evaluated(step, *evaluate(network, test_batches, device, judge))
    course.ended(step, timed.times)
    check_agreement(network)
    if args.save is not None and dist.get_rank() == 0:
        torch.save(network.state_dict(), args.save)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="MLBench task 2a.", allow_abbrev=False)
    parser.add_argument("--data", required=True, help="folder with converted splits (may name a $VARIABLE)")
    parser.add_argument("--alpha", type=float, help="default: the prescribed one for the number of workers")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS", help="at first (%(default)s)")
    add_options(parser, max_epochs=1000, target_accuracy=LINEAR.target_accuracy, duration_s=LINEAR.duration_s)
    args = parser.parse_args(argv)
    check_options(parser, args)
    if args.alpha is not None and not 0 < args.alpha < math.inf:
        parser.error(f"--alpha is {args.alpha}, expected a finite number above 0")
    return args


if __name__ == "__main__":
    main()
