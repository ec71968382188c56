"""Converts batch requests, data set specs and failures to their messages, and back."""

from __future__ import annotations

import dataclasses
import ipaddress

import numpy as np
import numpy.typing as npt

from hetero.batches.failures import MAX_TYPES
from hetero.batches.indexed import IndexedWork
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest, Helper, Work
from hetero.documents.text import printable
from hetero.errors import ConfigError, ProtocolError, SampleFailure
from hetero.spec import DatasetSpec
from hetero.wire import indexed, lanes
from hetero.wire.compression import compression_from_proto, compression_to_proto
from hetero.wire.limits import MAX_FETCH_BYTES, MAX_HELPERS, MAX_PARSED_BYTES, PROTOCOL, Limits
from hetero.wire.messages import parse, parse_bounded
from hetero.wire.proto import data_pb2 as pb

__all__ = [
    "failure_from_proto",
    "failure_to_proto",
    "from_proto",
    "parse_request",
    "serialize",
    "spec_from_proto",
    "spec_to_proto",
    "to_proto",
    "too_many_samples",
]

_DEFAULT_LIMITS = Limits()
_MAX_HELPER_TEXT = 512
_PLAIN_FIELDS = ("seed", "epoch", "position", "collate", "as_is", "contiguous", "is_part", "step", "verify")
"""Fields of a request that its message has under the same name and with the same value."""
_STAGES = ("build", "describe", "sample", "collate", "encode", "purity")


def spec_to_proto(spec: DatasetSpec) -> pb.DatasetSpec:
    """Return the message of a spec."""
    return pb.DatasetSpec(name=spec.name, arguments_json=spec.arguments_json)


def spec_from_proto(message: pb.DatasetSpec) -> DatasetSpec:
    """Return the spec in a message, without checking that such a data set is registered.

    Raises:
        ProtocolError: If the name or the arguments break the rules of `DatasetSpec`.
    """
    try:
        return DatasetSpec(message.name, message.arguments_json)
    except ConfigError as exc:
        raise ProtocolError(f"a request has no valid data set: {exc}") from exc


def to_proto(request: BatchRequest, limits: Limits = _DEFAULT_LIMITS) -> pb.FetchRequest:
    """Return the message of a request. It allows a batch of at most ``limits.max_batch_bytes``.

    Raises:
        ConfigError: If the request exceeds a limit, or a number is out of range.
    """
    if request.work.num_samples > limits.max_indices:
        raise ConfigError(too_many_samples(request.work.num_samples, limits))
    try:
        message = pb.FetchRequest(
            protocol=PROTOCOL,
            dataset=spec_to_proto(request.spec),
            **{name: getattr(request, name) for name in _PLAIN_FIELDS},
            max_batch_bytes=limits.max_batch_bytes,
            compression=compression_to_proto(request.compression),
            on_sample_error=pb.SKIP if request.on_sample_error == "skip" else pb.RAISE,
        )
        if request.owners is not None:
            items = [pb.Helper(**dataclasses.asdict(each)) for each in request.helpers]
            message.helpers = pb.Helpers(items=items).SerializeToString()
            message.owners = request.owners.tobytes()
        if isinstance(request.work, LaneWork):
            lanes.write(message, request.work)
        else:
            assert isinstance(request.work, IndexedWork)  # a new kind needs its own module, see `Work`
            indexed.write(message, request.work)
    except ValueError as exc:
        # protobuf raises this for a number out of range, or for text that is not UTF-8.
        raise ConfigError(f"a batch request cannot be sent: {exc}") from exc
    return message


def too_many_samples(num_samples: int, limits: Limits = _DEFAULT_LIMITS) -> str:
    """Return the error message for a batch with this number of samples, including advice."""
    return (
        f"a batch of {num_samples} samples cannot come from a data host, at most {limits.max_indices} can\n"
        "  Use a smaller batch_size, or a data set whose samples are rows of several."
    )


def serialize(request: BatchRequest, limits: Limits = _DEFAULT_LIMITS) -> bytes:
    """Return the bytes of a request.

    Raises:
        ConfigError: As in `to_proto`, and if the request has too many bytes.
    """
    message = to_proto(request, limits)
    data = message.SerializeToString()
    # The endpoint rejects larger keys and larger requests, so do not send them. Nearly all requests are smaller.
    if len(data) > MAX_PARSED_BYTES:
        what, advice = "indices", "Use smaller batches or shorter keys."
        if message.lanes:
            what, advice = "states of the lanes", "Use iterators whose states hold no samples, or smaller batches."
        sizes = {len(message.keys): MAX_PARSED_BYTES, len(message.lanes): MAX_PARSED_BYTES, len(data): MAX_FETCH_BYTES}
        for size, max_bytes in sizes.items():
            if size > max_bytes:
                raise ConfigError(
                    f"the {what} of batch {request.position} take {size} bytes, at most {max_bytes} are allowed\n"
                    f"  {advice}"
                )
    return data


