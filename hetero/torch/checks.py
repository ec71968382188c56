"""What a loader's arguments mean for where it fetches, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.utils.data

from hetero.batches.request import SAMPLE_ERROR_POLICIES, SampleErrorPolicy
from hetero.dataplane.script import SCRIPT_MODULE
from hetero.datasets import DatasetSpec, get_factory
from hetero.errors import ConfigError
from hetero.torch.local import has_same_code
from hetero.torch.pipeline import is_remote
from hetero.wire.compression import compression_to_proto, load_codec

__all__ = [
    "check_compression",
    "check_functions",
    "check_not_importing",
    "check_sample_errors",
    "check_subject",
    "effective_seed",
    "user_collate_fn",
]


def check_subject(subject: Any) -> None:
    """Refuse what this loader cannot fetch from.

    Raises:
        ConfigError: It is an IterableDataset, or an object where endpoints need a name.
    """
    if isinstance(subject, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"{type(subject).__name__} is an IterableDataset; hetero serves map-style data sets only for now\n"
            "  Give it __getitem__(index) and __len__(), or use torch.utils.data.DataLoader for it."
        )
    if is_remote() and not isinstance(subject, DatasetSpec):
        raise ConfigError(
            f"the data set is a {type(subject).__name__} object, which cannot be served by other hosts\n"
            "  This job has endpoints. Build it in a function decorated with @hetero.dataset at the top level of the "
            "script,\n  and pass what calling that function returns. Or run without data hosts."
        )


def check_not_importing() -> None:
    """Refuse batches to a script that is only being imported: it would train on data hosts and in loader processes.

    Raises:
        ConfigError: It is; names the line.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in (SCRIPT_MODULE, "__mp_main__"):
            raise ConfigError(
                f"line {frame.f_lineno} of {frame.f_code.co_filename} trains while the script is only being imported\n"
                "  Data hosts and loader processes import it for its data sets. "
                'Put the training behind if __name__ == "__main__":'
            )


def check_compression(compression: str | None) -> None:
    """Refuse what is none, and one whose package is missing here if batches come from endpoints.

    Raises:
        ConfigError: It is one of them.
    """
    compression_to_proto(compression)
    if compression is not None and is_remote():
        load_codec(compression)


def check_sample_errors(on_sample_error: str, max_skips: int, *, makes_batches: bool) -> SampleErrorPolicy:
    """Return the policy; refuse what is none, and to skip where there is no other sample."""
    if on_sample_error not in SAMPLE_ERROR_POLICIES:
        raise ConfigError(f"on_sample_error is {on_sample_error!r}, expected 'raise' or 'skip'")
    if type(max_skips) is not int or max_skips < 0:
        raise ConfigError(f"max_skips is {max_skips!r}, expected an integer of at least 0")
    if on_sample_error == "skip" and not makes_batches:
        raise ConfigError(
            "on_sample_error='skip' with batch_size=None: no other sample of a batch could stand in\n"
            "  Pass a batch_size, or catch exceptions in the data set's __getitem__."
        )
    return cast("SampleErrorPolicy", on_sample_error)


def check_functions(
    subject: Any, collate_fn: Callable[[Any], Any] | None, worker_init_fn: Callable[[int], object] | None
) -> None:
    """Refuse functions that endpoints do not have: they know those of the decorator, by name.

    Args:
        subject: The data set.
        collate_fn: As `user_collate_fn` returns it.
        worker_init_fn: The user's.

    Raises:
        ConfigError: The decorator has not the same.
    """
    if not is_remote() or not isinstance(subject, DatasetSpec):
        return
    factory = get_factory(subject.name)
    for argument, passed, registered in (
        ("collate_fn", collate_fn, factory.collate_fn),
        ("worker_init_fn", worker_init_fn, factory.worker_init_fn),
    ):
        if passed is None or (registered is not None and has_same_code(passed, registered)):
            continue
        raise ConfigError(
            f"{argument}={passed!r:.60} was passed to the DataLoader, but data set {subject.name!r} is served by "
            f"endpoints\n  No code travels to them. Write @hetero.dataset({argument}=...) above the factory."
        )


def user_collate_fn(collate_fn: Callable[[Any], Any] | None, *, makes_batches: bool) -> Callable[[Any], Any] | None:
    """Return None for the function that None stands for: one for batches, another one for single samples."""
    default = torch.utils.data.default_collate if makes_batches else torch.utils.data.default_convert
    return None if collate_fn is default else collate_fn


def effective_seed(seed: int, generator: torch.Generator | None) -> int:
    """Return the seed of order and draws.

    Raises:
        ConfigError: If ``seed`` is no signed 64-bit integer, or both were passed.
    """
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}, expected a signed 64-bit integer")
    if generator is None:
        return seed
    if seed:
        raise ConfigError(f"both seed={seed} and generator= were passed; pass one of them")
    return generator.initial_seed() % 2**63
