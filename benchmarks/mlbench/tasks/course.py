"""The course of a training: its clock, its evaluations, and the metrics that it logs.

The clock counts training only. It stands while the model is evaluated. Rank 0's clock is that of the training.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetero
from tasks.exchange import StepTimes
from tasks.standin import Origin

__all__ = ["Course", "evaluate", "log_skip", "log_start", "next_evaluation", "timed_waits"]

_T = TypeVar("_T")


class Course:
    """Decides when the training ends, and logs the metrics that README.md lists.

    Args:
        target_accuracy: Share of the test set. The time to accuracy ends there.
        duration_s: The training ends after this time in seconds.
        stops_at_target: Whether the training ends at the target.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        target_accuracy: float,
        duration_s: float,
        stops_at_target: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target_accuracy = target_accuracy
        self._duration_s = duration_s
        self._stops_at_target = stops_at_target
        self._clock = clock
        self._train_s = 0.0
        self._started_s: float | None = None
        self._losses: list[Tensor] = []
        self.has_reached = False
        """Whether an evaluation has found the target accuracy."""
        self.has_diverged = False
        """Whether an evaluation has found a loss that is not finite. The training is over then."""

    @property
    def train_s(self) -> float:
        """Seconds of training so far."""
        return self._train_s + (0.0 if self._started_s is None else self._clock() - self._started_s)

    def start(self) -> None:
        """Start the clock."""
        self._started_s = self._clock()

    def pause(self) -> None:
        """Stop the clock until the next `start`."""
        self._train_s, self._started_s = self.train_s, None

    def took_step(self, loss: Tensor) -> None:
        """Keep the loss of a mini-batch."""
        self._losses.append(loss.detach())

    def is_over(self) -> bool:
        """Return whether the training is over: by rank 0's clock, at the target, or because it has diverged.

        All ranks must call this at the same step.
        """
        used_s = torch.tensor([self.train_s], dtype=torch.float64)
        dist.broadcast(used_s, src=0)
        has_stopped = self.has_diverged or (self.has_reached and self._stops_at_target)
        return has_stopped or bool(used_s.item() >= self._duration_s)

    def evaluated(self, step: int, accuracy: float, test_loss: float) -> None:
        """Log an evaluation after ``step`` steps. The clock must stand. All ranks must call this.

        Values that are not finite are not logged. Instead the run is marked as diverged.
        """
        has_steps = bool(self._losses)  # since the last evaluation
        found = torch.stack(self._losses).mean() if self._losses else torch.tensor(float("nan"))
        self._losses.clear()
        total = found.detach().double().cpu()
        dist.all_reduce(total)
        loss = total.item() / dist.get_world_size()
        self.has_diverged |= not math.isfinite(test_loss) or (has_steps and not math.isfinite(loss))
        is_first = accuracy >= self._target_accuracy and not self.has_reached
        self.has_reached |= is_first
        if dist.get_rank() != 0:
            return
        values = {"train_s": self.train_s, "accuracy": accuracy, "test_loss": test_loss, "loss": loss}
        if is_first:
            values |= {"time_to_accuracy_s": self.train_s, "steps_to_accuracy": step}
            values["target_accuracy"] = self._target_accuracy
        if self.has_diverged:
            values["diverged"] = 1.0
            print(f"diverged at step {step}: loss {loss}, test loss {test_loss}", flush=True)
        for name, value in values.items():
            if math.isfinite(value):
                hetero.log_metric(name, value, step)

    def ended(self, step: int, times: StepTimes) -> None:
        """Log what every worker measured over its steps."""
        values = {
            "communication_s": times.communication_s,
            "computation_s": times.computation_s,
            "data_wait_s": times.data_wait_s,
            "communication_ratio": times.ratio,
        }
        for name, value in values.items():
            hetero.log_metric(name, value, step)


def next_evaluation(step: int, interval: int) -> int:
    """Return the step of the evaluation that follows the one at ``step``.

    The first 200 are ``interval`` steps apart. After that the distance is about 1 % of the steps so far, because a
    rank's log keeps every value only of a run with at most about 2,000 evaluations, and because each takes seconds.

    Args:
        step: Step of this evaluation, a multiple of ``interval``. 0 before the first one.
        interval: Steps between the first evaluations, >= 1.
    """
    return step + interval * max(1, step // (100 * interval))


def log_start(origin: Origin) -> None:
    """Log what the results of a run depend on besides its options: its data, and the load of its machine."""
    if origin.is_stand_in is not None:
        hetero.log_metric("stand_in", float(origin.is_stand_in))
    hetero.log_metric("training_samples", origin.num_samples)
    hetero.log_metric("load_average", os.getloadavg()[0])


def log_skip(reason: str) -> None:
    """Log that this run was skipped, and no other metrics."""
    print(f"skipped: {reason}", flush=True)
    hetero.log_metric("skipped", 1.0)


def timed_waits(batches: Iterable[_T], times: StepTimes) -> Iterator[_T]:
    """Yield the batches, and add the time that each one took to arrive to ``times``."""
    iterator = iter(batches)
    while True:
        started_s = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        times.data_wait_s += time.perf_counter() - started_s
        yield batch


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    judge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[float, float]:
    """Return accuracy and mean loss over the batches of all workers. Every worker evaluates rank 0's model.

    Buffers, such as running statistics of a normalisation, become those of rank 0 on all workers. Parameters are equal
    anyway. The model is in training mode afterwards.

    Args:
        model: The model.
        batches: This worker's part of the test set, each sample on one worker only.
        device: Device of the model.
        judge: Returns, for outputs and labels, the number of correct predictions and the sum of the losses.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    with torch.inference_mode():
        for inputs, labels in batches:
            correct, loss = judge(model(inputs.to(device)), labels.to(device))
            sums += torch.stack([correct.double(), loss.double(), torch.tensor(float(len(labels)), device=device)])
    model.train()
    dist.all_reduce(sums)
    num_correct, loss_sum, count = sums.tolist()
    return num_correct / count, loss_sum / count
