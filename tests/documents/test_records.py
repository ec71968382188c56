"""JSON against dataclasses: what is rejected, and how a message names it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.documents.records import Mismatch, camel_case, decode, encode, limits
from hetero.errors import ConfigError

HOST_NAME = limits(accepts=re.compile("[a-z0-9-]+").fullmatch, expected="a host name", max_length=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    host_name: str = field(metadata=HOST_NAME)
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    parts: tuple[Part, ...] = field(metadata=limits(min_items=1, max_items=2))
    labels: dict[str, int] = field(default_factory=dict)
    is_new: bool | None = None


GOOD: dict[str, Any] = {"parts": [{"host_name": "a"}], "labels": {"x": 1}, "is_new": None}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["parts", "labels", "host_name", "x"]), inner),
    max_leaves=8,
)


def test_value_survives_the_way_to_json_and_back() -> None:
    whole = Whole(parts=(Part(host_name="a", weight=2), Part(host_name="b")), labels={"x": 1}, is_new=True)
    assert decode(Whole, encode(whole)) == whole
    assert decode(Whole, GOOD) == Whole(parts=(Part(host_name="a"),), labels={"x": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": []}, "run.parts: 0 entries, expected at least 1"),
        ({"parts": [{}] * 3}, "run.parts: 3 entries, expected at most 2"),
        ({"parts": [{}]}, "run.parts[0].host_name: missing, expected a host name"),
        (
            {"parts": [{"hostname": "a"}]},
            "run.parts[0].host_name: missing, expected a host name; 'hostname' is an unknown key",
        ),
        (
            {"parts": [{"host_name": "a", "weigth": 1}]},
            "run.parts[0].weigth: unknown key, expected one of host_name, weight",
        ),
        ({"parts": [{"host_name": "a/.."}]}, "run.parts[0].host_name: found 'a/..', expected a host name"),
        ({"parts": [{"host_name": "a\n"}]}, r"run.parts[0].host_name: found 'a\n', expected a host name"),
        ({"parts": [{"host_name": "a" * 21}]}, "run.parts[0].host_name: string of 21 characters, expected at most 20"),
        ({"parts": [{"host_name": "a", "weight": True}]}, "run.parts[0].weight: found True, expected a number"),
        ({"parts": [{"host_name": "a", "weight": -1}]}, "run.parts[0].weight: found -1, expected a number from 0 to"),
        ({"labels": {"\x1b[2K": "1"}}, r"run.labels.\x1b[2K: found '1', expected an integer"),
        ({"is_new": 1}, "run.is_new: found 1, expected true or false"),
    ],
)
def test_wrong_value_is_named_with_its_path(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Whole, GOOD | change, path="run")
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value.record, Mismatch)


def test_document_of_another_program_may_have_unknown_keys_and_nulls() -> None:
    document = {"Parts": [{"HostName": "a", "Weight": None, "Extra": 1}], "Labels": None}
    found = decode(Whole, document, spelling=camel_case, is_foreign=True)
    assert found == Whole(parts=(Part(host_name="a"),))
    with pytest.raises(ConfigError, match=r"Parts\[0\].HostName: missing, .*; 'Hostname' is an unknown key"):
        decode(Whole, {"Parts": [{"Hostname": "a"}]}, spelling=camel_case, is_foreign=True)


@given(value=JSON)
def test_any_json_is_decoded_or_rejected_in_one_printable_line(value: object) -> None:
    for is_foreign in (False, True):
        try:
            text = repr(decode(Whole, value, is_foreign=is_foreign))
        except ConfigError as error:
            text = str(error)
        assert text.isprintable()
        assert text.startswith("Whole(") or len(text) < 400
