"""The port of a launcher for the ranks of its host: hostile bytes, other jobs, forks, and its end."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from hetero.control.hub import Hub
from hetero.control.launcher_link import LauncherLink
from hetero.control.rank.session import RankSession
from hetero.control.security import Token, proof_of_rank
from hetero.errors import AuthenticationError, HeteroError
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.limits import GREETING
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.transports import greeter
from tests.support.control.hubs import TOKEN, make_hub, wait_for

HELLO = GREETING + proof_of_rank(TOKEN, "job-a")
FAILURE = pb.RankReport(rank=0, failure=pb.Cause(summary="boom", exit_code=30))


@pytest.fixture
def trainer(hubs: tuple[Hub, Hub]) -> Hub:
    return hubs[0]


def connect(trainer: Hub, said: bytes = HELLO) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", trainer.rank_port), 20.0)
    connection.sendall(said)
    return connection


def link_to(trainer: Hub, *, rank: int = 0) -> LauncherLink:
    return LauncherLink(f"127.0.0.1:{trainer.rank_port}", TOKEN, job_id="job-a", rank=rank)


def register(link: LauncherLink) -> pb.RegisterReply:
    return link.register(pb.RegisterRequest(rank=0, world_size=1))


def message(request: pb.RankRequest) -> bytes:
    data = request.SerializeToString()
    return struct.pack("<I", len(data)) + data


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", MAX_REQUEST_BYTES + 1) + b"x",
        struct.pack("<I", 2) + b"\xff\xff",
        struct.pack("<I", 0),
        message(pb.RankRequest(report=pb.RankReport(counters={str(number): 1 for number in range(101)}))),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "no message", "of no kind", "beyond a bound", "another protocol"],
)
def test_connection_with_a_malformed_request_ends_and_others_are_served(
    trainer: Hub, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(link_to(trainer)) as link, connect(trainer) as hostile:
        assert register(link).remote
        hostile.sendall(sent)
        assert is_closed(hostile)
        assert register(link).remote
    assert len([record for record in caplog.records if "refused a message" in record.message]) <= 1


@pytest.mark.attack("A1")
@pytest.mark.attack("A11")
@pytest.mark.parametrize(
    "said",
    [
        GREETING + bytes(32),
        GREETING + proof_of_rank(Token.generate(), "job-a"),
        GREETING + proof_of_rank(TOKEN, "job-b"),
        GREETING + proof_of_rank(None, "job-a"),
        GREETING + TOKEN.reveal().encode()[:32].ljust(32),
        message(pb.RankRequest(report=FAILURE)),
    ],
    ids=["none", "another token", "another job", "no token", "the token itself", "no greeting"],
)
def test_peer_without_the_token_is_closed_unanswered_and_counted(trainer: Hub, said: bytes) -> None:
    """A1: A peer without access to the token ends no job."""
    with connect(trainer, said) as hostile:
        with contextlib.suppress(ConnectionError):
            hostile.sendall(message(pb.RankRequest(report=FAILURE)))
        assert is_closed(hostile)
    with trainer.membership() as membership:
        assert membership.own.decided is None
        assert not membership.own.ranks
    assert trainer.auth_failures == 1
    with contextlib.closing(link_to(trainer)) as link:
        assert link.report(FAILURE)  # what the peer sent would have counted
        wait_for(trainer, lambda membership: membership.own.decided is not None)
    assert trainer.auth_failures == 1


@pytest.mark.attack("A9")
@pytest.mark.parametrize("said", [b"", HELLO[:20]], ids=["nothing", "half a greeting"])
def test_peer_that_shows_nothing_in_time_is_closed_and_has_no_thread(
    trainer: Hub, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(greeter, "CONNECT_TIMEOUT_S", 0.1)
    with connect(trainer, said) as silent:
        assert is_closed(silent)
    assert not any(thread.name == "rank" for thread in threading.enumerate())


def test_rank_that_the_launcher_does_not_trust_learns_it(trainer: Hub) -> None:
    link = LauncherLink(f"127.0.0.1:{trainer.rank_port}", Token.generate(), job_id="job-a", rank=3)
    with pytest.raises(AuthenticationError, match="rank 3: its launcher at .* refuses the token"):
        register(link)
    assert not link.report(pb.RankReport(rank=3))


def test_job_without_a_token_asks_for_its_id_alone() -> None:
    with make_hub("trainer", {"data": 1}, token=None) as trainer:
        link = LauncherLink(f"127.0.0.1:{trainer.rank_port}", None, job_id="job-a", rank=0)
        with contextlib.closing(link):
            assert register(link).remote


def test_host_without_ranks_has_no_port_for_them() -> None:
    with make_hub("data", {"trainer": 1}, num_ranks=0) as data:
        assert data.rank_port == 0


def test_threads_that_run_out_cost_one_connection(trainer: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "rank" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with connect(trainer) as unlucky, contextlib.closing(link_to(trainer)) as link:
        assert is_closed(unlucky)
        assert register(link).remote


def test_all_ranks_of_a_host_watch_and_call() -> None:
    num_ranks = 100
    with make_hub("trainer", {"data": 1}) as trainer, contextlib.ExitStack() as stack:
        links = [stack.enter_context(contextlib.closing(link_to(trainer, rank=rank))) for rank in range(num_ranks)]
        for link in links:
            assert not next(stack.enter_context(contextlib.closing(link.watch()))).stop_requested
        assert all(register(link).remote for link in links)


def test_rank_whose_launcher_is_gone_says_so(trainer: Hub) -> None:
    trainer.stop()
    link = link_to(trainer, rank=3)
    with pytest.raises(HeteroError, match="rank 3: its launcher at"):
        register(link)
    assert not link.report(pb.RankReport(rank=3))


@pytest.mark.parametrize("end", [Hub.stop, None], ids=["by the launcher", "by the rank"])
def test_watch_ends(trainer: Hub, end: Callable[[Hub], None] | None) -> None:
    link = link_to(trainer)
    updates = link.watch()
    assert not next(updates).stop_requested
    if end is None:
        link.cancel()
    else:
        end(trainer)
    with pytest.raises(HeteroError):
        next(updates)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 and later warn of any thread
def test_forked_child_leaves_the_connection_to_its_parent(trainer: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.control.rank.session._session", None)
    address = f"127.0.0.1:{trainer.rank_port}"
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    monkeypatch.setattr("hetero.control.rank.session._session", session)
    with contextlib.closing(session):
        child = os.fork()
        if child == 0:
            from hetero.control.rank import session as sessions

            os._exit(int(sessions.current() is not None))
        assert os.waitpid(child, 0)[1] == 0
        trainer.update(stop_requested=True)
        wait_for(trainer, lambda membership: membership.own.stop_at is not None)  # it heard, and voted
