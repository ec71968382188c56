"""Iterables as users write them: with a state, without one, and with the usual faults."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data


def worker() -> tuple[int, int]:
    """Return the worker's number, and the number of workers."""
    info = torch.utils.data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Every n-th number, with noise of the global generators."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        own, count = worker()
        for number in range(own, self.num_samples, count):
            yield number, np.random.rand() + random.random()


class StatefulNumbers(Numbers):
    """The same with a state."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        own, count = worker()
        numbers = range(own, self.num_samples, count)
        for place in range(self.num_read, len(numbers)):
            self.num_read = place + 1
            yield numbers[place], np.random.rand() + random.random()
        self.num_read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]


class Buffered(StatefulNumbers):
    """Shuffles in a buffer that its state does not hold."""

    def __iter__(self) -> Iterator[Any]:
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 16:
                yield buffer.pop(random.randrange(16))
        yield from buffer


class Undivided(torch.utils.data.IterableDataset[Any]):
    """Gives all samples to each worker."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        yield from ((number, 0.0) for number in range(self.num_samples))


class Unrepeatable(Numbers):
    """Draws from a generator that is seeded by the time."""

    def __iter__(self) -> Iterator[Any]:
        chance = random.Random()
        own, count = worker()
        for number in range(own, self.num_samples, count):
            yield number, chance.random()


class Positioned:
    """Begins at any position, and divides itself. No class of torch."""

    def __init__(self, num_samples: int, lane: int = 0, num_lanes: int = 1) -> None:
        self.numbers = range(lane, num_samples, num_lanes)
        self.num_samples = num_samples

    def hetero_split(self, lane: int, num_lanes: int) -> Positioned:
        return Positioned(self.num_samples, lane, num_lanes)

    def hetero_iterate(self, position: int) -> Iterator[Any]:
        yield from ((number, random.random()) for number in self.numbers[position:])

    def __iter__(self) -> Iterator[Any]:
        return self.hetero_iterate(0)


class Drifting(Numbers):
    """Gives other samples in each process, and the same ones in one process."""

    def __iter__(self) -> Iterator[Any]:
        own, count = worker()
        for number in range(own, self.num_samples, count):
            yield number, os.getpid()
