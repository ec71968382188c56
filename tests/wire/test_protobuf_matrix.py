"""The committed messages under protobuf 4 to 7, each in a separate environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROUND_TRIP = """
from collections.abc import Mapping
from dataclasses import dataclass
import google.protobuf
import numpy as np
from google.protobuf.internal import api_implementation
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.spec import DatasetSpec
from hetero.errors import ProtocolError
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.proto import control_pb2, data_pb2
from hetero.wire.records import fields_of, record_of
from hetero.wire.requests import from_proto, to_proto

batch = {"a": [np.arange(300000), "x", 1, None], 3: (b"y", -0.0), "names": ["a", ""] * 9, "empty": [[], {}]}
encoded = EncodedBatch(batch)
assert data_pb2.Answer.FromString(encoded.message).SerializeToString() == encoded.message
decoder = BatchDecoder()
decoder.take_message(encoded.message)
payload = memoryview(b"".join(encoded.payload))
while not decoder.done:
    room = decoder.room()
    room[:] = payload[: len(room)]
    payload = payload[len(room) :]
    decoder.filled(len(room))
result = decoder.result()
assert repr(result) == repr(batch)
assert (result["a"][0] == batch["a"][0]).all()

request = BatchRequest(spec=DatasetSpec("a"), work=IndexedWork((1, "b", (2, 3))), seed=-1, epoch=2, position=3)
sent = data_pb2.FetchRequest.FromString(to_proto(request).SerializeToString())
assert from_proto(sent).work.indices == request.work.indices

@dataclass
class StepTimes:
    loader: str
    compute_s: tuple[float, ...]

@dataclass
class Report:
    steps_started: Mapping[str, int]
    summaries_json: tuple[bytes, ...]
    step_times: StepTimes | None

@dataclass
class Status:
    options: Mapping[str, str]
    ranks: tuple[Report, ...]

reports = Report({"a": 1}, (b"x",), StepTimes("a", (1.5, 2.5))), Report({}, (), None)
status = Status({"a": "b"}, reports)
message = control_pb2.HostStatus.FromString(control_pb2.HostStatus(**fields_of(status)).SerializeToString())
assert record_of(Status, message) == status

def field(tag, data):
    size, length = len(data), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return tag + length + bytes([size]) + data

def nested(depth):
    node = data_pb2.Node(none=True).SerializeToString()
    for _ in range(depth):
        node = field(b"\\x12", field(b"\\x0a", node))
    return field(b"\\x0a", node)

for bad in (nested(9), nested(20), nested(5000), b"\\x0a\\x03\\x52\\x01\\xff", b"\\x0a\\xff"):
    header = data_pb2.BatchHeader(protocol=1, structure=bad)
    try:
        BatchDecoder().take_message(data_pb2.Answer(header=header).SerializeToString())
    except ProtocolError:
        continue
    raise SystemExit(f"accepted {bad[:40]!r}")
print(google.protobuf.__version__, api_implementation.Type())
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("implementation", ["upb", "python"])
@pytest.mark.parametrize(
    ("requirement", "version"),
    # The floor, then the last of each.
    [
        ("protobuf==4.25.0", "4.25.0"),
        ("protobuf>=4.25,<5", "4.25."),
        ("protobuf>=5,<6", "5."),
        ("protobuf>=6,<7", "6."),
        ("protobuf>=7,<8", "7."),
    ],
)
def test_messages_round_trip_under_protobuf(
    requirement: str, version: str, implementation: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.getbasetemp() / f"protobuf-{requirement.translate(str.maketrans('<>=,', '----'))}"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, requirement, "numpy", "xxhash"], check=True)
    done = subprocess.run(
        [str(python), "-W", "error", "-c", ROUND_TRIP],
        cwd=ROOT,
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found, used = done.stdout.split()
    assert found.startswith(version)
    assert used == implementation
