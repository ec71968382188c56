"""Samples that take a while, and links to endpoints in this process that answer as a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest, Helper
from hetero.endpoint.link import Call
from hetero.spec import DatasetSpec
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.requests import from_proto, parse_request, serialize

HELPERS = tuple(
    Helper(endpoint_id=f"algo-{number}/0", host=f"algo-{number}", address="127.0.0.1:9", incarnation="a")
    for number in (2, 3)
)


class Slow:
    """Samples that take a while. ``computed`` lists the indices of those that were computed here."""

    def __init__(self, sample_s: float = 0.02, *, fails_at: int = -1) -> None:
        self.sample_s = sample_s
        self.fails_at = fails_at
        self.computed: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.computed.append(index)
        time.sleep(self.sample_s)
        return self.sample(index)

    def sample(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError("a broken sample")
        return {"value": np.full(3, index), "text": str(index)}


class Link:
    """A link to a helper. ``answer`` returns the samples for some indices, or raises."""

    def __init__(self, answer: Callable[[list[int]], Any]) -> None:
        self.answer = answer
        self.requests: list[BatchRequest] = []
        self.cancelled = threading.Event()
        self.is_closed = False
        self.has_ended = False

    @staticmethod
    def message(indices: list[int]) -> bytes:
        """Return a request for samples."""
        work = IndexedWork(np.array(indices))
        return serialize(BatchRequest(spec=DatasetSpec("slow"), work=work, seed=1, epoch=0, position=0, is_part=True))

    def attend(self) -> None:
        if self.has_ended:
            raise CallFailedError(Fault.UNREACHABLE, "the endpoint ended")

    def fetch(
        self, message: bytes, decoder: BatchDecoder, *, timeout_s: float, on_call: Callable[[Call], None]
    ) -> None:
        on_call(self)  # type: ignore[arg-type]
        request = from_proto(parse_request(message))
        self.requests.append(request)
        encoded = EncodedBatch(self.answer(list(request.work.labels)), request=message, is_part=True)  # type: ignore[arg-type]
        decoder.take_message(encoded.message)
        payload = b"".join(encoded.payload)
        while not decoder.done:
            room = decoder.room()
            room[:], payload = payload[: len(room)], payload[len(room) :]
            decoder.filled(len(room))

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.is_closed = True
