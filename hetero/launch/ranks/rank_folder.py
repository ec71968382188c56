"""The folder that the launcher shares with the ranks of its host, and the root cause of their failures.

The folder contains a FIFO for the output of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.control.causes import is_crash
from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.system.line_relay import LineRelay
from hetero.system.process import describe_exit_status
from hetero.system.stop_signals import END_SIGNALS

__all__ = ["RankFolder", "first_to_fail"]


class RankFolder:
    """The FIFOs of one generation of a host's ranks.

    Args:
        path: The folder to make. Its parent is private to this launcher.
        ranks: The ranks of this host, in the order of their local ranks.
        host: This host's name, for causes.
        relay: Receives the ranks' output, one source per rank.
    """

    def __init__(self, path: Path, ranks: Sequence[int], *, host: str, relay: LineRelay) -> None:
        self.path = path
        self._host = host
        self._relay = relay
        self._logs: list[int] = []
        """Open descriptors of the FIFOs."""
        path.mkdir(mode=0o700)
        self.log_prefix = f"{path}/log-"
        """Path of each FIFO without the local rank at its end. Ranks get it in `LOG_VARIABLE`."""
        for local_rank, rank in enumerate(ranks):
            fifo = f"{self.log_prefix}{local_rank}"
            os.mkfifo(fifo, 0o600)
            # With read and write access, `open` does not wait for the rank, and reading does not end when the rank
            # ends.
            log = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            relay.add(f"rank {rank}", log)
            self._logs.append(log)

    def close(self) -> None:
        """Relay the last output of the ranks, then close the FIFOs. Idempotent."""
        for log in self._logs:
            self._relay.discard(log)
        self._logs.clear()

    def root(self, failures: Sequence[tuple[int, int]], reported: Mapping[int, Cause]) -> Cause:
        """Return the root cause of failed ranks, from a report or an exit status.

        Args:
            failures: (rank, exit status) in order of time, at least one.
            reported: The causes that ranks reported before they ended, by rank.
        """
        rank, exit_status = first_to_fail(failures, reported)
        # A crash counts more than the rank's own report, because a process that crashes cannot report the crash. Its
        # earlier report says something else.
        if rank in reported and not is_crash(exit_status):
            return reported[rank]
        return self.describe(f"rank {rank}", exit_status)

    def describe(self, name: str, exit_status: int) -> Cause:
        """Return the cause of a process's end, from its exit status and its last output."""
        # `describe_exit_status` would read 31, for example, as an exit code of hetero. But a rank that ends with such a
        # code reports it to the launcher. Without a report, the script has chosen the number.
        is_code_of_script = 1 <= exit_status <= 128
        how = f"exited with {exit_status}" if is_code_of_script else describe_exit_status(exit_status)
        return Cause(
            host=self._host,
            summary=f"{name} {how}",
            detail="\n".join(self._relay.tail(name)),
            exit_code=ExitCode.SCRIPT_FAILED,
            # A negative status means that a signal has ended the process itself. Above 128, a shell in the process
            # reports a signal that ended another program.
            by_signal=exit_status < 0,
            is_consequence=exit_status < 0 and not is_crash(exit_status),
            of_rank=True,
        )


def first_to_fail(failures: Sequence[tuple[int, int]], reported: Mapping[int, Cause]) -> tuple[int, int]:
    """Return the failure that most likely caused the others.

    Failures are preferred in this order:

    - 0: The rank crashed.
    - 1: The rank exited by itself with an error status, without a report. Other ranks may report that their connection
      to it broke.
    - 2: The rank reported its exception.
    - 3: A signal ended the rank, and failures of other ranks may have caused that signal.
    - 4: The rank reported an exception that is a consequence of another rank's failure.
    - 5: The rank ended by the end signal without a report. The agent sends this signal after another rank's failure.

    Args:
        failures: (rank, exit status) in order of time, at least one.
        reported: The causes that ranks reported before they ended, by rank.
    """

    def place(failure: tuple[int, int]) -> int:
        """Return the number of a failure's kind in the list of `first_to_fail`. The smallest number is preferred.

        The numbers: 0 crash, 1 exit without a report, 2 report, 3 signal, 4 report of a consequence, 5 end signal.
        """
        rank, exit_status = failure
        # Only KILL, SEGV, BUS, ILL and FPE are crashes, because only a fault of the process itself or a lack of memory
        # explains them.
        if is_crash(exit_status):
            return 0
        if rank in reported:
            return 4 if reported[rank].is_consequence else 2
        if -exit_status in END_SIGNALS:
            return 5
        # After an exception in one rank, NCCL's watchdog aborts the others (SIGABRT), so reports come before other
        # signals.
        return 1 if exit_status >= 0 else 3

    return min(failures, key=place)
