"""A reader process's connection to one endpoint: its calls, and how they change what is known about the endpoint."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.batches.fetch import Description
from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skips
from hetero.control.members.directory import EndpointRecord
from hetero.control.security import Token, call_metadata
from hetero.documents.text import printable
from hetero.endpoint.link import Call, EndpointLink, SentFetch
from hetero.errors import ConfigError, DatasetError, ProtocolError
from hetero.plans.plan import Source
from hetero.plans.windows import WindowLayout
from hetero.spec import DatasetSpec
from hetero.system.waits import FIRST_BACKOFF_S, MAX_BACKOFF_S, backoff_s
from hetero.wire import requests
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.tls import Tls

__all__ = ["ConnectionState", "EndpointConnection", "Fetched"]

# The trainer uses the global generator, and may seed all ranks alike. Then all ranks would draw the same back-off.
_random = random.SystemRandom()


class ConnectionState(enum.Enum):
    """What is known about an endpoint.

    CONNECTING -> READY when the endpoint answered. READY or CONNECTING -> DOWN when a call failed. DOWN -> CONNECTING
    when the back-off is over. Any state -> FOREIGN when another process than the intended endpoint answered. FOREIGN is
    final for this incarnation of the endpoint.
    """

    CONNECTING = "connecting"
    READY = "ready"
    DOWN = "down"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A batch, and how it was transferred."""

    batch: Any
    nbytes: int
    """Bytes in memory: the payload before compression, and headers."""
    saved_bytes: int = 0
    """The part of ``nbytes`` that compression kept off the network."""
    lacks_compression: bool = False
    """Whether the endpoint lacks the package for the requested compression."""
    num_queued: int
    """The endpoint's load when it sent the batch."""
    num_parts: int = 1
    """Number of endpoints that have computed samples of the batch."""
    skips: Skips | None = None
    """The substituted samples of the batch."""


