"""Certificates for tests: those of a job, and every kind that must not do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import ssl
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hetero.wire.certificates import _Maker, make_certificates
from hetero.wire.tls import Tls, TlsSession
from hetero.wire.transports.interface import Connection
from hetero.wire.transports.tls import TlsTransport

import grpc  # isort: skip

Connect = Callable[..., Connection]
"""As `hetero.wire.transports.interface.Transport.connect`."""
GRPC_NAMES_THE_CHECK = tuple(map(int, grpc.__version__.split(".")[:2])) >= (1, 69)
"""Whether gRPC says which check a certificate fails. The oldest versions that pyproject.toml allows do not."""
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


def without_certificate(name: str) -> Connect:
    """Return what connects to a host, trusts the job's authority and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=folder("job") / "ca.pem")
    return opener_of(context, name)


def opener(client: Tls, name: str) -> Connect:
    """Return what makes connections of a host to another."""
    return functools.partial(TlsTransport(client).connect, host=name)


def opener_of(context: ssl.SSLContext, name: str) -> Connect:
    """Return what makes connections to a host with a context of OpenSSL."""
    client = SimpleNamespace(client_session=lambda name: TlsSession(context, name=name))
    return functools.partial(TlsTransport(cast("Tls", client)).connect, host=name)
