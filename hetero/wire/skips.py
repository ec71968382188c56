"""Converts the skipped samples of a batch to bytes in the header of its answer, and back.

This module is separate from `hetero.wire.framing` because it checks untrusted bytes against separate bounds.
"""

from __future__ import annotations

from hetero.batches.failures import MAX_EXCEPTION_CHARS, MAX_INDEX_CHARS
from hetero.batches.skips import MAX_LISTED, Skip, Skips
from hetero.errors import ProtocolError
from hetero.wire.limits import MAX_SKIPS_BYTES
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb

__all__ = ["decode_skips", "encode_skips"]


def encode_skips(skips: Skips | None) -> bytes:
    """Return a serialised ``Skips`` without epoch and host. Return empty bytes for None."""
    if skips is None:
        return b""
    listed = [pb.Skip(index=skip.index, exception=skip.exception) for skip in skips.listed]
    return pb.Skips(num_skipped=skips.num_skipped, listed=listed).SerializeToString()


def decode_skips(data: bytes, *, max_skipped: int) -> Skips | None:
    """Return the skipped samples, without epoch and host. Return None for empty bytes.

    Args:
        data: The bytes in the header.
        max_skipped: Largest number of skipped samples. 0 if the request does not allow skips.

    Raises:
        ProtocolError: If `encode_skips` could not have made these bytes for a request with this ``max_skipped``.
    """
    if not data:
        return None
    if len(data) > MAX_SKIPS_BYTES:
        raise ProtocolError(
            f"the skipped samples of a batch take {len(data)} bytes, at most {MAX_SKIPS_BYTES} are allowed"
        )
    message = parse(pb.Skips, data)
    if not 1 <= message.num_skipped <= max_skipped:
        raise ProtocolError(f"{message.num_skipped} samples of a batch were skipped, expected at most {max_skipped}")
    expected = min(message.num_skipped, MAX_LISTED)
    if len(message.listed) != expected:
        raise ProtocolError(f"{len(message.listed)} skipped samples are listed, expected {expected}")
    for skip in message.listed:
        for text, limit in ((skip.index, MAX_INDEX_CHARS), (skip.exception, MAX_EXCEPTION_CHARS)):
            if len(text) > limit or not text.isprintable():
                raise ProtocolError("a skipped sample is described by text that is too long or not printable")
    return Skips(
        num_skipped=message.num_skipped,
        listed=tuple([Skip(index=skip.index, exception=skip.exception) for skip in message.listed]),
    )
