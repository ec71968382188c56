"""The variables of ranks, the cause among several failures, and echoes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.launch.ranks import rank
from hetero.launch.ranks.agent import FAILURES_FILE
from hetero.launch.ranks.rank import is_consequence
from hetero.launch.ranks.rank_folder import RankFolder, first_to_fail
from hetero.launch.ranks.ranks import RankProcesses, free_port
from hetero.launch.ranks.starter import RanksOptions
from hetero.system.line_relay import LineRelay

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34723."
NOT_LISTENING = "The server socket has failed to listen on any local network address."
ABORTED = """{{function_node __wrapped__CollectiveReduceV2}} Collective ops is aborted by: Socket closed
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling
/tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
The error could be from a previous operation. Restart your program to reset. [Op:CollectiveReduceV2] name: """
LEADER_LOST = """Failed to send RPC to coordination service. Either the leader task was preempted/died unexpectedly.
Additional GRPC error information from remote target coordination_service while calling
/tensorflow.CoordinationService/Heartbeat:
"""


@pytest.mark.parametrize(
    ("failures", "reported", "rank"),
    [
        ([(0, 30)], {0}, 0),
        ([(0, 30), (1, -9)], {0}, 1),  # rank 0's connection to it broke
        ([(0, 30), (1, 7)], {0}, 1),  # os._exit(7)
        ([(0, -15), (1, 30)], {1}, 1),  # the agent ended rank 0 because of rank 1
        ([(1, -15), (0, -15)], set(), 1),  # a signal ended rank 1, and the agent then rank 0
        ([(0, -6), (1, 30)], {1}, 1),  # NCCL's watchdog aborted rank 0 because of rank 1
        ([(0, 30), (1, -6)], {0}, 0),
        ([(0, 30), (1, -11)], {0}, 1),  # it crashed
        ([(1, -6), (0, -15)], set(), 1),  # an assertion in C++
        ([(0, -6), (1, -6)], {1}, 1),  # rank 1 raised, and its watchdog did not wait for its end
    ],
)
@pytest.mark.fault("F9")
def test_first_to_fail_is_not_who_failed_because_of_it(
    failures: list[tuple[int, int]], reported: set[int], rank: int
) -> None:
    words = {number: Cause(host="algo-1", summary="it raised") for number in reported}
    assert first_to_fail(failures, words)[0] == rank


def test_first_to_fail_is_an_abort_rather_than_the_connection_that_it_broke() -> None:
    echo = Cause(host="algo-1", summary="connection closed by peer", is_consequence=True)
    assert first_to_fail([(0, 30), (1, -6)], {0: echo})[0] == 1


class DistBackendError(RuntimeError):
    """Replaces torch's error, by name."""


class DistNetworkError(RuntimeError):
    """Replaces torch's error, by name."""


class DistStoreError(RuntimeError):
    """Replaces torch's error, by name."""


class OpError(Exception):
    """Replaces TensorFlow's error, by name."""


class UnavailableError(OpError):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (DistBackendError("NCCL communicator was aborted"), True),
        (DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),  # rank 0 had the store
        (DistNetworkError("Broken pipe"), True),
        (DistNetworkError(f"{NOT_LISTENING} port: 29500, useIpv6: false, code: -98, name: EADDRINUSE"), False),
        (DistStoreError("Timed out after 4 seconds waiting for clients. 1/2 clients joined."), False),
        (UnavailableError(ABORTED), True),
        (OpError(f"Graph execution error:\n\n{ABORTED}"), True),
        (UnavailableError(LEADER_LOST), True),
        (UnavailableError("Failed to connect to the dispatcher: Socket closed"), False),  # of tf.data service
        (OpError("Failed to get tasks: Unknown iteration client id 3000. The dispatcher is not configured"), True),
        (RuntimeError(ABORTED), False),
        (RuntimeError("on purpose"), False),
        (ConnectionResetError("connection reset by peer"), False),  # the script's own connection
    ],
)
def test_echo_is_a_broken_process_group_only(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected


OPTIONS = RanksOptions(
    script="train.py",
    script_args=("--lr", "1"),
    framework="torch",
    num_hosts=2,
    host_index=1,
    meeting_points=[("10.0.0.1", 29500)],
    num_ranks=2,
    num_cpus=6,
    num_gpus=0,
    environment={"HETERO_JOB_ID": "j"},
    is_module=False,
    generation=0,
)


def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relay: LineRelay, command: Sequence[str] = ()
) -> RankProcesses:
    """Return ranks whose agent is another command, or the real one."""
    monkeypatch.setattr(
        "hetero.system.line_relay.start_child", lambda own, **options: subprocess.Popen(command or own, **options)
    )
    return RankProcesses(OPTIONS, host="algo-1", relay=relay, run_dir=tmp_path)


