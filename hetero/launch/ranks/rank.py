"""The main program of a rank. It connects to the launcher, runs the user's script, and reports how the script ended.

An agent or a follower runs it as ``python -m hetero.launch.ranks.rank SCRIPT ARGUMENTS...``. SCRIPT may be
``-m MODULE``.

A rank reports an exception to the launcher *before* its process ends. The collectives of other ranks break only when
the process ends. Their errors therefore arrive later and do not become the root cause.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hetero.control.rank.stopping import StopError
from hetero.errors import ExitCode, HeteroError, first_line
from hetero.launch.ranks.observed import observed
from hetero.system import logs
from hetero.system.memory import keep_freed_memory
from hetero.system.process import PARENT_VARIABLE, die_with_parent
from hetero.system.stop_signals import survive_first_sigterm

LOG_VARIABLE = "HETERO_RANK_LOG"
"""Environment variable with the path prefix of the FIFOs that the launcher reads. The local rank is appended to it."""
_OF_OTHER_RANKS = (
    "collective ops is aborted by",
    "from remote target /job:",
    "coordination service",
    "coordinationservice",
    "unknown iteration client id",
)
"""Parts of TensorFlow's messages, in lower case, if a rank failed because it lost another rank or the dispatcher.

The first is from a collective. Such an error may have any code, and contains the message of the original error. The
second is from a call to the other rank's server. The next two are from the service that watches all ranks. The last is
from a new dispatcher of tf.data.service, which does not know the ranks. The launcher reports the dispatcher's restart.
"""

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Connect to the launcher, run the script as ``__main__``, and report how the script ended. Return the exit code.

    If the script fails, this function does not return. It ends the process with the exit code of the failure.

    Args:
        arguments: The script, or ``-m`` and a module, then the script's arguments.
    """
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    # Call this before there are threads. A thread that starts earlier gets a separate memory arena. With such arenas,
    # the kernel needed 92 us to clear pages for each sample of video.
    keep_freed_memory()
    _redirect_output()
    # Ignore SIGTERM, which the platform may send to every process when it stops the job. The launcher acts on that
    # request, and all ranks then end after the same step. To end the other ranks after a failure, the agent sends
    # `end_signal` instead.
    survive_first_sigterm()
    from hetero.audit import ledger
    from hetero.control.rank import session as sessions

    try:
        session = sessions.connect()
    except HeteroError as error:
        # Without a connection, the launcher learns only the exit status and this line.
        logger.error("%s", error)
        return int(error.exit_code)
    if session is not None:
        # After a request to stop, a rank usually ends at its next step. From now on, it also ends if no step follows.
        session.take_late_stops()
    failure = _run(list(arguments))
    # Close the ledger here, because `os._exit` below runs no exit handlers. The ledger is the audit's record of the
    # delivered batches.
    ledger.close_current()
    if session is not None:
        if failure is not None:
            session.fail(failure.summary, failure.detail, failure.exit_code, is_consequence=failure.is_consequence)
        is_reported = session.close(finished=failure is None)
        # The script ended, but one of its stop callbacks had failed. If the launcher did not receive the report of
        # this, the exit status must show the failure.
        if failure is None and session.stop_failure is not None and not is_reported:
            failure = _Failure(session.stop_failure.summary)
    _flush()
    if failure is None:
        # Python now joins the threads and processes of the script, which may take long. The log should name what Python
        # waits for.
        _name_waits()
        return 0
    # Do not wait for threads of a broken process group, because they may never end.
    os._exit(int(failure.exit_code))


class _Failure(NamedTuple):
    """Why the script failed, as the launcher gets to know it."""

    summary: str
    detail: str = ""
    exit_code: ExitCode = ExitCode.SCRIPT_FAILED
    is_consequence: bool = False


