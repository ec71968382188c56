"""Certificates for tests: those of a job, and every kind that must not do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from hetero.wire.certificates import _Maker, make_certificates
from hetero.wire.streams import Stream, connect, listen
from hetero.wire.tls import Tls, TlsSession
from hetero.wire.tls_streams import TlsStream

HOSTS = ("algo-1", "algo-2", "data", "trainer", "intruder")


@functools.cache
def folder(kind: str) -> Path:
    """Return certificates of `HOSTS`: those of the ``job``, of an ``other`` one, or the job's but ``expired``."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here")
    made = Path(tempfile.mkdtemp(prefix="hetero-test-certificates-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    if kind != "expired":
        make_certificates(made, HOSTS, days=1, keep_authority_key=True)
        return made
    for name in ("ca.pem", "ca.key"):
        shutil.copy(folder("job") / name, made)
    begin = datetime.now(timezone.utc) - timedelta(days=9)
    authority_key = os.open(made / "ca.key", os.O_RDONLY | os.O_CLOEXEC)
    try:
        maker = _Maker(openssl, made, authority_key, begin, begin + timedelta(days=1))
        for host in HOSTS:
            maker.make_host(host)
    finally:
        os.close(authority_key)
    return made


def tls(kind: str = "job", host: str = "algo-1") -> Tls:
    """Return the TLS of a host."""
    return _tls(kind, host)


@functools.cache
def _tls(kind: str, host: str) -> Tls:
    with unchecked() if kind == "expired" else contextlib.nullcontext():
        return Tls(folder(kind), host)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let a host use a certificate that it should have refused itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tls, "_check_own", lambda _tls: 0.0)
        yield


def without_certificate(name: str) -> Callable[[socket.socket], Stream]:
    """Return what makes connections to a host that trust the job's authority and show nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=folder("job") / "ca.pem")
    return lambda given: TlsStream(given, TlsSession(context, name=name))


def opener(client: Tls, name: str) -> Callable[[socket.socket], Stream]:
    """Return what makes connections of a host to another."""
    return lambda given: TlsStream(given, client.client_session(name))


def accept(listener: socket.socket, server: Tls) -> Stream:
    """Accept a connection and complete its handshake; `hetero.dataplane.endpoint.transport` does it without blocking.

    Raises:
        TlsError: It failed; the other side was told why.
    """
    given, _ = listener.accept()
    session = server.server_session()
    given.settimeout(30.0)
    try:
        is_open = False
        while not is_open:
            data = given.recv(2**14)
            if not data:
                raise ConnectionResetError("the client left during the handshake")
            session.take(data)
            try:
                is_open = session.shake_hands()
            finally:
                given.sendall(session.outgoing())
    except BaseException:
        given.close()
        raise
    return TlsStream(given, session)


@contextlib.contextmanager
def opened(kind: str) -> Iterator[tuple[Stream, Stream]]:
    """Give both ends of a connection: in ``plaintext`` or under ``tls``."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1"))
        place = listener.getsockname()[:2]
        if kind == "plaintext":
            first = stack.enter_context(contextlib.closing(connect(*place)))
            second = Stream(listener.accept()[0])
        else:
            server, client = tls(host="algo-1"), tls(host="algo-2")
            accepted: list[Stream] = []
            thread = threading.Thread(target=lambda: accepted.append(accept(listener, server)), daemon=True)
            thread.start()
            first = stack.enter_context(contextlib.closing(connect(*place, make=opener(client, "algo-1"))))
            thread.join(30)
            (second,) = accepted
        stack.enter_context(contextlib.closing(second))
        yield first, second
