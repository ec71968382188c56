"""Certificates for tests: those of a job, and every kind that must not do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import ssl
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from hetero.wire.certificates import _Authority, _pem, make_certificates
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
    made = Path(tempfile.mkdtemp(prefix="hetero-test-certificates-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    if kind != "expired":
        make_certificates(made, HOSTS, days=1, keep_authority_key=True)
        return made
    for name in ("ca.pem", "ca.key"):
        shutil.copy(folder("job") / name, made)
    begin = datetime.now(timezone.utc) - timedelta(days=9)
    key = serialization.load_pem_private_key((made / "ca.key").read_bytes(), None)
    authority = _Authority(
        cast("EllipticCurvePrivateKey", key), x509.load_pem_x509_certificate((made / "ca.pem").read_bytes())
    )
    for host in HOSTS:
        key, certificate = authority.issue(host, begin, begin + timedelta(days=1))
        (made / f"{host}.pem").write_bytes(_pem(certificate))
        (made / f"{host}.key").write_bytes(_pem(key))
        (made / f"{host}.key").chmod(0o600)
        (made / f"{host}.pem").chmod(0o600)
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
