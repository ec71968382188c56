"""Batches through answers: bit for bit the same, readable by any protobuf reader."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hetero.batches.failures import dataset_error
from hetero.batches.purity.comparison import compare
from hetero.batches.structure.conversion import UnsupportedBatchError
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire.compression import ChecksumError
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder, EncodedBatch, encode_failure, encode_refusal
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from tests.support.wire.tensors import HAS_TORCH, bfloats, tensor

FAILURE = SampleFailure(dataset="d", host="h", stage="sample", sample_index="1", exception="KeyError", traceback="")
Pair = collections.namedtuple("Pair", "image label")

DTYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "?")
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: npst.arrays(np.dtype(dtype), SHAPES))
TENSORS = ARRAYS.map(tensor)
BFLOATS = npst.arrays(np.dtype("i2"), SHAPES).map(bfloats) if HAS_TORCH else st.nothing()
VIEWS = ARRAYS.map(lambda array: array.T[..., ::-1] if array.ndim else array)
SCALARS = st.sampled_from(DTYPES).flatmap(lambda dtype: npst.from_dtype(np.dtype(dtype)))
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary()
LONG = st.text(min_size=200, max_size=300) | st.binary(min_size=250, max_size=300)
LISTS = st.one_of(*(st.lists(kind, max_size=20) for kind in (st.booleans(), st.integers(0, 9), st.floats(), st.text())))
KEYS = st.text(max_size=8) | st.integers(-9, 9)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, children, max_size=4)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | mappings
        | mappings.map(collections.OrderedDict)
        | st.builds(Pair, children, children)
    )


BATCHES = st.recursive(
    ARRAYS | TENSORS | BFLOATS | VIEWS | SCALARS | PLAIN | LONG | LISTS, containers, max_leaves=12
).filter(lambda batch: depth_of(batch) <= 8)


def depth_of(batch: Any) -> int:
    if isinstance(batch, dict):
        batch = list(batch.values())
    return 1 + max(map(depth_of, batch), default=0) if isinstance(batch, list | tuple) else 0


def decode(encoded: EncodedBatch, limits: Limits | None = None, *, step: int = 2**30) -> Any:
    """Return the batch, its payload received in pieces of at most ``step`` bytes."""
    decoder = BatchDecoder(limits or Limits())
    decoder.take_message(encoded.message)
    payload = memoryview(b"".join(encoded.payload))
    while not decoder.done:
        room = decoder.room()[:step]
        room[:] = payload[: len(room)]
        payload = payload[len(room) :]
        decoder.filled(len(room))
    assert not len(payload)
    return decoder.result()


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(batch=BATCHES, step=st.integers(1, 200), copy=st.booleans())
def test_round_trip_random_batch_is_the_same(batch: Any, step: int, copy: bool) -> None:
    assert compare(batch, decode(EncodedBatch(batch, copy=copy), step=step)) is None


@pytest.mark.parametrize("num_keys", [3, 1000])
def test_batches_of_one_structure_share_no_container(num_keys: int) -> None:
    batch = {f"key-{number}": [1, {"a": 1.0}, True] for number in range(num_keys)}
    encoded = EncodedBatch(batch)
    first = decode(encoded)
    first["key-0"][1]["a"] = 2.0
    first["key-1"].append("more")
    assert compare(batch, decode(EncodedBatch(batch))) is None


def test_batches_whose_structures_differ_only_in_the_type_of_a_number_stay_apart() -> None:
    for number in (1, True, 1.0, 1, 0, False, 0.0, -0.0):
        assert compare([number], decode(EncodedBatch([number]))) is None


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2**18 - 1, 2**18, 2**18 + 1, 5 * 2**20])
def test_round_trip_around_the_sizes_of_chunks_is_the_same(size: int) -> None:
    batch = [tensor(np.arange(size).astype(np.uint8)), "end"]
    assert compare(batch, decode(EncodedBatch(batch))) is None


def test_message_protobuf_reader_understands_it() -> None:
    image = np.arange(300, dtype=np.uint8)
    batch = {"image": image, "label": tensor(range(3)), "names": ["a", "bc"] * 4, "weight": 0.5, "empty": np.zeros(0)}
    encoded = EncodedBatch(batch, num_queued=3)
    answer = pb.Answer.FromString(encoded.message)
    assert answer.WhichOneof("part") == "header"
    header = answer.header
    structure = pb.Structure.FromString(header.structure)
    payload = b"".join(encoded.payload)
    assert all(len(piece) for piece in encoded.payload)
    assert payload[:300] == image.tobytes()
    assert len(payload) == encoded.nbytes == header.payload_bytes == sum(leaf.nbytes for leaf in structure.leaves)
    assert header.checksum == xxhash.xxh3_64_intdigest(header.structure + payload)
    assert (header.protocol, header.num_queued) == (PROTOCOL, 3)
    assert [key.text for key in structure.root.mapping.keys] == list(batch)
    assert structure.root.mapping.values[3].real == 0.5
    first = structure.leaves[0]
    assert (first.dtype, first.container, list(first.shape)) == (pb.U8, pb.ARRAY, [300])


def test_encoded_batch_changed_afterwards_is_sent_as_it_was() -> None:
    array = np.zeros(10)
    encoded = EncodedBatch(array)
    array[:] = 1
    assert encoded.nbytes == 80
    assert decode(encoded).sum() == 0


def test_encoded_batch_without_copy_is_sent_from_its_own_memory() -> None:
    batch = {"image": np.arange(1000), "label": tensor(range(7)), "empty": np.empty(0), "names": ["a", "bc"] * 40}
    direct, copied = EncodedBatch(batch, copy=False), EncodedBatch(batch)
    assert direct.message == copied.message
    assert list(map(bytes, direct.payload)) == list(map(bytes, copied.payload))
    assert np.shares_memory(np.frombuffer(direct.payload[0], np.uint8), batch["image"])
    batch["image"][:] = 1
    with pytest.raises(ProtocolError, match="damaged"):
        decode(direct)


def test_encoded_batch_too_large_fails() -> None:
    with pytest.raises(UnsupportedBatchError, match="101 bytes, but only 100 are left"):
        EncodedBatch(np.zeros(101, np.uint8), limits=Limits(max_batch_bytes=100))
    with pytest.raises(UnsupportedBatchError, match="Use tensors"):
        EncodedBatch([["x" * 200] * 7] * 1000)


def test_result_arrays_are_writable_and_own_their_memory() -> None:
    encoded = EncodedBatch([np.zeros(10), tensor(np.zeros(10)), np.zeros((3, 4))[:, ::2]])
    first, second = decode(encoded), decode(encoded)
    for array in first:
        array += 1
    assert all(array.sum() == 0 for array in second)


@pytest.mark.skipif(not HAS_TORCH, reason="memory is asked for torch's tensors only")
def test_decoder_allocate_gets_one_call_per_tensor_and_its_memory_is_used() -> None:
    buffers: list[bytearray] = []

    def allocate(nbytes: int) -> memoryview:
        buffers.append(bytearray(nbytes + 100))  # may be larger
        return memoryview(buffers[-1])

    decoder = BatchDecoder(Limits(), allocate=allocate)
    encoded = EncodedBatch(
        [tensor(np.zeros(2, np.uint8)), tensor(np.zeros(0)), tensor(np.ones(3, np.uint8)), np.ones(5), "x" * 300]
    )
    decoder.take_message(encoded.message)
    assert decoder.needs_memory
    assert not buffers
    for piece in encoded.payload:
        assert decoder.needs_memory
        room = decoder.room()
        assert not decoder.needs_memory
        room[:] = piece
        decoder.filled(len(room))
    batch = decoder.result()
    assert [len(buffer) for buffer in buffers] == [102, 103]
    batch[2][1] = 7
    assert bytes(buffers[1][:3]) == b"\1\7\1"
    assert batch[3:] == [pytest.approx(np.ones(5)), "x" * 300]


def test_decoder_header_facts_are_known() -> None:
    decoder = BatchDecoder()
    decoder.take_message(EncodedBatch(np.zeros(4), num_queued=5).message)
    assert (decoder.num_queued, decoder.nbytes, decoder.done) == (5, 32, False)
    with pytest.raises(ProtocolError, match="32 of 32 bytes are missing"):
        decoder.result()


@pytest.mark.parametrize("refusal", [fault for fault in Fault if fault.value.is_refusal])
def test_refusal_is_raised_with_its_details_on_one_line(refusal: Fault) -> None:
    with pytest.raises(CallFailedError, match="come back later") as caught:
        BatchDecoder().take_message(encode_refusal(refusal, "come back\nlater" + "!" * 1000))
    assert caught.value.fault is refusal
    assert len(caught.value.details) <= 500


def test_failure_raises_dataset_error_with_the_record() -> None:
    failure = SampleFailure(
        dataset="photos", host="algo-1/0", stage="sample", sample_index="17", exception="ValueError: no",
        traceback="Traceback\n  line",
    )  # fmt: skip
    with pytest.raises(DatasetError) as caught:
        BatchDecoder().take_message(encode_failure(failure))
    assert caught.value.record == failure


def test_failure_of_long_text_is_bounded() -> None:
    text = "\N{SNOWMAN}\udc80" * 10**5
    kind: type[Exception] = ValueError
    for number in range(30):
        kind = type(f"\N{SNOWMAN}{number}" * 10**4, (kind,), {})
    error = dataset_error(kind(text), dataset="d" * 128, host="algo-1/0", stage="sample", sample_index=text)
    message = encode_failure(error.record)
    assert len(message) < Limits().max_failure_bytes
    with pytest.raises(DatasetError, match=r"\.\.\. cut \.\.\."):
        BatchDecoder().take_message(message)


def test_failure_with_control_characters_cannot_forge_a_log_line() -> None:
    failure = pb.Failure(stage="sample", exception="a\nfake line\x1b[31m", traceback="one\ntwo\x1b\r")
    with pytest.raises(DatasetError) as caught:
        BatchDecoder().take_message(pb.Answer(failure=failure).SerializeToString())
    assert caught.value.record.exception == r"a\nfake line\x1b[31m"
    assert caught.value.record.traceback == "one\ntwo\\x1b\\r"


@pytest.mark.parametrize(
    ("message", "raised"),
    [
        (EncodedBatch(np.zeros(0), request=b"one").message, None),
        (encode_failure(FAILURE, request=b"one"), DatasetError),
        (encode_refusal(Fault.MALFORMED, "no", request=b"one"), CallFailedError),
    ],
    ids=["batch", "failure", "refusal"],
)
def test_answer_to_another_request_does_not_pass(message: bytes, raised: type[Exception] | None) -> None:
    with contextlib.nullcontext() if raised is None else pytest.raises(raised):
        BatchDecoder(request=b"one").take_message(message)
    for other in (b"ane", b"one ", b""):
        with pytest.raises(ChecksumError, match="belongs to another request"):
            BatchDecoder(request=other).take_message(message)
