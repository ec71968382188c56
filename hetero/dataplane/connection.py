"""A reader process's connection to one endpoint, and what becomes of its calls."""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from hetero.batches.fetch import Description
from hetero.batches.request import BatchRequest
from hetero.control.directory import EndpointRecord
from hetero.control.security import Token, call_metadata
from hetero.dataplane.service import SERVICE
from hetero.datasets import DatasetSpec
from hetero.errors import AuthenticationError, ConfigError, DatasetError, ProtocolError
from hetero.wire import channels, framing, requests  # before grpc: channels sets its environment
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb

import grpc  # isort: skip

__all__ = ["CallFailedError", "ConnectionState", "EndpointConnection", "Fault", "Fetched"]

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_DESCRIBE_TIMEOUT_S = 300.0


class Fault(enum.Enum):
    """Why a call failed, as far as it decides what to do next."""

    UNREACHABLE = "the connection failed"
    LATE = "no answer in time"
    BUSY = "it has too many calls in progress"
    UNPREPARED = "it has not built the data set"
    REFUSED = "it belongs to another job"
    REJECTED = "it does not understand the request"
    CANCELLED = "the call was given up"
    BROKEN = "it failed internally"


_FAULTS = {
    grpc.StatusCode.UNAVAILABLE: Fault.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.LATE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.BUSY,
    grpc.StatusCode.NOT_FOUND: Fault.UNPREPARED,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.REFUSED,
    grpc.StatusCode.INVALID_ARGUMENT: Fault.REJECTED,
    grpc.StatusCode.UNIMPLEMENTED: Fault.REJECTED,
    grpc.StatusCode.CANCELLED: Fault.CANCELLED,
}


class CallFailedError(Exception):
    """A call to one endpoint failed; the fleet decides what that means."""

    def __init__(self, fault: Fault, details: str) -> None:
        super().__init__(fault, details)
        self.fault = fault
        self.details = details

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.details}" if self.details else self.fault.value


class ConnectionState(enum.Enum):
    """What is known of an endpoint.

    CONNECTING -> READY (it answered) -> DOWN (a call failed) -> CONNECTING (the
    back-off is over). CONNECTING -> DOWN, too. Any -> REFUSED, which is final
    for this incarnation.
    """

    CONNECTING = "connecting"
    READY = "ready"
    DOWN = "down"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A batch and how it came."""

    batch: Any
    nbytes: int
    """Received, headers included."""
    num_queued: int
    """The endpoint's load when it sent the batch."""
    compute_time_s: float


