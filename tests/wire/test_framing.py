"""Batches through frames: bit for bit the same, readable by any protobuf reader."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hetero.batches.purity import compare
from hetero.batches.structure import UnsupportedBatchError
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire.framing import BatchDecoder, EncodedBatch, encode_batch, encode_failure
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb

torch = pytest.importorskip("torch")

Pair = collections.namedtuple("Pair", "image label")

DTYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "?")
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: npst.arrays(np.dtype(dtype), SHAPES))
TENSORS = ARRAYS.map(lambda array: torch.from_numpy(np.array(array)))
BFLOATS = npst.arrays(np.dtype("i2"), SHAPES).map(lambda array: torch.from_numpy(np.array(array)).view(torch.bfloat16))
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


def decode(frames: Iterable[bytes], limits: Limits | None = None) -> Any:
    decoder = BatchDecoder(limits or Limits())
    for frame in frames:
        assert not decoder.done
        decoder.feed(frame)
    return decoder.result()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(batch=BATCHES, frame_bytes=st.integers(1, 200))
def test_round_trip_random_batch_is_the_same(batch: Any, frame_bytes: int) -> None:
    limits = Limits(frame_bytes=frame_bytes)
    assert compare(batch, decode(encode_batch(batch, limits=limits), limits)) is None


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**21 + 1, 5 * 2**20])
def test_round_trip_around_the_sizes_of_frames_is_the_same(size: int) -> None:
    batch = [torch.arange(size, dtype=torch.int32).to(torch.uint8), "end"]
    frames = list(encode_batch(batch))
    assert len(frames) == 1 + -(-size // Limits().frame_bytes)
    assert compare(batch, decode(frames)) is None


def test_frames_protobuf_reader_understands_all() -> None:
    image = np.arange(300, dtype=np.uint8)
    batch = {"image": image, "label": torch.arange(3), "names": ["a", "bc"] * 4, "weight": 0.5}
    frames = list(encode_batch(batch, limits=Limits(frame_bytes=128), num_queued=3, compute_time_s=0.25))
    messages = [pb.Frame.FromString(frame) for frame in frames]
    assert [message.WhichOneof("part") for message in messages] == ["header"] + ["payload"] * 3
    header = messages[0].header
    structure = pb.Structure.FromString(header.structure)
    payload = b"".join(message.payload for message in messages[1:])
    assert payload[:300] == image.tobytes()
    assert len(payload) == header.payload_bytes == sum(leaf.nbytes for leaf in structure.leaves)
    assert header.checksum == xxhash.xxh3_64_intdigest(header.structure + payload)
    assert (header.protocol, header.num_queued, header.compute_time_s) == (PROTOCOL, 3, 0.25)
    assert [key.text for key in structure.root.mapping.keys] == list(batch)
    assert structure.root.mapping.values[3].real == 0.5
    first = structure.leaves[0]
    assert (first.dtype, first.container, list(first.shape)) == (pb.U8, pb.ARRAY, [300])
    # ... and what protobuf would have sent is what we send.
    assert [message.SerializeToString() for message in messages] == frames


def test_frames_many_small_leaves_share_one() -> None:
    assert len(list(encode_batch([np.zeros(10)] * 500))) == 2


def inline_frames(batch: Any, limits: Limits | None = None, **options: Any) -> list[bytes]:
    return list(EncodedBatch(batch, limits=limits or Limits(), inline_small=True, **options).frames())


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(batch=BATCHES, max_inline=st.integers(1, 200), lazy=st.booleans())
def test_round_trip_random_small_batch_in_one_frame_is_the_same(batch: Any, max_inline: int, lazy: bool) -> None:
    limits = Limits(max_inline_payload_bytes=max_inline, frame_bytes=64)
    frames = inline_frames(batch, limits, lazy=lazy)
    assert compare(batch, decode(frames, limits)) is None
    header = pb.Frame.FromString(frames[0]).header
    assert (len(frames) == 1) == (header.payload_bytes <= max_inline)
    assert len(header.inline_payload) == (header.payload_bytes if len(frames) == 1 else 0)


def test_frames_small_batch_checksum_is_that_of_separate_frames() -> None:
    batch = {"image": np.arange(300, dtype=np.uint8), "label": torch.arange(3)}
    [single] = [pb.Frame.FromString(frame) for frame in inline_frames(batch)]
    header, payload = [pb.Frame.FromString(frame) for frame in encode_batch(batch)]
    assert single.header.inline_payload == payload.payload
    single.header.ClearField("inline_payload")
    assert single == header


def test_encoded_small_batch_changed_afterwards_is_sent_as_it_was() -> None:
    array = np.zeros(10)
    encoded = EncodedBatch(array, inline_small=True)
    array[:] = 1
    assert decode(encoded.frames()).sum() == 0


def test_result_of_a_single_frame_is_writable_and_owns_its_memory() -> None:
    frames = inline_frames([np.zeros(10), torch.zeros(10)])
    first, second = decode(frames), decode(frames)
    for array in first:
        array += 1
    assert all(array.sum() == 0 for array in second)


def test_encoded_batch_changed_afterwards_is_sent_as_it_was() -> None:
    array = np.zeros(10)
    encoded = EncodedBatch(array)
    array[:] = 1
    assert encoded.nbytes == 80
    assert decode(encoded.frames()).sum() == 0


def test_encoded_batch_lazy_frames_are_the_same_and_copied_when_taken() -> None:
    batch = {"image": np.arange(1000), "label": torch.arange(7), "empty": np.empty(0), "names": ["a", "bc"] * 40}
    for limits in (Limits(), Limits(frame_bytes=100)):
        frames = list(EncodedBatch(batch, limits=limits, lazy=True).frames())
        assert frames == list(EncodedBatch(batch, limits=limits).frames())
    array = np.zeros(1000, np.uint8)
    taken = EncodedBatch(array, limits=Limits(frame_bytes=500), lazy=True).frames()
    before = [next(taken), next(taken)]
    array[:] = 1
    with pytest.raises(ProtocolError, match="damaged"):
        decode([*before, *taken])


def test_encode_batch_too_large_fails_before_the_first_frame() -> None:
    with pytest.raises(UnsupportedBatchError, match="101 bytes, but only 100 are left"):
        encode_batch(np.zeros(101, np.uint8), limits=Limits(max_batch_bytes=100))
    with pytest.raises(UnsupportedBatchError, match="Use tensors"):
        encode_batch([["x" * 200] * 7] * 1000)


def test_result_arrays_are_writable_and_own_their_memory() -> None:
    frames = list(encode_batch([np.zeros(10), torch.zeros(10), np.zeros((3, 4))[:, ::2]]))
    first, second = decode(frames), decode(frames)
    for array in first:
        array += 1
    assert all(array.sum() == 0 for array in second)


def test_decoder_allocate_gets_one_call_per_leaf_and_its_memory_is_used() -> None:
    buffers: list[bytearray] = []

    def allocate(nbytes: int) -> memoryview:
        buffers.append(bytearray(nbytes + 100))  # may be larger
        return memoryview(buffers[-1])

    decoder = BatchDecoder(Limits(), allocate=allocate)
    frames = list(encode_batch([np.zeros(2, np.uint8), np.zeros(0), np.ones(3, np.uint8)]))
    decoder.feed(frames[0])
    assert not buffers
    decoder.feed(frames[1])
    batch = decoder.result()
    assert [len(buffer) for buffer in buffers] == [102, 103]
    batch[2][1] = 7
    assert bytes(buffers[1][:3]) == b"\1\7\1"


def test_decoder_header_facts_are_known() -> None:
    decoder = BatchDecoder()
    header, _ = encode_batch(np.zeros(4), num_queued=5, compute_time_s=1.5)
    decoder.feed(header)
    assert (decoder.num_queued, decoder.compute_time_s, decoder.nbytes, decoder.done) == (5, 1.5, 32, False)
    with pytest.raises(ProtocolError, match="32 of 32 bytes are missing"):
        decoder.result()


def test_failure_frame_raises_dataset_error_with_the_record() -> None:
    failure = SampleFailure(
        dataset="photos", host="algo-1/0", stage="sample", sample_index="17", exception="ValueError: no",
        traceback="Traceback\n  line",
    )  # fmt: skip
    with pytest.raises(DatasetError) as caught:
        BatchDecoder().feed(encode_failure(failure))
    assert caught.value.record == failure


def test_failure_frame_of_long_text_is_bounded() -> None:
    names = ("dataset", "host", "sample_index", "exception", "traceback")
    failure = SampleFailure(stage="sample", **dict.fromkeys(names, "\N{SNOWMAN}\udc80" * 10**5))
    frame = encode_failure(failure)
    assert len(frame) < Limits().max_failure_bytes
    with pytest.raises(DatasetError, match=r"\.\.\. cut \.\.\."):
        BatchDecoder().feed(frame)


def test_failure_frame_with_control_characters_cannot_forge_a_log_line() -> None:
    failure = pb.Failure(stage="sample", exception="a\nfake line\x1b[31m", traceback="one\ntwo\x1b\r")
    with pytest.raises(DatasetError) as caught:
        BatchDecoder().feed(pb.Frame(failure=failure).SerializeToString())
    assert caught.value.record.exception == r"a\nfake line\x1b[31m"
    assert caught.value.record.traceback == "one\ntwo\\x1b\\r"
