"""Compressed batches: bit for bit the same, never beyond their declared sizes, whatever arrives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.batches.purity.comparison import compare
from hetero.errors import ConfigError, ProtocolError
from hetero.wire import compression, framing
from hetero.wire.compression import COMPRESSIONS, ChecksumError, compress_leaf, load_codec
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import BLOCK_BYTES, PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from tests.support.wire.damage import mutate

lz4_block = pytest.importorskip("lz4.block")
zstandard = pytest.importorskip("zstandard")

Answer = tuple[bytes, bytes]
"""Message and payload."""

LIMITS = Limits(max_batch_bytes=2 * BLOCK_BYTES)
CODES = {"lz4": pb.LZ4, "zstd": pb.ZSTD}
SIZES = (0, 1, 1023, 1024, 1025, 70_000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 1025)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def ramp(nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) // 100).astype(np.uint8)


def encode(batch: Any, name: str, limits: Limits | None = None) -> Answer:
    encoded = EncodedBatch(batch, copy=False, **({} if limits is None else {"limits": limits}))
    encoded.compress(name)
    assert all(len(piece) for piece in encoded.payload)
    return encoded.message, b"".join(encoded.payload)


def decode(answer: Answer, asked: str | None, limits: Limits | None = None, *, step: int = 2**30) -> Any:
    """Decode while checking that no more than allowed is allocated. More payload than needed is left alone."""
    limits = limits or Limits()
    allocated = 0

    def allocate(nbytes: int) -> memoryview:
        nonlocal allocated
        allocated += nbytes
        assert 0 < nbytes <= allocated <= limits.max_batch_bytes
        return memoryview(bytearray(nbytes))

    message, payload = answer
    decoder = BatchDecoder(limits, allocate=allocate, compression=asked)
    decoder.take_message(message)
    rest = memoryview(payload)
    with mock.patch.object(framing, "_allocate", allocate):  # for leaves other than tensors
        while len(rest) and not decoder.done:
            room = decoder.room()[: min(step, len(rest))]
            assert 0 < len(room) <= 4 * BLOCK_BYTES
            room[:] = rest[: len(room)]
            rest = rest[len(room) :]
            decoder.filled(len(room))
    batch = decoder.result()
    assert decoder.saved_bytes == decoder.nbytes - (len(payload) - len(rest))
    return batch


LEAVES = st.tuples(st.sampled_from(("zeros", "noise", "ramp", "both")), st.sampled_from(SIZES))


def leaf(kind: str, nbytes: int) -> np.ndarray:
    made = {"zeros": lambda size: np.zeros(size, np.uint8), "noise": noise, "ramp": ramp}
    if kind == "both":  # blocks that shrink beside blocks that do not
        return np.concatenate([noise(nbytes // 2), ramp(nbytes - nbytes // 2)])
    return made[kind](nbytes)


@pytest.mark.parametrize("name", COMPRESSIONS)
@settings(max_examples=settings.default.max_examples // 2)
@given(leaves=st.lists(LEAVES, max_size=5), step=st.sampled_from((1013, 70_001, BLOCK_BYTES, 2**30)))
def test_round_trip_blocks_of_all_kinds_are_the_same(name: str, leaves: list[tuple[str, int]], step: int) -> None:
    batch = [leaf(*kind) for kind in leaves]
    assert compare(batch, decode(encode(batch, name), name, step=step)) is None


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_answer_protobuf_reader_understands_it(name: str) -> None:
    batch = {"image": ramp(BLOCK_BYTES + 5000), "noise": noise(5000), "label": 3}
    plain = EncodedBatch(batch)
    message, payload = encode(batch, name)
    header, before = pb.Answer.FromString(message).header, pb.Answer.FromString(plain.message).header
    assert header.compression == CODES[name]
    first, second, third = header.block_bytes
    assert 0 < first < BLOCK_BYTES
    assert 0 < second < 5000
    assert third == 0
    assert len(payload) == first + second + 5000 < 30_000
    decompress: Callable[[bytes, int], bytes] = {
        "lz4": lambda data, size: lz4_block.decompress(data, uncompressed_size=size),
        "zstd": lambda data, _: zstandard.ZstdDecompressor().decompress(data),
    }[name]
    image = decompress(payload[:first], BLOCK_BYTES) + decompress(payload[first:-5000], 5000)
    assert image == batch["image"].tobytes()
    header.ClearField("compression")
    header.ClearField("block_bytes")
    assert header == before  # sizes and checksum are those from before


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_leaf_that_does_not_shrink_travels_as_it_is_from_its_own_memory(name: str) -> None:
    data = noise(BLOCK_BYTES + 5000)
    pieces, sizes = compress_leaf(data.data, load_codec(name))
    assert sizes == [0, 0]
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), data) for piece in pieces)
    decoder = BatchDecoder(compression=name)
    decoder.take_message(encode(data, name)[0])
    assert (decoder.saved_bytes, decoder.lacks_compression) == (0, False)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_decoder_without_compression_of_what_was_asked_notes_it(name: str) -> None:
    encoded = EncodedBatch(ramp(5000))
    decoder = BatchDecoder(compression=name)
    decoder.take_message(encoded.message)
    assert decoder.lacks_compression
    assert compare(ramp(5000), decode((encoded.message, b"".join(encoded.payload)), name)) is None


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_codec_without_its_package_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_module", lambda _: None)
    assert not compression.is_installed(name)
    encoded = EncodedBatch(ramp(5000))
    before = encoded.message, list(encoded.payload)
    for attempt in (lambda: encoded.compress(name), lambda: BatchDecoder(compression=name)):
        with pytest.raises(
            ConfigError, match=rf"needs the package {compression.package_of(name)}.*\n.*pip install lz4 zstandard"
        ):
            attempt()
    assert (encoded.message, list(encoded.payload)) == before


def test_codec_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'gzip', expected None or one of lz4, zstd"):
        compression.compression_to_proto("gzip")


# Hostile answers


def changed(name: str, change: Callable[[pb.BatchHeader], object], batch: Any = None) -> Answer:
    """Return a compressed batch with another header."""
    message, payload = encode(ramp(5000) if batch is None else batch, name)
    answer = pb.Answer.FromString(message)
    change(answer.header)
    return answer.SerializeToString(), payload


def of_block(name: str, data: bytes, nbytes: int, declared: int | None = None) -> Answer:
    """Return a batch of one leaf of so many bytes, which is one block that claims to be compressed."""
    structure = pb.Structure(
        root=pb.Node(leaf=0), leaves=[pb.Leaf(dtype=pb.U8, container=pb.ARRAY, shape=[nbytes], nbytes=nbytes)]
    ).SerializeToString()
    header = pb.BatchHeader(
        protocol=PROTOCOL,
        structure=structure,
        payload_bytes=nbytes,
        checksum=xxhash.xxh3_64_intdigest(structure + bytes(min(nbytes, BLOCK_BYTES))),
        compression=CODES[name],  # type: ignore[arg-type]
        block_bytes=[len(data) if declared is None else declared],
    )
    return pb.Answer(header=header).SerializeToString(), data


def compressed(name: str, data: bytes) -> bytes:
    if name == "lz4":
        return bytes(lz4_block.compress(data, store_size=False))
    return bytes(zstandard.ZstdCompressor().compress(data))


HEADERS: dict[str, tuple[Callable[[pb.BatchHeader], object], str]] = {
    "unknown codec": (lambda header: setattr(header, "compression", 9), "unknown compression 9"),
    "blocks of no codec": (lambda header: header.ClearField("compression"), "ended early"),
    "no blocks": (lambda header: header.ClearField("block_bytes"), "has 0 compressed blocks, its leaves make 1"),
    "one block too many": (lambda header: header.block_bytes.append(0), "has 2 compressed blocks"),
    "10^5 blocks": (lambda header: header.block_bytes.extend([1] * 10**5), "100001 compressed blocks"),
    "block of the length that it gives": (
        lambda header: header.block_bytes.__setitem__(0, 5000),
        "expected less than its 5000",
    ),
    "block longer than what it gives": (
        lambda header: header.block_bytes.__setitem__(0, 2**32 - 1),
        "expected less than",
    ),
    "block longer than it is": (lambda header: header.block_bytes.__setitem__(0, 4999), "ended early: 5000 of 5000"),
    "block shorter than it is": (lambda header: header.block_bytes.__setitem__(0, 9), "damaged: its 9 bytes do not"),
    "block of one byte": (lambda header: header.block_bytes.__setitem__(0, 1), "damaged: its 1 bytes do not"),
    "block that is not compressed": (lambda header: header.block_bytes.__setitem__(0, 0), "ended early"),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("case", HEADERS)
def test_decoder_wrong_sizes_are_a_protocol_error(name: str, case: str) -> None:
    change, message = HEADERS[case]
    with pytest.raises(ProtocolError, match=message):
        decode(changed(name, change), name, LIMITS)


@pytest.mark.parametrize(("sent", "asked"), [("lz4", "zstd"), ("zstd", "lz4"), ("lz4", None), ("zstd", None)])
def test_decoder_codec_that_was_not_asked_for_is_refused(sent: str, asked: str | None) -> None:
    with pytest.raises(ProtocolError, match=f"compressed with {sent}, but {asked} was requested"):
        decode(encode(ramp(5000), sent), asked)


@pytest.mark.attack("A6")
@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("nbytes", [100, 5000, BLOCK_BYTES])
def test_decoder_bomb_stops_at_the_declared_size(name: str, nbytes: int) -> None:
    """256 MiB of zeros, in a block that is to give less."""
    bomb = compressed(name, bytes(2**28))[: nbytes - 1]
    with pytest.raises(ChecksumError, match=f"do not give {nbytes}"):
        decode(of_block(name, bomb, nbytes), name, LIMITS)


@pytest.mark.attack("A6")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_codec_bomb_writes_no_byte_beyond_its_room(name: str) -> None:
    memory = np.full(6000, 7, np.uint8)
    with pytest.raises(ChecksumError):
        load_codec(name).decompress(memoryview(compressed(name, bytes(5001))), memory.data[:5000])
    assert (memory[5000:] == 7).all()


@pytest.mark.attack("A6")
def test_zstd_frame_that_wants_a_large_window_is_refused() -> None:
    """A frame may ask for 128 MiB to be undone in, however little it gives."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = writer.compress(bytes(5000)) + writer.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 2**27
    with pytest.raises(ChecksumError):
        load_codec("zstd").decompress(memoryview(frame), memoryview(bytearray(5000)))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_decoder_block_that_gives_less_is_a_checksum_error(name: str) -> None:
    with pytest.raises(ChecksumError, match="do not give 5000"):
        decode(of_block(name, compressed(name, bytes(4999)), 5000), name)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_decoder_other_content_of_the_right_size_is_a_checksum_error(name: str) -> None:
    with pytest.raises(ChecksumError, match="arrived damaged"):
        decode(of_block(name, compressed(name, b"\1" * 5000), 5000), name)