class EndpointConnection:
    """One endpoint as this process sees it.

    The fields are guarded by the fleet's lock; `prepare`, `describe` and `fetch` block and are called without it.

    Args:
        record: The endpoint.
        token: The job's token.
        job_id: The job's id.
        limits: What its answers may make this process allocate.
    """

    def __init__(self, record: EndpointRecord, token: Token | None, *, job_id: str, limits: Limits) -> None:
        self.record = record
        self.state = ConnectionState.CONNECTING
        self.last_word = "not heard of yet"
        self.prepared: set[DatasetSpec] = set()
        """Specifications that it serves and that agree with the reference."""
        self.preparing: set[DatasetSpec] = set()
        self.refused: set[DatasetSpec] = set()
        """Those that it cannot build, or that differ from the reference."""
        self.descriptions: dict[DatasetSpec, Description] = {}
        self.num_outstanding = 0
        """Our own requests on it."""
        self.load = 0
        """As it last reported, at ``load_at_s``."""
        self.load_at_s = 0.0
        self.chosen_at = 0
        """Number of the choice that took it last."""
        self.busy_until_s = 0.0
        self.retry_at_s = 0.0
        self.reserved_by: object | None = None
        """Whoever wants it alone."""
        self.is_retired = False
        """It left the directory."""
        self._num_failures = 0
        self._metadata = call_metadata(token, job_id)
        self._limits = limits
        self._channel_lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stale: list[grpc.Channel] = []
        self._generation = 0

    @property
    def name(self) -> str:
        """Id and address, for messages."""
        return f"{self.record.endpoint_id} ({self.record.address})"

    @property
    def identity(self) -> tuple[str, str]:
        """Tells this process of the endpoint from its successors."""
        return self.record.endpoint_id, self.record.incarnation

    def serves(self, spec: DatasetSpec) -> bool:
        """Tell whether requests for ``spec`` may be sent."""
        return self.state is ConnectionState.READY and spec in self.prepared and not self.is_retired

    def mark_ready(self) -> None:
        """It answered."""
        self.state = ConnectionState.READY
        self._num_failures = 0
        self.last_word = "answered"

    def mark_down(self, why: str, now_s: float, generation: int | None = None) -> bool:
        """A call failed: try again after a random back-off.

        Args:
            why: Last word.
            now_s: Monotonic seconds.
            generation: Of the channel whose call failed; the failure of an older one says nothing any more.

        Returns:
            Whether this was news.
        """
        if self.state is ConnectionState.REFUSED or (generation is not None and generation != self._generation):
            return False
        was_down = self.state is ConnectionState.DOWN
        self.state = ConnectionState.DOWN
        self.last_word = why
        if was_down:
            return False
        self.prepared.clear()
        self.descriptions.clear()
        self.reserved_by = None
        bound_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**self._num_failures)
        self._num_failures += 1
        # Full jitter: ranks that lost the same host must not come back in step.
        self.retry_at_s = now_s + random.uniform(0.0, bound_s)
        with self._channel_lock:
            if self._channel is not None:
                self._stale.append(self._channel)  # closing may wait for calls: not under the fleet's lock
                self._channel = None
            self._generation += 1
        return True

    def mark_refused(self, why: str) -> None:
        """Never use this incarnation."""
        self.state = ConnectionState.REFUSED
        self.last_word = why
        self.prepared.clear()
        self.reserved_by = None

    @property
    def generation(self) -> int:
        """Grows with every new channel."""
        return self._generation

    def disconnect(self) -> None:
        """Close the channel; calls in progress fail. The next call makes a new one."""
        with self._channel_lock:
            if self._channel is not None:
                self._stale.append(self._channel)
                self._channel = None
            self._generation += 1
        self.close_stale()

    def close_stale(self) -> None:
        """Close channels that failed; blocks until their calls have ended."""
        with self._channel_lock:
            stale, self._stale = self._stale, []
        for channel in stale:
            channel.close()

    @property
    def is_connected(self) -> bool:
        """Tell whether a channel exists."""
        return self._channel is not None

    def prepare(self, spec: DatasetSpec, *, timeout_s: float) -> None:
        """Have the endpoint build the data set; may take minutes.

        Raises:
            DatasetError: The factory raised there.
            CallFailedError: The call failed.
            AuthenticationError: The endpoint refuses the token.
        """
        request = pb.PrepareRequest(protocol=PROTOCOL, dataset=requests.spec_to_proto(spec))
        reply = pb.PrepareReply()
        self._unary("Prepare", request.SerializeToString(), reply, timeout_s)
        if reply.HasField("failure"):
            raise DatasetError(requests.failure_from_proto(reply.failure))

    def describe(self, spec: DatasetSpec) -> Description:
        """Return length, fingerprint and environment of a prepared data set.

        Raises:
            DatasetError, CallFailedError, AuthenticationError: As `prepare`.
        """
        request = pb.DescribeRequest(protocol=PROTOCOL, dataset=requests.spec_to_proto(spec))
        reply = pb.DescribeReply()
        self._unary("Describe", request.SerializeToString(), reply, _DESCRIBE_TIMEOUT_S)
        if reply.HasField("failure"):
            raise DatasetError(requests.failure_from_proto(reply.failure))
        return Description(
            num_samples=reply.num_samples if reply.HasField("num_samples") else None,
            fingerprint=reply.fingerprint[:256],
            environment=dict(reply.environment),
        )

    def fetch(
        self,
        request: BatchRequest,
        *,
        timeout_s: float,
        allocate: Callable[[int], memoryview] | None,
        on_call: Callable[[grpc.Call], None],
    ) -> Fetched:
        """Return one batch.

        Args:
            request: What to compute.
            timeout_s: Bound of the whole call.
            allocate: Where leaves go; None for ordinary memory.
            on_call: Given the call, so that another thread can cancel it.

        Raises:
            DatasetError: The user's code raised there.
            ProtocolError: The answer breaks the protocol or arrived damaged.
            ConfigError: The request is too large.
            CallFailedError, AuthenticationError: As `prepare`.
        """
        message = requests.to_proto(request, self._limits).SerializeToString()
        if len(message) > channels.MAX_REQUEST_BYTES:
            raise ConfigError(
                f"the indices of batch {request.position} take {len(message)} bytes, "
                f"at most {channels.MAX_REQUEST_BYTES} can be asked for; use smaller batches or shorter keys"
            )
        decoder = (
            framing.BatchDecoder(self._limits)
            if allocate is None
            else framing.BatchDecoder(self._limits, allocate=allocate)
        )
        nbytes = 0
        try:
            call = self._connected().unary_stream(f"/{SERVICE}/Fetch", None, None)(
                message, timeout=timeout_s, metadata=self._metadata
            )
            on_call(call)
            try:
                for frame in call:
                    nbytes += len(frame)
                    decoder.feed(frame)
            finally:
                call.cancel()  # type: ignore[no-untyped-call]  # where the decoder gave up; nothing where the call has ended
        except grpc.RpcError as error:
            raise _translate(error, self.name) from error
        except ValueError as error:  # gRPC's way to say that the channel was closed meanwhile
            raise CallFailedError(Fault.UNREACHABLE, "the connection was closed") from error
        if not decoder.done:
            raise ProtocolError(f"the answer of {self.name} ended after {nbytes} bytes, before its batch was complete")
        return Fetched(
            batch=decoder.result(),
            nbytes=nbytes,
            num_queued=decoder.num_queued,
            compute_time_s=decoder.compute_time_s,
        )

    def _unary(self, method: str, request: bytes, reply: Any, timeout_s: float) -> None:
        try:
            data = self._connected().unary_unary(f"/{SERVICE}/{method}", None, None)(
                request, timeout=timeout_s, metadata=self._metadata
            )
            reply.ParseFromString(data)
        except grpc.RpcError as error:
            raise _translate(error, self.name) from error
        except DecodeError as error:
            raise CallFailedError(Fault.BROKEN, f"its answer to {method} is no message of the protocol") from error
        except ValueError as error:
            raise CallFailedError(Fault.UNREACHABLE, "the connection was closed") from error

    def _connected(self) -> grpc.Channel:
        with self._channel_lock:
            if self._channel is None:
                self._channel = grpc.insecure_channel(
                    self.record.address, options=channels.client_options(single_threaded_streams=True)
                )
            return self._channel


def _translate(error: grpc.RpcError, name: str) -> Exception:
    """Return this side's exception for gRPC's: the only place that does."""
    code = error.code()  # type: ignore[attr-defined, unused-ignore]
    details = channels.short_details(error)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{name} refuses this job's token: give every host of the job the same one")
    return CallFailedError(_FAULTS.get(code, Fault.BROKEN), details)
