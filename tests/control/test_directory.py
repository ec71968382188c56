from __future__ import annotations

import threading

from hetero.control.directory import Directory, EndpointRecord


def record(endpoint_id: str, incarnation: str = "a") -> EndpointRecord:
    return EndpointRecord(
        endpoint_id=endpoint_id, host=endpoint_id.split("/")[0], address="127.0.0.1:1", incarnation=incarnation
    )


def test_directory_records_come_in_natural_order() -> None:
    directory = Directory(record(name) for name in ("algo-10/0", "algo-2/10", "algo-2/9"))
    assert [entry.endpoint_id for entry in directory.records()] == ["algo-2/9", "algo-2/10", "algo-10/0"]


def test_directory_replace_with_the_same_keeps_the_version() -> None:
    directory = Directory([record("a/0"), record("a/1")])
    directory.replace([record("a/1"), record("a/0")])
    assert directory.version == 0
    directory.replace([record("a/1"), record("a/0", incarnation="b")])
    assert directory.version == 1


def test_directory_wait_returns_when_changed_or_over() -> None:
    directory = Directory()
    assert directory.wait_newer(0, timeout_s=0.0) == 0
    changer = threading.Thread(target=directory.replace, args=([record("a/0")],))
    changer.start()
    assert directory.wait_newer(0, timeout_s=30.0) == 1
    changer.join()
