"""gRPC as the peers use it that send a batch as one message or in frames: a stream without end, no limit on sizes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import grpc  # isort: skip

_SERVICE, _METHOD = "peers", "Read"
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@functools.cache
def batch_class() -> Any:
    """Return the class of ``message Batch { repeated bytes leaves = 1; }``: the leaves of a batch."""
    file = descriptor_pb2.FileDescriptorProto(name="peers.proto", package="peers", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    file.message_type.add(name="Batch").field.add(
        name="leaves", number=1, type=field.TYPE_BYTES, label=field.LABEL_REPEATED
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("peers.Batch"))


@contextlib.contextmanager
def serve(messages: Callable[[], Iterator[Any]], serialize: Callable[[Any], bytes] | None) -> Iterator[dict[str, int]]:
    """Stream ``messages()`` to every client. Yield the ``port``."""
    handler = grpc.unary_stream_rpc_method_handler(lambda _request, _context: messages(), None, serialize)
    handlers = [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})]
    server = grpc.server(ThreadPoolExecutor(2), handlers=handlers, options=_UNLIMITED)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield {"port": port}
    server.stop(0)


@contextlib.contextmanager
def read(port: int, parse: Callable[[bytes], Any] | None, *options: tuple[str, Any]) -> Iterator[Iterator[Any]]:
    """Give what `serve` streams there."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[*_UNLIMITED, *options]) as channel:
        yield channel.unary_stream(f"/{_SERVICE}/{_METHOD}", None, parse)(b"", wait_for_ready=True)
