"""Batch requests and data set specs through their messages."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest, Helper
from hetero.errors import ConfigError, ProtocolError
from hetero.spec import DatasetSpec
from hetero.wire import messages, requests
from hetero.wire.limits import MAX_FETCH_BYTES, PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.requests import from_proto, parse_request, serialize, to_proto

SPEC = DatasetSpec("photos", '{"root":"/data"}')
HELPER = Helper(endpoint_id="algo-2/0", host="algo-2", address="10.0.0.2:4711", incarnation="ab-1")
HELPER_6 = dataclasses.replace(HELPER, address="[fe80::1]:65535")
HELPER_MESSAGE = pb.Helper(**dataclasses.asdict(HELPER))


def helper(address: str) -> pb.Helpers:
    return pb.Helpers(items=[pb.Helper(endpoint_id="a/0", host="a", address=address, incarnation="x")])


INT64 = st.integers(-(2**63), 2**63 - 1)
KEYS = st.recursive(
    st.one_of(
        st.integers(), st.text(max_size=20), st.floats(allow_nan=False), st.binary(max_size=9), st.booleans(), st.none()
    ),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.lists(inner, max_size=4),
    max_leaves=9,
)


def request(*, indices: Any = range(4), occurrences: Any = None, **fields: Any) -> BatchRequest:
    work = IndexedWork(np.array(indices) if isinstance(indices, range) else indices, occurrences)
    return BatchRequest(**{"spec": SPEC, "work": work, "seed": 0, "epoch": 0, "position": 0, **fields})


def message(*, indices: Any = (1,), keys: Any = (), occurrences: Any = (), helpers: Any = None, **fields: Any) -> Any:
    """Return a request with these numbers and messages as bytes."""
    dataset = pb.DatasetSpec(name="photos", arguments_json="{}")
    return pb.FetchRequest(
        **{"protocol": PROTOCOL, "dataset": dataset, "collate": True, **fields},
        indices=np.array(indices, np.int64).tobytes(),
        keys=pb.Children(items=keys).SerializeToString(),
        occurrences=np.array(occurrences, np.uint32).tobytes(),
        helpers=b"" if helpers is None else helpers.SerializeToString(),
    )


def nested(depth: int) -> Any:
    return () if depth == 1 else [nested(depth - 1)]


def nested_key(depth: int) -> pb.Node:
    inner = pb.Node(tuple=pb.Children())
    for _ in range(depth - 1):
        inner = pb.Node(list=pb.Children(items=[inner]))
    return inner


@given(
    indices=st.lists(INT64, max_size=9).map(lambda items: np.array(items, np.int64))
    | st.lists(KEYS, min_size=1, max_size=9).map(tuple),
    seed=INT64,
    epoch=st.integers(0, 2**64 - 1),
    collate=st.booleans(),
    data=st.data(),
)
def test_request_round_trip_is_the_same(
    indices: Any, seed: int, epoch: int, collate: bool, data: st.DataObject
) -> None:
    counts = st.lists(st.integers(0, 2**32 - 1), min_size=len(indices), max_size=len(indices))
    drawn = data.draw(st.none() | counts)
    sent = request(
        indices=indices,
        occurrences=None if drawn is None else np.array(drawn, np.uint32),
        seed=seed,
        epoch=epoch,
        position=epoch // 2,
        collate=collate or len(indices) != 1,
        as_is=not collate,
        contiguous=collate,
        step=epoch // 3,
        verify=collate,
        compression=data.draw(st.sampled_from((None, "lz4", "zstd"))),
        on_sample_error=data.draw(st.sampled_from(("raise", "skip"))) if collate else "raise",
    )
    got = from_proto(pb.FetchRequest.FromString(to_proto(sent).SerializeToString()))
    for name in (
        "spec",
        "seed",
        "epoch",
        "position",
        "collate",
        "as_is",
        "contiguous",
        "step",
        "verify",
        "compression",
        "on_sample_error",
        "is_part",
    ):
        assert getattr(got, name) == getattr(sent, name)
    assert type(got.work.indices) is type(sent.work.indices)
    assert repr(list(got.work.indices)) == repr(list(sent.work.indices))  # types included
    zeros = [0] * len(indices)
    assert list(zeros if got.work.occurrences is None else got.work.occurrences) == (drawn or zeros)
    if isinstance(got.work.indices, np.ndarray):
        assert got.work.indices.dtype == np.int64


def test_request_for_a_part_round_trip_is_the_same() -> None:
    assert from_proto(to_proto(request(is_part=True))).is_part


def test_request_with_owner_hosts_round_trip_is_the_same() -> None:
    owners = np.array([0, 2, 1], np.uint8)
    got = from_proto(to_proto(request(indices=range(3), helpers=(HELPER, HELPER_6), owners=owners)))
    assert got.owners is not None
    assert (got.owners.tolist(), got.helpers) == ([0, 2, 1], (HELPER, HELPER_6))


def test_request_with_a_million_indices_may_name_helpers() -> None:
    sent = request(indices=range(2**20), occurrences=np.full(2**20, 2**32 - 1, np.uint32), helpers=(HELPER,) * 63)
    sent = dataclasses.replace(sent, owners=np.full(2**20, 63, np.uint8))
    assert from_proto(parse_request(serialize(sent))).helpers == sent.helpers


def test_request_longest_integer_round_trips_and_can_be_shown() -> None:
    longest = (1 << 8191) - 1
    assert from_proto(to_proto(request(indices=(longest,)))).work.indices == (longest,)
    assert len(str(longest)) == 2466


def test_request_occurrences_all_zero_are_not_sent() -> None:
    assert not to_proto(request(occurrences=np.zeros(4, np.uint32))).occurrences


def test_request_asks_for_the_limit_of_its_sender() -> None:
    sent = to_proto(request(), Limits(max_batch_bytes=1000))
    assert Limits().within(sent.max_batch_bytes).max_batch_bytes == 1000
    assert Limits(max_batch_bytes=10).within(sent.max_batch_bytes).max_batch_bytes == 10
    assert Limits().within(0) == Limits()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"indices": np.arange(11)}, "a batch of 11 samples cannot come from a data host, at most 10 can"),
        ({"indices": (1 << 8191,)}, "the index of 1025 bytes exceeds 1024 bytes"),
        ({"indices": (nested(9),)}, "nests deeper than 8 levels"),
        ({"indices": (1j,)}, "1j of type complex cannot be sent"),
        ({"indices": ("\udc80",)}, "cannot be sent"),
        ({"seed": 2**63}, "cannot be sent"),
        ({"epoch": -1}, "cannot be sent"),
        ({"compression": "gzip"}, "'gzip', expected None or one of lz4, zstd"),
    ],
)
def test_to_proto_beyond_a_limit_is_a_config_error(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        to_proto(request(**fields), Limits(max_indices=10))


@pytest.mark.attack("A12")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"protocol": 99}, f"has protocol 99, this endpoint has protocol {PROTOCOL}"),
        ({"protocol": 0}, "has protocol 0"),
        ({"dataset": None}, "has no valid data set"),
        ({"dataset": pb.DatasetSpec(name="../etc")}, "has no valid data set"),
        ({"dataset": pb.DatasetSpec(name="a", arguments_json="x" * 70_000)}, "has no valid data set"),
        ({"indices": [], "collate": False}, "without collation has 0"),
        ({"keys": [pb.Node(integer=1)]}, "1 indices and 1 keys"),
        ({"indices": [1] * 11}, "11 indices"),
        ({"indices": [], "keys": [pb.Node(integer=1)] * 11}, "11 keys"),
        ({"indices": [], "keys": [pb.Node()]}, "an unknown kind"),
        ({"indices": [], "keys": [pb.Node(big_integer=b"x" * 1025)]}, "exceeds 1024"),
        ({"indices": [], "keys": [pb.Node(none=False)]}, "has the value false"),
        ({"indices": [], "keys": [pb.Node(leaf=0)]}, "no known kind"),
        ({"indices": [], "keys": [pb.Node(mapping=pb.Mapping())]}, "no known kind"),
        ({"indices": [], "keys": [pb.Node(list=pb.Children(items=[pb.Node()]))]}, "an unknown kind"),
        ({"indices": [], "keys": [nested_key(9)]}, "nests deeper than 8 levels"),
        ({"indices": [], "keys": [nested_key(40)]}, "nests deeper than 8 levels"),
        ({"occurrences": [1, 2]}, "1 indices but 2 occurrences"),
        ({"indices": [1, 2], "collate": False}, "without collation has 2"),
        ({"compression": 9}, "unknown compression 9"),
        ({"on_sample_error": 2}, "unknown policy 2"),
        ({"on_sample_error": 1, "collate": False}, "cannot skip: no other sample"),
        ({"helpers": pb.Helpers(items=[HELPER_MESSAGE] * 64)}, "names 64 helpers, at most 63"),
        ({"helpers": pb.Helpers(items=[pb.Helper(host="a")])}, "fields are empty or too long"),
        ({"helpers": helper("x" * 513)}, "fields are empty or too long"),
        ({"helpers": helper("dns:///elsewhere:80")}, "address is not ip:port"),
        ({"helpers": helper("unix:/run/x")}, "address is not ip:port"),
        ({"helpers": helper("localhost:80")}, "address is not ip:port"),
        ({"helpers": helper("10.0.0.1:0")}, "address is not ip:port"),
        ({"helpers": helper("[::1]:65536")}, "address is not ip:port"),
        ({"helpers": pb.Helpers(items=[HELPER_MESSAGE]), "owners": b"\1\2"}, "2 owners up to number 2"),
        ({"owners": b"\0\1"}, "names 0 helpers, and 2 owners"),
        ({"helpers": pb.Helpers(items=[HELPER_MESSAGE])}, "1 helpers, and 0 owners"),
        ({"is_part": True, "verify": True}, "options that are for whole batches"),
        ({"is_part": True, "on_sample_error": 1}, "options that are for whole batches"),
        (
            {"is_part": True, "helpers": pb.Helpers(items=[HELPER_MESSAGE]), "owners": b"\1"},
            "options that are for whole batches",
        ),
    ],
)
def test_from_proto_malformed_request_is_a_protocol_error(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        from_proto(message(**fields), Limits(max_indices=10))


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"max_depth": 0}, "max_depth is 0"), ({"max_leaves": 1.5}, "1.5"), ({"max_indices": -1}, "at least 1")],
)
def test_limits_out_of_range_is_a_config_error(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Limits(**fields)


def test_request_for_a_million_samples_fits() -> None:
    most = request(indices=np.arange(2**20), occurrences=np.full(2**20, 2**32 - 1, np.uint32), epoch=2**64 - 1)
    most = dataclasses.replace(
        most, spec=DatasetSpec("photos", '{"root":"' + "x" * 65_000 + '"}'), on_sample_error="skip"
    )
    data = serialize(most)
    assert 2**23 < len(data) < MAX_FETCH_BYTES
    got = from_proto(parse_request(data))
    assert np.array_equal(got.work.indices, most.work.indices)
    with pytest.raises(
        ConfigError, match=r"a batch of 1048577 samples cannot come from a data host, at most 1048576 can\n"
    ):
        serialize(request(indices=np.arange(2**20 + 1)))


def test_request_with_many_keys_is_refused_by_who_sends_it() -> None:
    with pytest.raises(ConfigError, match="the indices of batch 0 take .* bytes, at most 1048576 are allowed"):
        serialize(request(indices=("x" * 1000,) * 2000))


@pytest.mark.attack("A12")
@pytest.mark.parametrize("field", ["keys", "helpers"])
def test_field_of_many_small_messages_is_refused_before_it_is_parsed(field: str) -> None:
    sent = message()
    setattr(sent, field, b"\x0a\x00" * (2**19 + 1))  # items without content
    with (
        mock.patch.object(messages, "parse", side_effect=AssertionError),
        pytest.raises(ProtocolError, match="a (Children|Helpers) of a request has 1048578 bytes"),
    ):
        from_proto(sent)


@pytest.mark.attack("A12")
def test_request_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    with (
        mock.patch.object(requests, "parse", side_effect=AssertionError),
        pytest.raises(ProtocolError, match="a request has 16777217 bytes"),
    ):
        parse_request(bytes(2**24 + 1))


@pytest.mark.attack("A12")
@pytest.mark.parametrize(
    "sent",
    [
        message().SerializeToString() + b"\x08\x0a" * (2**23 - 100),  # one field again and again
        message().SerializeToString() + b"\x98\x06\x01" * (2**24 // 3 - 100),  # a field that is not known
        message().SerializeToString() + message(indices=[1] * 2**18).SerializeToString() * 7,
        message(occurrences=[1] * 2**21, indices=[1] * 2**20).SerializeToString(),
    ],
    ids=["known field", "unknown field", "indices", "occurrences"],
)
def test_long_request_takes_no_more_than_a_few_times_its_bytes(sent: bytes) -> None:
    code = (
        "import resource, sys\n"
        "from hetero.errors import ProtocolError\n"
        "from hetero.wire.requests import from_proto, parse_request\n"
        "data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    from_proto(parse_request(data))\n"
        "except ProtocolError:\n"
        "    pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True, timeout=100)
    assert int(found.stdout) * 1024 < 4 * MAX_FETCH_BYTES
