"""The socket between a launcher and the ranks of its host: hostile bytes, other users, forks, and its end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hubs import TOKEN, wait_for

from hetero.control import host_socket
from hetero.control.host_socket import ADDRESS_PREFIX, METHODS, HostSocket, SocketLink
from hetero.control.hub import Hub
from hetero.control.rank.session import RankSession
from hetero.control.security import Token
from hetero.errors import AuthenticationError, HeteroError
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.proto import control_pb2 as pb


@pytest.fixture
def trainer(hubs: tuple[Hub, Hub]) -> Hub:
    return hubs[0]


@pytest.fixture
def rank_socket(trainer: Hub) -> Iterator[HostSocket]:
    with trainer.open_host_socket() as opened:
        yield opened


def connect(address: str, token: Token | None = TOKEN) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20.0)
    connection.connect("\0" + address.removeprefix(ADDRESS_PREFIX))
    if token is not None:
        shown = token.reveal().encode()
        connection.sendall(struct.pack("!BI", host_socket._TOKEN, len(shown)) + shown)
    return connection


def register(link: SocketLink) -> pb.RegisterReply:
    return link.register(pb.RegisterRequest(rank=0, world_size=1))


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!BI", 0, MAX_REQUEST_BYTES + 1) + b"x",
        struct.pack("!BI", len(host_socket.METHODS), 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "unknown method", "another protocol"],
)
def test_host_socket_ends_a_connection_that_sends_no_frame_and_serves_the_others(
    rank_socket: HostSocket, sent: bytes
) -> None:
    link = SocketLink(rank_socket.address, TOKEN, rank=0)
    with contextlib.closing(link), connect(rank_socket.address) as hostile:
        assert register(link).remote
        hostile.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert hostile.recv(1) == b""
        assert register(link).remote


def test_host_socket_refuses_a_message_that_is_none_and_goes_on(rank_socket: HostSocket) -> None:
    with connect(rank_socket.address) as connection:
        connection.sendall(struct.pack("!BI", 0, 2) + b"\xff\xff")
        number, length = struct.unpack("!BI", connection.recv(5, socket.MSG_WAITALL))
        assert number == 1
        assert b"are not a valid RegisterRequest message" in connection.recv(length, socket.MSG_WAITALL)
        connection.sendall(struct.pack("!BI", 0, 0))
        assert connection.recv(1) == b"\0"


FAILURE = pb.RankReport(rank=0, failure=pb.Cause(summary="boom", exit_code=30))


def frame(number: int, data: bytes) -> bytes:
    return struct.pack("!BI", number, len(data)) + data


@pytest.mark.attack("A1")
@pytest.mark.parametrize(
    "shown",
    [
        b"",
        frame(host_socket._TOKEN, b"x" * len(TOKEN.reveal())),
        frame(host_socket._TOKEN, b""),
        frame(0, TOKEN.reveal().encode()),
        struct.pack("!BI", host_socket._TOKEN, host_socket._MAX_TOKEN_BYTES + 1),
    ],
    ids=["none", "wrong", "empty", "as a method", "too long"],
)
def test_host_socket_closes_a_peer_without_the_token_and_counts_it(
    trainer: Hub, rank_socket: HostSocket, shown: bytes
) -> None:
    """A1: A peer of this user in another container, which has no access to the token, ends no job."""
    report = frame(METHODS.index("Report"), FAILURE.SerializeToString())
    with connect(rank_socket.address, None) as hostile, contextlib.suppress(ConnectionError):
        hostile.sendall(shown + report)
        assert hostile.recv(1) == b""
    with trainer.membership() as membership:
        assert membership.own.decided is None
        assert not membership.own.ranks
    assert trainer.auth_failures == 1
    link = SocketLink(rank_socket.address, TOKEN, rank=0)
    with contextlib.closing(link):
        assert link.report(FAILURE)  # what the stranger sent would have counted
        wait_for(trainer, lambda membership: membership.own.decided is not None)
    assert trainer.auth_failures == 1


def test_host_socket_counts_no_connection_that_was_cut_before_its_token(trainer: Hub, rank_socket: HostSocket) -> None:
    connect(rank_socket.address, None).close()
    with connect(rank_socket.address, None) as peer:
        peer.sendall(frame(0, b"token")[:2])
    with connect(rank_socket.address, None) as wrong:
        wrong.sendall(frame(0, b"no token"))
        assert wrong.recv(1) == b""
    assert trainer.auth_failures == 1


@pytest.mark.attack("A9")
def test_host_socket_waits_for_the_token_only_so_long(
    trainer: Hub, rank_socket: HostSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A9: Neither a silent peer nor one that sends byte for byte keeps a thread."""
    monkeypatch.setattr(host_socket, "_TOKEN_S", 0.1)
    with connect(rank_socket.address, None) as silent:
        assert silent.recv(1) == b""
    monkeypatch.setattr(host_socket, "_TOKEN_S", 0.0)
    with connect(rank_socket.address, None) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(b"\xff")
        assert slow.recv(1) == b""
    assert trainer.auth_failures == 2


