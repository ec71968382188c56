"""The Pareto front of a plot of costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["pareto_front"]

_T = TypeVar("_T")


def pareto_front(items: Sequence[_T], costs_of: Callable[[_T], Sequence[float] | None]) -> list[_T]:
    """Return the items that no other item beats.

    An item beats another one if none of its costs is higher and at least one is lower.

    Args:
        items: The items.
        costs_of: Returns the costs of an item, the lower the better, or None to leave the item out.
    """
    known = [(item, tuple(costs)) for item in items if (costs := costs_of(item)) is not None]
    return [
        item
        for item, costs in known
        if not any(
            other != costs and all(one <= two for one, two in zip(other, costs, strict=True)) for _, other in known
        )
    ]
