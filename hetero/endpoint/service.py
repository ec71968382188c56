"""Answers the readers of an endpoint: Prepare and Attend over gRPC, batches over separate connections.

Handler threads parse requests. Only `Compute` runs the user's code. A handler thread waits for a large batch and sends
it while `Compute` computes the next batch. Every half second, the handler thread checks whether the caller has left. If
so, it stops waiting. The compute thread sends a small batch itself: see `hetero.endpoint.replies`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import dataset_error
from hetero.batches.fetch import describe
from hetero.batches.request import Helper
from hetero.control.security import Policy
from hetero.datasets import get_factory
from hetero.endpoint.batches import Experience, RequestedBatch
from hetero.endpoint.compute import Compute, Task
from hetero.endpoint.delivery import Delivery
from hetero.endpoint.failures import Failures, UnpreparedError
from hetero.endpoint.gathering import Gathering
from hetero.endpoint.link import EndpointLink
from hetero.endpoint.options import EndpointOptions
from hetero.endpoint.parts import Links
from hetero.endpoint.prebuilt import Prebuilt, build, is_shareable
from hetero.endpoint.replies import LATER, Answer, Later, Reply
from hetero.errors import DatasetError, ProtocolError
from hetero.spec import DatasetSpec
from hetero.system.fault_injection import faults_at
from hetero.system.waits import POLL_S
from hetero.wire import framing, requests  # before grpc: channels sets its environment
from hetero.wire.limits import MAX_EXPECTED, PROTOCOL, SERVICE, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.transports.interface import Transport

import grpc  # isort: skip

__all__ = ["DATA_POLICIES", "DataServicer"]

DATA_POLICIES: Mapping[str, Policy] = {
    f"/{SERVICE}/Prepare": Policy.TOKEN,
    f"/{SERVICE}/Attend": Policy.TOKEN,
}

MAX_DATASETS = 64
"""Largest number of data sets that one endpoint keeps."""

# Priority of building a data set. It runs before all batches, because the priority of a batch is its step, from 0.
_FIRST = -1
_Message = TypeVar("_Message", bound=Message)

logger = logging.getLogger(__name__)


class _Served:
    """One data set of this endpoint: the task that builds it, and then the data set."""

    def __init__(self) -> None:
        self.build_task: Task | None = None
        self.built: BuiltDataset | None = None
        """The data set. None until the task is done."""
        self.experience = Experience()


class DataServicer:
    """Handlers of the data plane. Thread-safe.

    Args:
        compute: Runs the user's code.
        options: The endpoint's settings.
        max_requests: Largest number of requests in progress.
        transport: How readers connect for batches.
        on_build: Called on a compute thread, with False when the build of a data set begins and True when it has ended.
        prebuilt: Data sets that were built before this process was forked.
        announce: Called on a compute thread before the first build, with the data sets that other endpoints may share.
            The call returns if this process has to build the data sets itself, see `hetero.endpoint.prebuilt.announce`.
            If None, this process builds them itself.
        connect: Opens a link to an endpoint of a host that keeps samples. None: this endpoint asks no other one.

    Raises:
        PortError, OSError: As for `Delivery`.
        ConfigError: If `HETERO_FAULTS` is malformed.
    """

    def __init__(
        self,
        compute: Compute,
        options: EndpointOptions,
        *,
        max_requests: int,
        transport: Transport,
        on_build: Callable[[bool], None] = lambda has_ended: None,
        prebuilt: Mapping[DatasetSpec, Prebuilt] | None = None,
        announce: Callable[[Sequence[DatasetSpec]], object] | None = None,
        connect: Callable[[Helper], EndpointLink] | None = None,
    ) -> None:
        self._prebuilt = prebuilt or {}
        self._announce = announce
        # Without links, this endpoint computes all samples of its batches, and no parts for other endpoints.
        self._links = None if connect is None else Links(connect)
        self._compute = compute
        self._options = options
        self._failures = Failures(options.name)
        # Faults that tests inject into the calls.
        self._faults = {method: faults_at(method) for method in ("Prepare", "Attend")}
        self._limits = Limits(max_batch_bytes=options.max_batch_bytes)
        self._on_build = on_build
        self._lock = threading.Lock()
        self._served: dict[DatasetSpec, _Served] = {}
        self.delivery = Delivery(options.address, self._answer, max_requests=max_requests, transport=transport)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the service for ``grpc.server``. Its methods get bytes and handle parsing errors themselves."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Prepare": grpc.unary_unary_rpc_method_handler(self._prepare),
                "Attend": grpc.unary_stream_rpc_method_handler(self._attend),
            },
        )

    @property
    def num_parts(self) -> int:
        """Parts of batches that were computed for other endpoints. Blocks while the service is stuck."""
        with self._lock:
            return sum(served.experience.num_parts for served in self._served.values())

    # Prepare, Attend

    def _prepare(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Handle a Prepare call: build the data set and return its description, or a failure of the user's code."""
        with self._failures.as_statuses(context, self._faults["Prepare"]):
            request = _parse(pb.PrepareRequest, data)
            try:
                expected = [requests.spec_from_proto(each) for each in request.expected[:MAX_EXPECTED]]
                task = self._start_build(requests.spec_from_proto(request.dataset), expected)
                # If the caller has left, gRPC ignores the answer.
                if not _wait(task, lambda: not context.is_active()):
                    return b""
                reply: bytes = task.result()
            except DatasetError as error:
                reply = pb.PrepareReply(failure=requests.failure_to_proto(error.record)).SerializeToString()
            return reply

    def _start_build(self, spec: DatasetSpec, expected: Sequence[DatasetSpec]) -> Task:
        """Return the task that builds and describes a data set: queued, running or done. Concurrent calls share it.

        Raises:
            DatasetError: This endpoint already holds `MAX_DATASETS` data sets.
        """
        with self._lock:
            served = self._served.get(spec)
            if served is None:
                if len(self._served) >= MAX_DATASETS:
                    # Report a failed build, and not `Fault.BUSY`, because a reader would ask a busy endpoint again
                    # until its timeout.
                    raise dataset_error(
                        f"this endpoint already holds {MAX_DATASETS} data sets, because each choice of arguments makes "
                        "another one; register one data set with all samples, and choose among them with a sampler",
                        dataset=spec.name,
                        host=self._options.name,
                        stage="build",
                    )
                served = self._served[spec] = _Served()
                announced = (spec, *expected)
                work = functools.partial(self._build, spec, announced, served)
                served.build_task = self._compute.submit(priority=_FIRST, work=work)
            assert served.build_task is not None
            return served.build_task

    def _build(self, spec: DatasetSpec, announced: Sequence[DatasetSpec], served: _Served, _task: Task) -> bytes:
        """Build and describe a data set. Return the answer to Prepare. Runs on a compute thread.

        ``announced`` are this data set and those that the reader will ask for later.
        """
        # Announce the data sets before the build is reported. The fork server may end this process in `_announce`, and
        # the process that replaces it reports its own builds.
        if self._announce is not None:
            self._announce([each for each in announced if is_shareable(each)])
        begin_s = time.monotonic()
        # False, because the build has not ended.
        self._on_build(False)
        try:
            prebuilt = self._prebuilt.get(spec) or build(spec, host=self._options.name)
            built = prebuilt.built
            built.become_worker(self._options.index, self._options.num_endpoints, host=self._options.name)
            if spec not in self._prebuilt:
                logger.info("built data set %s in %.1f s", spec, time.monotonic() - begin_s)
            description = describe(built, host=self._options.name)
            compare = getattr(built.user_dataset, "hetero_problems", None) if self._options.compares_shards else None
            problems = () if compare is None else tuple(compare())
            served.built = built
        except BaseException as error:
            with self._lock:
                # Forget the failed build. Then the next Prepare tries again, because a mount may have been late.
                del self._served[spec]
            if isinstance(error, DatasetError):
                raise
            raise dataset_error(error, dataset=spec.name, host=self._options.name, stage="build") from error
        finally:
            self._on_build(True)
        return pb.PrepareReply(
            num_samples=description.num_samples,
            fingerprint=description.fingerprint,
            environment=description.environment,
            globals=prebuilt.globals,
            warnings=description.warnings + problems,
            sources=[
                pb.Source(
                    name=source.name,
                    num_samples=source.num_samples,
                    layout=b"" if source.layout is None else source.layout.to_bytes(),
                )
                for source in description.sources
            ],
            # A reader splits a batch into parts only among endpoints that set this flag.
            keeps_samples=self._links is not None and built.is_divisible and _has_owners(spec.name),
            is_iterable=description.is_iterable,
        ).SerializeToString()

    def _find(self, spec: DatasetSpec) -> tuple[_Served, BuiltDataset]:
        """Return a data set that is built here. Raise `UnpreparedError` if it is not."""
        with self._lock:
            served = self._served.get(spec)
        if served is None or served.built is None:
            raise UnpreparedError("the data set is not built here")
        return served, served.built

    def _attend(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Handle an Attend call: give the reader a session token that is valid until the call ends."""
        with self._failures.as_statuses(context, self._faults["Attend"]):
            _parse(pb.AttendRequest, data)
            session_token = self.delivery.admit()
            try:
                ended = threading.Event()
                # If `add_callback` returns False, the caller has left already, and gRPC will not call back.
                if not context.add_callback(ended.set):
                    return
                yield pb.AttendReply(port=self.delivery.port, ticket=session_token).SerializeToString()
                # The end of this call closes the reader's connections. So stay until the reader has left, or the grace
                # period of a stop is over.
                while not ended.wait(POLL_S) and not self.delivery.is_stopped:
                    pass
            finally:
                self.delivery.dismiss(session_token)

    # Batches

    def _answer(self, data: bytes, reply: Reply) -> Answer | Later:
        """Answer one request. Raises nothing."""
        return self._failures.answered(data, lambda: self._fetch(data, reply))

    def _fetch(self, data: bytes, reply: Reply) -> framing.EncodedBatch | Later | None:
        """Return the requested batch, `LATER` if the compute thread will send it, or None if the reader has left."""
        message = requests.parse_request(data)
        request = requests.from_proto(message, self._limits)
        served, built = self._find(request.spec)
        wanted = RequestedBatch(
            request=request,
            data=data,
            built=built,
            experience=served.experience,
            limits=self._limits.within(message.max_batch_bytes),
            name=self._options.name,
            load=self._compute,
            links=self._links,
        )
        gathering = wanted.gathering()
        if gathering is not None:
            return self._gather(wanted, gathering, reply)
        # This thread sends a batch that has to be compressed, because compression takes longer than sending. It also
        # sends a part, because the sizes of earlier batches say nothing about the size of a part.
        compute_thread_sends = served.experience.is_sent_at_once and request.compression is None and not request.is_part
        if not compute_thread_sends:
            return self._compute_and_wait(wanted, wanted.compute, reply)

        def send(task: Task) -> None:
            """Send the batch of a task that is done. Runs on the compute thread."""
            answer: Answer = None
            try:
                answer = self._failures.answered(data, lambda: wanted.finish(task))
            finally:  # if memory for an answer is lacking, the connection ends
                reply.send(answer)

        # No thread waits for the batch, so the reply must be able to cancel the task if the reader leaves.
        reply.if_given_up(self._submit(wanted, wanted.compute, on_finish=send).cancel)
        return LATER

    def _gather(self, wanted: RequestedBatch, gathering: Gathering, reply: Reply) -> framing.EncodedBatch | None:
        """Answer a request whose samples other hosts keep."""
        with gathering:
            # Wait on this thread and not on the compute thread, which has to compute parts for other endpoints. If the
            # compute threads waited, all endpoints would wait for each other until they give up. Then each endpoint
            # would compute the samples of the others too. While other tasks are queued, the wait costs nothing.
            while not gathering.wait(is_busy=self._compute.num_queued > 0):
                if reply.has_left():
                    return None
            return self._compute_and_wait(wanted, functools.partial(wanted.compute, gathering=gathering), reply)

    def _compute_and_wait(
        self, wanted: RequestedBatch, work: Callable[[Task], Any], reply: Reply
    ) -> framing.EncodedBatch | None:
        """Wait until a batch is computed, and return it. Return None if the reader leaves first."""
        task = self._submit(wanted, work, is_abandoned=reply.has_left)
        if not _wait(task, reply.has_left):
            task.cancel()
            return None
        return wanted.finish(task)

    def _submit(self, wanted: RequestedBatch, work: Callable[[Task], Any], **options: Any) -> Task:
        """Queue the work for a request. Lower steps run first. ``options`` are arguments of `Compute.submit`."""
        request = wanted.request
        return self._compute.submit(
            request.step, work, emulated_s=self._options.sample_time_s * request.work.num_samples, **options
        )


def _has_owners(name: str) -> bool:
    """Return whether each sample of a data set is kept by one of several hosts."""
    cache = get_factory(name).cache
    return cache is not None and cache.owner_hosts


def _wait(task: Task, has_left: Callable[[], bool]) -> bool:
    """Block until the task is done. Return False if the caller left first."""
    while not task.wait(POLL_S):
        if has_left():
            return False
    return True


def _parse(kind: type[_Message], data: bytes) -> _Message:
    """Parse a message and check its protocol version.

    Raises:
        ProtocolError: The bytes are not such a message, or the version differs.
    """
    message = parse(kind, data)
    protocol = message.protocol  # type: ignore[attr-defined]
    if protocol != PROTOCOL:
        raise ProtocolError(f"the request has data plane protocol {protocol}, this endpoint has {PROTOCOL}")
    return message
