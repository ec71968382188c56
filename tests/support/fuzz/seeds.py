"""Valid frames of every kind: what mutations and the fuzzer begin with."""

from __future__ import annotations

import dataclasses
import struct
import types
from typing import Any

import numpy as np

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.control.members.directory import EndpointRecord
from hetero.control.status import Cause, HostState, HostStatus, RankReport, StopPoint, status_to_proto
from hetero.errors import ExitCode, SampleFailure
from hetero.spec import DatasetSpec
from hetero.wire.faults import Fault
from hetero.wire.framing import EncodedBatch, encode_failure, encode_refusal
from hetero.wire.limits import PROTOCOL
from hetero.wire.proto import control_pb2
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.records import fields_of
from hetero.wire.requests import spec_to_proto, to_proto

__all__ = ["BATCHES", "answer", "seeds"]


@dataclasses.dataclass
class Sample:
    """A record as users have them."""

    text: str
    size: int


BATCHES: tuple[Any, ...] = (
    {
        "image": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
        "mask": np.zeros(7, np.bool_),
        "names": ["a", "\N{SNOWMAN}", ""] * 4,
        "blobs": [b"\xff"] * 9,
        "nested": [(1, 2.5, None, True), {"x": "y", 3: b"z"}, []],
        "record": Sample("a", 1),
        "scalar": np.float16(2),
        "empty": np.empty((0, 3)),
        "turned": np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
    },
    [(np.arange(3000) // 100).astype(np.uint8), np.random.default_rng(0).integers(0, 256, 3000, np.uint8)],
    (np.zeros((2, 3), np.int64), [1, 2, 3], "text"),
    None,
    {
        "sets": [{1, "a"}, frozenset({(1, None), b"b"})],
        "more": [np.array(["a", "bc"]), np.array([3], "m8[7ns]"), np.ones(2, np.complex64), np.str_("x")],
        None: types.MappingProxyType({2.5: 1j, (True, "x"): 2**100}),
    },
)
_SPEC = DatasetSpec("photos", '{"root":"/data","split":"train"}')
_REFUSALS = [fault for fault in Fault if fault.value.is_refusal]
_FAILURE = SampleFailure(
    dataset="photos", host="algo-1/0", stage="sample", sample_index="17", exception="KeyError", traceback="a\nb\n"
)
_CAUSE = Cause(host="algo-1", summary="it failed", detail="trace", exit_code=ExitCode.SCRIPT_FAILED, by_signal=True)
_REPORT = RankReport(
    rank=1,
    steps_started={"train": 7, "validate": 2},
    loader="train",
    summaries_json=(b"{}", b'{"name": "train"}'),
    counters={"hedges": 3},
    stop_vote=True,
    failure=_CAUSE,
)
_STATUS = HostStatus(
    host="algo-1",
    incarnation="0123456789abcdef",
    version="1",
    script_digest="d",
    state=HostState.TRAINING,
    endpoints=tuple(
        EndpointRecord(endpoint_id=f"algo-1/{i}", host="algo-1", address=f"127.0.0.1:{i + 1}", incarnation="ab")
        for i in range(3)
    ),
    failure=_CAUSE,
    decided=_CAUSE,
    stop_requested=True,
    stop_at=StopPoint(loader="train", steps=9),
    usage_json=b"{}",
    ranks=(_REPORT, _REPORT),
    counters={"endpoint restarts": 1},
    revision=5,
    rendezvous_port=1234,
)


def answer(batch: Any, compression: str | None = None) -> bytes:
    """Return an answer as it travels."""
    encoded = EncodedBatch(batch)
    if compression is not None:
        encoded.compress(compression)
    return struct.pack("<I", len(encoded.message)) + encoded.message + b"".join(encoded.payload)


def _requests() -> list[bytes]:
    given: list[dict[str, Any]] = [
        {"indices": np.arange(4)},
        {"indices": np.array([-1, 2**62]), "occurrences": np.array([0, 3], np.uint32), "compression": "zstd"},
        {"indices": ("a", "b"), "verify": True, "compression": "lz4"},
        {"indices": ((1, 2), (3,)), "step": 2**40},
        {"indices": (5,), "collate": False},
        {"indices": (None, 2.5, b"b", True, 2**70, ("a", (1, None)), [1, [2.5, "x"]])},
    ]
    common: dict[str, Any] = {"spec": _SPEC, "seed": 17, "epoch": 3, "position": 12}
    works = [IndexedWork(fields.pop("indices"), fields.pop("occurrences", None)) for fields in given]
    found = [BatchRequest(**common, work=work, **fields) for work, fields in zip(works, given, strict=True)]
    return [to_proto(request).SerializeToString() for request in found]


def seeds() -> list[bytes]:
    """Return valid inputs of `targets.run`, several for each parser."""
    refusals = [struct.pack("<I", len(data)) + data for data in (
        encode_failure(_FAILURE), *(encode_refusal(fault, "why not") for fault in _REFUSALS))]  # fmt: skip
    structures = [pb.Answer.FromString(EncodedBatch(batch).message).header.structure for batch in BATCHES]
    messages = (
        pb.AttendRequest(protocol=PROTOCOL),
        pb.AttendReply(port=1234, ticket=bytes(32)),
        pb.PrepareRequest(protocol=PROTOCOL, dataset=spec_to_proto(_SPEC)),
        pb.PrepareReply(num_samples=100, fingerprint="abc", environment={"torch": "2.1", "cpu": "avx2"}),
    )
    inputs: list[list[bytes]] = [
        [*(answer(batch) for batch in BATCHES), *refusals],
        [answer(batch) for batch in BATCHES],
        [answer(batch, "lz4") for batch in BATCHES],
        [answer(batch, "zstd") for batch in BATCHES],
        structures,
        _requests(),
        [status_to_proto(_STATUS).SerializeToString()],
        [control_pb2.RankReport(**fields_of(_REPORT)).SerializeToString()],
        [bytes([kind]) + message.SerializeToString() for kind, message in enumerate(messages)],
    ]
    return [bytes([target]) + data for target, given in enumerate(inputs) for data in given]
