from __future__ import annotations

import logging

import pytest

from hetero.batches.fetch import Description
from hetero.control.directory import EndpointRecord
from hetero.dataplane.reader.connection import ConnectionState, EndpointConnection
from hetero.dataplane.reader.consistency import Agreement
from hetero.errors import DatasetError, DatasetMismatchError, ExitCode, ProtocolMismatchError, SampleFailure
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
    agreement = Agreement(SPEC)
    first.preparing.add(SPEC)
    answer(second, num_samples=20)
    agreement.update([first, second])
    assert agreement.reference is None
    answer(first, num_samples=10)
    agreement.update([first, second])
    assert agreement.reference is not None
    assert agreement.reference.num_samples == 10
    assert isinstance(agreement.failure, DatasetMismatchError)


def test_reference_skips_endpoints_that_are_down() -> None:
    first, second = connection("algo-1/0"), connection("algo-2/0")
    agreement = Agreement(SPEC)
    first.mark_down("refused", 0.0)
    answer(second, num_samples=20)
    agreement.update([first, second])
    assert agreement.reference is not None
    assert second.serves(SPEC)
    assert agreement.is_settled([first, second])


@pytest.mark.parametrize(("num_samples", "fingerprint"), [(11, "f"), (10, "g")])
def test_difference_at_the_start_fails_and_names_both(num_samples: int, fingerprint: str) -> None:
    first, second = connection("algo-1/0"), connection("algo-2/0")
    agreement = Agreement(SPEC)
    answer(first)
    answer(second, num_samples, fingerprint)
    agreement.update([first, second])
    text = str(agreement.failure)
    assert "algo-1/0 has 10 samples with fingerprint f" in text
    assert f"algo-2/0 has {num_samples} samples with fingerprint {fingerprint}" in text
    assert agreement.failure is not None
    assert agreement.failure.exit_code is ExitCode.DISAGREEMENT
    assert not second.serves(SPEC)


def test_difference_of_a_latecomer_is_a_warning_and_refusal(caplog: pytest.LogCaptureFixture) -> None:
    first, late = connection("algo-1/0"), connection("algo-3/0")
    agreement = Agreement(SPEC)
    answer(first)
    agreement.update([first])
    answer(late, num_samples=9)
    with caplog.at_level(logging.WARNING):
        agreement.update([first, late])
        agreement.update([first, late])
    assert agreement.failure is None
    assert first.serves(SPEC)
    assert not late.serves(SPEC)
    assert len(caplog.records) == 1
    assert "algo-3/0" in caplog.text


def test_factory_that_raises_only_on_a_latecomer_is_a_warning() -> None:
    first, late = connection("algo-1/0"), connection("algo-3/0")
    error = DatasetError(
        SampleFailure(dataset="photos", host="h", stage="build", sample_index="", exception="OSError", traceback="")
    )
    agreement = Agreement(SPEC)
    agreement.build_failed(first, error)
    assert agreement.failure is error
    agreement = Agreement(SPEC)
    answer(first)
    agreement.update([first])
    agreement.build_failed(late, error)
    assert agreement.failure is None
    assert SPEC in late.unusable
    assert late.state is ConnectionState.CONNECTING


def test_endpoint_of_another_version_fails_at_the_start_and_is_left_out_later() -> None:
    first, late = connection("algo-1/0"), connection("algo-3/0")
    agreement = Agreement(SPEC)
    agreement.rejected(first, "protocol 6 was asked for")
    assert isinstance(agreement.failure, ProtocolMismatchError)
    assert agreement.failure.exit_code is ExitCode.DISAGREEMENT
    assert "algo-1/0 (127.0.0.1:1) speaks another protocol: protocol 6 was asked for" in str(agreement.failure)
    agreement = Agreement(SPEC)
    answer(first)
    agreement.update([first])
    agreement.rejected(late, "protocol 6 was asked for")
    assert agreement.failure is None
    assert SPEC in late.unusable
    assert late.last_word == "speaks another protocol: protocol 6 was asked for"


def test_environments_that_differ_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    connections = [connection(f"algo-{number}/0") for number in (1, 2, 3)]
    for number, found in enumerate(connections):
        answer(found, numpy=f"1.{number}", python="3.11")
    agreement = Agreement(SPEC)
    with caplog.at_level(logging.WARNING):
        agreement.update(connections)
    assert all(found.serves(SPEC) for found in connections)
    assert len(caplog.records) == 1
    assert "numpy 1.0 and 1.1" in caplog.text
    assert "python" not in caplog.text


def test_size_of_batches_is_that_of_the_largest_of_the_last_ones() -> None:
    agreement = Agreement(SPEC)
    assert agreement.batch_bytes == 64 * 2**20
    agreement.observe_size(10)
    assert agreement.batch_bytes == 10
    agreement.observe_size(1000)
    for _ in range(127):
        agreement.observe_size(20)
        assert agreement.batch_bytes == 1000
    agreement.observe_size(20)
    assert agreement.batch_bytes == 20