@pytest.mark.fault("F9")
@pytest.mark.parametrize(
    ("number", "is_consequence"),
    [(signal.SIGKILL, False), (signal.SIGSEGV, False), (signal.SIGABRT, True), (signal.SIGTERM, True)],
)
def test_end_by_a_signal_may_be_an_echo_unless_it_is_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, is_consequence: bool
) -> None:
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})"
    relay = LineRelay(lambda _source, _line: None)
    ranks = start(tmp_path, monkeypatch, relay, [sys.executable, "-c", code])
    try:
        os.waitid(os.P_PID, ranks.pid, os.WEXITED | os.WNOWAIT)
        assert ranks.poll() == -number
        cause = ranks.cause({})
    finally:
        ranks.kill()
        relay.close()
    assert (cause.by_signal, cause.is_consequence) == (True, is_consequence)
    assert cause.summary.startswith(f"rank agent killed by {number.name}")


def test_agent_that_cannot_be_killed_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero.launch.ranks.ranks.END_TIMEOUT_S", 0.1)
    relay = LineRelay(lambda _source, _line: None)
    ranks = start(tmp_path, monkeypatch, relay, ["sleep", "60"])
    try:
        with monkeypatch.context() as device:  # as if it waited for one
            device.setattr("hetero.launch.ranks.ranks.os.killpg", lambda *_: None)
            device.setattr("hetero.launch.ranks.ranks.kill_all", lambda _: None)
            ranks.kill()
        assert ranks.poll() is None
        words = rf"not ended 0 s after SIGKILL: process {ranks.pid} \(rank agent, [\w-]+\); continuing without"
        assert re.search(words, caplog.text)
    finally:
        monkeypatch.setattr("hetero.launch.ranks.ranks.END_TIMEOUT_S", 30.0)
        ranks.kill()
        relay.close()
    assert ranks.poll() == -signal.SIGKILL


def test_ranks_of_the_second_host_get_their_numbers_and_a_share_of_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    relay = LineRelay(lambda _source, _line: None)
    ranks = start(tmp_path, monkeypatch, relay)
    try:
        os.waitid(os.P_PID, ranks.pid, os.WEXITED | os.WNOWAIT)
        assert ranks.poll() == 0, relay.tail("rank agent")
    finally:
        ranks.kill()
        relay.close()
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (2, 3)]
    assert told == [["--lr", "1", "j", "2", "0", "3"], ["--lr", "1", "j", "3", "1", "3"]]


TELLS = """
import json, os, sys
from pathlib import Path
told = [os.environ[name] for name in ("HETERO_JOB_ID", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS")]
Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps([*sys.argv[1:], *told]))
"""


def ended(tmp_path: Path, exit_status: int) -> RankProcesses:
    """Return the ranks of the second of two hosts, whose first one has ended, rank 2 of four."""
    relay: Any = SimpleNamespace(tail=lambda _: ["last line"], add=lambda _name, descriptor: os.close(descriptor))
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._folder = RankFolder(tmp_path / "ranks", [2, 3], host="algo-3", relay=relay)
    (tmp_path / "ranks" / FAILURES_FILE).write_text(json.dumps([{"rank": 2, "exit_status": exit_status}]))
    return ranks


def test_exit_status_of_the_scripts_own_is_no_code_of_ours(tmp_path: Path) -> None:
    cause = ended(tmp_path, 20).cause({})
    assert cause.exit_code is ExitCode.SCRIPT_FAILED
    assert cause.first_line == "HET-30 algo-3: rank 2 exited with 20"
    assert cause.detail == "last line"


@pytest.mark.parametrize(("exit_status", "expected"), [(22, "refused"), (-9, "rank 2 killed by SIGKILL")])
def test_report_counts_unless_the_rank_crashed(tmp_path: Path, exit_status: int, expected: str) -> None:
    reported = Cause(host="algo-3", summary="rank 2: refused", exit_code=ExitCode.AUTHENTICATION)
    assert expected in ended(tmp_path, exit_status).cause({2: reported}).first_line


def test_what_keeps_a_rank_from_ending_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    children = [SimpleNamespace(name="Process-3", daemon=False), SimpleNamespace(name="pool-1", daemon=True)]
    monkeypatch.setattr("multiprocessing.active_children", lambda: children)
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="upload")
    thread.start()
    try:
        rank._name_waits()
    finally:
        may_end.set()
        thread.join()
    (line,) = caplog.messages
    assert line.startswith("the script has ended, but Python waits for what it has started: ")
    assert "thread upload" in line
    assert line.endswith("process Process-3")


def test_free_ports_in_a_row_are_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("", 0))
        before_it = taken.getsockname()[1] - 1
        draw = secrets.randbelow
        draws = iter([before_it - 1024])  # the first of two, and the second is taken
        monkeypatch.setattr(
            "hetero.launch.ranks.ranks.secrets.randbelow", lambda bound: next(draws, None) or draw(bound)
        )
        first = free_port(2)
        assert first != before_it
        for port in (first, first + 1):
            stack.enter_context(socket.socket()).bind(("", port))
