"""The answers of an endpoint: Prepare, Describe and Attend over gRPC, batches over separate connections.

Handler threads parse, wait and send. Only `Compute` runs the user's code. While a handler thread sends one batch,
`Compute` computes the next. Waits are bounded and check whether the caller has left, which frees the thread.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast

from google.protobuf.message import Message

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import dataset_error
from hetero.batches.fetch import Description, describe, fetch
from hetero.batches.globals import GlobalsReader
from hetero.batches.request import BatchRequest
from hetero.batches.samples import Cancelled
from hetero.batches.skips import Skips
from hetero.control.security import Policy
from hetero.dataplane.endpoint.compute import Compute, Task
from hetero.dataplane.endpoint.transport import Delivery
from hetero.datasets import build, get_factory
from hetero.errors import ConfigError, DatasetError, ProtocolError, SampleFailure
from hetero.spec import DatasetSpec
from hetero.system.process import limit_threads
from hetero.wire import framing, requests  # before grpc: channels sets its environment
from hetero.wire.compression import is_installed
from hetero.wire.framing import Refusal
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.tls import Tls

import grpc  # isort: skip

__all__ = ["DATA_POLICIES", "SERVICE", "DataService"]

SERVICE = "hetero.v1.Data"

DATA_POLICIES: Mapping[str, Policy] = {
    f"/{SERVICE}/Prepare": Policy.TOKEN,
    f"/{SERVICE}/Describe": Policy.TOKEN,
    f"/{SERVICE}/Attend": Policy.TOKEN,
}

MAX_DATASETS = 64
"""Bound of the different specifications that one endpoint keeps built."""

_POLL_S = 0.5
_FIRST = -1  # a priority ahead of all steps
_Message = TypeVar("_Message", bound=Message)

logger = logging.getLogger(__name__)


class _UnpreparedError(Exception):
    """The data set is not built here, after a restart for example. The reader prepares it and asks again."""


class _Served:
    """One data set of this endpoint: the task that builds it, and then the data set."""

    def __init__(self) -> None:
        self.build: Task | None = None
        self.built: BuiltDataset | None = None
        self.description: Task | None = None
        self.globals: dict[str, str] = {}
        """Digests of the globals that its code reads, taken before any of that code ran here."""


class DataService:
    """Handlers of the data plane. Thread-safe.

    Args:
        compute: Runs the user's code.
        address: Numeric address for the connections that carry batches.
        max_requests: Bound of the requests in progress at the same time.
        name: Name of this endpoint, for the user's errors: ``algo-1/0``.
        worker_index: Number of this endpoint on its host, from 0.
        num_workers: Endpoints of this host.
        sample_time_s: Emulated seconds per sample, 0 for real time only.
        limits: Bounds of what is sent and accepted.
        on_build: Called on the compute thread, with False when the building of a data set begins and with True when it
            has ended.
        tls: This host's TLS, None for a job in plaintext.

    Raises:
        PortError, OSError: As for `Delivery`.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        address: str,
        max_requests: int,
        name: str,
        worker_index: int,
        num_workers: int,
        sample_time_s: float,
        limits: Limits,
        on_build: Callable[[bool], None] = lambda has_ended: None,
        tls: Tls | None = None,
    ) -> None:
        self._compute = compute
        self._name = name
        self._worker_index = worker_index
        self._num_workers = num_workers
        self._sample_time_s = sample_time_s
        self._limits = limits
        self._on_build = on_build
        self._lock = threading.Lock()
        self._served: dict[DatasetSpec, _Served] = {}
        self.delivery = Delivery(address, self._answer, max_requests=max_requests, tls=tls)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the service for ``grpc.server``. Messages stay bytes, so this side handles parsing errors."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Prepare": grpc.unary_unary_rpc_method_handler(self._guarded(self._prepare)),
                "Describe": grpc.unary_unary_rpc_method_handler(self._guarded(self._describe)),
                "Attend": grpc.unary_stream_rpc_method_handler(self._guarded_stream(self._attend)),
            },
        )

    def show_life(self) -> None:
        """Take and release the lock. Returns only if the service is not stuck."""
        with self._lock:
            pass

    # Prepare, Describe, Attend

    def _prepare(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        request = _parse(pb.PrepareRequest, data)
        reply = pb.PrepareReply()
        try:
            build = self._start_build(requests.spec_from_proto(request.dataset))
            if not _wait(build, lambda: not context.is_active()):
                return b""
            build.result()
        except DatasetError as error:
            reply.failure.CopyFrom(requests.failure_to_proto(_record(error)))
        return reply.SerializeToString()

    def _start_build(self, spec: DatasetSpec) -> Task:
        """Return the task that builds a data set, which is queued, running or done. Concurrent calls share one task.

        Raises:
            DatasetError: This endpoint already holds `MAX_DATASETS` data sets.
        """
        with self._lock:
            served = self._served.get(spec)
            if served is None:
                if len(self._served) >= MAX_DATASETS:
                    raise dataset_error(
                        f"this endpoint holds {MAX_DATASETS} data sets already: every other choice of arguments is one "
                        "more; register one data set that holds them all, and choose among its samples with a sampler",
                        dataset=spec.name,
                        host=self._name,
                        stage="build",
                    )
                served = self._served[spec] = _Served()
                served.build = self._compute.submit(_FIRST, functools.partial(self._build, spec, served))
            assert served.build is not None
            return served.build

    def _build(self, spec: DatasetSpec, served: _Served, _task: Task) -> None:
        begin_s = time.monotonic()
        self._on_build(False)
        try:
            served.globals = GlobalsReader(get_factory(spec.name)).digests()
            served.built = build(spec, host=self._name, worker_index=self._worker_index, num_workers=self._num_workers)
            limit_threads()  # the factory may have imported torch or OpenCV just now
        except BaseException as error:
            with self._lock:
                del self._served[spec]  # the next Prepare tries again, because a mount may have been late
            if isinstance(error, DatasetError):
                raise
            raise dataset_error(error, dataset=spec.name, host=self._name, stage="build") from error
        finally:
            self._on_build(True)
        logger.info("built data set %s in %.1f s", spec, time.monotonic() - begin_s)

    def _describe(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        request = _parse(pb.DescribeRequest, data)
        try:
            served, built = self._find(requests.spec_from_proto(request.dataset))
        except _UnpreparedError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            raise AssertionError("abort raises") from error
        with self._lock:
            if served.description is None:
                served.description = self._compute.submit(_FIRST, lambda _task: describe(built, host=self._name))
            task = served.description
        if not _wait(task, lambda: not context.is_active()):
            return b""
        try:
            description: Description = task.result()
        except DatasetError as error:
            with self._lock:
                served.description = None
            return pb.DescribeReply(failure=requests.failure_to_proto(_record(error))).SerializeToString()
        return pb.DescribeReply(
            num_samples=description.num_samples,
            fingerprint=description.fingerprint,
            environment=description.environment,
            globals=served.globals,
            warnings=description.warnings,
        ).SerializeToString()

    def _find(self, spec: DatasetSpec) -> tuple[_Served, BuiltDataset]:
        with self._lock:
            served = self._served.get(spec)
        if served is None or served.built is None:
            raise _UnpreparedError("the data set is not prepared here")
        return served, served.built

    def _attend(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        _parse(pb.AttendRequest, data)
        ticket = self.delivery.admit()
        try:
            ended = threading.Event()
            if not context.add_callback(ended.set):
                return
            yield pb.AttendReply(port=self.delivery.port, ticket=ticket).SerializeToString()
            while not ended.wait(_POLL_S) and not self.delivery.is_stopped:
                pass
        finally:
            self.delivery.dismiss(ticket)

    # Batches

    def _answer(self, data: bytes, has_left: Callable[[], bool]) -> framing.EncodedBatch | bytes | None:
        """Answer one request. Return None if the requester has left. Raises nothing."""
        try:
            return self._fetch(data, has_left)
        except DatasetError as error:
            return framing.encode_failure(_record(error), request=data)
        except _UnpreparedError as error:
            return framing.encode_refusal(Refusal.UNPREPARED, str(error), request=data)
        except (ProtocolError, ConfigError) as error:
            return framing.encode_refusal(Refusal.MALFORMED, _one_line(error), request=data)
        except BaseException as error:  # noqa: BLE001 - a broken answer must not end the connection's thread
            return framing.encode_refusal(Refusal.BROKEN, self._log_incident(error), request=data)

    def _fetch(self, data: bytes, has_left: Callable[[], bool]) -> framing.EncodedBatch | None:
        message = requests.parse_request(data)
        request = requests.from_proto(message, self._limits)
        _, built = self._find(request.spec)
        limits = self._limits.within(message.max_batch_bytes)
        task = self._compute.submit(
            request.step,
            functools.partial(self._compute_batch, built, request, data, limits),
            emulated_s=self._sample_time_s * len(request.indices),
            is_abandoned=has_left,
        )
        if not _wait(task, has_left):
            task.cancel()
            return None
        if task.was_cancelled:
            return None
        try:
            found = task.result()
        except Cancelled:
            return None
        if not isinstance(found, framing.EncodedBatch):
            batch, skips = found
            found = self._encode(batch, request, data, limits, skips, copy=False)
        # Without the package the batch is sent uncompressed. The answer says this, and the reader warns. Every batch is
        # the same either way, and a job that runs slower than it could is better than a job that does not run.
        if request.compression is not None and is_installed(request.compression):
            found.compress(request.compression)
        return found

    def _compute_batch(
        self, built: BuiltDataset, request: BatchRequest, data: bytes, limits: Limits, task: Task
    ) -> framing.EncodedBatch | tuple[Any, Skips | None]:
        """Return the encoded batch. If its memory is new, return the batch and its skips, to be encoded elsewhere."""
        told: list[Skips] = []
        try:
            batch = fetch(built, request, host=self._name, cancelled=task.is_cancelled, on_skips=told.append)
            skips = told[0] if told else None
            # A handler thread can encode and send new memory while the next batch is computed. But the user's own code
            # may return a buffer that it fills again for the next batch.
            if built.makes_new_memory(collate=request.collate):
                return batch, skips
            return self._encode(batch, request, data, limits, skips, copy=True)
        except (DatasetError, Cancelled):
            raise
        except BaseException as error:
            # For example sys.exit() in a transform. It is the user's failure, and must not end the endpoint.
            raise dataset_error(error, dataset=request.spec.name, host=self._name, stage="sample") from error

    def _encode(
        self,
        batch: Any,
        request: BatchRequest,
        data: bytes,
        limits: Limits,
        skips: Skips | None,
        *,
        copy: bool,
    ) -> framing.EncodedBatch:
        """Return the batch as the answer to a request, whose bytes are ``data``.

        Raises:
            DatasetError: The batch holds an object that cannot be sent, or is too large.
        """
        try:
            return framing.EncodedBatch(
                batch,
                limits=limits,
                num_queued=self._compute.num_queued,
                copy=copy,
                skips=skips,
                request=data,
            )
        except ConfigError as error:
            failed = dataset_error(str(error), dataset=request.spec.name, host=self._name, stage="encode")
            raise failed from error

    # The only place that turns this side's exceptions into gRPC statuses

    def _guarded(self, method: Callable[..., bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def guarded(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return method(data, context)
            except Exception as error:  # noqa: BLE001
                self._translate(error, context)

        return guarded

    def _guarded_stream(
        self, method: Callable[..., Iterator[bytes]]
    ) -> Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]:
        def guarded(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                yield from method(data, context)
            except Exception as error:  # noqa: BLE001
                self._translate(error, context)

        return guarded

    def _translate(self, error: Exception, context: grpc.ServicerContext) -> NoReturn:
        if context.code() is not None or not context.is_active():  # type: ignore[attr-defined]
            raise error  # it is the abort of a handler, or the caller has left
        if isinstance(error, ProtocolError | ConfigError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _one_line(error))
        context.abort(grpc.StatusCode.INTERNAL, self._log_incident(error))
        raise AssertionError("abort raises")

    def _log_incident(self, error: BaseException) -> str:
        """Log an unexpected error. Return the text that the other side may see."""
        incident = secrets.token_hex(4)
        logger.error("internal error %s", incident, exc_info=error)
        return f"internal error {incident}, see the log of {self._name}"


def _record(error: DatasetError) -> SampleFailure:
    return cast("SampleFailure", error.record)


def _wait(task: Task, has_left: Callable[[], bool]) -> bool:
    """Block until the task is done. Return False if the caller left first."""
    while not task.wait(_POLL_S):
        if has_left():
            return False
    return True


def _parse(kind: type[_Message], data: bytes) -> _Message:
    """Return the message.

    Raises:
        ProtocolError: The bytes are not such a message, or the protocol version differs.
    """
    message = parse(kind, data)
    protocol = message.protocol  # type: ignore[attr-defined]
    if protocol != PROTOCOL:
        raise ProtocolError(f"data plane protocol {protocol} was asked for, this endpoint has {PROTOCOL}")
    return message


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
