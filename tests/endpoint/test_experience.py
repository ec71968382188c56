"""Which thread of an endpoint sends the next batch of a data set."""

from __future__ import annotations

import pytest

from hetero.endpoint.batches import Experience


@pytest.mark.parametrize(
    ("nbytes", "took_s", "expected"),
    [
        (10_000, 0.0, True),
        (10_000, 1.0, True),
        (1_000_000, 0.0001, True),  # ready-made
        (1_000_000, 0.001, False),
        (10_000_000, 0.0001, False),
    ],
)
def test_compute_thread_sends_small_batches_and_medium_ones_that_were_ready(
    nbytes: int, took_s: float, expected: bool
) -> None:
    experience = Experience()
    assert not experience.is_sent_at_once  # nothing is known before the first
    experience.latest_bytes, experience.latest_s = nbytes, took_s
    assert experience.is_sent_at_once is expected
