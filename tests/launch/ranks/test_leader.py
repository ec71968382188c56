"""LocalLeader of a launcher on one host: one leads, the others follow, and each notices the end of another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.errors import PortError
from hetero.launch.ranks import leader as leader_module
from hetero.launch.ranks.leader import LocalLeader, meeting_name
from hetero.launch.ranks.parent_launcher import ParentLauncher

FOLLOW = """
import sys
from hetero.launch.ranks.leader import Follower
from hetero.launch.ranks.parent_launcher import ParentLauncher
number = int(sys.argv[2])
parent = ParentLauncher(name="mpirun", run="1", rank=number + 4, world_size=8, local_rank=number, num_local=3)
follower = Follower(parent, "\\0" + sys.argv[1], command=sys.argv[3:], variables={"OF_MPI": "yes"})
print("follows", flush=True)
code = follower.run()
sys.exit(99 if code is None else code)
"""
LEAD = """
import sys, time
from hetero.launch.ranks.leader import LocalLeader
from hetero.launch.ranks.parent_launcher import ParentLauncher
parent = ParentLauncher(name="torchrun", run="1", rank=4, world_size=8, local_rank=0, num_local=3)
leader = LocalLeader(parent, "\\0" + sys.argv[1])
while not leader.is_complete:
    leader.poll()
    time.sleep(0.01)
