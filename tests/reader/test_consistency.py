from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from hetero.batches.fetch import Description
from hetero.control.members.directory import EndpointRecord
from hetero.errors import DatasetError, DatasetMismatchError, ExitCode, ProtocolMismatchError, SampleFailure
from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.consistency import ServedDataset
from hetero.spec import DatasetSpec
from hetero.wire.limits import Limits

SPEC = DatasetSpec("photos", "{}")


def connection(name: str, *, incarnation: str = "a") -> EndpointConnection:
    record = EndpointRecord(endpoint_id=name, host=name.split("/")[0], address="127.0.0.1:1", incarnation=incarnation)
    return EndpointConnection(record, None, job_id="x", limits=Limits())


def answer(found: EndpointConnection, num_samples: int = 10, fingerprint: str = "f", **environment: str) -> None:
    found.preparing.discard(SPEC)
    found.mark_ready()
    found.descriptions[SPEC] = Description(num_samples=num_samples, fingerprint=fingerprint, environment=environment)


def test_reference_is_the_first_in_order_that_may_still_answer() -> None:
    first, second = connection("algo-1/0"), connection("algo-2/0")
    dataset = ServedDataset(SPEC)
    first.preparing.add(SPEC)
    answer(second, num_samples=20)
    dataset.update([first, second])
    assert dataset.reference is None
    answer(first, num_samples=10)
    dataset.update([first, second])
    assert dataset.reference is not None
    assert dataset.reference.num_samples == 10
    assert isinstance(dataset.failure, DatasetMismatchError)


def test_reference_skips_endpoints_that_are_down() -> None:
    first, second = connection("algo-1/0"), connection("algo-2/0")
    dataset = ServedDataset(SPEC)
    first.mark_down("refused", 0.0)
    answer(second, num_samples=20)
    dataset.update([first, second])
    assert dataset.reference is not None
    assert second.serves(SPEC)


def test_endpoint_that_a_builder_replaces_counts_as_present_at_the_start() -> None:
    first, second = connection("algo-1/0"), connection("algo-2/0")
    dataset = ServedDataset(SPEC)
    answer(first)
    dataset.update([first, second])
    second.mark_down("the process ended", 0.0)
    assert not dataset.is_settled([first, second])
    successor = connection("algo-2/0")  # with the same incarnation
    assert not dataset.is_settled([first, successor])
    answer(successor, num_samples=20)
    dataset.update([first, successor])
    assert isinstance(dataset.failure, DatasetMismatchError)


@pytest.mark.parametrize(("num_samples", "fingerprint"), [(11, "f"), (10, "g")])
def test_difference_at_the_start_fails_and_names_both(num_samples: int, fingerprint: str) -> None:
    first, second = connection("algo-1/0"), connection("algo-2/0")
    dataset = ServedDataset(SPEC)
    answer(first)
    answer(second, num_samples, fingerprint)
    dataset.update([first, second])
    text = str(dataset.failure)
    assert "algo-1/0 has 10 samples with fingerprint f" in text
    assert f"algo-2/0 has {num_samples} samples with fingerprint {fingerprint}" in text
    assert dataset.failure is not None
    assert dataset.failure.exit_code is ExitCode.DISAGREEMENT
    assert not second.serves(SPEC)


def test_difference_of_a_latecomer_is_a_warning_and_refusal(caplog: pytest.LogCaptureFixture) -> None:
    first, late = connection("algo-1/0"), connection("algo-3/0")
    dataset = ServedDataset(SPEC)
    answer(first)
    dataset.update([first])
    answer(late, num_samples=9)
    with caplog.at_level(logging.WARNING):
        dataset.update([first, late])
        dataset.update([first, late])
    assert dataset.failure is None
    assert first.serves(SPEC)
    assert not late.serves(SPEC)
    assert len(caplog.records) == 1
    assert "algo-3/0" in caplog.text


