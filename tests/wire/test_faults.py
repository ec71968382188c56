"""The catalogue of faults is complete, and both sides use it alike."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hetero
from hetero.wire.faults import CallFailedError, Fault, fault_of_status
from hetero.wire.proto import data_pb2 as pb

import grpc  # isort: skip

FAULTS = pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)


@FAULTS
def test_every_fault_has_a_text_of_its_own(fault: Fault) -> None:
    assert [other for other in Fault if other.value.text == fault.value.text] == [fault]
    assert str(CallFailedError(fault, "details")) == f"{fault.value.text}: details"
    assert str(CallFailedError(fault, "")) == fault.value.text


def test_refusals_are_those_of_the_protocol() -> None:
    assert {fault.name for fault in Fault if fault.value.is_refusal} == {*pb.Refusal.Reason.keys()} - {"UNSPECIFIED"}


@FAULTS
def test_every_refusal_can_be_sent_as_a_status_too_and_every_status_means_one_fault(fault: Fault) -> None:
    assert fault.value.statuses or not fault.value.is_refusal
    for status in fault.value.statuses:
        assert grpc.StatusCode[status]
        assert fault_of_status(status) is fault


def test_status_that_endpoints_do_not_send_is_an_internal_failure() -> None:
    known = {status for fault in Fault for status in fault.value.statuses}
    for status in {status.name for status in grpc.StatusCode} - known:
        assert fault_of_status(status) is Fault.BROKEN


def test_statuses_that_the_data_plane_names_are_in_the_catalogue() -> None:
    known = {status for fault in Fault for status in fault.value.statuses} | {"UNAUTHENTICATED"}  # ends all reading
    for path in Path(hetero.__file__).parent.joinpath("endpoint").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "grpc.StatusCode":
                assert node.attr in known, path
