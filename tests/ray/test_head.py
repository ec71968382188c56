"""The head of a Ray cluster that is lost."""

from __future__ import annotations

import socket

import pytest

from hetero.ray.head import HeadWatch


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


def test_head_that_answers_is_not_lost() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = HeadWatch(f"127.0.0.1:{server.getsockname()[1]}", say=lines.append, clock=Clock())
        assert [watch.loss() for _ in range(100)] == [""] * 100
    assert lines == []


def test_head_that_does_not_answer_is_waited_for_then_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "40")
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    watch = HeadWatch(address, say=lines.append, clock=Clock())
    found = [watch.loss() for _ in range(20)]
    first = next(loss for loss in found if loss)
    assert first.startswith(f"the head of the Ray cluster at {address} has not answered for 30 s: ")
    assert len(lines) == 1
    assert "waiting for it" in lines[0]


def test_head_that_comes_back_is_not_lost() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    watch = HeadWatch(f"127.0.0.1:{address[1]}", say=lines.append, clock=Clock())
    assert not any(watch.loss() for _ in range(12))
    with socket.create_server(address):
        assert not any(watch.loss() for _ in range(40))
    assert [line.rpartition(" ")[2] for line in lines] == ["it", "again"]


def test_without_an_address_nothing_is_watched() -> None:
    assert HeadWatch("", say=print, clock=Clock()).loss() == ""
