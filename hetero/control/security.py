"""The job's token: where it comes from, how calls carry it, how servers demand it.

Boundary: the hosts of the job. Every call carries the token and the job's id in
its metadata, and every call to an endpoint also the incarnation it is meant for,
so that a recorded call is worth nothing once the process is another. Launchers
have none to name: their peers and ranks call before they have heard of it. A
server refuses whatever its policy table does not name, so an RPC that somebody
adds without thinking of access is closed, not open.
"""

from __future__ import annotations

import enum
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
from typing import Any, NoReturn, TypeAlias, TypeVar

from hetero.errors import AuthenticationError
from hetero.wire import channels  # noqa: F401  (before grpc: sets its environment)

import grpc  # isort: skip

__all__ = [
    "TOKEN_FILE_VARIABLE",
    "Policy",
    "ServerInterceptor",
    "Token",
    "call_metadata",
    "load_token",
    "serve_on",
    "token_from_environment",
    "token_memfd",
    "write_token",
]

TOKEN_FILE_VARIABLE = "HETERO_TOKEN_FILE"
"""Environment variable that names the token's file. The token itself is never in an environment."""

_AUTHORIZATION = "authorization"
_JOB = "hetero-job"
_INCARNATION = "hetero-incarnation"
_MIN_CHARS = 16
_MAX_CHARS = 512
_NUM_REFUSERS = 2
_TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)

_Behaviour = TypeVar("_Behaviour", bound=Callable[..., Any])
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

logger = logging.getLogger(__name__)


def _is_no_strangers_word(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Invalid encoding on")


# gRPC logs headers that are no UTF-8, with a traceback each, before anybody is asked for a token: whoever reaches a
# port could fill the log with words of his own. Such a call is refused and counted like any other.
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_strangers_word)


class Token:
    """A shared secret that does not show itself in logs, reprs or pickles.

    Args:
        value: 16 to 512 characters of the URL-safe and base64 alphabets.

    Raises:
        AuthenticationError: ``value`` has another length or other characters; the message does not quote it.
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
        """Return the secret itself, for a token file or a call's metadata."""
        return self._value.decode("ascii")

    def matches(self, candidate: bytes) -> bool:
        """Compare in time that does not depend on where the two differ."""
        return hmac.compare_digest(self._value, candidate)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Token(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not to be pickled; hand over the path of its file")


def load_token(path: str) -> Token:
    """Read a token file.

    Args:
        path: A regular file or ``/proc/PID/fd/N`` of a memfd; only its owner may have access.

    Raises:
        AuthenticationError: The file is missing, unreadable, open to others, no regular file or holds no token.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"cannot open the token file {path!r}: {error}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise AuthenticationError(f"the token file {path!r} is not a regular file")
        if facts.st_uid not in (os.geteuid(), 0):
            raise AuthenticationError(f"the token file {path!r} belongs to user {facts.st_uid}, not to this one")
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise AuthenticationError(f"the token file {path!r} has mode {mode:04o}: others have access; chmod 600 it")
        # pread: descriptors under /proc share their offset with the process that made them.
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
    """Return the token that `TOKEN_FILE_VARIABLE` points at; None if it is not set.

    Raises:
        AuthenticationError: It is set and the file cannot be used.
    """
    path = environment.get(TOKEN_FILE_VARIABLE)
    return None if path is None else load_token(path)


def write_token(path: str, token: Token) -> None:
    """Create a token file that only this user can read.

    Raises:
        FileExistsError: There is a file at ``path`` already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token.reveal() + "\n")


def token_memfd(token: Token) -> tuple[int, str]:
    """Put the token into anonymous memory.

    Returns:
        The descriptor, to be kept open as long as children may read it, and the
        path under ``/proc`` by which processes of the same user reach it.
    """
    descriptor = os.memfd_create("hetero-token", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, token.reveal().encode("ascii"))
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


class _Bearer(str):
    """The value of the header. Tracebacks that show local variables do not show this one."""

    __slots__ = ()

    def __new__(cls, token: Token) -> _Bearer:
        return super().__new__(cls, f"Bearer {token.reveal()}")

    def __repr__(self) -> str:
        return "'Bearer ...'"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not to be pickled; hand over the path of its file")