leader.start(lambda local_rank: {})
print("leads", flush=True)
time.sleep(600)
"""

StartFollower = Callable[..., "subprocess.Popen[str]"]


def place(local_rank: int = 0, *, num_local: int = 3) -> ParentLauncher:
    return ParentLauncher(
        name="torchrun", run="1", rank=local_rank + 4, world_size=8, local_rank=local_rank, num_local=num_local
    )


@pytest.fixture
def name() -> str:
    """Return a name in the abstract namespace, without the zero that it begins with."""
    return f"hetero-test-{uuid.uuid4().hex}"


@pytest.fixture
def start(name: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process of this test's meeting place."""
    processes = []

    def start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, name, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def wait_for(leader: LocalLeader, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s
        leader.poll()
        time.sleep(0.01)


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_followers_end_with_the_exit_code_of_their_leader(name: str, start: StartFollower) -> None:
    followers = [start(FOLLOW, number) for number in ("1", "2")]
    with LocalLeader(place(), f"\0{name}") as leader:
        leader.finish(30)  # also if they come only now
        assert leader.ranks == {0: 4, 1: 5, 2: 6}
    assert [follower.wait(100.0) for follower in followers] == [30, 30]


def test_leader_that_does_not_end_is_killed_with_the_reason_in_the_log(name: str) -> None:
    code = (
        "import logging, subprocess\n"
        "from hetero.launch.ranks import leader\n"
        "logging.basicConfig(format='%(message)s')\n"
        "leader.END_TIMEOUT_S = 0.2\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        + FOLLOW.replace("variables={", "leader_pid=child.pid, variables={")
    )
    with LocalLeader(place(), f"\0{name}") as leader:
        command = [sys.executable, "-c", code, name, "1"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as follower:
            wait_for(leader, lambda: 1 in leader.ranks)
            leader._connections[1].write({"exit": 3})
            _, log = follower.communicate(timeout=100.0)
    assert follower.returncode == 3
    assert "has not ended within 0.2 s of its last message and is killed now" in log


def test_follower_starts_a_rank_with_what_it_alone_was_told_and_says_how_it_ended(
    name: str, start: StartFollower, tmp_path: Path
) -> None:
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['OF_MPI'] + os.environ['RANK']); sys.exit(7)"
    followers = [start(FOLLOW, str(n), sys.executable, "-c", code, str(tmp_path / str(n))) for n in (1, 2)]
    with LocalLeader(place(), f"\0{name}") as leader:
        wait_for(leader, lambda: leader.is_complete)
        leader.start(lambda local_rank: {"RANK": str(leader.ranks[local_rank])})
        wait_for(leader, lambda: len(leader.ended) == 2)
        assert leader.ended == {1: 7, 2: 7}
        leader.finish(0)
    assert [follower.wait(100.0) for follower in followers] == [0, 0]
    assert [(tmp_path / str(n)).read_text() for n in (1, 2)] == ["yes5", "yes6"]


def test_rank_is_killed_with_what_it_started(name: str, start: StartFollower) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    follower = start(FOLLOW, "1", sys.executable, "-c", code)
    with LocalLeader(place(num_local=2), f"\0{name}") as leader:
        wait_for(leader, lambda: leader.is_complete)
        leader.start(lambda _: {})
        assert says(follower) == "follows"
        grandchild = int(says(follower))
        leader.kill()
        wait_for(leader, lambda: bool(leader.ended))
        assert leader.ended == {1: -signal.SIGKILL}
        leader.finish(30)
    assert follower.wait(100.0) == 30
    assert not Path(f"/proc/{grandchild}").exists()


def test_follower_that_is_killed_counts_as_lost_and_not_as_a_rank_that_crashed(name: str, start: StartFollower) -> None:
    follower = start(FOLLOW, "1", "sleep", "600")
    with LocalLeader(place(num_local=2), f"\0{name}") as leader:
        wait_for(leader, lambda: leader.is_complete)
        follower.kill()
        wait_for(leader, lambda: bool(leader.ended))
        assert (leader.ended, leader.lost) == ({1: -signal.SIGTERM}, {1})


def test_followers_end_when_their_leader_is_killed_and_so_do_their_ranks(name: str, start: StartFollower) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    leader = start(LEAD)
    followers = [start(FOLLOW, number, sys.executable, "-c", code) for number in ("1", "2")]
    assert [says(follower) for follower in followers] == ["follows", "follows"]
    assert says(leader) == "leads"
    ranks = [int(says(follower)) for follower in followers]
    leader.kill()
    assert [follower.wait(100.0) for follower in followers] == [99, 99]
    assert [rank for rank in ranks if Path(f"/proc/{rank}").exists()] == []


def test_follower_does_not_take_what_an_earlier_run_has_left(name: str, start: StartFollower) -> None:
    with LocalLeader(place(num_local=1), f"\0{name}") as earlier:
        earlier.finish(30)
    follower = start(FOLLOW, "1")
    assert says(follower) == "follows"
    with LocalLeader(place(num_local=2), f"\0{name}") as leader:
        wait_for(leader, lambda: leader.is_complete)
        assert follower.poll() is None
        leader.finish(0)
    assert follower.wait(100.0) == 0


def test_request_to_stop_ends_a_follower_only_if_nobody_leads(name: str, start: StartFollower) -> None:
    alone = start(FOLLOW, "1")
    assert says(alone) == "follows"
    wait_for_handler(alone.pid)
    alone.terminate()
    assert alone.wait(100.0) == 128 + signal.SIGTERM
    with LocalLeader(place(num_local=2), f"\0{name}") as leader:
        follower = start(FOLLOW, "1")
        wait_for(leader, lambda: leader.is_complete)
        follower.terminate()
        leader.finish(143)
        assert follower.wait(100.0) == 143


@pytest.fixture
def asked() -> Iterator[list[int]]:
    """Return what collects the requests to stop that reach this process as a leader."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_request_that_comes_with_the_first_words_is_heard(name: str, asked: list[int]) -> None:
    with LocalLeader(place(), f"\0{name}") as leader, socket.socket(socket.AF_UNIX) as copy:
        copy.connect(f"\0{name}")
        copy.sendall(b'{"local_rank": 1, "rank": 5}\n{"stop": true}\n')  # while the leader was busy
        leader.poll()
        assert (leader.ranks[1], asked) == (5, [signal.SIGTERM])


def test_request_that_comes_when_the_leader_is_done_changes_nothing(name: str, asked: list[int]) -> None:
    with LocalLeader(place(num_local=2), f"\0{name}") as leader, socket.socket(socket.AF_UNIX) as copy:
        copy.connect(f"\0{name}")
        copy.sendall(b'{"local_rank": 1, "rank": 5}\n')
        leader.poll()
        copy.sendall(b'{"stop": true}\n')
        leader.finish(143)
        assert copy.recv(100) == b'{"exit": 143}\n'
    assert asked == []


def test_last_words_of_a_copy_that_is_gone_count(name: str) -> None:
    with LocalLeader(place(num_local=2), f"\0{name}") as leader, socket.socket(socket.AF_UNIX) as copy:
        copy.connect(f"\0{name}")
        copy.sendall(b'{"local_rank": 1, "rank": 5}\n')
        leader.poll()
        copy.sendall(b'{"ended": 7}\n')
        copy.close()
        leader.kill()
        leader.poll()
        assert leader.ended == {1: 7}


def test_what_a_leader_said_last_is_read_by_a_follower_that_finds_it_gone() -> None:
    here, there = socket.socketpair()
    lines = leader_module._Connection(here)
    there.sendall(b'{"exit": 30}\n')
    there.close()
    lines.write({"stop": True})
    lines.wait(100.0)
    assert lines.read() == [{"exit": 30}]
    assert lines.is_closed
    lines.close()
    lines.wait(100.0)  # not for anything that could come
    assert lines.read() == []


def test_follower_does_not_wait_without_end_where_others_stand_in_the_queue(name: str, start: StartFollower) -> None:
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(socket.socket(socket.AF_UNIX))
        leader.bind(f"\0{name}")
        leader.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                stranger.connect(f"\0{name}")
        follower = start(FOLLOW, "1")
        assert says(follower) == "follows"
        wait_for_handler(follower.pid)
        follower.terminate()
        assert follower.wait(100.0) == 128 + signal.SIGTERM


def wait_for_handler(pid: int) -> None:
    """Wait until a process has a handler for SIGTERM."""
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)
    pytest.fail("no handler")


def test_second_leader_is_refused(name: str) -> None:
    with LocalLeader(place(), f"\0{name}"), pytest.raises(PortError, match="another launcher already leads this host"):
        LocalLeader(place(), f"\0{name}")


@pytest.mark.parametrize(
    "hello",
    [b"{}\n", b"[]\n", b"no\n", b'{"local_rank": 0, "rank": 4}\n', b'{"local_rank": 9, "rank": 4}\n', b"x" * (2 << 20)],
)
def test_who_says_something_else_is_no_follower(name: str, hello: bytes) -> None:
    with LocalLeader(place(), f"\0{name}") as leader, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        stranger.settimeout(0.2)
        with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
            stranger.sendall(hello)
        for _ in range(20):
            leader.poll()
        assert leader.ranks == {0: 4}


def test_meeting_names_differ_by_host_run_and_tree(tmp_path: Path) -> None:
    names = {
        meeting_name(place(), job_id=job, host=host, base_dir=base)
        for job in ("job-1", "job-2")
        for host in ("algo-1", "algo-2")
        for base in (tmp_path, tmp_path / "ml")
    }
    assert len(names) == 8
    assert all(name.startswith("\0hetero-") and len(name) < 108 for name in names)