class EndpointConnection:
    """One endpoint as this process sees it.

    The fleet's lock guards the fields. `prepare` and `fetch` block and are called without the lock.

    Args:
        record: The endpoint's entry in the directory.
        token: The job's token.
        job_id: The job's id.
        limits: Bounds of the memory that the endpoint's answers may make this process allocate.
        tls: This host's TLS, None for a job in plaintext.
    """

    def __init__(
        self, record: EndpointRecord, token: Token | None, *, job_id: str, limits: Limits, tls: Tls | None = None
    ) -> None:
        self.record = record
        self.state = ConnectionState.CONNECTING
        self.last_message = "no answer yet"
        """The latest news about the endpoint, for messages."""
        self.prepared: set[DatasetSpec] = set()
        """Specifications that the endpoint serves. Its description of the data set agrees with the reference, which is
        the description of the job's first endpoint (`hetero.reader.consistency`)."""
        self.preparing: set[DatasetSpec] = set()
        """Specifications that the endpoint has been asked to prepare and has not answered for."""
        self.unusable: set[DatasetSpec] = set()
        """Specifications that the endpoint cannot build, or whose description differs from the reference."""
        self.descriptions: dict[DatasetSpec, Description] = {}
        self.num_outstanding = 0
        """Requests of this process that the endpoint has not answered yet."""
        self.load = 0
        """Requests of all ranks that waited or were computed on the endpoint when it sent its last batch."""
        self.delivered_at_s = 0.0
        """Monotonic time when the last batch from the endpoint arrived. 0 before the first batch."""
        self.last_choice = 0
        """The router numbers its choices. This is the number of the last one that chose this endpoint, or 0."""
        self.busy_until_s = 0.0
        """Monotonic time until which the endpoint gets no request, because it has rejected one."""
        self._num_avoided = 0  # calls of `avoid` since the last batch
        self._avoided_until_s = 0.0  # see `is_avoided`
        self.retry_at_s = 0.0
        """Monotonic time when the back-off after a failed call ends."""
        self.reserved_by: object | None = None
        """The request that reserved the endpoint, because it must run alone, or None."""
        self.is_retired = False
        """Whether the endpoint left the directory."""
        self.has_died = False
        """Whether the endpoint left the directory while its host stayed, so only the endpoint itself ended."""
        self._num_failures = 0  # failed calls since the last batch. The back-off grows with them
        self._metadata = call_metadata(token, job_id, incarnation=record.incarnation)
        self._limits = limits
        self._tls = tls
        self._link_lock = threading.Lock()
        self._link: EndpointLink | None = None
        self._is_closed = False
        self._stale: list[EndpointLink] = []
        """Links that were given up and are not closed yet."""
        self.generation = 0
        """Number of links that were given up. It tells failures of an older link from failures of the present one."""

    @property
    def name(self) -> str:
        """Id and address, for messages."""
        return f"{self.record.endpoint_id} ({self.record.address})"

    @property
    def identity(self) -> tuple[str, str]:
        """Id and incarnation, which distinguish this endpoint process from its successors."""
        return self.record.endpoint_id, self.record.incarnation

    def serves(self, spec: DatasetSpec) -> bool:
        """Return whether requests for ``spec`` may be sent."""
        return self.state is ConnectionState.READY and spec in self.prepared and not self.is_retired

    def may_serve(self, spec: DatasetSpec) -> bool:
        """Return whether requests for ``spec`` may be sent, now or soon."""
        is_up = self.state in (ConnectionState.READY, ConnectionState.CONNECTING)
        return is_up and spec not in self.unusable and not self.is_retired

    def mark_ready(self) -> None:
        """Record that the endpoint is prepared. Earlier failures still count until a batch arrives: see `delivered`."""
        self.state = ConnectionState.READY
        # Failures are kept here. When each preparation forgot them, an endpoint that prepares but never delivers was
        # tried for ever.
        if not self._num_failures:
            self.last_message = "answered"

    def delivered(self, *, num_queued: int, now_s: float) -> None:
        """Record that a batch arrived. The next failure counts as the first one again.

        Args:
            num_queued: The load that the endpoint reported with the batch.
            now_s: Monotonic seconds.
        """
        self._num_failures = self._num_avoided = 0
        self.load, self.delivered_at_s = num_queued, now_s
        self.last_message = "answered"

    def mark_down(self, why: str, now_s: float, generation: int | None = None) -> bool:
        """Record a failed call. Try again after a random back-off, which grows until a batch is delivered.

        Args:
            why: The reason, for ``last_message``.
            now_s: Monotonic seconds.
            generation: Generation of the link whose call failed. The failure of an older link is ignored. None stands
                for the present link.

        Returns:
            Whether the endpoint was ready until now.
        """
        # A foreign endpoint is never called again, so it needs no back-off.
        if self.state is ConnectionState.FOREIGN or generation not in (None, self.generation):
            return False
        was_down, was_ready = self.state is ConnectionState.DOWN, self.state is ConnectionState.READY
        self.state = ConnectionState.DOWN
        self.last_message = why
        # Several calls may fail for the same loss. Only the first one counts and begins a back-off.
        if was_down:
            return False
        # An endpoint that comes back may be another process, which has to build its data sets again.
        self.prepared.clear()
        self.descriptions.clear()
        self.reserved_by = None
        self._num_failures += 1
        # Draw any time from 0 to the back-off, because ranks that lost the same host must not all call it at once.
        self.retry_at_s = now_s + _random.uniform(0.0, backoff_s(self._num_failures))
        # The link is closed later, because the caller holds the fleet's lock, and closing may wait for calls.
        self._retire_link()
        return was_ready

    def mark_connecting(self) -> None:
        """Record that the endpoint is called again after its back-off."""
        if self.state is ConnectionState.DOWN:
            self.state = ConnectionState.CONNECTING

    def mark_busy(self, why: str, now_s: float) -> None:
        """Record that the endpoint rejected a request because it has too many. Send it no request for 0.2 s."""
        self.last_message = why
        self.busy_until_s = now_s + FIRST_BACKOFF_S

    def avoid(self, kept_s: float, now_s: float) -> None:
        """Avoid the endpoint for a time, because it kept a request for ``kept_s`` seconds without a result.

        The endpoint failed, was late, or sent a damaged answer. Or another endpoint answered a hedge (a second request
        for the same batch) sooner. The first time, the endpoint is avoided for ``kept_s`` seconds. The time doubles
        with each repetition, up to 10 s.
        """
        # The exponent has a bound, because a large one would overflow. 2 ** 16 exceeds the limit of the time anyway.
        self._avoided_until_s = now_s + min(MAX_BACKOFF_S, kept_s * 2.0 ** min(self._num_avoided, 16))
        self._num_avoided += 1

    def is_avoided(self, now_s: float) -> bool:
        """Return whether the endpoint gets a request only if no other endpoint can take it.

        Without this rule a stuck endpoint would get the next request, because the request that it did not answer is
        cancelled and no longer counts as its load. When the time is over, the endpoint gets one request at a time until
        it sends a batch.
        """
        return self._num_avoided > 0 and (now_s < self._avoided_until_s or self.num_outstanding > 0)

    def mark_unprepared(self, why: str) -> None:
        """Record that the endpoint has to prepare its data sets again."""
        self.last_message = why
        self.prepared.clear()
        self.descriptions.clear()

    def mark_unusable(self, spec: DatasetSpec, why: str) -> None:
        """Record that the endpoint must never be used for a data set."""
        self.last_message = why
        self.unusable.add(spec)

    def retire(self, *, has_died: bool) -> None:
        """Record that the endpoint left the directory."""
        self.is_retired, self.has_died = True, has_died
        self.reserved_by = None

    def mark_foreign(self, why: str) -> None:
        """Record that the process at this address is not the intended endpoint. This incarnation is never used."""
        self.state = ConnectionState.FOREIGN
        self.last_message = why
        self.prepared.clear()
        self.reserved_by = None

    def disconnect(self) -> None:
        """Close the link for good. Calls in progress and later calls fail. Idempotent. Blocks as `close_stale` does."""
        with self._link_lock:
            # Without the flag, a preparation that begins now could open a link that stays open.
            self._is_closed = True
        self._retire_link()
        self.close_stale()

    def close_stale(self) -> None:
        """Close the links that failed. Blocks until their calls have ended."""
        with self._link_lock:
            stale, self._stale = self._stale, []
        for link in stale:
            link.close()

    def prepare(self, spec: DatasetSpec, *, expected: Sequence[DatasetSpec] = (), timeout_s: float) -> Description:
        """Make the endpoint build the data set. May take minutes.

        Args:
            spec: The data set.
            expected: Data sets that may be asked for later.
            timeout_s: Seconds that the endpoint has.

        Returns:
            Length, fingerprint and environment of the data set.

        Raises:
            DatasetError: The data set raised on the endpoint while it was built or described.
            CallFailedError: The call failed.
            AuthenticationError: The endpoint refuses the token.
        """
        request = pb.PrepareRequest(
            protocol=PROTOCOL,
            dataset=requests.spec_to_proto(spec),
            expected=[requests.spec_to_proto(each) for each in expected],
        )
        link = self._open_link()
        # `attend` opens the first connection for batches. So an endpoint whose port for batches is dead fails here, and
        # not with its first batch.
        link.attend()
        reply = link.call("Prepare", request, pb.PrepareReply, timeout_s)
        if reply.HasField("failure"):
            raise _failed(reply.failure)
        return Description(
            num_samples=reply.num_samples if reply.HasField("num_samples") else None,
            # Another host sent these texts, and they go into errors and the log. So their length is limited, and
            # control characters are escaped (attack A14).
            fingerprint=reply.fingerprint[:256],
            environment=dict(reply.environment),
            globals=dict(reply.globals),
            warnings=tuple(printable(text[:1000]) for text in reply.warnings[:100]),
            keeps_samples=reply.keeps_samples,
            is_iterable=reply.is_iterable,
            sources=tuple(
                Source(
                    name=source.name[:1000],
                    num_samples=source.num_samples,
                    layout=WindowLayout.from_bytes(source.layout) if source.layout else None,
                )
                for source in reply.sources
            ),
        )

    def fetch(
        self,
        request: BatchRequest,
        *,
        timeout_s: float,
        allocate: Callable[[int], memoryview] | None,
        on_call: Callable[[Call], None],
        was_sent: bool = False,
    ) -> Fetched:
        """Return one batch.

        Args:
            request: The batch to compute.
            timeout_s: Bound of the whole call.
            allocate: Allocates memory for leaves, None for ordinary memory.
            on_call: Called with the call. Other threads may cancel it.
            was_sent: Whether the endpoint may have received the request already, because `begin` sent it.

        Raises:
            DatasetError: The user's code raised on the endpoint.
            ProtocolError: The answer breaks the protocol or arrived damaged.
            ConfigError: The request is too large.
            CallFailedError: The call failed. Without a link, the fault is `Fault.UNREACHABLE` if ``was_sent``, else
                `Fault.UNSENT`.
            AuthenticationError: As in `prepare`.
        """
        message, decoder = self._encode(request, allocate)
        # Only `prepare` opens links, because it also opens the connection for batches and finds a dead port. When a
        # link was opened here, the first fetch met the dead port, and this counted as the loss of an endpoint.
        link = self._link
        if link is None:
            # UNSENT says that the endpoint has not received the request, so it cannot have died of it.
            raise CallFailedError(Fault.UNREACHABLE if was_sent else Fault.UNSENT, "there is no connection to it")
        nbytes = link.fetch(message, decoder, timeout_s=timeout_s, on_call=on_call, was_sent=was_sent)
        return self._fetched(request, decoder, nbytes)

    def begin(
        self,
        request: BatchRequest,
        *,
        timeout_s: float,
        allocate: Callable[[int], memoryview] | None,
        on_call: Callable[[Call], None],
    ) -> SentFetch[Fetched] | None:
        """Send the request for a batch if a connection is idle. Does not block. The arguments are those of `fetch`.

        Returns:
            The fetch, whose `SentFetch.receive` returns the batch. None if nothing was sent. Then the caller should
            `fetch` the batch.

        Raises:
            ConfigError: The request is too large.
        """
        link = self._link
        if link is None:
            return None
        message, decoder = self._encode(request, allocate)
        finish = functools.partial(self._fetched, request, decoder)
        return link.begin(message, decoder, timeout_s=timeout_s, on_call=on_call, finish=finish)

    def _encode(
        self, request: BatchRequest, allocate: Callable[[int], memoryview] | None
    ) -> tuple[bytes, BatchDecoder]:
        """Return the request to send, and the decoder of its answer."""
        try:
            message = requests.serialize(request, self._limits)
        except ConfigError:
            if not request.helpers:
                raise
            # Only the names of the helpers made the request too long. Without helpers one endpoint computes all
            # samples.
            message = requests.serialize(dataclasses.replace(request, helpers=(), owners=None), self._limits)
        # Without ``allocate``, the decoder uses its own default.
        options = {} if allocate is None else {"allocate": allocate}
        # At least one sample has worked, because a batch without a good sample raises. So an answer that reports more
        # skipped samples than this is refused.
        max_skipped = max(0, request.work.num_samples - 1) if request.on_sample_error == "skip" else 0
        decoder = BatchDecoder(
            self._limits, compression=request.compression, request=message, max_skipped=max_skipped, **options
        )
        return message, decoder

    def _fetched(self, request: BatchRequest, decoder: BatchDecoder, nbytes: int) -> Fetched:
        """Return the decoded batch and the facts about its transfer."""
        skips = decoder.skips
        if skips is not None:
            # The answer contains no epoch and no host, because this process knows both and need not trust the endpoint.
            skips = dataclasses.replace(skips, epoch=request.epoch, host=self.record.endpoint_id)
        return Fetched(
            batch=decoder.result(),
            nbytes=nbytes,
            saved_bytes=decoder.saved_bytes,
            lacks_compression=decoder.lacks_compression,
            num_queued=decoder.num_queued,
            num_parts=decoder.num_parts,
            skips=skips,
        )

    def _open_link(self) -> EndpointLink:
        """Return the link to the endpoint. Make it if there is none."""
        with self._link_lock:
            if self._is_closed:
                raise CallFailedError(Fault.UNREACHABLE, "the connection was closed")
            if self._link is None:
                self._link = EndpointLink(self.record, self._metadata, self._limits, self._tls)
            return self._link

    def _retire_link(self) -> None:
        """Give up the link. `close_stale` closes it later."""
        with self._link_lock:
            if self._link is not None:
                self._stale.append(self._link)
                self._link = None
            self.generation += 1


def _failed(failure: pb.Failure) -> Exception:
    """Return the exception for an answer to Prepare that reports a failure of the user's code."""
    try:
        return DatasetError(requests.failure_from_proto(failure))
    except ProtocolError as error:
        # Only this endpoint is at fault. A `ProtocolError` would end all reading, so return another error instead.
        return CallFailedError(Fault.BROKEN, str(error))
