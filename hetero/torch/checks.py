"""Checks of a loader's arguments. What is allowed depends on whether batches come from endpoints."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from operator import index as to_integer
from typing import Any

import torch
import torch.utils.data

from hetero.batches.build import is_iterable
from hetero.batches.lanes.source import iterable_problem
from hetero.datasets import get_factory
from hetero.errors import ConfigError
from hetero.loaders.checks import check_seed, check_shuffle
from hetero.loaders.pipeline import is_remote
from hetero.loaders.sampling import Shard
from hetero.spec import DatasetFactory, DatasetSpec

__all__ = [
    "check_functions",
    "check_subject",
    "effective_seed",
    "user_collate_fn",
]

logger = logging.getLogger(__name__)

_warned: set[tuple[str, str]] = set()
"""Data sets and arguments that `check_functions` has logged a warning for."""


def check_subject(subject: Any, guarantee: str | None) -> None:
    """Reject a data set that this loader cannot fetch from.

    Raises:
        ConfigError: If the data set is iterable and a guarantee is missing, or the other way round. If it is a factory
            that was not called, or one of torch's wrappers around a factory's return value. Also if it is an object
            and the job has endpoints, because endpoints serve only registered data sets.
    """
    if isinstance(subject, DatasetFactory):
        raise ConfigError(
            f"the data set is {subject.name!r} itself, a function decorated with @hetero.dataset\n"
            f"  Call it, and pass what it returns: DataLoader({subject.name}(...))."
        )
    if (inner := _spec_inside(subject)) is not None:
        raise ConfigError(
            f"the data set is a {type(subject).__name__} of {inner}, which only names a data set\n"
            "  A factory decorated with @hetero.dataset builds nothing where it is called. Split, join or choose "
            f"samples inside of it:\n  def {inner.name}(..., part): return Subset(..., indices[part])\n"
            "  Or pass the loader a sampler."
        )
    if guarantee is None and is_iterable(subject):
        raise ConfigError(iterable_problem(type(subject).__name__))
    if guarantee is not None and hasattr(type(subject), "__next__"):
        raise ConfigError(
            f"the data set is an iterator ({type(subject).__name__}), which can be read only once\n"
            "  Pass an object whose __iter__ begins anew."
        )
    if guarantee is not None and not isinstance(subject, DatasetSpec) and not is_iterable(subject):
        raise ConfigError(
            f"{type(subject).__name__} has an index, so it needs no guarantee\n"
            "  Leave out guarantee=, lanes= and end=. Each batch is delivered exactly once."
        )
    if is_remote() and not isinstance(subject, DatasetSpec):
        raise ConfigError(
            f"the data set is a {type(subject).__name__} object, which cannot be served by other hosts\n"
            "  This job has endpoints. Build it in a function decorated with @hetero.dataset at the top level of the "
            "script,\n  and pass what calling that function returns. Or run without data hosts."
        )


def _spec_inside(subject: Any) -> DatasetSpec | None:
    """Return the spec inside one of torch's wrappers, or None if the wrapper contains no spec."""
    if isinstance(subject, torch.utils.data.Subset):
        inner = [subject.dataset]
    elif isinstance(subject, torch.utils.data.ConcatDataset | torch.utils.data.StackDataset):
        inner = list(subject.datasets.values() if isinstance(subject.datasets, dict) else subject.datasets)
    else:
        return None
    return next((spec for part in inner if (spec := _spec_of(part)) is not None), None)


def _spec_of(part: Any) -> DatasetSpec | None:
    return part if isinstance(part, DatasetSpec) else _spec_inside(part)


def check_order(order: str, shuffle: object) -> str:
    """Return the order of `LoaderOptions` for two arguments of the loader.

    Raises:
        ConfigError: If ``order`` is not ``"hetero"`` or ``"torch"``, or as in `check_shuffle`.
    """
    if order not in ("hetero", "torch"):
        raise ConfigError(f"order is {order!r:.80}, expected 'hetero' or 'torch'")
    named = check_shuffle(shuffle)
    if named and order == "torch":
        raise ConfigError(f'order="torch" permutes all samples, and shuffle={shuffle!r:.40} does not; pass one of them')
    return named or order


def check_shard(shard: tuple[int, int] | None) -> Shard | None:
    """Return the shard that a script passed.

    Raises:
        ConfigError: If it is not a valid rank and world size.
    """
    if shard is None:
        return None
    try:
        rank, world_size = (to_integer(number) for number in shard)
    except (TypeError, ValueError):
        raise ConfigError(f"shard is {shard!r:.80}, expected (rank, world size)") from None
    return Shard(rank, world_size)


def check_functions(
    subject: Any, collate_fn: Callable[[Any], Any] | None, worker_init_fn: Callable[[int], object] | None
) -> None:
    """Reject functions that were not passed to the decorator, because endpoints do not have them.

    If batches are made locally, such a function works. Then only log a warning that a job with data hosts would reject
    the function.

    Args:
        subject: The data set.
        collate_fn: Return value of `user_collate_fn`.
        worker_init_fn: The user's function.

    Raises:
        ConfigError: If the decorator has a different function, or does not have one.
    """
    if not isinstance(subject, DatasetSpec):
        return
    factory = get_factory(subject.name)
    for argument, passed, registered in (
        ("collate_fn", collate_fn, factory.collate_fn),
        ("worker_init_fn", worker_init_fn, factory.worker_init_fn),
    ):
        if passed is None or (registered is not None and _has_same_code(passed, registered)):
            continue
        function = getattr(passed, "func", passed)  # unwraps a functools.partial
        shown = f"{argument}={getattr(function, '__qualname__', type(function).__name__)}"
        if not is_remote():
            # Log the warning once, because scripts make loaders in loops.
            if (subject.name, argument) in _warned:
                continue
            _warned.add((subject.name, argument))
            logger.warning(
                "%s was passed to the loader of data set %r: a job with data hosts rejects it, because no code travels "
                "to them. Write @hetero.dataset(%s=...) above the factory",
                shown,
                subject.name,
                argument,
            )
            continue
        raise ConfigError(
            f"{shown} was passed to the DataLoader, but data set {subject.name!r} is served by "
            f"endpoints\n  No code travels to them. Write @hetero.dataset({argument}=...) above the factory."
        )


def user_collate_fn(collate_fn: Callable[[Any], Any] | None, *, makes_batches: bool) -> Callable[[Any], Any] | None:
    """Return the user's function, or None for torch's default, which differs between batches and single samples."""
    default = torch.utils.data.default_collate if makes_batches else torch.utils.data.default_convert
    return None if collate_fn is default else collate_fn


def effective_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """Return the seed of the order and of all random draws.

    Raises:
        ConfigError: If ``seed`` is not a signed 64-bit integer, or if a seed other than 0 and a generator were passed.
    """
    if seed is not None:
        check_seed(seed)
    if generator is None:
        return seed or 0
    # A loader without a seed has the seed 0. So the generator decides if ``seed`` is 0.
    if seed:
        raise ConfigError(f"both seed={seed} and generator= were passed; pass one of them")
    # torch's seeds have up to 64 bits, and a seed of hetero is a signed 64-bit integer.
    return generator.initial_seed() % 2**63


def _has_same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Return whether two functions are the same, or come from the same line of a script imported under two names."""
    if one is other:
        return True
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return False
    # In a job, the script is imported under another name than ``__main__``, which makes its functions a second time.
    first, second = one.__code__, other.__code__
    return (first.co_filename, first.co_firstlineno, one.__qualname__) == (
        second.co_filename,
        second.co_firstlineno,
        other.__qualname__,
    )
