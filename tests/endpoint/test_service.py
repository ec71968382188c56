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

from hetero.batches.build import BuiltDataset
from hetero.endpoint.compute import Compute
from hetero.endpoint.replies import Answer, Later, Reply
from hetero.endpoint.service import DataServicer, _Served
from hetero.errors import DatasetError
from hetero.wire import requests
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import Limits
from tests.support.batch_path.services import make_service


def answer_of(service: DataServicer, request: bytes, has_left: Callable[[], bool] = lambda: False) -> Answer:
    """Return the answer to a request, from whichever thread it comes."""
    later: queue.Queue[Answer] = queue.Queue()
    reply = SimpleNamespace(has_left=has_left, send=later.put, if_given_up=lambda cancel: None)
    answer = service._answer(request, cast("Reply", reply))
    return later.get(timeout=100.0) if isinstance(answer, Later) else answer


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
        service.delivery.start()  # its end closes the port
        service.delivery.stop(0.0)
    assert isinstance(answer, EncodedBatch)
    assert asked_in  # while it was computed
    assert threading.current_thread() not in asked_in


class Large:
    """Samples of 1,000 doubles."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": np.int64(index), "pair": (np.zeros(1000), [np.zeros(2)])}


@pytest.mark.parametrize(
    ("limit", "collate_fn", "text"),
    [
        (20_000, None, r"batch\['pair'\]\[0\]: 32000 bytes, but only 19968 are left of the 20000 "),
        (32_100, None, ""),
        (32_064, None, r"batch\['pair'\]\[1\]\[0\]: 64 bytes, but only 32 are left"),
        (20_000, list, r"batch\[2\]\['pair'\]\[0\]: 8000 bytes, but only"),
    ],
)
def test_batch_over_the_limit_is_refused(tools: Any, limit: int, collate_fn: Any, text: str) -> None:
    pytest.importorskip("torch.utils.data")
    (wanted,) = tools.requests(tools.spec(), num_batches=1, batch_size=4)
    with contextlib.closing(Compute()) as compute:
        service = make_service(compute, limits=Limits(max_batch_bytes=limit))
        served = service._served[wanted.spec] = _Served()
        served.built = BuiltDataset.from_object(Large(), collate_fn=collate_fn)
        request = requests.to_proto(wanted, Limits()).SerializeToString()
        answer = answer_of(service, request)
        if text:
            assert isinstance(answer, bytes)
            with pytest.raises(DatasetError, match=rf"was encoded(?s:.*){text}(?s:.*)raise --max-batch-bytes"):
                BatchDecoder(request=request).take_message(answer)
        else:
            assert isinstance(answer, EncodedBatch)
        service.delivery.start()
        service.delivery.stop(0.0)
