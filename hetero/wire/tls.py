"""Mutual TLS between the hosts of a job: this host's certificate, checks of other certificates, and failure messages.

`hetero certs` makes a folder with ``ca.pem``, the certificate authority of one job, and a certificate ``HOST.pem`` and
its key ``HOST.key`` for each host. The name in a certificate identifies the host, and a host does not need another
host's key. Both sides of a connection show a certificate. The system's authorities are not accepted. Connections go to
numeric addresses, so the address does not contain the host's name. The client checks that the server's certificate has
the name that the host has in the description of the cluster.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hetero.errors import AuthenticationError

__all__ = ["WELCOME", "Tls", "TlsDiagnosis", "TlsError", "TlsSession", "diagnose"]

WELCOME = b"hetero"
"""First bytes that the server sends under TLS, after it has accepted the client's certificate.

The client waits for these bytes, because in TLS 1.3 the client's handshake ends before the server has checked the
client's certificate.
"""

_MAX_FILE_BYTES = 2**20
_ADVICE = "give every host of the job --tls-dir with certificates of one run of hetero certs, or none of them"

_Buffer: TypeAlias = "bytes | memoryview"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsDiagnosis:
    """The check of TLS that failed."""

    text: str
    """The failure as this side describes it: "its certificate is not valid: certificate has expired"."""
    is_certificate: bool
    """Whether this or the other side rejected a certificate. If so, trying again does not help."""


# OpenSSL's and BoringSSL's names of failures. An alert is a failure that the other side reports.
_REASONS = (
    ("Hostname Verification Check failed", "its certificate is not valid: it is one of another host", True),
    ("is not in peer certificate", "its certificate is not valid: it is one of another host", True),
    ("ALERT_UNKNOWN_CA", "it refuses this host's certificate: another authority signed it than its ca.pem", True),
    ("ALERT_CERTIFICATE_EXPIRED", "it refuses this host's certificate: certificate has expired", True),
    ("ALERT_CERTIFICATE_REQUIRED", "it demands a certificate, and this side shows none", True),
    ("ALERT_HANDSHAKE_FAILURE", "it refuses the handshake: TLS 1.2 or newer and certificates on both sides?", False),
    ("ALERT_BAD_CERTIFICATE", "it refuses this host's certificate", True),
    ("ALERT_CERTIFICATE_UNKNOWN", "it refuses this host's certificate", True),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "it refuses this host's certificate", True),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it shows no certificate", True),
    ("ALERT_PROTOCOL_VERSION", "it has no version of TLS in common with this host (1.2 or newer)", False),
    ("UNSUPPORTED_PROTOCOL", "it has no version of TLS in common with this host (1.2 or newer)", False),
    ("WRONG_VERSION_NUMBER", f"it does not speak TLS; {_ADVICE}", False),
    ("HTTP_REQUEST", f"it does not speak TLS; {_ADVICE}", False),
    ("BAD_RECORD_MAC", "the received data is damaged, or belongs to another connection", False),
)

_OTHER_AUTHORITY = ("issuer certificate", "self-signed", "self signed", "signature failure")


def diagnose(words: str) -> TlsDiagnosis | None:
    """Return the TLS failure that a library's error text describes, or None if it does not describe one.

    Args:
        words: The text of an `ssl.SSLError`, or the details of a gRPC status.
    """
    _, marker, reason = words.partition("CERTIFICATE_VERIFY_FAILED")
    if marker:
        # The reason stands between the marker and the next separator.
        reason = reason.strip(" :]").partition(":")[0].partition(";")[0].strip(" .]")
        if any(word in reason.lower() for word in _OTHER_AUTHORITY):
            reason = f"another authority signed it than this host's ca.pem ({reason})"
        # gRPC before 1.69 does not give a reason.
        reason = reason or "verification failed"
        return TlsDiagnosis(text=f"its certificate is not valid: {reason}", is_certificate=True)
    for name, text, is_certificate in _REASONS:
        if name in words:
            return TlsDiagnosis(text=text, is_certificate=is_certificate)
    return None


class TlsError(ConnectionError):
    """TLS failed. The message names the failed check if the library reports it."""


class Tls:
    """This host's certificate and key, and the authority of the job. Thread-safe.

    The constructor checks the certificate as the other hosts do, and raises at once if they would reject it.

    Args:
        directory: Holds ``ca.pem``, ``HOST.pem`` and ``HOST.key``. Only the owner may have access to the key, and only
            the owner may write any of the files.
        host: This host's name.

    Raises:
        AuthenticationError: If a file is missing, unreadable or malformed, or if the certificate does not belong to
            this host.
    """

    def __init__(self, directory: Path, host: str) -> None:
        self.directory = directory.absolute()
        self.host = host
        paths = [self.directory / name for name in ("ca.pem", f"{host}.pem", f"{host}.key")]
        # The contents of the three files. `_read` also checks who has access to them.
        self._pems = tuple(_read(path, is_secret=path.suffix == ".key") for path in paths)
        self._server, self._client = (
            _make_context(protocol, paths) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )
        self.expires_epoch_s = self._check_own()
        """Time when the certificate expires, in seconds like `time.time`."""

    def reveal(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of the authority, certificate and key files. gRPC does not accept paths."""
        authority, certificate, key = self._pems
        return authority, certificate, key

    def server_session(self) -> TlsSession:
        """Return the TLS session of an accepted connection."""
        return TlsSession(self._server)

    def client_session(self, name: str) -> TlsSession:
        """Return the TLS session of a connection to a host.

        Args:
            name: The host's name.
        """
        return TlsSession(self._client, name=name)

    def _check_own(self) -> float:
        """Run a handshake with this host's own certificate on both sides. Return when the certificate expires.

        The handshake applies all checks that the other hosts apply.
        """
        client, server = self.client_session(self.host), self.server_session()
        client_is_done = server_is_done = False
        try:
            # Each round moves the handshake on, or raises.
            while not (client_is_done and server_is_done):
                client_is_done = client_is_done or client.shake_hands()
                server.take(client.outgoing())
                server_is_done = server_is_done or server.shake_hands()
                client.take(server.outgoing())
        except TlsError as error:
            raise AuthenticationError(
                f"the certificate of {self.host} in {self.directory} cannot be used: "
                f"{str(error).removeprefix('its certificate is not valid: ')}\n"
                "  to do: make the job's certificates anew with hetero certs, with every host's name"
            ) from error
        return client.peer_expires_epoch_s()