def test_host_socket_of_a_job_without_a_token_asks_for_none() -> None:
    with HostSocket(lambda *_: [b"answer"]) as opened, connect(opened.address, None) as connection:
        connection.sendall(frame(0, b""))
        assert connection.recv(1) == b"\0"


@pytest.mark.parametrize("side", ["launcher", "rank"])
def test_host_socket_of_another_user_is_refused(
    rank_socket: HostSocket, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    is_own_user = host_socket._is_own_user
    launcher_thread = rank_socket._thread

    def pretend(connection: socket.socket) -> bool:
        is_launcher = threading.current_thread() is launcher_thread
        return is_own_user(connection) and is_launcher != (side == "launcher")

    monkeypatch.setattr(host_socket, "_is_own_user", pretend)
    error, text = (HeteroError, "rank 0 cannot reach") if side == "launcher" else (AuthenticationError, "another user")
    with pytest.raises(error, match=text):
        register(SocketLink(rank_socket.address, TOKEN, rank=0))


def test_host_socket_goes_on_when_descriptors_run_out_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = socket.socket.accept
    errors = [OSError(errno.EMFILE, "Too many open files")] * 3

    def scarce(listener: socket.socket) -> object:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(host_socket, "_PAUSE_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", scarce)
    with caplog.at_level(logging.WARNING), HostSocket(lambda *_: [b""]) as opened:
        with contextlib.closing(SocketLink(opened.address, rank=0)) as link:
            assert not register(link).remote
        assert opened._thread.is_alive()
    assert [record.message for record in caplog.records] == [
        "cannot accept the connection of a rank: [Errno 24] Too many open files; trying again"
    ]


def test_host_socket_goes_on_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "hetero-rank" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with HostSocket(lambda *_: [b""]) as opened, contextlib.closing(SocketLink(opened.address, rank=0)) as link:
        with connect(opened.address, None) as unlucky:
            assert unlucky.recv(1) == b""
            assert not opened._connections
        assert not register(link).remote


def test_rank_whose_launcher_is_gone_says_so(rank_socket: HostSocket) -> None:
    rank_socket.close()
    link = SocketLink(rank_socket.address, TOKEN, rank=3)
    with pytest.raises(HeteroError, match="rank 3 cannot reach its launcher"):
        register(link)
    assert not link.report(pb.RankReport(rank=3))


def test_watch_ends_when_the_launcher_closes_its_socket(rank_socket: HostSocket) -> None:
    updates = SocketLink(rank_socket.address, TOKEN, rank=0).watch(pb.WatchRequest(rank=0))
    assert not next(updates).stop_requested
    rank_socket.close()
    with pytest.raises(HeteroError, match="closed the connection"):
        next(updates)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 and later warn of any thread
def test_forked_child_leaves_the_connection_to_its_parent(trainer: Hub, rank_socket: HostSocket) -> None:
    session = RankSession(rank_socket.address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        child = os.fork()
        if child == 0:
            session.abandon()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        trainer.update(stop_requested=True)
        wait_for(trainer, lambda membership: membership.own.stop_at is not None)  # it heard, and voted
