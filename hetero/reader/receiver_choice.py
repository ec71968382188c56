"""Who should receive the batches of a data set that are not large: the consumer itself, or fetchers.

To wake a fetcher, and the consumer, for each batch takes longer than to transfer a small one. But what fetchers receive
while the consumer is away costs it no time. Therefore fetchers receive, unless the consumer takes batches in quick
succession.
"""

from __future__ import annotations

__all__ = ["ReceiverChoice"]

_NUM_ROUNDS = 16
"""Number of batches from one choice to the next."""
_MAX_AWAY_S = 0.5e-3
"""Largest mean time away of a consumer that receives.

Up to 0.4 ms it was quicker in nearly all loops, up to 1.9 times. From 0.5 ms on, loops that sleep or compute natively,
as a training step does, were quicker with fetchers: see "Who receives" in benchmarks/README.md.
"""


class ReceiverChoice:
    """The choice for one data set. bench_transport pays for it.

    For one consumer: loaders that take turns to read the same data set in several threads may choose badly.
    """

    def __init__(self) -> None:
        self.is_consumer = False
        """Whether the consumer should receive the batches that are requested next."""
        self._num_rounds = 0
        self._away_s = 0.0  # in these rounds
        self._left_s: float | None = None

    def come_back(self, now_s: float) -> None:
        """Note that the consumer calls ``next``, at this monotonic time."""
        if self._left_s is None:
            return
        self._num_rounds += 1
        self._away_s += now_s - self._left_s
        if self._num_rounds == _NUM_ROUNDS:
            # Not a median, which takes a loop that computes after several batches for a quick one. The time away
            # hardly depends on who receives, so the choice does not change its own figure.
            self.is_consumer = self._away_s <= _NUM_ROUNDS * _MAX_AWAY_S
            self._num_rounds, self._away_s = 0, 0.0

    def leave(self, now_s: float) -> None:
        """Note that the consumer gets a batch, at this monotonic time."""
        self._left_s = now_s
