"""The protobuf message of those peers that send a batch as one: its leaves as bytes."""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


@functools.cache
def batch_class() -> Any:
    """Return the class of ``message Batch { repeated bytes leaves = 1; }``."""
    file = descriptor_pb2.FileDescriptorProto(name="peers.proto", package="peers", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    file.message_type.add(name="Batch").field.add(
        name="leaves", number=1, type=field.TYPE_BYTES, label=field.LABEL_REPEATED
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("peers.Batch"))