def _run(arguments: list[str]) -> _Failure | None:
    """Run the script and return its failure, or None."""
    is_module = arguments[0] == "-m"
    script = arguments[1] if is_module else arguments[0]
    # Python itself leaves out ``-m`` too.
    sys.argv = arguments[1:] if is_module else arguments
    # Set the first search path as Python does: the folder of a script, or the current folder with -m.
    sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    try:
        with observed(int(os.environ.get("RANK", "0"))):
            if is_module:
                # alter_sys sets sys.argv[0] and sys.modules["__main__"]. torch's workers need both to import the
                # module.
                runpy.run_module(script, run_name="__main__", alter_sys=True)  # allowed: the user's own script
            else:
                runpy.run_path(script, run_name="__main__")  # allowed: the user's own script
    except SystemExit as error:
        return _exit_failure(error.code)
    except HeteroError as error:
        _show_traceback()
        return _Failure(first_line(error), str(error), error.exit_code)
    except BaseException as error:  # noqa: BLE001  a KeyboardInterrupt is reported too
        # Keras and TensorFlow raise another error that contains the error of the data set only as text.
        hidden_error = _hidden_in(error)
        # `StopError` is no failure. It says that the job was asked to stop.
        if isinstance(hidden_error, StopError):
            return _stop()
        text = _show_traceback()
        if hidden_error is not None:
            return _Failure(first_line(hidden_error), str(hidden_error), hidden_error.exit_code)
        line = traceback.format_exception_only(type(error), error)[-1].strip()
        return _Failure(f"the training script raised {line}", text, is_consequence=is_consequence(error))
    return None


def _hidden_in(error: BaseException) -> HeteroError | None:
    """Return the hetero error that a framework replaced with this exception, or None if it replaced none."""
    from hetero.control.rank import session as sessions

    session = sessions.current()
    last_error = None if session is None else session.hidden_error
    # The framework's exception contains the text of hetero's error. If it does not, the script has handled hetero's
    # error, and has raised another one later.
    return last_error if last_error is not None and first_line(last_error) in str(error) else None


def _stop() -> _Failure | None:
    """End the session as a loader does when the job must stop. Return a failure if a stop callback fails, else None."""
    from hetero.control.rank import session as sessions

    session = sessions.current()
    assert session is not None
    # `end` always raises SystemExit.
    try:
        session.end()
    except SystemExit as error:
        return _exit_failure(error.code)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error is the result of a failure elsewhere, for example in a rank whose connection broke."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    from_gloo = "gloo" in text and ("closed by peer" in text or "reset by peer" in text)
    from_tensorflow = "OpError" in names and any(words in text.lower() for words in _OF_OTHER_RANKS)
    # In other ranks, a DistNetworkError means that the TCPStore of rank 0 was lost, so rank 0 has failed. Rank 0 itself
    # gets this error with "failed to listen" if its port is in use. That is not a consequence of another failure.
    from_torch = "DistBackendError" in names or ("DistNetworkError" in names and "failed to listen" not in text)
    return from_torch or from_gloo or from_tensorflow


def _exit_failure(code: object) -> _Failure | None:
    """Return the failure for the argument of a `SystemExit`. None if the script succeeded or was asked to stop."""
    from hetero.control.rank import session as sessions

    session = sessions.current()
    # A script that was asked to stop ends by SystemExit(143). The exit code of the job shows the stop, so the rank ends
    # with 0.
    if code is None or code == 0 or (session is not None and session.stopped):
        return None
    if isinstance(code, int):
        return _Failure(f"the training script exited with status {code}")
    sys.stderr.write(f"{code}\n")
    return _Failure(f"the training script exited: {code}")


def _show_traceback() -> str:
    """Print the current exception without the frames of this module, and return the text."""
    kind, error, frames = sys.exc_info()
    # The first frames are those of this module and of Python's `runpy`, which has run the script.
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(kind, error, frames))
    sys.stderr.write(text)
    return text


def _redirect_output() -> None:
    """Send this process's output to the FIFO that the environment names. Do nothing if it names none."""
    prefix = os.environ.get(LOG_VARIABLE)
    if prefix is None:
        return
    descriptor = os.open(f"{prefix}{os.environ['LOCAL_RANK']}", os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logs.setup_logging_of_script()


def _name_waits() -> None:
    """Log the script's threads and processes that Python waits for before this process ends."""
    other_threads = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    names = [f"thread {thread.name}" for thread in other_threads if not thread.daemon]
    names += [f"process {child.name}" for child in multiprocessing.active_children() if not child.daemon]
    if names:
        logger.warning("the script has ended, but Python waits for what it has started: %s", ", ".join(names))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
