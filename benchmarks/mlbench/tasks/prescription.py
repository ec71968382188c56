"""The numbers of MLBench's closed division: the algorithms of tasks 1a and 2a, and the published times and prices.

Where the document is ambiguous, the docstring says which reading is used. README.md gives the reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "IMAGES",
    "LINEAR",
    "PRICES",
    "PUBLISHED_TIMES_S",
    "ImageTask",
    "LinearTask",
    "Prices",
    "PublishedTime",
    "image_rate",
    "linear_alpha",
    "linear_rate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTask:
    """Task 1a: a residual network on CIFAR-10."""

    batch_size: int = 32
    """Samples per worker and step."""
    max_epochs: int = 164
    rate_per_sample: float = 0.1 / 256
    """Learning rate divided by the samples of a worker's batch."""
    warmup_epochs: int = 5
    """The rate grows from that of one worker to that of all workers during these epochs."""
    decay_epochs: tuple[int, ...] = (82, 109)
    """The rate is multiplied by `decay` after each of these numbers of epochs."""
    decay: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0001
    """Applied to all parameters, also those of batch normalisation."""
    target_accuracy: float = 0.8
    """Share of the test set, for the time to accuracy."""
    duration_s: float = 7200.0
    """Seconds of training, for the accuracy after time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTask:
    """Task 2a: logistic regression on epsilon."""

    batch_size: int = 100
    """Samples per worker and step."""
    alphas: tuple[tuple[int, float], ...] = (
        *((1, 200.0), (2, 400.0), (4, 600.0), (8, 700.0)),
        *((16, 800.0), (32, 800.0), (64, 800.0)),
    )
    """Pairs of a number of workers and its alpha. The learning rate of step t is alpha / sqrt(t)."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    """The optimizer's. The regularisation is part of the loss instead."""
    regularization: float = 0.0000025
    """L2 rate: the loss has the term ``regularization / 2 * |w|^2``."""
    target_accuracy: float = 0.89
    """Share of the test set, for the time to accuracy."""
    target_loss: float = 0.2828
    """The published target of the loss on epsilon."""
    duration_s: float = 7200.0
    """Seconds of training, for the accuracy after time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Published prices in USD per hour."""

    host_usd: float = 0.19
    """One n1-standard-4."""
    preemptible_host_usd: float = 0.04
    """One preemptible n1-standard-4."""
    preemptible_gpu_usd: float = 0.135
    """One preemptible K80, without the host that it is attached to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTime:
    """A published time of one worker to 80 % accuracy in task 1a."""

    name: str
    time_s: float
    num_gpus: int
    """K80s of the one host."""


IMAGES = ImageTask()
LINEAR = LinearTask()
PRICES = Prices()
PUBLISHED_TIMES_S = (
    PublishedTime(name="PyTorch, CPU", time_s=5895.0, num_gpus=0),
    PublishedTime(name="PyTorch, GPU", time_s=407.0, num_gpus=1),
    PublishedTime(name="TensorFlow, GPU", time_s=1191.0, num_gpus=1),
)


def image_rate(step: int, *, steps_per_epoch: int, num_workers: int, task: ImageTask = IMAGES) -> float:
    """Return the learning rate of one step of task 1a, for gradients that are averaged over the workers.

    With rate per sample r, batch b and k workers, the rate is r b (1 + (k - 1) s / W) at step s of the W warm-up steps,
    then r b k. It is divided by ten once 82 epochs are complete, and again once 109 are.

    Args:
        step: Steps completed before this one, >= 0.
        steps_per_epoch: Steps of an epoch, >= 1.
        num_workers: Workers, >= 1.
        task: The numbers of the task.

    Raises:
        ValueError: If an argument is out of range.
    """
    if step < 0 or steps_per_epoch < 1 or num_workers < 1:
        raise ValueError(
            f"step {step}, {steps_per_epoch} steps per epoch and {num_workers} workers; expected at least 0, 1 and 1"
        )
    own = task.rate_per_sample * task.batch_size
    grown = min(1.0, step / (task.warmup_epochs * steps_per_epoch))
    decays = sum(step // steps_per_epoch >= epoch for epoch in task.decay_epochs)
    return own * (1 + (num_workers - 1) * grown) * task.decay**decays


def linear_alpha(num_workers: int, *, task: LinearTask = LINEAR) -> float:
    """Return the prescribed alpha of task 2a for a number of workers.

    Raises:
        ValueError: If the document has no alpha for that number.
    """
    alphas = dict(task.alphas)
    if num_workers not in alphas:
        raise ValueError(
            f"task 2a prescribes no alpha for {num_workers} workers; expected one of {', '.join(map(str, alphas))}. "
            "In the open division, pass --alpha"
        )
    return alphas[num_workers]


def linear_rate(step: int, *, alpha: float) -> float:
    """Return the learning rate of one step of task 2a.

    Args:
        step: Number of the step, from 1. Every mini-batch is a step.
        alpha: Factor, for example `linear_alpha`'s.

    Raises:
        ValueError: If ``step`` is less than 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}; expected 1 or more")
    return alpha / math.sqrt(step)
