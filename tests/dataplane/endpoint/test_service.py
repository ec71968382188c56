"""The service in this process, without connections."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from services import make_service

from hetero.batches.build import BuiltDataset
from hetero.endpoint.compute import Compute
from hetero.endpoint.replies import Answer, Later, Reply
from hetero.endpoint.service import DataServicer, _Served
from hetero.errors import DatasetError
from hetero.wire import requests
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import Limits


def answer_of(service: DataServicer, request: bytes, has_left: Callable[[], bool] = lambda: False) -> Answer:
    """Return the answer to a request, from whichever thread it comes."""
    later: queue.Queue[Answer] = queue.Queue()
    reply = SimpleNamespace(has_left=has_left, send=later.put, if_given_up=lambda cancel: None)
    answer = service._answer(request, cast("Reply", reply))
    return later.get(timeout=30.0) if isinstance(answer, Later) else answer


def test_batch_that_is_there_is_sent_without_asking_for_whom(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is a system call, and the handler thread sends next: then it finds out."""
    monkeypatch.setattr("hetero.endpoint.compute._ASK_INTERVAL_S", 0.0)
    monkeypatch.setattr("hetero.endpoint.service.POLL_S", 30.0)
    asked_in: list[threading.Thread] = []

    def has_left() -> bool:
        asked_in.append(threading.current_thread())
        return False

    (wanted,) = tools.requests(tools.spec(), num_batches=1)
    with contextlib.closing(Compute()) as compute:
        service = make_service(compute)
        served = service._served[wanted.spec] = _Served()
        served.built = BuiltDataset.from_object(range(100), collate_fn=list)
        answer = answer_of(service, requests.to_proto(wanted, Limits()).SerializeToString(), has_left)
        service.delivery.start()  # so that its end closes what it listens on
        service.delivery.stop(0.0)
    assert isinstance(answer, EncodedBatch)
    assert asked_in  # while it was computed
    assert threading.current_thread() not in asked_in


class Large:
    """Samples of 1,000 doubles, which count how often they were computed."""

    def __init__(self) -> None:
        self.num_computed = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_computed += 1
        return {"index": np.int64(index), "pair": (np.zeros(1000), [np.zeros(2)])}


@pytest.mark.parametrize(
    ("limit", "num_samples", "collate_fn", "num_computed", "text"),
    [
        (20_000, 4, None, 1, r"batch\['pair'\]\[0\]: 32000 bytes, but only 20000 are left of the 20000 "),
        (32_010, 4, None, 1, r"batch\['pair'\]\[1\]\[0\]: 64 bytes, but only 10 are left of the 32010 "),
        (32_100, 4, None, 4, ""),
        (32_064, 4, None, 4, r"batch\['index'\]|batch\['pair'\]\[1\]\[0\]: 64 bytes, but only 32 are left"),
        (20_000, 4, list, 4, r"batch\[2\]\['pair'\]\[0\]: 8000 bytes, but only"),
    ],
)
def test_batch_over_the_limit_is_refused_after_its_first_sample_if_torch_collates(
    tools: Any, limit: int, num_samples: int, collate_fn: Any, num_computed: int, text: str
) -> None:
    pytest.importorskip("torch.utils.data")
    (wanted,) = tools.requests(tools.spec(), num_batches=1, batch_size=num_samples)
    data = Large()
    with contextlib.closing(Compute()) as compute:
        service = make_service(compute, limits=Limits(max_batch_bytes=limit))
        served = service._served[wanted.spec] = _Served()
        served.built = BuiltDataset.from_object(data, collate_fn=collate_fn)
        request = requests.to_proto(wanted, Limits()).SerializeToString()
        for _ in range(2):
            data.num_computed = 0
            answer = answer_of(service, request)
            assert data.num_computed == num_computed
            if not text:
                assert isinstance(answer, EncodedBatch)
                continue
            assert isinstance(answer, bytes)
            with pytest.raises(DatasetError, match=rf"was encoded(?s:.*){text}(?s:.*)raise --max-batch-bytes"):
                BatchDecoder(request=request).take_message(answer)
        service.delivery.start()
        service.delivery.stop(0.0)
