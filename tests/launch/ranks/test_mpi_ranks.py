"""Which of several ranks that mpirun has made is the cause, where mpirun kills the launchers of the others."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hetero.launch.ranks.leader import LocalLeader
from hetero.launch.ranks.mpi_ranks import MpiRanks
from hetero.launch.ranks.parent_launcher import ParentLauncher
from hetero.launch.ranks.starter import RanksOptions
from hetero.system.line_relay import LineRelay

FOLLOW = """
import sys
from hetero.launch.ranks.leader import Follower
from hetero.launch.ranks.parent_launcher import ParentLauncher
number = int(sys.argv[2])
parent = ParentLauncher(name="mpirun", run="1", rank=number, world_size=2, local_rank=number, num_local=2)
sys.exit(Follower(parent, "\\0" + sys.argv[1], command=["sleep", "600"], variables={}).run())
"""
OPTIONS = RanksOptions(
    script="train.py",
    script_args=(),
    framework="torch",
    num_hosts=1,
    host_index=0,
    meeting_points=[("127.0.0.1", 1)],
    num_ranks=2,
    num_cpus=2,
    num_gpus=0,
    environment={},
    is_module=False,
    generation=0,
)


def until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def followers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield the list of the followers."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for follower in found:
        follower.kill()
        follower.wait()


@pytest.fixture
def given(followers: list[subprocess.Popen[bytes]], tmp_path: Path) -> Iterator[MpiRanks]:
    """Yield two ranks of one host, which have begun."""
    name = f"hetero-test-{uuid.uuid4().hex}"
    parent = ParentLauncher(name="mpirun", run="1", rank=0, world_size=2, local_rank=0, num_local=2)
    followers += [subprocess.Popen([sys.executable, "-c", FOLLOW, name, str(number)]) for number in range(2)]
    with LocalLeader(parent, f"\0{name}") as leader, contextlib.closing(LineRelay(lambda name, line: None)) as relay:
        until(lambda: leader.poll() or leader.is_complete)
        ranks = MpiRanks(OPTIONS, leader, host="algo-9", relay=relay, run_dir=tmp_path)
        until(lambda: all(ranks_of(follower) for follower in followers))
        yield ranks
        ranks.kill()


def ranks_of(follower: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(follower.pid).children()


def test_copy_that_was_killed_is_an_echo(given: MpiRanks, followers: list[subprocess.Popen[bytes]]) -> None:
    followers[0].kill()
    until(lambda: given.poll() == 1)
    cause = given.cause({})
    assert cause.first_line.startswith("HET-30 algo-9: rank 0 ended with its launcher, because mpirun ends all")
    assert cause.is_consequence
    assert cause.of_rank


def test_rank_that_crashed_is_the_cause_though_a_copy_went_before(
    given: MpiRanks, followers: list[subprocess.Popen[bytes]]
) -> None:
    (rank,) = ranks_of(followers[1])
    followers[0].kill()
    until(lambda: given.poll() == 1)
    rank.kill()
    until(lambda: given.poll() == 1 and not given.cause({}).is_consequence)
    assert given.cause({}).first_line.startswith("HET-30 algo-9: rank 1 killed by SIGKILL")
