"""The Pareto front of plots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero.decide.pages.front import pareto_front


def test_front_has_the_items_that_no_other_beats() -> None:
    items = {"fast": (1.0, 9.0), "cheap": (9.0, 1.0), "both": (5.0, 5.0), "beaten": (5.0, 6.0), "unknown": None}
    assert pareto_front(list(items), lambda item: items[item]) == ["fast", "cheap", "both"]


def test_equal_items_are_all_on_the_front() -> None:
    assert pareto_front([(1, 1), (1, 1)], lambda item: item) == [(1, 1), (1, 1)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_every_item_outside_of_the_front_is_beaten_by_one_on_it(items: list[tuple[int, int, int]]) -> None:
    front = pareto_front(items, lambda item: item)
    for item in items:
        beaten = any(all(a <= b for a, b in zip(other, item, strict=True)) and other != item for other in front)
        assert beaten != (item in front)
