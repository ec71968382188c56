"""The job's token: reads and writes its file, adds it to calls, and checks it in servers.

The trust boundary is the hosts of the job. Every call carries the token and the job's id in its metadata. A call to an
endpoint also names the endpoint's incarnation, so a recorded call is useless after the process was restarted.
Calls to launchers name no incarnation, because peers and ranks call a launcher before they know its incarnation. A
server rejects every method that its policy table does not list, so an RPC without a policy cannot be called.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeAlias

from hetero.errors import AuthenticationError
from hetero.system.waits import LOG_INTERVAL_S
from hetero.wire import channels  # before grpc, because channels sets grpc's environment

import grpc  # isort: skip

__all__ = [
    "CONTROL_POLICIES",
    "CONTROL_SERVICE",
    "TOKEN_FILE_VARIABLE",
    "Policy",
    "ServerInterceptor",
    "Token",
    "call_metadata",
    "control_server",
    "is_of_other_job",
    "load_token",
    "proof_of_rank",
    "token_from_environment",
    "token_memfd",
    "write_token",
]

TOKEN_FILE_VARIABLE = "HETERO_TOKEN_FILE"
"""Environment variable with the path of the token's file. The token itself is never in an environment."""

_AUTHORIZATION = "authorization"
_JOB = "hetero-job"
_JOB_DIGEST = "hetero-job-digest"
"""Trailer of every rejection for a missing or wrong token. With it, the caller finds out that another job has the port.
The digest is not a secret: the id of a job can be guessed from it."""
_INCARNATION = "hetero-incarnation"
_MIN_CHARS = 16
_MAX_CHARS = 512
_NUM_REFUSERS = 2
_SPARE_THREADS = 64
"""Threads of a control server for callers that are not peers, such as hosts that want to join."""
_SECRET_OF_A_POD = (0, 0o440)
"""Owner and mode of a secret in a pod with ``fsGroup``, which a pod that does not run as root needs. Nothing can change
the mode, because the volume is read-only."""
_TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

logger = logging.getLogger(__name__)


def _is_not_about_headers(record: logging.LogRecord) -> bool:
    """Return whether to log a record of gRPC: any but those about the encoding of a header."""
    return not str(record.msg).startswith("Invalid encoding on")


# gRPC logs each header that is not UTF-8, with a traceback, before the token is checked. An unauthenticated peer could
# fill the log with arbitrary text. Calls with such headers are still rejected and counted.
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_about_headers)


class Token:
    """A shared secret that logs, reprs and pickles do not show.

    Args:
        value: 16 to 512 characters of the URL-safe and base64 alphabets.

    Raises:
        AuthenticationError: If ``value`` has another length or other characters. The message does not quote it.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not _MIN_CHARS <= len(value) <= _MAX_CHARS:
            raise AuthenticationError(f"a token has {_MIN_CHARS} to {_MAX_CHARS} characters, this one has {len(value)}")
        if not _TOKEN_PATTERN.fullmatch(value):
            raise AuthenticationError("a token consists of letters, digits and ._~+/=-; this one has other characters")
        self._value = value.encode("ascii")

    @classmethod
    def generate(cls) -> Token:
        """Return a new token of 256 random bits."""
        return cls(secrets.token_urlsafe(32))

    def reveal(self) -> str:
        """Return the secret itself, for a token file or the metadata of a call."""
        return self._value.decode("ascii")

    def matches(self, candidate: bytes) -> bool:
        """Compare the token with ``candidate``. The time taken does not depend on where they differ."""
        return hmac.compare_digest(self._value, candidate)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Token(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token cannot be pickled; pass the path of its file")


def load_token(path: str) -> Token:
    """Read a token file.

    Args:
        path: A regular file or ``/proc/PID/fd/N`` of a memfd. Only its owner may have access, or it is a file of root
            that only its group can read, as in a pod of Kubernetes.

    Raises:
        AuthenticationError: If the file is missing, unreadable, open to others, not a regular file, or without a token.
    """
    try:
        # O_NONBLOCK, because opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"cannot open the token file {path!r}: {error}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise AuthenticationError(f"the token file {path!r} is not a regular file")
        if facts.st_uid not in (os.geteuid(), 0):
            raise AuthenticationError(f"the token file {path!r} belongs to user {facts.st_uid}, not to this one")
        mode = stat.S_IMODE(facts.st_mode)
        if mode & 0o077 and (facts.st_uid, mode) != _SECRET_OF_A_POD:
            raise AuthenticationError(f"the token file {path!r} has mode {mode:04o}: others have access; chmod 600 it")
        # Use pread, because descriptors under /proc share their offset with the process that made them.
        content = os.pread(descriptor, 4096, 0)
    except OSError as error:
        raise AuthenticationError(f"cannot read the token file {path!r}: {error}") from error
    finally:
        os.close(descriptor)
    try:
        return Token(content.decode("ascii").strip())
    except (UnicodeDecodeError, AuthenticationError) as error:
        reason = "it is not ASCII text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise AuthenticationError(f"the token file {path!r} holds no token: {reason}") from None


def token_from_environment(environment: Mapping[str, str]) -> Token | None:
    """Return the token that `TOKEN_FILE_VARIABLE` points at, or None if the variable is not set.

    Raises:
        AuthenticationError: If the variable is set and the file cannot be used.
    """
    path = environment.get(TOKEN_FILE_VARIABLE)
    return None if path is None else load_token(path)


def write_token(path: str, token: Token) -> None:
    """Create a token file that only this user can read.

    Raises:
        FileExistsError: If there is already a file at ``path``.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token.reveal() + "\n")