class TlsSession:
    """The TLS session of one connection. It works on bytes in memory, without a socket.

    One thread at a time may send, and one may receive. They may do so at the same time.

    Args:
        context: A context of `Tls`.
        name: The name that the server's certificate must have. None on the server's side.
    """

    def __init__(self, context: ssl.SSLContext, *, name: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # The lock is needed because OpenSSL allows only one thread at a time to use a session.
        self._lock = threading.Lock()
        self._is_server = name is None
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=self._is_server, server_hostname=name)

    def take(self, data: _Buffer) -> None:
        """Process bytes that arrived from the other side."""
        self._incoming.write(data)

    def outgoing(self) -> bytes:
        """Return the bytes to send to the other side. Each byte is returned once."""
        return self._outgoing.read()

    def shake_hands(self) -> bool:
        """Continue the handshake, and return whether it is complete. Do not call this after it is complete.

        When the handshake is complete, the server sends `WELCOME`.

        Raises:
            TlsError: If the handshake failed. The bytes in `outgoing` tell the other side the reason.
        """
        # No lock is needed, because no other thread uses the session before the handshake is complete.
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise _translated(error) from error
        if self._is_server:
            self._ssl.write(WELCOME)
        return True

    def encrypt(self, data: memoryview) -> bytes:
        """Return the encrypted bytes to send for ``data``."""
        with self._lock:
            self._ssl.write(data)
            return self._outgoing.read()

    def decrypt(self, room: memoryview) -> int:
        """Write the arrived data into ``room``, and return the number of bytes written.

        The number is less than the length of ``room`` if more data must arrive.

        Raises:
            TlsError: If the data was damaged, or the other side reports a failure.
        """
        filled = 0
        try:
            # Each call decrypts one record of 16 KiB at most. During the call, the interpreter's lock is free.
            while filled < len(room):
                with self._lock:
                    size: int = self._ssl.read(len(room) - filled, room[filled:])  # type: ignore[assignment]
                if not size:
                    break
                filled += size
        except ssl.SSLWantReadError:  # more data must arrive
            pass
        except ssl.SSLError as error:
            raise _translated(error) from error
        return filled

    @property
    def has_more(self) -> bool:
        """Whether bytes have arrived that `decrypt` has not returned."""
        return bool(self._incoming.pending or self._ssl.pending())

    def peer_expires_epoch_s(self) -> float:
        """Return when the other side's certificate expires. Call this after the handshake."""
        certificate = self._ssl.getpeercert()
        assert certificate
        return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def _translated(error: ssl.SSLError) -> TlsError:
    """Return hetero's exception for the library's exception."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # `verify_message` has only the reason, without the words that `diagnose` looks for.
        found = diagnose(f"CERTIFICATE_VERIFY_FAILED: {error.verify_message}")
    else:
        found = diagnose(error.reason or str(error))
    return TlsError(found.text if found is not None else f"TLS failed: {error.reason or error}")


def _read(path: Path, *, is_secret: bool) -> bytes:
    """Return the content of a PEM file. Reject a file that others can write, and a secret file that others can read."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            facts = os.fstat(file.fileno())
            # Read only a regular file, because reading another one, such as a pipe, may block.
            content = file.read(_MAX_FILE_BYTES) if stat.S_ISREG(facts.st_mode) else b""
    except OSError as error:
        raise AuthenticationError(
            f"cannot read {path} (--tls-dir): {error.strerror}; hetero certs makes ca.pem, HOST.pem and HOST.key"
        ) from error
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid not in (os.geteuid(), 0):
        raise AuthenticationError(f"{path} (--tls-dir) belongs to user {facts.st_uid}: expected this user or root")
    if is_secret and mode & 0o077:
        raise AuthenticationError(f"the key {path} has mode {mode:04o}: others have access; chmod 600 it")
    # Check this for public files too, because anyone who can write ca.pem decides who may join the job.
    if mode & 0o022:
        raise AuthenticationError(f"{path} (--tls-dir) has mode {mode:04o}: others can write it; chmod go-w it")
    if b"-----BEGIN " not in content:
        raise AuthenticationError(f"{path} (--tls-dir) is not a PEM file: make the files with hetero certs")
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _make_context(protocol: ssl._SSLMethod, paths: list[Path]) -> ssl.SSLContext:
    """Return OpenSSL's settings for one side of a connection. The other side must show a certificate of the job."""
    authority, certificate, key = paths
    # PROTOCOL_TLS_CLIENT also checks the host's name.
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        # Send no session tickets. Sessions are never resumed, and a ticket would be unread bytes on an idle connection.
        context.num_tickets = 0
    try:
        context.load_verify_locations(cafile=authority)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"{authority} (--tls-dir) has no certificate that can be used: {error}") from error
    try:
        # Without the argument ``password``, OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise AuthenticationError(
            f"{certificate} and {key.name} (--tls-dir) cannot be used as a pair: {error}"
        ) from error
    return context
