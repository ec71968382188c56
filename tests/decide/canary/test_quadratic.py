"""What the runs do not exclude: a part of the time that grows with the square of the data."""

from __future__ import annotations

import re

import pytest

from hetero.decide.canary.forecast import forecast
from hetero.decide.canary.model import Candidate
from hetero.decide.canary.points import CanaryPoint
from tests.support.canary import job, work


def shown(points: tuple[CanaryPoint, ...]) -> Candidate:
    return forecast(Candidate(name="x", groups=("trainer=x:1",), points=points)).candidate


def longest_s(found: Candidate) -> float | None:
    matches = (re.search(r"do not exclude ([\d,]+) s", note) for note in found.notes)
    return next((float(match[1].replace(",", "")) for match in matches if match), None)


def with_square(fraction: float) -> float:
    """Return the time of a job. Its square adds a tenth to the growth at 3 %, and 333 % to the whole."""
    return 2 + 1000 * fraction * (1 + fraction * 0.1 / 0.03)


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_square_that_no_rule_sees_is_within_the_stated_bound(noise: float) -> None:
    for seed in range(10):
        found = shown(job(with_square, noise=noise, seed=seed))
        assert found.refused("time") == ()
        bound_s = longest_s(found)
        assert bound_s is not None
        assert bound_s > with_square(1) + 5
        assert "Runs on larger fractions would show it." in found.notes[0]


def test_ten_percent_refuse_the_square_and_need_no_note_for_a_line() -> None:
    for seed in range(10):
        fractions = (0.01, 0.03, 0.1)
        curved = shown(job(with_square, noise=0.01, seed=seed, fractions=fractions))
        assert "curved" in {refusal.rule for refusal in curved.refused("time")}
        assert longest_s(curved) is None
        straight = shown(job(lambda fraction: 2 + 1000 * fraction, noise=0.01, seed=seed, fractions=fractions))
        assert straight.refusals == ()
        assert straight.notes == ()


def test_steps_of_loaders_do_not_grow_with_the_square() -> None:
    points = job(
        lambda fraction: 1 + 7200 * fraction,
        noise=0.001,
        more=lambda fraction: {"loaders": (work(fraction, step_s=2.4 * 0.99),)},
    )
    found = shown(points)
    assert found.refused("time") == ()
    assert longest_s(found) is None
