"""How many vCPUs, hosts or slots suffice."""

from __future__ import annotations

import pytest

from hetero.metrics.headspace import needed_for_headspace, number_for_headspace


@pytest.mark.parametrize(
    ("vcpus", "utilisation", "number"),
    [
        (96, 0.6, 160),  # the published example: 8 accelerators of 20 vCPUs each
        (8, 0.3, 27),
        (36, 0.89, 41),
        (8, 1.0, 8),
        (7, 0.7, 10),  # 10.000000000000002 in floating point
    ],
)
def test_vcpus_that_suffice_are_those_of_now_divided_by_the_utilisation(
    vcpus: int, utilisation: float, number: int
) -> None:
    assert number_for_headspace(1 / utilisation, 1 / vcpus) == number


def test_number_that_need_not_be_whole_has_the_same_formula() -> None:
    # 20 batches/s. A slot that computes 90 % of its time makes 0.9 of them.
    assert needed_for_headspace(20, 0.9) == pytest.approx(22.2, abs=0.03)
    assert number_for_headspace(20, 0.9) == 23
