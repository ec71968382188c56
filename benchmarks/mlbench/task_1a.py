"""MLBench task 1a: a residual network on CIFAR-10, trained by synchronous SGD as the closed division prescribes.

README.md in this folder has the readings of the prescription, the metrics, and the studies that run this script. One
worker, alone, on small stand-in data that it makes::

    python benchmarks/mlbench/task_1a.py --data data/mlbench/images --stand-in 800 200 --epochs 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks.cifar import open_split
from tasks.course import Course, evaluate, log_skip, log_start, timed_waits
from tasks.exchange import Timed, check_agreement, synchronous
from tasks.images import ImageDataset
from tasks.options import add_options, check_options, ends_without_traceback
from tasks.prescription import IMAGES, image_rate
from tasks.residual import DEPTHS, VERSIONS, ResNet
from tasks.standin import make_cifar, once, origin_of, require_stand_in
from tasks.workers import Skipped, joined
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader


@hetero.dataset
def cifar10(folder: str, split: str) -> Dataset[tuple[Tensor, int]]:
    """Build the data set wherever it is needed."""
    return ImageDataset(os.path.expandvars(folder), split)  # $SM_CHANNEL_..., each host's own


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
    """Train one network and log its metrics."""
    folder = Path(os.path.expandvars(args.data))
    with ends_without_traceback():
        if args.stand_in:
            num_train, num_test = args.stand_in
            once(folder, lambda draft: make_cifar(draft, num_train=num_train, num_test=num_test))
            require_stand_in(folder, num_train=num_train, num_test=num_test)
        origin = origin_of(folder, "CIFAR-10", [len(open_split(folder, split)) for split in ("train", "test")])
    torch.manual_seed(args.seed)
    network = ResNet(version=args.version, depth=args.depth).to(device)
    timed = Timed(device)
    model = synchronous(network, timed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.0,  # set at each step
        momentum=IMAGES.momentum,
        nesterov=IMAGES.nesterov,
        weight_decay=IMAGES.weight_decay,
    )
    options: dict[str, Any] = {"batch_size": IMAGES.batch_size, "num_workers": args.num_workers}
    batches: DataLoader[Any] = DataLoader(
        cifar10(args.data, "train"), shuffle=True, seed=args.seed, drop_last=True, **options
    )
    test_batches: DataLoader[Any] = DataLoader(cifar10(args.data, "test"), padding=False, **options)
    steps_per_epoch, num_workers = len(batches), dist.get_world_size()
    if steps_per_epoch == 0:
        raise SystemExit(f"{folder} has fewer training images than one batch of {num_workers} workers")
    if dist.get_rank() == 0:
        print(f"data: {origin.name}; {num_workers} workers, {steps_per_epoch} steps per epoch", flush=True)
        log_start(origin)
    course = Course(
        target_accuracy=args.target_accuracy, duration_s=args.duration_s, stops_at_target=args.stop_at_target
    )
    step = epoch = 0
    while epoch < args.epochs and step < args.max_steps and not course.is_over():
        batches.set_epoch(epoch)
        course.start()
        for images, labels in timed_waits(batches, timed.times):
            rate = image_rate(step, steps_per_epoch=steps_per_epoch, num_workers=num_workers)
            optimizer.param_groups[0]["lr"] = rate
            with timed:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
            course.took_step(loss)
            step += 1
            if step >= args.max_steps:
                break
        course.pause()
        epoch += 1
        course.evaluated(step, *evaluate(network, test_batches, device, judge))
    course.ended(step, timed.times)
    check_agreement(network)
    if args.save is not None and dist.get_rank() == 0:
        torch.save(network.state_dict(), args.save)


def judge(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of correct predictions and the sum of the losses."""
    return (logits.argmax(dim=1) == labels).sum(), functional.cross_entropy(logits, labels, reduction="sum")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="MLBench task 1a.", allow_abbrev=False)
    parser.add_argument("--data", required=True, help="folder with CIFAR-10's binary files (may name a $VARIABLE)")
    parser.add_argument("--version", type=int, choices=VERSIONS, default=1, help="of the network (%(default)s)")
    parser.add_argument("--depth", type=int, choices=DEPTHS, default=20, help="layers of the network (%(default)s)")
    add_options(
        parser,
        max_epochs=IMAGES.max_epochs,
        target_accuracy=IMAGES.target_accuracy,
        duration_s=IMAGES.duration_s,
    )
    args = parser.parse_args(argv)
    check_options(parser, args)
    return args


if __name__ == "__main__":
    main()
