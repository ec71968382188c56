"""What ranks are told, which of several that ended badly is the cause, and what counts as an echo."""

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.launch.ranks.rank import is_echo
from hetero.launch.ranks.rank_folder import RankFolder, first_to_fail
from hetero.launch.ranks.ranks import RankProcesses, free_port
from hetero.launch.ranks.starter import RanksOptions
from hetero.launch.ranks.torchrun_agent import Torchrun
from hetero.system.line_relay import LineRelay

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34723."
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
        ([(0, -15), (1, 30)], {1}, 1),  # torch's agent ended rank 0 because of rank 1
        ([(1, -15), (0, -15)], set(), 1),  # somebody ended rank 1, and the agent then rank 0
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
    echo = Cause(host="algo-1", summary="connection closed by peer", is_echo=True)
    assert first_to_fail([(0, 30), (1, -6)], {0: echo})[0] == 1


class DistBackendError(RuntimeError):
    """Stands for torch's, by name."""


class OpError(Exception):
    """Stands for TensorFlow's, by name."""


class UnavailableError(OpError):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (DistBackendError("NCCL communicator was aborted"), True),
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
    assert is_echo(error) is expected


def options_at(address: str, *, framework: str = "torch") -> RanksOptions:
    """Return what one rank of a host at an address is told."""
    return RanksOptions(
        script="train.py",
        script_args=(),
        framework=framework,
        num_hosts=1,
        host_index=0,
        meeting_points=[(address, 29500)],
        own_address=address,
        num_ranks=1,
        num_cpus=1,
        num_gpus=0,
        environment={},
    )


def start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    relay: LineRelay,
    command: list[str],
    *,
    framework: str = "torch",
) -> RankProcesses:
    """Return a rank whose agent is another command."""
    monkeypatch.setattr(
        "hetero.launch.ranks.ranks.start_child",
        lambda _command, **options: subprocess.Popen(command, **options),
    )
    return RankProcesses(options_at("127.0.0.1", framework=framework), host="algo-1", relay=relay, run_dir=tmp_path)


@pytest.mark.fault("F9")
@pytest.mark.parametrize(
    ("number", "is_echo", "framework", "agent"),
    [
        (signal.SIGKILL, False, "torch", "torchrun"),
        (signal.SIGSEGV, False, "tensorflow", "rank starter"),
        (signal.SIGABRT, True, "torch", "torchrun"),
        (signal.SIGTERM, True, "tensorflow", "rank starter"),
    ],
)
def test_end_by_a_signal_may_be_an_echo_unless_it_is_a_crash(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    is_echo: bool,
    framework: str,
    agent: str,
) -> None:
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})"
    relay = LineRelay(lambda _source, _line: None)
    ranks = start(tmp_path, monkeypatch, relay, [sys.executable, "-c", code], framework=framework)
    try:
        os.waitid(os.P_PID, ranks.pid, os.WEXITED | os.WNOWAIT)
        assert ranks.poll() == -number
        cause = ranks.cause({})
    finally:
        ranks.kill()
        relay.close()
    assert (cause.by_signal, cause.is_echo) == (True, is_echo)
    assert cause.summary.startswith(f"{agent} killed by {number.name}")


def test_agent_that_cannot_be_killed_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero.launch.ranks.ranks._KILL_TIMEOUT_S", 0.1)
    relay = LineRelay(lambda _source, _line: None)
    ranks = start(tmp_path, monkeypatch, relay, ["sleep", "60"])
    try:
        with monkeypatch.context() as device:  # as if it waited for one
            device.setattr("hetero.launch.ranks.ranks.os.killpg", lambda *_: None)
            device.setattr("hetero.launch.ranks.ranks.kill_all", lambda _: None)
            ranks.kill()
        assert ranks.poll() is None
        words = rf"not ended 0 s after SIGKILL: process {ranks.pid} \(torchrun, [\w-]+\); continuing without"
        assert re.search(words, caplog.text)
    finally:
        monkeypatch.setattr("hetero.launch.ranks.ranks._KILL_TIMEOUT_S", 30.0)
        ranks.kill()
        relay.close()
    assert ranks.poll() == -signal.SIGKILL


@pytest.mark.parametrize("address", ["127.0.0.1", "fd00::1"])
def test_ranks_meet_at_the_bare_address_also_if_it_is_ipv6(tmp_path: Path, address: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    command = Torchrun().command(options_at(address), tmp_path / "ended.json")
    arguments = dict(argument.split("=", 1) for argument in command if "=" in argument)
    assert (arguments["--master-addr"], arguments["--local-addr"]) == (address, address)
    # As torch makes MASTER_ADDR and MASTER_PORT of them.
    endpoint = f"{arguments['--master-addr']}:{arguments['--master-port']}"
    assert parse_rendezvous_endpoint(endpoint, -1) == (address, 29500)


def ended(tmp_path: Path, exit_status: int, note: dict[str, object] | None) -> RankProcesses:
    """Return the ranks of the second of two hosts, whose first one has ended, rank 2 of four."""
    relay: Any = SimpleNamespace(tail=lambda _: ["last line"], add=lambda _name, descriptor: os.close(descriptor))
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._folder = RankFolder(tmp_path / "ranks", [2, 3], host="algo-3", relay=relay)
    ranks._result_file = tmp_path / "ended.json"
    ranks._result_file.write_text(json.dumps([{"rank": 2, "exit_status": exit_status}]))
    if note is not None:
        (tmp_path / "ranks" / "end-0").write_text(json.dumps(note))
    return ranks


def test_exit_status_of_the_scripts_own_is_no_code_of_ours(tmp_path: Path) -> None:
    cause = ended(tmp_path, 20, None).cause({})
    assert cause.exit_code is ExitCode.SCRIPT_FAILED
    assert cause.first_line == "HET-30 algo-3: rank 2 exited with 20"
    assert cause.detail == "last line"


@pytest.mark.parametrize(("exit_status", "code"), [(22, ExitCode.AUTHENTICATION), (21, ExitCode.SCRIPT_FAILED)])
def test_exit_status_counts_where_the_rank_left_a_note_of_it(tmp_path: Path, exit_status: int, code: ExitCode) -> None:
    note = {"exit_code": 22, "summary": "rank 2: refused", "detail": "trace", "is_echo": False}
    ranks = ended(tmp_path, exit_status, note)
    assert ranks.cause({}).exit_code is code
    failure = ranks.failure_at_stop()
    assert failure is not None
    assert failure.first_line == "HET-22 algo-3: rank 2: refused"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"exit_code": 99, "summary": "", "detail": "", "is_echo": 0}'])
def test_note_that_is_none_is_ignored(tmp_path: Path, text: str) -> None:
    ranks = ended(tmp_path, 22, None)
    (tmp_path / "ranks" / "end-1").write_text(text)
    assert ranks.failure_at_stop() is None


def test_free_ports_in_a_row_are_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("", 0))
        before_it = taken.getsockname()[1] - 1
        draw = secrets.randbelow
        draws = iter([before_it - 1024])  # the first of two of which the second is taken
        monkeypatch.setattr(
            "hetero.launch.ranks.ranks.secrets.randbelow", lambda bound: next(draws, None) or draw(bound)
        )
        first = free_port(2)
        assert first != before_it
        for port in (first, first + 1):
            stack.enter_context(socket.socket()).bind(("", port))
