"""What a loader's arguments may be, whatever the framework."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from typing import cast

from hetero.batches.request import SAMPLE_ERROR_POLICIES, SampleErrorPolicy
from hetero.control.rank import session as control
from hetero.dataplane.endpoint.script import SCRIPT_MODULE
from hetero.errors import ConfigError
from hetero.loaders.pipeline import is_remote
from hetero.wire.compression import compression_to_proto, load_codec

__all__ = [
    "check_compression",
    "check_not_child_of_rank",
    "check_not_importing",
    "check_prefetch_factor",
    "check_sample_errors",
    "check_seed",
    "warn_in_process_of_rank",
]

logger = logging.getLogger(__name__)

_SPAWNED_S = 2.0
"""Until a new process has imported the script and knows whether it is a daemon."""


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


def check_not_child_of_rank() -> None:
    """Refuse batches to a process that a rank of a job with endpoints has started.

    It has no connection to the launcher. It would make all batches itself, while the data hosts are idle.

    Raises:
        ConfigError: It is such a process.
    """
    if control.is_child_of_rank():
        raise ConfigError(
            "a process that a rank has started takes batches, and only ranks get those of the data hosts\n"
            "  Start every trainer as a rank (hetero launch --nproc-per-node N) instead of with mp.spawn: the script "
            "then calls its\n  training function itself, and reads RANK, LOCAL_RANK and WORLD_SIZE from the "
            "environment.\n"
            f"  To make batches in this process all the same, remove {control.LAUNCHER_VARIABLE} from its environment."
        )


def warn_in_process_of_rank() -> None:
    """Log, where a rank started this process as ``mp.spawn`` does, that it is no rank.

    For when the loader is imported. Its first batch may be too late: with torchrun's environment
    ``init_process_group`` waits for ever at a ``tcp://`` address, for a server that no process starts.
    """
    is_spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if is_spawned and control.current() is None and os.environ.get(control.LAUNCHER_VARIABLE):
        # The process learns what it is only after it has imported the script.
        timer = threading.Timer(_SPAWNED_S, _warn_unless_daemon)
        timer.daemon = True
        timer.start()


def _warn_unless_daemon() -> None:
    process = multiprocessing.current_process()
    if not process.daemon:  # as torch's loader processes are
        logger.warning(
            "a rank of the job started this process (%s), which is no rank: init_process_group with a tcp:// address "
            "may wait here for ever, and batches of data hosts are for ranks only. Start every trainer as a rank "
            "(hetero launch --nproc-per-node N) instead of with mp.spawn",
            process.name,
        )


def check_compression(compression: str | None) -> None:
    """Refuse what is none, and one whose package is missing here if batches come from endpoints.

    Raises:
        ConfigError: It is one of them.
    """
    compression_to_proto(compression)
    if compression is not None and is_remote():
        load_codec(compression)


def check_prefetch_factor(prefetch_factor: int | None) -> None:
    """Refuse what is no number of batches, also where none come from endpoints.

    Raises:
        ConfigError: It is not.
    """
    if prefetch_factor is not None and (type(prefetch_factor) is not int or prefetch_factor < 1):
        raise ConfigError(f"prefetch_factor is {prefetch_factor!r}, expected an integer of at least 1")


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


def check_seed(seed: int) -> None:
    """Refuse what is no signed 64-bit integer.

    Raises:
        ConfigError: It is not.
    """
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}, expected a signed 64-bit integer")