def call_metadata(token: Token | None, job_id: str, *, incarnation: str = "") -> tuple[tuple[str, str], ...]:
    """Return the metadata of a client's call.

    Args:
        token: The job's.
        job_id: The job's.
        incarnation: Of the endpoint that is meant; empty for a launcher.
    """
    told = ((_JOB, job_id), *(((_INCARNATION, incarnation),) if incarnation else ()))
    return told if token is None else ((_AUTHORIZATION, _Bearer(token)), *told)


class Policy(enum.Enum):
    """Who may call an RPC."""

    TOKEN = "token"
    """Holders of the job's token who name the job's id."""
    OPEN = "open"
    """Anybody: the health check, which returns nothing else."""


class ServerInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses every call that the policy table does not allow. Thread-safe.

    Args:
        token: The job's token; None for a job that runs without one (then only ids and the table are checked).
        job_id: Id of this server's job.
        policies: Full method name (``/package.Service/Method``) to its policy; what is not in it is refused.
        incarnation: Of this server, random per start: calls that do not name it, or name another one, are refused.
            Empty: calls name none.
        clock: Monotonic seconds, for the rate limit of the log.
    """

    LOG_INTERVAL_S = 10.0

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
        # Of their own: a flood of strangers must not make the server start as many threads as it has for its own.
        threads = ThreadPoolExecutor(_NUM_REFUSERS, thread_name_prefix="refuse")
        unauthenticated, precondition = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION
        self._unauthenticated = _refusal(unauthenticated, "authentication failed", threads)
        self._other_job = _refusal(precondition, f"this server belongs to job {job_id}", threads)
        self._other_incarnation = _refusal(precondition, "this server was started anew", threads)

    @property
    def auth_failures(self) -> int:
        """Calls refused so far for want of the token, of a policy or of this job's id."""
        with self._lock:
            return self._auth_failures

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Return the real handler, or one that refuses."""
        policy = self._policies.get(handler_call_details.method)
        if policy is Policy.OPEN:
            return continuation(handler_call_details)
        metadata = list(handler_call_details.invocation_metadata or ())
        if policy is None or not self._is_authentic(_values(metadata, _AUTHORIZATION)):
            self.count_failure()
            return self._unauthenticated
        jobs = _values(metadata, _JOB)
        if len(jobs) != 1 or not hmac.compare_digest(jobs[0], self._job_id):
            self.count_failure()
            return self._other_job
        meant = _values(metadata, _INCARNATION)
        is_meant = len(meant) == 1 and hmac.compare_digest(meant[0], self._incarnation)
        # Not counted: readers that have not heard of a restart yet are no strangers.
        if self._incarnation and not is_meant:
            return self._other_incarnation
        return continuation(handler_call_details)

    def _is_authentic(self, values: list[bytes]) -> bool:
        if self._token is None:
            return True
        scheme, _, candidate = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        return self._token.matches(candidate) and scheme.lower() == b"bearer"

    def count_failure(self) -> None:
        """Count a refusal, and log it unless one was logged just before; of other ways in, too."""
        with self._lock:
            self._auth_failures += 1
            total, now_s = self._auth_failures, self._clock()
            is_due = now_s >= self._next_log_s
            if is_due:
                self._next_log_s = now_s + self.LOG_INTERVAL_S
        if is_due:
            # Nothing of the call is logged: method and headers are the stranger's words.
            logger.warning("refused a call without this job's token or id (%d so far)", total)


def _values(metadata: list[Any], key: str) -> list[bytes]:
    found = [value for name, value in metadata if name == key]
    return [value if isinstance(value, bytes) else value.encode("utf-8") for value in found]


def serve_on(threads: ThreadPoolExecutor, behaviour: _Behaviour) -> _Behaviour:
    """Have gRPC call a handler on threads of its own instead of the server's; return it."""
    behaviour.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return behaviour


def _refusal(code: grpc.StatusCode, details: str, threads: ThreadPoolExecutor) -> _Handler:
    def refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
        context.abort(code, details)

    # A stream on both sides answers calls of all four arities, and without waiting for their first message.
    return grpc.stream_stream_rpc_method_handler(serve_on(threads, refuse))
