"""A host's status survives the wire, and nothing over its bound does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.control.members.directory import BATCHES, KINDS, EndpointRecord
from hetero.control.metric_series import MAX_HOST_VALUES
from hetero.control.status import (
    Cause,
    HostState,
    HostStatus,
    RankReport,
    StepTimes,
    StopPoint,
    status_from_proto,
    status_to_proto,
)
from hetero.errors import ExitCode, ProtocolError
from hetero.metrics.logged import LoggedMetric
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import fields_of, record_of

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), max_size=30)
counts = st.integers(0, 2**31)
seconds = st.floats(0, 1e9)


def logged(values: list[tuple[str, float, int | None]]) -> tuple[LoggedMetric, ...]:
    """Return what a rank has logged, in the order of times, which the wire keeps."""
    return tuple(
        LoggedMetric(name=name, value=value, step=step, at_s=at_s, unix_s=1.7e9 + at_s)
        for at_s, (name, value, step) in enumerate(values)
    )


def with_its_rank(report: RankReport) -> RankReport:
    """Return the report with the values of its rank."""
    if report.metrics is None:
        return report
    return replace(report, metrics=tuple(replace(value, rank=report.rank) for value in report.metrics))


causes = st.builds(
    Cause,
    host=words,
    summary=words,
    detail=words,
    exit_code=st.sampled_from(ExitCode),
    by_signal=st.booleans(),
    is_consequence=st.booleans(),
    of_rank=st.booleans(),
)
reports = st.builds(
    RankReport,
    rank=counts,
    steps_started=st.dictionaries(words, counts, max_size=3),
    loader=words,
    summaries_json=st.lists(st.binary(max_size=9), max_size=3).map(tuple),
    counters=st.dictionaries(words, counts, max_size=3),
    waiting=st.booleans(),
    stop_vote=st.booleans(),
    failure=st.none() | causes,
    finished=st.booleans(),
    generation=counts,
    metrics=st.none()
    | st.lists(st.tuples(st.sampled_from(["f1", "loss"]), st.floats(-9, 9), st.none() | counts), max_size=4).map(
        logged
    ),
    step_times=st.none()
    | st.builds(
        lambda loader, first, times: StepTimes(
            loader=loader, first=first, compute_s=tuple(t for t, _ in times), wait_s=tuple(t for _, t in times)
        ),
        words,
        counts,
        st.lists(st.tuples(seconds, seconds), max_size=3),
    ),
).map(with_its_rank)
hosts = st.shared(words)
endpoints = st.builds(
    EndpointRecord,
    endpoint_id=words,
    host=hosts,
    address=words,
    incarnation=words,
    num_slots=st.integers(1, 1000),
    kind=st.sampled_from(KINDS),
    is_optional=st.booleans(),
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
    trainer_endpoints=st.integers(0, 1024),
)


@given(statuses)
def test_status_over_the_wire_is_the_same(status: HostStatus) -> None:
    data = status_to_proto(status).SerializeToString()
    ranks = tuple(
        replace(
            report,
            failure=None if report.failure is None else replace(report.failure, detail=""),
            step_times=None,
        )
        for report in status.ranks
    )
    assert status_from_proto(pb.HostStatus.FromString(data)) == replace(status, ranks=ranks)


@given(reports)
def test_report_over_the_wire_is_the_same(report: RankReport) -> None:
    data = pb.RankReport(**fields_of(report)).SerializeToString()
    assert record_of(RankReport, pb.RankReport.FromString(data)) == report


@pytest.mark.parametrize(
    ("num_ranks", "character", "summary_bytes"),
    [(64, "x", 0), (8, "\N{GRINNING FACE}", 0), (64, "\udc80", 0), (96, "x", 20_000)],
    ids=["many ranks", "wide characters", "broken characters", "large summaries"],
)
def test_status_of_a_host_whose_ranks_all_fail_fits_into_a_request(
    num_ranks: int, character: str, summary_bytes: int
) -> None:
    failed = Cause(host="a", summary="it raised", detail=100_000 * character)
    ranks = tuple(
        RankReport(rank=rank, failure=failed, summaries_json=(b"x" * summary_bytes,)) for rank in range(num_ranks)
    )
    status = HostStatus(
        host="a", incarnation="i", version="1", script_digest="d", failure=failed, decided=failed, ranks=ranks
    )
    message = status_to_proto(status)
    assert message.ByteSize() <= MAX_REQUEST_BYTES
    assert len(message.failure.detail) > 1000
    received = status_from_proto(pb.HostStatus.FromString(message.SerializeToString()))
    assert [report.failure is not None for report in received.ranks] == [True] * num_ranks
    num_left_out = sum(not report.summaries_json for report in received.ranks)
    assert received.counters.get("rank summaries too large to send", 0) == num_left_out < num_ranks


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


def test_endpoint_of_unknown_kind_is_refused() -> None:
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d"))
    message.endpoints.add(endpoint_id="a/0", address="127.0.0.1:1", incarnation="i", kind="door")
    with pytest.raises(ProtocolError, match="unknown kind 'door'"):
        status_from_proto(message)


def test_endpoint_that_says_no_kind_serves_batches() -> None:
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d"))
    message.endpoints.add(endpoint_id="a/0", address="127.0.0.1:1", incarnation="i")
    assert status_from_proto(message).endpoints[0].kind == BATCHES


def test_status_over_its_bound_is_refused() -> None:
    message = status_to_proto(
        HostStatus(host="a", incarnation="i", version="1", script_digest="d", usage_json=b"x" * 100_000)
    )
    with pytest.raises(ProtocolError, match="expected at most"):
        status_from_proto(message)


@pytest.mark.parametrize("options", [{str(number): "" for number in range(33)}, {"x": "y" * 254}])
def test_options_over_their_bounds_are_refused(options: dict[str, str]) -> None:
    status = HostStatus(host="a", incarnation="i", version="1", script_digest="d", options=options)
    with pytest.raises(ProtocolError, match="expected at most"):
        status_from_proto(status_to_proto(status))


@pytest.mark.parametrize(("num_computes", "num_waits"), [(1025, 1025), (2, 3)])
def test_step_times_over_their_bounds_are_refused(num_computes: int, num_waits: int) -> None:
    times = StepTimes(loader="train", first=0, compute_s=(1.0,) * num_computes, wait_s=(1.0,) * num_waits)
    with pytest.raises(ProtocolError, match="expected"):
        record_of(RankReport, pb.RankReport(**fields_of(RankReport(rank=0, step_times=times))))


def test_values_of_a_host_fit_into_a_heartbeat_to_the_host_of_the_report_and_are_left_out_of_others() -> None:
    values = logged([("loss", 0.5, step) for step in range(10_000)])
    ranks = tuple(
        RankReport(rank=rank, metrics=tuple(replace(value, rank=rank) for value in values)) for rank in range(8)
    )
    status = HostStatus(host="a", incarnation="i", version="1", script_digest="d", ranks=ranks)
    message = status_to_proto(status, has_metrics=True)
    assert message.ByteSize() <= 27 * MAX_HOST_VALUES + 10_000
    for report in status_from_proto(message).ranks:
        assert report.metrics is not None
        assert (report.metrics[0].step, report.metrics[-1].step) == (0, 9_999)
    others = status_from_proto(status_to_proto(status, has_metrics=False)).ranks
    assert [report.metrics for report in others] == [None] * 8


def test_histories_of_steps_are_sent_to_the_host_of_the_report_alone() -> None:
    summary = json.dumps({"name": "train", "history": {"begin_s": [0.0]}}).encode()
    ranks = (RankReport(rank=0, summaries_json=(summary, b"{,", b"[]")),)
    status = HostStatus(host="a", incarnation="i", version="1", script_digest="d", ranks=ranks)
    for has_metrics, expected in ((True, summary), (False, b'{"name": "train"}')):
        (report,) = status_from_proto(status_to_proto(status, has_metrics=has_metrics)).ranks
        assert report.summaries_json == (expected, b"{,", b"[]")


@pytest.mark.parametrize(
    "series",
    [
        [pb.MetricSeries(name="a b", step=[0], value=[1.0], at_s=[1.0], unix_s=[1.0])],
        [pb.MetricSeries(name="a", step=[0], value=[1.0, 2.0], at_s=[1.0], unix_s=[1.0])],
        [pb.MetricSeries(name="a", step=[0], value=[float("nan")], at_s=[1.0], unix_s=[1.0])],
        [pb.MetricSeries(name="a", step=[0] * 10_001, value=[1.0] * 10_001)],
        [pb.MetricSeries(name="a")] * 101,
    ],
    ids=["name", "lengths", "not finite", "values", "names"],
)
def test_malformed_values_are_refused(series: list[pb.MetricSeries]) -> None:
    with pytest.raises(ProtocolError):
        record_of(RankReport, pb.RankReport(metrics=series, has_metrics=True))


def test_cause_of_several_lines_becomes_one_line() -> None:
    cause = Cause(host="a", summary="one\ntwo\x1b[31m", exit_code=ExitCode.SCRIPT_FAILED)
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d", failure=cause))
    failure = status_from_proto(message).failure
    assert failure is not None
    assert "\n" not in failure.first_line


@pytest.mark.parametrize("summary", ["no file caf\udce9.jpg", 2000 * "\udc80"], ids=["one", "many"])
def test_cause_with_broken_characters_in_its_summary_is_the_same_on_every_host(summary: str) -> None:
    cause = Cause(host="a", summary=summary, exit_code=ExitCode.SCRIPT_FAILED)
    message = status_to_proto(HostStatus(host="a", incarnation="i", version="1", script_digest="d", failure=cause))
    failure = status_from_proto(pb.HostStatus.FromString(message.SerializeToString())).failure
    assert failure is not None
    assert failure.first_line == cause.first_line
    assert len(failure.summary) <= 1024
    assert failure.summary.startswith(summary[:12].encode("utf-8", "backslashreplace").decode())
