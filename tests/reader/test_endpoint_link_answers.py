"""Answers over gRPC that the protocol does not have, read by each implementation of protobuf."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.internal import api_implementation
from hetero.control.members.directory import EndpointRecord
from hetero.wire.faults import CallFailedError
from hetero.endpoint.link import EndpointLink
from hetero.wire import channels
from hetero.wire.limits import Limits
from hetero.wire.proto import data_pb2 as pb

import grpc

answer = b""


def attend(_request, _context):
    if answer is not None:
        yield answer


handlers = {
    "Prepare": grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer),
    "Attend": grpc.unary_stream_rpc_method_handler(attend),
}
server = grpc.server(ThreadPoolExecutor(4), [grpc.method_handlers_generic_handler("hetero.v1.Data", handlers)])
address = f"127.0.0.1:{channels.bind(server, '127.0.0.1')}"
server.start()
print(api_implementation.Type())
for answer in (b"\\xff", b"\\x0a\\x03\\x0a\\x01\\xff", b"\\x7b" * 5000, b"", None):
    record = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address=address, incarnation="a")
    link = EndpointLink(record, (), Limits())
    for call in (lambda: link.call("Prepare", pb.PrepareRequest(), pb.PrepareReply, 10.0), link.attend):
        try:
            call()
        except CallFailedError as error:
            print(error.fault.name)
        else:
            print("taken")
    link.close()
server.stop(0).wait()
"""


@pytest.mark.parametrize("implementation", ["python", "upb"])
def test_answer_that_is_no_message_is_the_endpoints_failure_under_every_protobuf(implementation: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    used, *faults = done.stdout.split()
    assert used == implementation
    # No bytes are an empty message, which names no port for batches. At the end the server itself fails.
    assert faults == ["BROKEN"] * 6 + ["taken", "BROKEN"] + ["BROKEN"] * 2
