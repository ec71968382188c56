"""The processes of a benchmark: trainers and servers, started from the parent or from each other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from harness import usage
from hetero.system.process import is_resource_tracker, kill_all

HERE = Path(__file__).resolve().parents[1]
"""The folder of the benchmarks."""
_REPLY_TIMEOUT_S = 300.0


class ProcessFailedError(Exception):
    """A trainer or server process ended or did not answer."""


class Child:
    """A process of this benchmark that takes commands on stdin and answers in JSON lines on another descriptor.

    Args:
        script: The benchmark's file, which calls `dispatch` first thing.
        role: ``trainer`` or ``server``.
        name: Name of the competitor or server.
        config: Passed to the competitor or server.
        environment: Variables to add to this process's environment.
        prefix: A command that runs the process, such as ``nsenter``.
    """

    def __init__(
        self,
        script: str,
        role: str,
        name: str,
        config: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        read_end, write_end = os.pipe()
        # Endpoints, actors and servers import hetero and the pipelines by name.
        path = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH")]))
        self._name = name
        self._errors = Path(os.environ.get("BENCH_LOG", os.devnull)).open("ab")  # noqa: SIM115 - closed in stop
        self._process = subprocess.Popen(
            [*prefix, sys.executable, script, f"--child-{role}", name, str(write_end), json.dumps(dict(config))],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(write_end,),
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {}), "PYTHONPATH": path},
            start_new_session=True,
        )
        os.close(write_end)
        self._replies: IO[str] = os.fdopen(read_end, encoding="utf-8")

    def ask(self, command: str = "", timeout_s: float = _REPLY_TIMEOUT_S) -> Any:
        """Send a command, unless it is empty, and return the answer.

        Raises:
            ProcessFailedError: The process failed, ended, or did not answer in time.
        """
        try:
            if command:
                self._send(command)
            ready, _, _ = select.select([self._replies], [], [], timeout_s)
            line = self._replies.readline() if ready else ""
        except OSError as error:
            raise ProcessFailedError(f"{self._name}: {error}") from error
        if not line:
            state = "ended" if ready else f"did not answer within {timeout_s:g} s"
            raise ProcessFailedError(f"{self._name} {state}; set BENCH_LOG to a file to see its output")
        reply = json.loads(line)
        if isinstance(reply, dict) and "error" in reply:
            raise ProcessFailedError(f"{self._name}: {reply['error']}")
        return reply

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its descendants."""
        return usage.cpu_s([psutil.Process(self._process.pid), *usage.descendants(self._process.pid)])

    def stop(self, grace_s: float = 15.0) -> None:
        """Ask it to end. If it does not, kill it and its descendants."""
        # Python's trackers remove what killed processes have in /dev/shm, and end after the last of these.
        family = usage.descendants(self._process.pid)
        trackers = [process for process in family if is_resource_tracker(process)]
        others = [process for process in family if process not in trackers]
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for each in (others, trackers):
            psutil.wait_procs(each, timeout=2.0)
            kill_all(each)
        self._replies.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()


def server(name: str, config: Mapping[str, Any], prefix: Sequence[str] = ()) -> Child:
    """Start a server of this benchmark from one of its trainer processes.

    Args:
        name: Key of `dispatch`'s servers.
        config: Given to it.
        prefix: See `Child`.
    """
    return Child(sys.argv[0], "server", name, config, prefix=prefix)


def call(arguments: Sequence[str], name: str, *, timeout_s: float | None = None) -> None:
    """Run a program to its end. If it fails, exit with its name and the end of its output."""
    done = subprocess.run(
        arguments, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    if done.returncode != 0:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)
