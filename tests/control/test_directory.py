from __future__ import annotations

from hetero.control.members.directory import Directory, EndpointRecord


def record(endpoint_id: str, incarnation: str = "a") -> EndpointRecord:
    return EndpointRecord(
        endpoint_id=endpoint_id, host=endpoint_id.split("/")[0], address="127.0.0.1:1", incarnation=incarnation
    )


def test_directory_records_come_in_natural_order() -> None:
    directory = Directory(record(name) for name in ("algo-10/0", "algo-2/10", "algo-2/9"))
    assert [entry.endpoint_id for entry in directory.records()] == ["algo-2/9", "algo-2/10", "algo-10/0"]


def test_directory_has_the_hosts_of_its_endpoints_unless_it_is_told_which() -> None:
    directory = Directory([record("a/0"), record("a/1"), record("b/0")])
    assert directory.contents() == (directory.records(), frozenset({"a", "b"}))
    told: list[object] = []
    directory.subscribe(lambda: told.append(directory.contents()))
    directory.replace([record("b/0")], hosts=["b", "a"])
    directory.replace([record("b/0")], hosts=["a", "b", "a"])
    directory.replace([record("b/0")])
    assert told == [((record("b/0"),), frozenset({"a", "b"})), ((record("b/0"),), frozenset({"b"}))]


def test_directory_replace_tells_of_changes_alone_until_that_is_ended() -> None:
    directory = Directory([record("a/0"), record("a/1")])
    seen: list[tuple[EndpointRecord, ...]] = []
    unsubscribe = directory.subscribe(lambda: seen.append(directory.records()))
    directory.replace([record("a/1"), record("a/0")])
    assert seen == []
    directory.replace([record("a/1"), record("a/0", incarnation="b")])
    assert seen == [(record("a/0", incarnation="b"), record("a/1"))]
    unsubscribe()
    unsubscribe()
    directory.replace([])
    assert len(seen) == 1
