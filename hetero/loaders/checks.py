"""Checks of a loader's arguments and process that all frameworks share."""

from __future__ import annotations

import sys
from typing import cast

from hetero.batches.request import SAMPLE_ERROR_POLICIES, SampleErrorPolicy
from hetero.control.rank import session as control
from hetero.control.rank.variables import LAUNCHER_VARIABLE
from hetero.errors import ConfigError
from hetero.loaders.pipeline import is_remote
from hetero.plans.mixtures import Mixture
from hetero.system.scripts import SCRIPT_MODULE
from hetero.wire.compression import compression_to_proto, load_codec

__all__ = [
    "check_compression",
    "check_not_child_of_rank",
    "check_not_importing",
    "check_prefetch_factor",
    "check_sample_errors",
    "check_seed",
    "check_shuffle",
]


def check_not_importing() -> None:
    """Reject a request for batches while the script is only imported, because data hosts must not train.

    Raises:
        ConfigError: If the script is only being imported. The message names the line of the script that trains.
    """
    # The script is being imported if its module's code is in progress. Loader processes import it as ``__mp_main__``.
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in (SCRIPT_MODULE, "__mp_main__"):
            raise ConfigError(
                f"line {frame.f_lineno} of {frame.f_code.co_filename} trains while the script is only being imported\n"
                "  Data hosts and loader processes import it for its data sets. "
                'Put the training behind if __name__ == "__main__":'
            )


def check_not_child_of_rank() -> None:
    """Reject a request for batches in a process that a rank of a job with endpoints has started.

    Such a process is not connected to the launcher. It would make all batches itself while the data hosts are idle.

    Raises:
        ConfigError: If this is such a process.
    """
    # A PyTorch loader calls this only at its first batch, because torch's workers may import a script that makes
    # loaders.
    if control.is_child_of_rank():
        raise ConfigError(
            "a process that a rank has started requests batches, but only ranks get batches from data hosts\n"
            "  Start every trainer as a rank (hetero launch --nproc-per-node N) instead of with mp.spawn. The script "
            "then calls its\n  training function itself, and reads RANK, LOCAL_RANK and WORLD_SIZE from the "
            "environment.\n"
            f"  To make batches in this process nevertheless, remove {LAUNCHER_VARIABLE} from its environment."
        )


def check_compression(compression: str | None) -> None:
    """Reject an unknown compression. With endpoints, also reject one whose package this host does not have.

    Raises:
        ConfigError: In both cases.
    """
    # Both calls are made for the error that they raise.
    compression_to_proto(compression)
    if compression is not None and is_remote():
        load_codec(compression)


def check_prefetch_factor(prefetch_factor: int | None) -> None:
    """Reject an invalid prefetch factor, even if batches do not come from endpoints.

    Raises:
        ConfigError: If it is neither None nor an integer of at least 1.
    """
    # Check this in local runs too. With prefetch_factor=0 a local run worked, but a job with data hosts failed after
    # everything had started.
    if prefetch_factor is not None and (type(prefetch_factor) is not int or prefetch_factor < 1):
        raise ConfigError(f"prefetch_factor is {prefetch_factor!r}, expected an integer of at least 1")


def check_sample_errors(on_sample_error: str, max_skips: int, *, makes_batches: bool) -> SampleErrorPolicy:
    """Check both arguments, and return ``on_sample_error``.

    Raises:
        ConfigError: If an argument is invalid, or if samples may be skipped but are not made into batches.
    """
    if on_sample_error not in SAMPLE_ERROR_POLICIES:
        raise ConfigError(f"on_sample_error is {on_sample_error!r}, expected 'raise' or 'skip'")
    if type(max_skips) is not int or max_skips < 0:
        raise ConfigError(f"max_skips is {max_skips!r}, expected an integer of at least 0")
    if on_sample_error == "skip" and not makes_batches:
        raise ConfigError(
            "on_sample_error='skip' with batch_size=None: no other sample can be the substitute\n"
            "  Pass a batch_size, or catch exceptions in the data set's __getitem__."
        )
    return cast("SampleErrorPolicy", on_sample_error)


def check_seed(seed: int) -> None:
    """Reject a seed that is not a signed 64-bit integer.

    Raises:
        ConfigError: If it is not such an integer.
    """
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}, expected a signed 64-bit integer")


def check_shuffle(shuffle: object) -> str:
    """Return the order that the argument ``shuffle`` names. An empty text for True and False.

    Raises:
        ConfigError: If it is another text.
    """
    if isinstance(shuffle, str) and shuffle != "window":
        raise ConfigError(f"shuffle is {shuffle!r:.80}, expected True, False, 'window' or a hetero.Mixture")
    if isinstance(shuffle, Mixture):
        return "mixture"
    return "window" if shuffle == "window" else ""
