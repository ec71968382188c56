"""A host's status survives the wire, and nothing over its bound does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.control.directory import EndpointRecord
from hetero.control.status import (
    Cause,
    HostState,
    HostStatus,
    RankReport,
    StopPoint,
    status_from_proto,
    status_to_proto,
)
from hetero.errors import ExitCode, ProtocolError
from hetero.wire.proto import control_pb2 as pb

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), max_size=30)
counts = st.integers(0, 2**31)
causes = st.builds(
    Cause,
    host=words,
    summary=words,
    detail=words,
    exit_code=st.sampled_from(ExitCode),
    by_signal=st.booleans(),
    is_echo=st.booleans(),
    of_rank=st.booleans(),
)
reports = st.builds(
    RankReport,
    rank=counts,
    steps_started=st.dictionaries(words, counts, max_size=3),
    loader=words,
    summaries_json=st.lists(st.binary(max_size=9), max_size=3).map(tuple),
    counters=st.dictionaries(words, counts, max_size=3),
    stop_vote=st.booleans(),
    failure=st.none() | causes,
    finished=st.booleans(),
    generation=counts,
)
hosts = st.shared(words)
endpoints = st.builds(
    EndpointRecord, endpoint_id=words, host=hosts, address=words, incarnation=words, num_slots=st.integers(1, 1000)
)
statuses = st.builds(
    HostStatus,
    host=hosts,
    incarnation=words,
    version=words,
    script_digest=words,
    state=st.sampled_from(HostState),
    endpoints=st.lists(endpoints, max_size=3).map(tuple),
    failure=st.none() | causes,
    decided=st.none() | causes,
    stop_requested=st.booleans(),
    stop_at=st.none() | st.builds(StopPoint, loader=words, steps=counts),
    usage_json=st.binary(max_size=20),
    ranks=st.lists(reports, max_size=3).map(tuple),
    counters=st.dictionaries(words, counts, max_size=3),
    revision=counts,
    rendezvous_port=st.integers(0, 65535),
    generation=counts,
    restarted_for=st.none() | causes,
    ticks=counts,
    options=st.dictionaries(words, words, max_size=3),
)


@given(statuses)
def test_status_over_the_wire_is_the_same(status: HostStatus) -> None:
    data = status_to_proto(status).SerializeToString()
    assert status_from_proto(pb.HostStatus.FromString(data)) == status


def test_status_of_another_protocol_is_refused_with_both_versions() -> None:
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d"))
    message.protocol = 99
    with pytest.raises(ProtocolError, match=r"99.*1"):
        status_from_proto(message)


def test_status_of_unknown_state_is_refused() -> None:
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d"))
    message.state = 77
    with pytest.raises(ProtocolError, match="77"):
        status_from_proto(message)


def test_status_over_its_bound_is_refused() -> None:
    message = status_to_proto(
        HostStatus(host="a", incarnation="i", version="1", script_digest="d", usage_json=b"x" * 100_000)
    )
    with pytest.raises(ProtocolError, match="bound"):
        status_from_proto(message)


@pytest.mark.parametrize("options", [{str(number): "" for number in range(33)}, {"x": "y" * 201}])
def test_options_over_their_bounds_are_refused(options: dict[str, str]) -> None:
    status = HostStatus(host="a", incarnation="i", version="1", script_digest="d", options=options)
    with pytest.raises(ProtocolError, match="bound"):
        status_from_proto(status_to_proto(status))


def test_cause_of_several_lines_becomes_one_line() -> None:
    cause = Cause(host="a", summary="one\ntwo\x1b[31m", exit_code=ExitCode.SCRIPT_FAILED)
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d", failure=cause))
    failure = status_from_proto(message).failure
    assert failure is not None
    assert "\n" not in failure.first_line
