"""How a source is divided into lanes, and where each part of it begins.

A source with a method ``hetero_split(lane, num_lanes)`` divides itself. Each other source is copied for each lane, and
asks ``torch.utils.data.get_worker_info()``, as in a worker of torch's loader. Hugging Face's and torch's iterable data
sets and WebDataset divide themselves in this way.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hetero.batches.imported import imported
from hetero.errors import ConfigError
from hetero.plans.sources import Shuffled

__all__ = ["Opened", "as_lane", "library_of", "open_part"]

_POSITION = "hetero_iterate"


class Opened:
    """The iterator over the part of a source that one lane reads.

    Args:
        part: The part.
        iterator: The iterator over it.
    """

    def __init__(self, part: Any, iterator: Iterator[Any]) -> None:
        self.part = part
        self._iterator = iterator
        self._num_read = 0
        self._counts = callable(getattr(part, _POSITION, None))

    def __next__(self) -> Any:
        sample = next(self._iterator)
        self._num_read += 1
        return sample

    @property
    def has_state(self) -> bool:
        """Whether `state` returns a state."""
        return self._counts or any(_is_stateful(each) for each in (self._iterator, self.part))

    def state(self) -> Any:
        """Return the state after the samples that were read."""
        if self._counts:
            return self._num_read
        holder: Any = self._iterator if _is_stateful(self._iterator) else self.part
        return holder.state_dict()

    @classmethod
    def begin(cls, part: Any, state: Any | None) -> Opened:
        """Return the iterator from the beginning of a part, or from a state on."""
        if callable(method := getattr(part, _POSITION, None)):
            opened = cls(part, iter(method(state or 0)))
            opened._num_read = state or 0
            return opened
        iterator: Any = iter(part)
        if state is None:
            return cls(part, iterator)
        if _is_stateful(iterator) and iterator is not part:
            iterator.load_state_dict(state)
            return cls(part, iterator)
        # Make the iterator after the state is loaded. Otherwise it would begin at the old position
        # (PrimeIntellect-ai/prime-rl#3332).
        part.load_state_dict(state)
        return cls(part, iter(part))


def open_part(source: Any, lane: int, num_lanes: int, *, seed: int, epoch: int, state: Any | None) -> Opened:
    """Return the iterator of a lane. Call it within `as_lane`.

    Raises:
        ConfigError: If the source cannot be copied.
    """
    if callable(method := getattr(source, "hetero_split", None)):
        part = method(lane, num_lanes)
    else:
        try:
            # A pipeline may hold a module, such as ``rng=random`` in WebDataset's shuffle. It stays the same.
            part = copy.deepcopy(source, {id(module): module for module in tuple(sys.modules.values())})
        except Exception as error:
            raise ConfigError(
                f"a {type(source).__name__} cannot be copied for each lane: {error}\n"
                "  Give it a method hetero_split(self, lane, num_lanes) that returns the part of a lane."
            ) from error
    if isinstance(part, Shuffled):
        part.seed = seed
    if callable(method := getattr(part, "set_epoch", None)):
        method(epoch)
    return Opened.begin(part, state)


@contextmanager
def as_lane(source: Any, lane: int, num_lanes: int, seed: int) -> Iterator[None]:
    """Return a context for the source's code: it is the worker of a lane, and of no rank.

    Without this, a source that also divides by rank would deliver only a part of each lane, and only on trainers.
    """
    # WebDataset reads the rank in these variables. If one of them is missing, it asks the process group.
    ranks = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    torch_data = imported("torch.utils.data")
    module: Any = None if torch_data is None else torch_data._utils.worker
    before = None if module is None else module._worker_info
    try:
        _set_environment({"RANK": "0", "WORLD_SIZE": "1"})
        if module is not None:
            divides_itself = callable(getattr(source, "hetero_split", None))
            module._worker_info = (
                None
                if divides_itself
                else module.WorkerInfo(id=lane, num_workers=num_lanes, seed=seed + lane, dataset=source)
            )
        yield
    finally:
        _set_environment(ranks)
        if module is not None:
            module._worker_info = before


def _set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables, or remove those whose value is None. Write only what differs.

    Other threads, such as those of gRPC, may read the environment in C, which is not safe during a write.
    """
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def library_of(source: Any) -> str:
    """Return the library of a source and its version. Empty for a class of the script, or of hetero.

    States and orders differ between versions: the order of one seed differs between datasets 4.8, 5.0 and 5.2.
    """
    name = type(source).__module__.partition(".")[0]
    version = getattr(sys.modules.get(name), "__version__", None)
    return f"{name} {version}" if isinstance(version, str) and name != "hetero" else ""


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
