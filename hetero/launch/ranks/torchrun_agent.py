"""Agent that runs `torch.distributed.run`, and writes to a file how ranks failed.

It is a child process of the launcher, because the launcher itself must not import torch. Usage:
``python -m hetero.launch.ranks.torchrun_agent RESULT_FILE TORCHRUN_ARGUMENTS...``
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.system.memory import no_garbage_collection
from hetero.system.process import PARENT_VARIABLE, die_with_parent
from hetero.system.stop_signals import end_signal

if TYPE_CHECKING:  # the agent itself does not import modules that only the launcher needs
    from hetero.launch.ranks.starter import RanksOptions

__all__ = ["Torchrun", "main"]

_NO_TORCH = (
    "torchrun cannot start the ranks, because this host has no torch; pip install torch, or give "
    "--framework tensorflow (hetero_framework, HETERO_FRAMEWORK) for a job that trains with TensorFlow"
)


class Torchrun:
    """This module as an `Agent`."""

    name = "torchrun"
    meets_everywhere = False
    has_rank_per_gpu = True
    uses_grpc = False

    def obstacle(self) -> str:
        """Return a message if torch is not installed, else an empty text."""
        return _NO_TORCH if importlib.util.find_spec("torch") is None else ""

    def command(self, options: RanksOptions, result_file: Path) -> list[str]:
        """Return this module and torchrun's arguments, without the script."""
        address, port = options.meeting_points[0]
        return [
            "hetero.launch.ranks.torchrun_agent",
            str(result_file),
            f"--nnodes={options.num_hosts}",
            f"--node-rank={options.host_index}",
            f"--nproc-per-node={options.num_ranks}",
            f"--master-addr={address}",
            f"--master-port={port}",
            f"--local-addr={options.own_address}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            f"--log-dir={result_file.parent / 'torchrun'}",  # torchrun's default folder would outlive the job
            "--module",
            "hetero.launch.ranks.rank",
        ]


def main(arguments: list[str]) -> int:
    """Run torch's agent. Return 0 if all ranks of this host ended with 0, else write the failures and return 1."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    result_file, *agent_arguments = arguments
    # The ranks are children of this process, and must end when it ends.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    with no_garbage_collection():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _end_ranks_with(end_signal())
    try:
        run.main(agent_arguments)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_status": failure.exitcode, "pid": failure.pid, "at": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        ordered = sorted(failures, key=lambda failure: failure["at"])
        Path(result_file).write_text(json.dumps(ordered), encoding="utf-8")
        return 1
    return 0


def _end_ranks_with(number: signal.Signals) -> None:
    """Let torch's agent end the other ranks with a signal that they obey, because ranks may ignore SIGTERM."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_with(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(self, number if death_sig in (None, signal.SIGTERM) else death_sig, timeout)

    PContext.close = close_with  # type: ignore[method-assign]


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a normal exit takes half a second with torch, and the launcher would wait