def token_memfd(token: Token) -> tuple[int, str]:
    """Put the token into anonymous memory.

    Returns:
        The descriptor, which must stay open while children may read it, and the path under ``/proc`` where processes
        of the same user can read it.
    """
    descriptor = os.memfd_create("hetero-token", os.MFD_CLOEXEC)
    # A memfd begins with mode 0777, and `load_token` rejects a file that others can access.
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, token.reveal().encode("ascii"))
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


class _Bearer(str):
    """Value of the authorization header. Tracebacks that print local variables do not show it."""

    __slots__ = ()

    def __new__(cls, token: Token) -> _Bearer:
        return super().__new__(cls, f"Bearer {token.reveal()}")

    def __repr__(self) -> str:
        return "'Bearer ...'"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token cannot be pickled; pass the path of its file")


def call_metadata(token: Token | None, job_id: str, *, incarnation: str = "") -> tuple[tuple[str, str], ...]:
    """Return the metadata of a client's call.

    Args:
        token: The job's token.
        job_id: Id of the job.
        incarnation: Incarnation of the endpoint that is called. Empty for a launcher.
    """
    ids = ((_JOB, job_id), *(((_INCARNATION, incarnation),) if incarnation else ()))
    return ids if token is None else ((_AUTHORIZATION, _Bearer(token)), *ids)


def proof_of_rank(token: Token | None, job_id: str) -> bytes:
    """Return the first 32 bytes of a connection of a rank to a launcher. They do not show the token.

    Args:
        token: The job's token. Without one, the bytes prove only that the peer knows the job's id.
        job_id: Id of the job.
    """
    secret = b"" if token is None else token.reveal().encode("ascii")
    return hmac.digest(secret, b"rank of " + job_id.encode("utf-8"), "sha256")


def is_of_other_job(error: grpc.RpcError, job_id: str) -> bool:
    """Return whether the server that rejected the token of a call belongs to another job than ``job_id``.

    A server sends a digest of its job's id with each rejection of a token.
    """
    found = _values(list(error.trailing_metadata() or ()), _JOB_DIGEST)
    return bool(found) and found != [_digest(job_id).encode()]


def _digest(job_id: str) -> str:
    """Return a short digest of a job's id, for `_JOB_DIGEST`."""
    return hashlib.sha256(job_id.encode("utf-8")).hexdigest()[:16]


class Policy(enum.Enum):
    """Who may call an RPC."""

    TOKEN = "token"
    """Callers that have the job's token and name the job's id."""
    JOINING = "joining"
    """Callers that have the job's token. They do not know the job's id yet."""


CONTROL_SERVICE = "hetero.v1.Control"
"""Name of the service of launchers, and of the registrar, which has the port before the launcher of its host."""
CONTROL_POLICIES: Mapping[str, Policy] = {
    f"/{CONTROL_SERVICE}/Heartbeat": Policy.TOKEN,
    f"/{CONTROL_SERVICE}/Join": Policy.JOINING,
}
"""The policy of each method of `CONTROL_SERVICE`."""


class ServerInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects every call that the policy table does not allow. Thread-safe.

    Args:
        token: The job's token. None for a job without one. Then only ids and the policy table are checked.
        job_id: Id of this server's job.
        policies: Maps a full method name (``/package.Service/Method``) to its policy. Other methods are rejected.
        incarnation: Incarnation of this server, random for each start. Calls that do not name it are rejected. If the
            incarnation is empty, calls need not name one.
        clock: Monotonic seconds, for the rate limit of the log.
    """

    def __init__(
        self,
        token: Token | None,
        *,
        job_id: str,
        policies: Mapping[str, Policy],
        incarnation: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policies = dict(policies)
        self._token = token
        self._job_id = job_id.encode("utf-8")
        self._incarnation = incarnation.encode("utf-8")
        self._clock = clock
        self._lock = threading.Lock()
        self._auth_failures = 0
        self._next_log_s = float("-inf")
        # Reject calls on separate threads. A flood of unauthenticated calls must not occupy the server's threads.
        threads = ThreadPoolExecutor(_NUM_REFUSERS, thread_name_prefix="refuse")
        unauthenticated, precondition = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION
        # By the digest, a rejected caller finds out that another job has this port.
        digest = ((_JOB_DIGEST, _digest(job_id)),)
        self._unauthenticated = _refusal(unauthenticated, "authentication failed", threads, digest)
        self._other_job = _refusal(precondition, f"this server belongs to job {job_id}", threads)
        self._other_incarnation = _refusal(precondition, "this server was started anew", threads)

    @property
    def auth_failures(self) -> int:
        """Number of calls rejected so far for a missing or wrong token, a missing policy or another job's id."""
        with self._lock:
            return self._auth_failures

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Return the real handler, or one that rejects the call."""
        policy = self._policies.get(handler_call_details.method)
        metadata = list(handler_call_details.invocation_metadata or ())
        # A method that has no policy must not be callable, so it is rejected like a call without the token.
        if policy is None or not self._is_authentic(_values(metadata, _AUTHORIZATION)):
            self._count_failure()
            return self._unauthenticated
        # A host that wants to join does not know the job's id and the server's incarnation yet.
        if policy is Policy.JOINING:
            return continuation(handler_call_details)
        jobs = _values(metadata, _JOB)
        if len(jobs) != 1 or not hmac.compare_digest(jobs[0], self._job_id):
            self._count_failure()
            return self._other_job
        # Require exactly one incarnation. Without this check, an attacker who had recorded a call could repeat the call
        # without this header (attack A11 in docs/reliability.md).
        meant = _values(metadata, _INCARNATION)
        is_meant = len(meant) == 1 and hmac.compare_digest(meant[0], self._incarnation)
        # A wrong incarnation does not count as a failed authentication. The caller belongs to the job, and may not know
        # yet that this server was restarted.
        if self._incarnation and not is_meant:
            return self._other_incarnation
        return continuation(handler_call_details)

    def _is_authentic(self, values: list[bytes]) -> bool:
        """Return whether the authorization headers of a call are one header with the job's token."""
        if self._token is None:
            return True
        # Without exactly one header, compare an empty text, which no token equals.
        scheme, _, candidate = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        return self._token.matches(candidate) and scheme.lower() == b"bearer"

    def _count_failure(self) -> None:
        """Count a rejected call and log it, at most once per `LOG_INTERVAL_S`."""
        with self._lock:
            self._auth_failures += 1
            total, now_s = self._auth_failures, self._clock()
            is_due = now_s >= self._next_log_s
            if is_due:
                self._next_log_s = now_s + LOG_INTERVAL_S
        if is_due:
            # The log shows nothing of the call, because an unauthenticated peer chose its method and headers.
            logger.warning("refused a call without this job's token or id (%d so far)", total)


def control_server(access: ServerInterceptor, handlers: Mapping[str, _Handler], *, num_peers: int) -> grpc.Server:
    """Return a server of `CONTROL_SERVICE` without a port.

    Args:
        access: Rejects calls.
        handlers: The handler of each method.
        num_peers: Number of hosts that call.
    """
    # If a call is lost, its peer may call again before the lost call has ended here. So a peer may need two threads.
    num_threads = 2 * num_peers + _SPARE_THREADS
    server = grpc.server(
        ThreadPoolExecutor(num_threads, thread_name_prefix="control"),
        interceptors=[access],
        options=channels.server_options(max_streams=num_threads),
        maximum_concurrent_rpcs=num_threads,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CONTROL_SERVICE, dict(handlers)),))
    return server


def _values(metadata: list[Any], key: str) -> list[bytes]:
    """Return the values of all headers with this name, as bytes."""
    found = [value for name, value in metadata if name == key]
    return [value if isinstance(value, bytes) else value.encode("utf-8") for value in found]


def _refusal(
    code: grpc.StatusCode, details: str, threads: ThreadPoolExecutor, trailers: tuple[tuple[str, str], ...] = ()
) -> _Handler:
    """Return a handler that rejects each call with a code, on separate threads."""

    def refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        context.set_trailing_metadata(trailers)
        context.abort(code, details)

    # gRPC then calls the handler on these threads instead of the server's.
    refuse.experimental_thread_pool = threads  # type: ignore[attr-defined]
    # A handler with streams on both sides can reject unary and streaming calls, without waiting for a first message.
    return grpc.stream_stream_rpc_method_handler(refuse)
