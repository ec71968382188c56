"""Records and messages have the same fields, and no message becomes a record that its bounds do not allow."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.message import Message

from hetero.control.members.admission import JoinRequest
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.joined import JoinedHost
from hetero.control.status import Cause, HostState, HostStatus, RankReport, SessionOptions, StepTimes, StopPoint
from hetero.errors import ProtocolError
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import at_most, fields_of, printable, record_of


@pytest.mark.parametrize(
    ("kind", "message", "only_in_record", "only_in_message"),
    [
        (Cause, pb.Cause, set(), set()),
        (StopPoint, pb.StopPoint, set(), set()),
        (StepTimes, pb.StepTimes, set(), set()),
        (JoinedHost, pb.JoinedHost, set(), set()),
        (EndpointRecord, pb.Endpoint, {"host"}, set()),
        (RankReport, pb.RankReport, set(), {"has_metrics"}),
        (HostStatus, pb.HostStatus, set(), {"protocol"}),
        (JoinRequest, pb.JoinRequest, set(), {"protocol"}),
        (SessionOptions, pb.RegisterReply, {"max_pass_batches"}, {"remote", "elapsed_s"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_record_has_the_fields_of_its_message(
    kind: Any, message: type[Message], only_in_record: set[str], only_in_message: set[str]
) -> None:
    own = {field.name for field in dataclasses.fields(kind)}
    sent = {field.name for field in message.DESCRIPTOR.fields}
    assert own - sent == only_in_record
    assert sent - own == only_in_message


def test_value_that_is_none_is_absent_in_the_message() -> None:
    status = HostStatus(host="a", incarnation="i", version="1", script_digest="d")
    message = pb.HostStatus(**fields_of(status))
    assert not message.HasField("failure")
    assert record_of(HostStatus, message).failure is None
    assert record_of(HostStatus, pb.HostStatus(state=pb.INIT, failure=pb.Cause())).failure is not None


def test_number_of_no_member_of_an_enumeration_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown HostState 0"):
        record_of(HostStatus, pb.HostStatus())
    assert record_of(HostStatus, pb.HostStatus(state=pb.DONE)).state is HostState.DONE


def test_bounds_are_checked_before_a_field_is_converted() -> None:
    """A later field is over its bound, and an earlier one would be refused when it is converted."""
    with pytest.raises(ProtocolError, match="101 counters, expected at most 100"):
        record_of(HostStatus, pb.HostStatus(state=77, counters={str(number): 1 for number in range(101)}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wire", "allowed", "refused"),
    [
        (at_most(3, "bytes"), b"abc", b"abcd"),
        (at_most(2, "items", each=1), [b"a", b"b"], [b"a", b"bc"]),
        (at_most(2, "options", each=1), {"a": "b"}, {"a": "bc"}),
        (at_most(2, "options", each=1), {}, {"ab": "c"}),
        (printable(3, "name"), "abc", "abcd"),
        (printable(3, "name"), "", "a\n"),
    ],
)
def test_bound_allows_up_to_it_and_refuses_more(wire: Any, allowed: object, refused: object) -> None:
    wire.check(allowed)
    with pytest.raises(ProtocolError, match="expected at most"):
        wire.check(refused)