def test_factory_that_raises_only_on_a_latecomer_is_a_warning() -> None:
    first, late = connection("algo-1/0"), connection("algo-3/0")
    error = DatasetError(
        SampleFailure(dataset="photos", host="h", stage="build", sample_index="", exception="OSError", traceback="")
    )
    dataset = ServedDataset(SPEC)
    dataset.build_failed(first, error)
    assert dataset.failure is error
    dataset = ServedDataset(SPEC)
    answer(first)
    dataset.update([first])
    dataset.build_failed(late, error)
    assert dataset.failure is None
    assert SPEC in late.unusable
    assert late.state is ConnectionState.CONNECTING


def test_endpoint_of_another_version_fails_at_the_start_and_is_left_out_later() -> None:
    first, late = connection("algo-1/0"), connection("algo-3/0")
    dataset = ServedDataset(SPEC)
    dataset.rejected(first, "protocol 6 was asked for")
    assert isinstance(dataset.failure, ProtocolMismatchError)
    assert dataset.failure.exit_code is ExitCode.DISAGREEMENT
    assert "algo-1/0 (127.0.0.1:1) speaks another protocol: protocol 6 was asked for" in str(dataset.failure)
    dataset = ServedDataset(SPEC)
    answer(first)
    dataset.update([first])
    dataset.rejected(late, "protocol 6 was asked for")
    assert dataset.failure is None
    assert SPEC in late.unusable
    assert late.last_message == "speaks another protocol: protocol 6 was asked for"


def test_environments_that_differ_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    connections = [connection(f"algo-{number}/0") for number in (1, 2, 3)]
    for number, found in enumerate(connections):
        answer(found, numpy=f"1.{number}", python="3.11")
    dataset = ServedDataset(SPEC)
    with caplog.at_level(logging.WARNING):
        dataset.update(connections)
    assert all(found.serves(SPEC) for found in connections)
    assert len(caplog.records) == 1
    assert "numpy 1.0 and 1.1" in caplog.text
    assert "python" not in caplog.text


def test_size_of_batches_is_that_of_the_largest_of_the_last_ones() -> None:
    dataset = ServedDataset(SPEC)
    assert dataset.batch_bytes == 64 * 2**20
    dataset.observe_size(10)
    assert dataset.batch_bytes == 10
    dataset.observe_size(1000)
    for _ in range(127):
        dataset.observe_size(20)
        assert dataset.batch_bytes == 1000
    dataset.observe_size(20)
    assert dataset.batch_bytes == 20


def optional(name: str) -> EndpointConnection:
    found = connection(name)
    found.record = replace(found.record, is_optional=True)
    return found


def test_endpoint_without_which_the_job_was_planned_gives_no_reference(caplog: pytest.LogCaptureFixture) -> None:
    first, second = optional("algo-1/0"), connection("algo-2/0")
    dataset = ServedDataset(SPEC)
    answer(first, num_samples=20)
    second.preparing.add(SPEC)
    dataset.update([first, second])
    assert dataset.reference is None
    answer(second, num_samples=10)
    dataset.update([first, second])
    assert (first.serves(SPEC), second.serves(SPEC), dataset.failure) == (False, True, None)
    assert "endpoint algo-1/0 joined later and is not used" in caplog.text


def test_endpoint_without_which_the_job_was_planned_may_fail_to_build_the_data_set() -> None:
    first, second = optional("algo-1/0"), connection("algo-2/0")
    dataset = ServedDataset(SPEC)
    failure = SampleFailure(
        dataset="photos", host="algo-1/0", stage="build", sample_index="", exception="OSError", traceback=""
    )
    dataset.build_failed(first, DatasetError(failure))
    assert dataset.failure is None
    answer(second)
    dataset.update([first, second])
    assert second.serves(SPEC)
    assert dataset.is_settled([first, second])


def test_endpoint_without_which_the_job_was_planned_gives_the_reference_if_it_is_alone() -> None:
    first = optional("algo-1/0")
    dataset = ServedDataset(SPEC)
    answer(first)
    dataset.update([first])
    assert first.serves(SPEC)
