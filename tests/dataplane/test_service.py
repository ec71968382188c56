"""The service in this process, without connections."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from services import make_service

from hetero.batches.build import BuiltDataset
from hetero.dataplane.endpoint.compute import Compute
from hetero.dataplane.endpoint.service import _Served
from hetero.wire import requests
from hetero.wire.framing import EncodedBatch
from hetero.wire.limits import Limits


def test_batch_that_is_there_is_sent_without_asking_for_whom(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is a system call, and the handler thread sends next: then it finds out."""
    monkeypatch.setattr("hetero.dataplane.endpoint.compute._ASK_INTERVAL_S", 0.0)
    monkeypatch.setattr("hetero.dataplane.endpoint.service._POLL_S", 30.0)
    asked_in: list[threading.Thread] = []

    def has_left() -> bool:
        asked_in.append(threading.current_thread())
        return False

    (wanted,) = tools.requests(tools.spec(), num_batches=1)
    with contextlib.closing(Compute()) as compute:
        service = make_service(compute)
        served = service._served[wanted.spec] = _Served()
        served.built = BuiltDataset.from_object(range(100), collate_fn=list)
        answer = service._answer(requests.to_proto(wanted, Limits()).SerializeToString(), has_left)
        service.delivery.start()  # so that its end closes what it listens on
        service.delivery.stop(0.0)
    assert isinstance(answer, EncodedBatch)
    assert asked_in  # while it was computed
    assert threading.current_thread() not in asked_in
