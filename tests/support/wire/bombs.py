"""Small answers that claim to be large. As a program, this decodes each in a process that could not pay for it.

The program writes one JSON object: name -> what the decoder said, how far resident memory rose, how long it took.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hetero.errors import ProtocolError
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import BLOCK_BYTES, PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb

HUGE = 2**31
COMPRESSIONS = (None, "lz4", "zstd")


def nested_structure(depth: int) -> bytes:
    """Return a structure of lists in lists, as bytes: no protobuf builds what it refuses to read."""

    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    node = pb.Node(none=True).SerializeToString()
    for _ in range(depth):
        node = field(2, field(1, node))
    return field(1, node)


def header(structure: bytes, payload_bytes: int = 0, **fields: Any) -> bytes:
    """Return the message of an answer with a right checksum and no payload."""
    made = pb.BatchHeader(
        protocol=PROTOCOL,
        structure=structure,
        payload_bytes=payload_bytes,
        checksum=xxhash.xxh3_64_intdigest(structure),
        **fields,
    )
    return pb.Answer(header=made).SerializeToString()


def leaf(shape: list[int], nbytes: int, dtype: Any = pb.F32, container: Any = pb.TENSOR) -> bytes:
    made = pb.Leaf(dtype=dtype, container=container, shape=shape, nbytes=nbytes)
    return pb.Structure(root=pb.Node(leaf=0), leaves=[made]).SerializeToString()


def leaves(number: int, nbytes: int) -> bytes:
    root = pb.Node(list=pb.Children(items=[pb.Node(leaf=index) for index in range(number)]))
    made = [pb.Leaf(dtype=pb.U8, container=pb.ARRAY, shape=[nbytes], nbytes=nbytes)] * number
    return pb.Structure(root=root, leaves=made).SerializeToString()


def bombs() -> dict[str, bytes]:
    """Return messages by their fault."""
    return {
        "4 EiB": header(leaf([HUGE, HUGE], 4)),
        "4 EiB, sizes agree": header(leaf([HUGE, HUGE], 2**64 - 1), 2**64 - 1),
        "4 TiB": header(leaf([2**20, 2**20], 2**42), 2**42),
        "2 GiB": header(leaf([2**29], 2**31), 2**31),
        "product overflows to 0": header(leaf([2**32, 2**32], 0)),
        "zero in the shape": header(leaf([0, 2**63], 0)),
        "2^64-1 eight times": header(leaf([2**64 - 1] * 8, 0)),
        "10^5 dimensions": header(leaf([1] * 10**5, 4), 4),
        "1024 leaves of 1 GiB": header(leaves(1024, 2**30), 2**40),
        "10^5 leaves": header(b"\x12\x00" * 10**5),
        "10^4 levels": header(nested_structure(10**4)),
        "list of 2^31 texts": header(leaf([HUGE], 0, pb.UTF8, pb.LIST)),
        "list of 2^31 numbers": header(leaf([HUGE], 2**34, pb.I64, pb.LIST), 2**34),
        "blocks of 4 GiB": header(
            leaf([BLOCK_BYTES // 4], BLOCK_BYTES), BLOCK_BYTES, compression=pb.ZSTD, block_bytes=[2**32 - 1]
        ),
        "10^6 blocks": header(leaf([1], 4), 4, compression=pb.LZ4, block_bytes=[1] * 10**6),
        "a message of 64 MiB": b"\x0a" + bytes(2**26),
    }


def resident_kib(key: str) -> int:
    """Return ``VmRSS``, or ``VmHWM``: the most since the last write to ``clear_refs``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def decode(message: bytes, compression: str | None) -> str:
    """Return why the message is refused."""
    try:
        BatchDecoder(Limits(), compression=compression).take_message(message)
    except ProtocolError as error:
        return str(error)
    return ""


def main() -> None:
    """Decode them all."""
    given = bombs()
    for compression in COMPRESSIONS:  # imports, and what the parser keeps
        decode(EncodedBatch(np.zeros(4)).message, compression)
        decode(header(leaf([2], 8), 8), compression)
        decode(header(b"\x12\x00" * 2000), compression)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**27, mapped + 2**27))
    found = {}
    for name, message in given.items():
        times_s = []
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before_kib = resident_kib("VmRSS")
        for compression in COMPRESSIONS:
            begin_s = time.perf_counter()
            refused = decode(message, compression)
            times_s.append(time.perf_counter() - begin_s)
        found[name] = {
            "refused": refused,
            "peak_kib": resident_kib("VmHWM") - before_kib,
            "grown_kib": resident_kib("VmRSS") - before_kib,
            "time_s": min(times_s),
            "message_bytes": len(message),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
