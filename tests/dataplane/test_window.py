"""The window and its lanes, without a consumer and without a network."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hetero.control.directory import Directory
from hetero.dataplane.agreement import Agreement
from hetero.dataplane.attempts import Item
from hetero.dataplane.fleet import Fleet
from hetero.dataplane.reader import Reader


def test_window_whose_lane_could_not_be_started_can_be_closed(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("hetero-lane"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    (request,) = tools.requests(tools.spec(), num_batches=1)
    with Fleet(Directory(), None, job_id="x") as fleet:
        reader = Reader(fleet, iter([]))
        with pytest.raises(RuntimeError, match="new thread"), fleet.lock:
            reader._window.add(Item(0, request, Agreement(request.spec)))
        reader.close()
        assert not reader._window._lanes
