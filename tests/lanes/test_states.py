"""States of iterators as bytes: each plain value comes back, and damaged bytes are rejected."""

from __future__ import annotations

import json
import math
import random
import zlib
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.lanes.states import MAX_STATE_BYTES, decode_state, encode_state
from hetero.errors import ConfigError

torch = pytest.importorskip("torch")

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=20,
)


class Level(IntEnum):
    HIGH = 3


class Stream:
    """An object that cannot be saved."""


@given(PLAIN)
def test_plain_values_come_back_with_their_types(state: Any) -> None:
    restored = decode_state(encode_state(state))
    assert restored == state
    assert repr(restored) == repr(state)  # 1 == True == 1.0
    assert encode_state(state) == encode_state(restored)


@pytest.mark.parametrize(
    "state",
    [
        {"shards": {0: {"offset": 5}, -7: {"offset": 2**70}}, (1, "a"): [None]},
        ["dict", ["bytes", "AA=="]],  # looks like the encoding itself
        random.Random(3).getstate(),
        (2**64, -(2**200)),
        {"left": b"\x00\xff", "text": "ä\ud800\n"},
        [math.inf, -0.0],
        [],
        {},
        (),
    ],
    ids=lambda state: type(state).__name__,
)
def test_nested_values_come_back(state: Any) -> None:
    assert repr(decode_state(encode_state(state))) == repr(state)


def test_nan_comes_back() -> None:
    assert math.isnan(decode_state(encode_state({"loss": math.nan}))["loss"])


def test_member_of_an_enum_becomes_its_number() -> None:
    restored = decode_state(encode_state({"level": Level.HIGH}))
    assert type(restored["level"]) is int
    assert restored == {"level": 3}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.array(1.5),
        np.zeros((0, 3)),
        np.array([1, 2], ">i4"),
        np.array(["ab", ""]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([True, False]),
        np.random.default_rng(0).bit_generator.random_raw(9),
        np.float32(0.1),
        np.int64(-5),
        np.bool_(True),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_and_scalars_come_back(array: Any) -> None:
    restored = decode_state(encode_state([array]))[0]
    assert type(restored) is type(array)
    assert restored.dtype == array.dtype
    assert restored.shape == array.shape
    assert np.array_equal(restored, array)


def test_restored_array_may_be_changed() -> None:
    restored = decode_state(encode_state(np.zeros(3)))
    restored[0] = 1.0
    assert restored[0] == 1.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.Generator().manual_seed(4).get_state(),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(7),
        torch.empty(0),
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_tensors_come_back(tensor: Any) -> None:
    restored = decode_state(encode_state({"tensor": tensor}))["tensor"]
    assert isinstance(restored, torch.Tensor)
    assert restored.dtype == tensor.dtype
    assert torch.equal(restored, tensor)


def test_restored_state_of_a_generator_continues_it() -> None:
    one, other = torch.Generator().manual_seed(4), torch.Generator()
    torch.rand(5, generator=one)
    other.set_state(decode_state(encode_state(one.get_state())))
    assert torch.equal(torch.rand(5, generator=one), torch.rand(5, generator=other))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Stream(), "Stream"),
        ({1, 2}, "set"),
        (open, "builtin_function_or_method"),
        (np.array([Stream()], object), "ndarray"),
        (np.zeros(2, "i4,f8"), "ndarray"),  # its names would be lost
        (1j, "complex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_values_are_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"has a {name}, which cannot be saved"):
        encode_state({"inner": [value]})


def list_that_holds_itself() -> list[Any]:
    state: list[Any] = []
    state.append(state)
    return state


@pytest.mark.parametrize("value", [list_that_holds_itself(), torch.zeros(2, dtype=torch.bfloat16), 10**5000], ids=type)
def test_value_that_cannot_be_encoded_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="the state of the iterator cannot be saved"):
        encode_state([value])


def test_state_above_the_limit_is_refused() -> None:
    noise = random.Random(0).randbytes(MAX_STATE_BYTES)
    encode_state(noise[: MAX_STATE_BYTES // 2])
    with pytest.raises(ConfigError, match=f"takes .* bytes, at most {MAX_STATE_BYTES} are allowed"):
        encode_state(noise)


def test_bytes_that_unpack_to_more_than_the_limit_are_refused() -> None:
    content = encode_state("a" * 10_000)
    with pytest.raises(ConfigError, match="damaged: it is cut off, or too long"):
        decode_state(content, max_bytes=9_000)


@pytest.mark.parametrize("length", [0, 1, 5, -1])
def test_truncated_bytes_are_refused(length: int) -> None:
    content = encode_state({"offset": list(range(50))})
    with pytest.raises(ConfigError, match="the state of a lane is damaged"):
        decode_state(content[:length])


@pytest.mark.parametrize(
    "value",
    [
        [],
        ["object", "os.system"],
        ["bytes"],
        ["bytes", 5],
        ["tensor"],
        ["tensor", "text"],
        ["tensor", ["array", "<U1", [1], "AAAAAA=="]],
        ["dict", 5],
        ["dict", ["list"]],
        ["dict", [["list"], 1]],
        ["array", "<i8"],
        ["array", "|O", [1], "AAAAAAAAAAA="],
        ["array", "<i8", [2**70], ""],
        ["array", "<i8", [3], "AAAAAAAAAAA="],
        ["array", "i4,(", [1], ""],
        ["array", "<U4000000000", [1], ""],
        ["scalar", "<i8", [], ""],
        [1, 2],
    ],
    ids=json.dumps,
)
def test_hostile_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="the state of a lane is damaged"):
        decode_state(zlib.compress(json.dumps(value).encode()))


@pytest.mark.parametrize("text", [b"\xff", b"{", b"[" * 100_000, b"1" * 5000])
def test_hostile_text_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="the state of a lane is damaged"):
        decode_state(zlib.compress(text))


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="the state of a lane is damaged"):
        decode_state(content)
