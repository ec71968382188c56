"""Large JSON in small memory: the same values as `json`, whatever the size of what is read at once."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.pricing import json_stream
from hetero.pricing.json_stream import JsonStream

SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


class Drip(io.StringIO):
    """Gives out a few characters at a time."""

    def read(self, size: int | None = -1, /) -> str:
        return super().read(3)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.sampled_from([None, 0, 2]))
def test_values_are_those_of_json(document: dict[str, Any], indent: int | None) -> None:
    stream = JsonStream(Drip(json.dumps(document, indent=indent)), "test")
    assert {name: stream.value() for name in stream.members()} == document


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.data())
def test_what_is_skipped_is_passed_over(document: dict[str, Any], data: st.DataObject) -> None:
    document = {**document, "last": 1}
    stream = JsonStream(Drip(json.dumps(document)), "test")
    found = {}
    for name in stream.members():
        if name == "last" or data.draw(st.booleans()):
            found[name] = stream.value()
        else:
            stream.skip()
    assert found.items() <= document.items()
    assert found["last"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "character 0: found '', expected '{'"),
        ("[1]", "expected '{'"),
        ('{"a": 1', "expected ','"),
        ('{"a" 1}', "expected ':'"),
        ('{"a": }', "expected a value"),
        ("{1: 2}", "expected a name in quotes"),
        ('{"a": "cut', "expected a value"),
        ('{"a": {"b": 1}', "expected ','"),
        ('{"a": ' + "[" * 100_000, "fewer digits or less nesting"),
        ('{"a": ' + "9" * 5000 + "}", "fewer digits or less nesting"),
    ],
)
def test_text_that_is_no_json_says_where(text: str, words: str) -> None:
    stream = JsonStream(Drip(text), "offer.json")
    with pytest.raises(ConfigError) as caught:
        {name: stream.value() for name in stream.members()}
    assert str(caught.value).startswith("offer.json: character ")
    assert words in str(caught.value)


@pytest.mark.parametrize("content", ['"' + "x" * 5000 + '"', "[" + "1," * 5000 + "1]", '{"b": 1' + " " * 5000 + "}"])
def test_value_that_is_too_long_is_refused(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_MAX_VALUE_CHARS", 1000)
    stream = JsonStream(Drip(f'{{"a": {content}}}'), "test")
    with pytest.raises(ConfigError, match="at most 1000 characters"):
        {name: stream.value() for name in stream.members()}


def test_objects_that_are_large_can_be_skipped_up_to_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_MAX_VALUE_CHARS", 100)

    def nested(depth: int) -> JsonStream:
        return JsonStream(Drip('{"a": ' * depth + '"' + "x" * 90 + '"' + "}" * depth), "test")

    nested(10).skip()
    with pytest.raises(ConfigError, match="nested at most 16 deep"):
        nested(40).skip()


def test_file_that_is_no_text_is_refused() -> None:
    stream = JsonStream(io.TextIOWrapper(io.BytesIO(b'{"a": "\xff"}'), encoding="utf-8"), "offer.json")
    with pytest.raises(ConfigError, match=r"offer.json is not UTF-8"):
        {name: stream.value() for name in stream.members()}


class Endless(io.StringIO):
    """A document of 16 MiB that is made as it is read."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = self._made()

    def _made(self) -> Iterator[str]:
        yield '{"products": {'
        for index in range(16 * 1024):
            yield f'"{index}": {{"x": "{"x" * 1000}"}},'
        yield '"last": {}}}'

    def read(self, size: int | None = -1, /) -> str:
        return next(self._parts, "")


@pytest.mark.parametrize("takes", [True, False], ids=["taken", "skipped"])
def test_memory_does_not_grow_with_the_document(takes: bool) -> None:
    stream = JsonStream(Endless(), "test")
    tracemalloc.start()
    try:
        for _ in stream.members():
            if takes:
                assert sum(1 for _ in stream.members() if stream.value() is not None) == 16 * 1024 + 1
            else:
                stream.skip()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
