"""Keys of samples and batches, and the generators that they seed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.seeds import (
    BUILD_KEY,
    batch_key,
    preserved_generators,
    sample_key,
    seed_generators,
)
from hetero.errors import ConfigError
from hetero.spec import Index

torch = pytest.importorskip("torch")

# Pinned: a change here changes every user's augmentation without a word.
GOLDEN_SAMPLES: list[tuple[tuple[int, int, Index, int], int]] = [
    ((0, 0, 0, 0), 15900084721624219352),
    ((17, 3, 123_456, 2), 12817778423830201045),
    ((-1, 2**64 - 1, 2**63 - 1, 2**32 - 1), 13129757167907809122),
    ((17, 3, "cat/001.jpg", 0), 8833614999026255369),
    ((17, 3, (4, -5), 1), 11145214263541393253),
]
GOLDEN_KEYS: list[tuple[Index, int]] = [
    (2**63, 3286154751759976235),
    (-(2**200), 13665166153718353004),
    (0.5, 2401318576667726147),
    (b"a", 12973001623140222538),
    (None, 11179728260453723181),
    (("a", 1, None), 8106889602387191056),
    ([1, 2], 13521776782066513173),
    ([(1, [2.5])], 12658795196142044964),
]
GOLDEN_BATCHES: list[tuple[tuple[int, int, int, Any], int]] = [
    ((0, 0, 0, (1, 2)), 11839635230241892452),
    ((17, 3, 9, ("a", "b")), 5467696574772190780),
    ((17, 3, 9, (1, "b", (2, 3))), 15884849706267058495),
]


@pytest.mark.parametrize(("arguments", "key"), GOLDEN_SAMPLES)
def test_sample_key_is_stable(arguments: tuple[int, int, Index, int], key: int) -> None:
    assert sample_key(*arguments) == key


@pytest.mark.parametrize(("index", "key"), GOLDEN_KEYS)
def test_sample_key_of_keys_of_any_type_is_stable(index: Index, key: int) -> None:
    assert sample_key(17, 3, index, 1) == key


def test_sample_key_of_booleans_is_that_of_integers() -> None:
    assert sample_key(17, 3, True, 0) == sample_key(17, 3, 1, 0)
    assert sample_key(17, 3, (False, 2), 0) == sample_key(17, 3, (0, 2), 0)


@pytest.mark.parametrize(("arguments", "key"), GOLDEN_BATCHES)
def test_batch_key_is_stable(arguments: tuple[int, int, int, Any], key: int) -> None:
    assert batch_key(*arguments) == key


def test_build_key_is_stable() -> None:
    assert BUILD_KEY == 6337877450997525374


int64 = st.integers(-(2**63), 2**63 - 1)
plain = st.one_of(st.integers(), st.text(max_size=6), st.floats(allow_nan=False), st.binary(max_size=6), st.none())
index = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.lists(inner, max_size=3), max_leaves=6
)
small = st.integers(-2, 2)
near = st.tuples(
    small,
    st.integers(0, 2),
    small | st.sampled_from(["", "a", "\0"]) | st.lists(small, max_size=2).map(tuple),
    st.integers(0, 2),
)
far = st.tuples(int64, st.integers(0, 2**64 - 1), index, st.integers(0, 2**32 - 1))


@given(st.lists(near | far, max_size=40, unique_by=repr))
def test_sample_key_of_different_fields_never_collides(fields: list[tuple[int, int, Any, int]]) -> None:
    keys = {sample_key(*each) for each in fields}
    assert len(keys) == len(fields)
    assert all(0 <= key < 2**64 for key in keys)


indices = st.lists(
    small | st.sampled_from(["", "a", "ab", "b"]) | st.lists(small, max_size=2).map(tuple) | index, max_size=4
)


@given(
    st.lists(st.tuples(small, st.integers(0, 2), st.integers(0, 2), indices.map(tuple)), max_size=40, unique_by=repr)
)
def test_batch_key_of_different_fields_never_collides(fields: list[tuple[int, int, int, Any]]) -> None:
    assert len({batch_key(*each) for each in fields}) == len(fields)


@given(st.lists(int64, max_size=5))
def test_batch_key_of_array_and_tuple_is_the_same(values: list[int]) -> None:
    key = batch_key(1, 2, 3, tuple(values))
    assert key == batch_key(1, 2, 3, np.array(values, dtype=np.int64))
    assert key == batch_key(1, 2, 3, [np.int64(value) for value in values])  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments",
    [(2**63, 0, 0, 0), (0, -1, 0, 0), (0, 0, 0, 2**32), (0, 0, 1j, 0), (0, 0, (1j,), 0)],
)
def test_sample_key_out_of_range_raises(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="no key for seed="):
        sample_key(*arguments)


@pytest.mark.parametrize("arguments", [(0, 0, -1, (1,)), (0, 0, 0, (1j,))])
def test_batch_key_out_of_range_raises(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="no key for seed="):
        batch_key(*arguments)


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


@given(st.integers(0, 2**64 - 1))
def test_seed_generators_with_same_key_repeats_all_draws(key: int) -> None:
    seed_generators(key)
    first = draw()
    draw()
    seed_generators(key)
    assert draw() == first


@given(st.integers(0, 2**64 - 1))
def test_seed_generators_seeds_as_the_libraries_own_functions_do(key: int) -> None:
    draw()  # leaves the second of a pair of normal numbers in each
    seed_generators(key)
    numpy_state: Any = np.random.get_state(legacy=False)
    states = (random.getstate(), numpy_state["state"]["key"].tolist(), numpy_state["has_gauss"], torch.get_rng_state())
    random.seed(key)
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key % 2**63)  # then initial_seed() is an int64
    numpy_state = np.random.get_state(legacy=False)
    assert states[:3] == (random.getstate(), numpy_state["state"]["key"].tolist(), numpy_state["has_gauss"])
    assert torch.equal(states[3], torch.get_rng_state())


def test_seed_generators_draws_agree_with_none_of_the_others() -> None:
    seed_generators(0x12345678_12345679)
    streams = (
        [random.getrandbits(32) for _ in range(4)],
        np.random.randint(0, 2**32, 4, dtype=np.uint32).tolist(),
        (torch.empty(4, dtype=torch.int64).random_(0, 2**32)).tolist(),
    )
    assert len({number for stream in streams for number in stream}) == 12


def test_preserved_generators_puts_all_three_back() -> None:
    seed_generators(5)
    draw()
    with preserved_generators():
        expected = draw()
        seed_generators(6)
    assert draw() == expected


def draw_then_raise() -> None:
    draw()
    raise ConfigError("on purpose")


def test_preserved_generators_left_by_exception_puts_all_three_back() -> None:
    seed_generators(5)
    expected = draw()
    seed_generators(5)
    with pytest.raises(ConfigError), preserved_generators():
        draw_then_raise()
    assert draw() == expected
