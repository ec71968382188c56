"""Synchronous SGD: a model whose gradients are averaged over the workers after each mini-batch, with times.

The prescription has one all-reduce after each mini-batch. DDP gets one bucket for all gradients, so its all-reduce
begins when the whole backward pass is done. Communication and computation then follow each other, and both are measured
where they happen: a communication hook blocks until the average is there, and takes the time.

The time of communication includes waiting for the slowest worker, because an all-reduce ends at the same time for all.
It also includes copying the gradients into and out of the network's buffers. On a GPU, the hook waits for the GPU
before and after the all-reduce, so it measures the all-reduce and not its start.
"""

from __future__ import annotations

import inspect
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

__all__ = ["StepTimes", "Timed", "check_agreement", "synchronous"]

_ONE_BUCKET_MB = sys.maxsize >> 21
"""Above any model."""


@dataclass(slots=True)
class StepTimes:
    """Seconds of one worker, summed over steps."""

    communication_s: float = 0.0
    """All-reduce, with the wait for the slowest worker."""
    computation_s: float = 0.0
    """Forward and backward pass and update."""
    data_wait_s: float = 0.0
    """Time that the worker was blocked in ``next()`` of its loader."""
    num_steps: int = 0

    @property
    def ratio(self) -> float:
        """Communication divided by computation. 0 before the first step."""
        return self.communication_s / self.computation_s if self.computation_s else 0.0


class Timed:
    """Measures steps of a synchronous model. Use it as a context manager around forward pass, backward pass and update.

    Args:
        device: Device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.times = StepTimes()
        self._device = device
        self._started_s = 0.0
        self._in_communication_s = 0.0

    def now_s(self) -> float:
        """Return a monotonic time in seconds, after all work that a GPU was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __enter__(self) -> Timed:
        self._in_communication_s = 0.0
        self._started_s = self.now_s()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            whole_s = self.now_s() - self._started_s
            self.times.communication_s += self._in_communication_s
            self.times.computation_s += whole_s - self._in_communication_s
            self.times.num_steps += 1

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Replace the gradients by their average over the workers. DDP calls this in the thread of the backward pass.

        Each worker divides by the number of workers, then the all-reduce adds. DDP does the same without a hook. One
        worker exchanges nothing, so its time of communication is 0.
        """
        started_s = self.now_s()
        gradients = bucket.buffer()
        if dist.get_world_size() > 1:
            gradients.div_(dist.get_world_size())
            dist.all_reduce(gradients)
            self._in_communication_s += self.now_s() - started_s
        done: Future[Tensor] = Future()
        done.set_result(gradients)
        return done


def synchronous(model: nn.Module, timed: Timed) -> DistributedDataParallel:
    """Return the model with averaged gradients, and with rank 0's parameters and buffers on every worker.

    Buffers are not synchronised at steps: the running statistics of a batch normalisation are those of the worker's own
    samples. They do not affect the training.

    Args:
        model: The model, on its device.
        timed: Measures the steps.
    """
    # torch 2.13 renamed the argument, and warns about its old name.
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    synchronises_buffers = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
    parallel = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB, **{synchronises_buffers: False})
    parallel.register_comm_hook(None, lambda _, bucket: timed.average(bucket))
    return parallel


def check_agreement(model: nn.Module) -> None:
    """Check that all workers have the same parameters, bit for bit, as synchronous SGD must leave them.

    Raises:
        RuntimeError: If a parameter differs from that of rank 0.
    """
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    differing = int((own.view(torch.int32) != first.view(torch.int32)).sum())
    if differing:
        raise RuntimeError(
            f"{differing} of {own.numel()} parameters of rank {dist.get_rank()} differ from those of rank 0; expected "
            "equal ones after each step of synchronous SGD"
        )
