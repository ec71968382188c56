"""Agent that runs `torch.distributed.run` as a child of the launcher, and writes to a file how ranks failed.

It is a separate process because the launcher must not import torch. Usage:
``python -m hetero.launch.ranks.torchrun_agent RESULT_FILE TORCHRUN_ARGUMENTS...``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hetero.system.process import die_with_parent

PARENT_VARIABLE = "HETERO_PARENT_PID"


def main(arguments: list[str]) -> int:
    """Run torch's agent. Return 0 if all ranks of this host ended with 0, else write the failures and return 1."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    result_file, *agent_arguments = arguments
    # The ranks are children of this process and must not outlive it either.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

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


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a normal exit would take torch half a second, and the launcher waits