def parse_request(data: bytes) -> pb.FetchRequest:
    """Return the message of a request.

    Raises:
        ProtocolError: If the bytes are not a request, or more than `MAX_FETCH_BYTES`.
    """
    if len(data) > MAX_FETCH_BYTES:
        raise ProtocolError(f"a request has {len(data)} bytes, at most {MAX_FETCH_BYTES} are allowed")
    return parse(pb.FetchRequest, data)


def from_proto(message: pb.FetchRequest, limits: Limits = _DEFAULT_LIMITS) -> BatchRequest:
    """Return the request in a message, without its ``max_batch_bytes`` (see `Limits.within`).

    Raises:
        ProtocolError: If the versions differ, or `to_proto` could not have made the message.
    """
    if message.protocol != PROTOCOL:
        raise ProtocolError(
            f"the request has protocol {message.protocol}, this endpoint has protocol {PROTOCOL}\n"
            "  Install the same version of hetero on all hosts."
        )
    work: Work = lanes.read(message, limits) if message.lanes else indexed.read(message, limits)
    if not message.collate and work.num_samples != 1:
        raise ProtocolError(f"a request without collation has {work.num_samples} indices, expected exactly 1")
    if message.on_sample_error not in (pb.RAISE, pb.SKIP):
        raise ProtocolError(f"a request has the unknown policy {message.on_sample_error} for samples that raise")
    if message.on_sample_error == pb.SKIP and not message.collate:
        raise ProtocolError("a request without collation cannot skip: no other sample can be the substitute")
    helpers: tuple[Helper, ...] = ()
    owners: npt.NDArray[np.uint8] | None = None
    if message.helpers or message.owners:
        helpers, owners = _helpers_from_proto(message, work.num_samples)
    if message.is_part and (helpers or message.verify or message.on_sample_error == pb.SKIP):
        raise ProtocolError("a request for a part of a batch has options that are for whole batches")
    return BatchRequest(
        spec=spec_from_proto(message.dataset),
        work=work,
        **{name: getattr(message, name) for name in _PLAIN_FIELDS},
        compression=compression_from_proto(message.compression),
        on_sample_error="skip" if message.on_sample_error == pb.SKIP else "raise",
        helpers=helpers,
        owners=owners,
    )


def _helpers_from_proto(message: pb.FetchRequest, num_samples: int) -> tuple[tuple[Helper, ...], npt.NDArray[np.uint8]]:
    """Return the helpers in a request, and the owners of its samples.

    Raises:
        ProtocolError: If there are too many helpers, a helper has no valid address, or an owner is not one of them.
    """
    items = parse_bounded(pb.Helpers, message.helpers).items
    if len(items) > MAX_HELPERS:
        raise ProtocolError(f"a request names {len(items)} helpers, at most {MAX_HELPERS} are allowed")
    for each in items:
        if not all(0 < len(getattr(each, field.name)) <= _MAX_HELPER_TEXT for field in dataclasses.fields(Helper)):
            raise ProtocolError("a request names a helper whose fields are empty or too long")
        # The endpoint connects to this address. A request must not make it look up a name.
        if not _is_numeric(each.address):
            raise ProtocolError("a request names a helper whose address is not ip:port")
    helpers = tuple(
        Helper(**{field.name: getattr(each, field.name) for field in dataclasses.fields(Helper)}) for each in items
    )
    # One byte per sample: 0 for the endpoint itself, or the number of a helper, from 1.
    owners = np.frombuffer(message.owners, np.uint8)
    largest = int(owners.max(initial=0))
    if len(owners) != num_samples or largest > len(helpers):
        raise ProtocolError(
            f"a request for {num_samples} samples names {len(helpers)} helpers, and {len(owners)} owners up to number "
            f"{largest}"
        )
    return helpers, owners


def _is_numeric(address: str) -> bool:
    """Return whether an address has the form ``ip:port``, as in the directory. A host name would be looked up."""
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return port.isascii() and port.isdigit() and 0 < int(port) < 2**16


def failure_to_proto(failure: SampleFailure) -> pb.Failure:
    """Return the message of a failure. `hetero.batches.failures` has bounded the texts of the failure."""
    return pb.Failure(**dataclasses.asdict(failure))


def failure_from_proto(message: pb.Failure) -> SampleFailure:
    """Return the failure in a message. Its text is escaped, so it cannot imitate lines of a log.

    Raises:
        ProtocolError: If the stage is unknown.
    """
    if message.stage not in _STAGES:
        raise ProtocolError(f"a failure has the stage {message.stage!r:.60}, expected one of {', '.join(_STAGES)}")
    texts = {field.name: getattr(message, field.name) for field in dataclasses.fields(SampleFailure)}
    types = tuple(printable(name) for name in texts.pop("types")[:MAX_TYPES])
    # The texts are shown in this rank's log, where they must not look like lines of hetero. Only a traceback may have
    # several lines, because the log indents each of them.
    traceback = printable(texts.pop("traceback"), keep="\n\t")
    return SampleFailure(**{name: printable(text) for name, text in texts.items()}, traceback=traceback, types=types)
