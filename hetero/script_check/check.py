"""Starts the check of a script in another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hetero.documents.text import last_bytes
from hetero.script_check.findings import Finding
from hetero.system.scripts import find_script, script_words

__all__ = ["DEFAULT_SECONDS", "check_script"]

DEFAULT_SECONDS = 30.0
"""Most seconds that the script runs. The whole check then takes less than a minute."""
_MARGIN_S = 20.0
"""Seconds for the start of Python and of the endpoints, and for the search of the source."""


def check_script(
    script: str, arguments: Sequence[str] = (), *, is_module: bool = False, seconds: float = DEFAULT_SECONDS
) -> tuple[list[Finding], int, str]:
    """Run a script as a rank whose batches come from endpoints, for a short time, and return what was found.

    The script runs on this machine, with its files and its accelerator, and may write what it always writes.

    Args:
        script: Path of the script, or the name of a module.
        arguments: The script's command line after its name.
        is_module: Whether ``script`` is the name of a module.
        seconds: Seconds that the script runs at most.

    Returns:
        The findings, how many batches were compared, and the end of the script's output.

    Raises:
        ConfigError: If the script does not exist.
    """
    find_script(script, is_module=is_module)
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "findings.json", Path(folder) / "log"
        words = [str(output), f"{seconds:g}", *script_words(script, is_module=is_module), *arguments]
        # The environment of a rank that is alone, for scripts that make a process group. Port 0 means any free port.
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONUNBUFFERED": "1"}
        started_s = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "hetero.script_check.run", *words],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # In a new session, killpg ends the endpoints and all processes that the script has started, too.
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # The endpoints may take as long to start as the script may run.
                    process.wait(2 * seconds + _MARGIN_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        # The process writes the number of batches only when the check ends.
        found = json.loads(output.read_text()) if output.exists() else {"findings": [], "num_batches": None}
    findings = [Finding(**each) for each in found["findings"]]
    if not findings and not found["num_batches"]:
        what = f"the script took no batch within {time.monotonic() - started_s:.0f} s, so nothing was compared"
        to_do = "Pass --seconds, or arguments with which the training begins sooner."
        # Popen has a negative status if a signal ended the process.
        if found["num_batches"] is None and process.returncode < 0:
            what = f"the script's process ended by {signal.Signals(-process.returncode).name}"
            to_do = "Run it with python to see why."
        findings = [Finding(file=script, line=1, what=what, to_do=to_do)]
    return findings, found["num_batches"] or 0, last_bytes(text, 2_000)