@pytest.mark.attack("A6")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_decoder_header_of_compressed_gigabyte_allocates_nothing(name: str) -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        decode(of_block(name, b"\0" * 100, 2**31), name)


@pytest.mark.attack("A7")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_decoder_mutated_compressed_answers_raise_nothing_but_protocol_errors(name: str) -> None:
    rng = random.Random(17)
    batch = {"image": ramp(20_000), "zeros": np.zeros(3000), "noise": noise(2000), "large": ramp(BLOCK_BYTES + 2000)}
    message, payload = encode(batch, name)
    outcomes: Counter[str] = Counter()
    for _ in range(1_500):
        hostile = [message, payload]
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(4) > 0
            hostile[at] = mutate(hostile[at], rng)
        try:
            found = decode((hostile[0], hostile[1]), name, LIMITS)
            assert compare(batch, found) is None  # in bytes that neither checksum nor codec looks at
            outcomes["batch"] += 1
        except ProtocolError as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["ChecksumError"] > 700
    assert outcomes["ProtocolError"] > 100
    assert outcomes["batch"] < 200


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_decoder_noise_in_compressed_blocks_raises_nothing_but_checksum_errors(name: str) -> None:
    rng = random.Random(23)
    start = compressed(name, bytes(range(256)) * 20)
    for _ in range(5_000):
        data = start[: rng.randrange(40)] + rng.randbytes(rng.randrange(1, 200))
        with pytest.raises(ChecksumError):
            decode(of_block(name, data, 5120), name)
