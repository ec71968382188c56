"""Skipped samples in the header of an answer: round trip, bounds, checksum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.skips import MAX_LISTED, Skip, Skips
from hetero.errors import ProtocolError
from hetero.wire.compression import ChecksumError
from hetero.wire.framing import BatchDecoder, EncodedBatch, decode_skips, encode_skips
from hetero.wire.limits import MAX_SKIPS_BYTES, Limits
from hetero.wire.proto import data_pb2 as pb

PRINTABLE = st.characters(exclude_categories=("C", "Z")) | st.just(" ")
ONE = Skips(num_skipped=1, listed=(Skip(index="17", exception="ValueError: bad"),))


def skips_of(texts: list[tuple[str, str]], more: int = 0) -> Skips:
    listed = tuple(Skip(index=index, exception=exception) for index, exception in texts)
    return Skips(num_skipped=len(listed) + more, listed=listed)


def answer(sent: Skips | None, **changes: Any) -> pb.Answer:
    encoded = EncodedBatch({"x": np.arange(4)}, skips=sent)
    message = pb.Answer.FromString(encoded.message)
    for name, value in changes.items():
        setattr(message.header, name, value)
    return message


def decode(message: pb.Answer, max_skipped: int = 3) -> BatchDecoder:
    decoder = BatchDecoder(max_skipped=max_skipped)
    decoder.take_message(message.SerializeToString())
    room = decoder.room()
    room[:] = np.arange(4).tobytes()
    decoder.filled(len(room))
    return decoder


@given(st.lists(st.tuples(st.text(PRINTABLE, max_size=64), st.text(PRINTABLE, max_size=160)), min_size=1, max_size=5))
def test_skips_round_trip_is_the_same(texts: list[tuple[str, str]]) -> None:
    sent = skips_of(texts)
    assert decode_skips(encode_skips(sent), max_skipped=5) == sent


def test_skips_largest_list_is_within_the_bounds() -> None:
    widest = "\N{MUSICAL SYMBOL G CLEF}"
    sent = skips_of([(widest * 160, widest * 160)] * MAX_LISTED, more=60_000)
    data = encode_skips(sent)
    assert decode_skips(data, max_skipped=65_535) == sent
    assert len(data) <= MAX_SKIPS_BYTES
    limits = Limits()
    assert MAX_SKIPS_BYTES + limits.max_header_bytes + 4 * (1024 + limits.max_leaves) < limits.max_answer_bytes


def test_answer_without_skips_is_what_it_was() -> None:
    assert not answer(None).header.skips
    assert decode(answer(None), max_skipped=0).skips is None
    assert decode_skips(b"", max_skipped=0) is None


def test_answer_brings_skips_without_epoch_and_host() -> None:
    decoder = decode(answer(ONE))
    assert decoder.skips == ONE
    assert decoder.result()["x"].tolist() == [0, 1, 2, 3]


def test_answer_with_other_skips_than_were_sent_is_damaged() -> None:
    for changed in (encode_skips(None), encode_skips(skips_of([("18", "ValueError: bad")]))):
        with pytest.raises(ChecksumError):
            decode(answer(ONE, skips=changed))


@pytest.mark.attack("A7")
@pytest.mark.parametrize(
    ("data", "max_skipped", "text"),
    [
        (encode_skips(ONE), 0, "1 samples of a batch were skipped, expected at most 0"),
        (encode_skips(skips_of([("1", "a"), ("2", "b")])), 1, "2 samples of a batch were skipped, expected at most 1"),
        (pb.Skips(num_skipped=2**32 - 1).SerializeToString(), 3, "4294967295 samples"),
        (pb.Skips(listed=[pb.Skip()]).SerializeToString(), 3, "0 samples of a batch were skipped"),
        (
            pb.Skips(num_skipped=2, listed=[pb.Skip()]).SerializeToString(),
            3,
            "1 skipped samples are listed, expected 2",
        ),
        (pb.Skips(num_skipped=500, listed=[pb.Skip()] * 33).SerializeToString(), 999, "33 .* listed, expected 32"),
        (encode_skips(skips_of([("x" * 161, "")])), 3, "too long or not printable"),
        (encode_skips(skips_of([("", "x" * 161)])), 3, "too long or not printable"),
        (encode_skips(skips_of([("a\nhetero_metric x=0", "")])), 3, "too long or not printable"),
        (encode_skips(skips_of([("", "\x1b[31m")])), 3, "too long or not printable"),
        (b"\x80\x04\x95 a pickle", 3, "not a valid Skips message"),
        (bytes(MAX_SKIPS_BYTES + 1), 3, f"take {MAX_SKIPS_BYTES + 1} bytes"),
    ],
)
def test_malformed_skips_are_a_protocol_error(data: bytes, max_skipped: int, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_skips(data, max_skipped=max_skipped)
    with pytest.raises(ProtocolError, match=text):
        decode(answer(None, skips=data), max_skipped=max_skipped)


@given(st.binary(max_size=200))
def test_any_bytes_are_skips_or_a_protocol_error(data: bytes) -> None:
    try:
        found = decode_skips(data, max_skipped=3)
    except ProtocolError:
        return
    assert found is None or 1 <= found.num_skipped <= 3
