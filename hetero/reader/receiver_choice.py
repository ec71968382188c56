"""Who should receive the batches of a data set that are not large: the consumer itself, or fetchers.

To wake a fetcher and the consumer for each batch takes longer than to transfer a small batch. But batches that fetchers
receive while the consumer is away cost the consumer no time. Therefore fetchers receive the batches, unless the
consumer takes batches in quick succession.
"""

from __future__ import annotations

__all__ = ["ReceiverChoice"]

_NUM_ROUNDS = 16
"""Number of batches from one choice to the next."""
_MAX_AWAY_S = 0.5e-3
"""Largest mean time away of a consumer that receives.

With up to 0.4 ms away, nearly all loops were quicker if the consumer received, up to 1.9 times. From 0.5 ms on, loops
that sleep or compute in native code, as a training step does, were quicker with fetchers: see "Who receives" in
benchmarks/README.md.
"""


class ReceiverChoice:
    """The choice for one data set and one consumer. benchmarks/bench_transport.py shows the gain.

    If loaders in several threads take turns to read the same data set, the choice may be bad.
    """

    def __init__(self) -> None:
        self.is_consumer = False
        """Whether the consumer should receive the batches that are requested next."""
        self._num_rounds = 0
        """Rounds since the last choice. In a round the consumer gets a batch, works on it, and comes back for more."""
        self._away_s = 0.0
        """Seconds that the consumer has worked on batches in these rounds, all together."""
        self._left_s: float | None = None
        """Monotonic time when the consumer got its last batch. None before the first batch."""

    def come_back(self, now_s: float) -> None:
        """Record that the consumer calls ``next``, at this monotonic time. Every 16 calls, choose who receives.

        A consumer that was away only for a short time between two batches receives the next batches itself. If the
        consumer was away for longer, fetchers can receive in this time.
        """
        if self._left_s is None:
            return
        self._num_rounds += 1
        self._away_s += now_s - self._left_s
        if self._num_rounds == _NUM_ROUNDS:
            # Use the mean. If a loop computes only once after several batches, its median time away is short.
            # The time away hardly depends on who receives, so a choice does not influence the next one.
            self.is_consumer = self._away_s <= _NUM_ROUNDS * _MAX_AWAY_S
            self._num_rounds, self._away_s = 0, 0.0

    def leave(self, now_s: float) -> None:
        """Record that the consumer gets a batch, at this monotonic time."""
        self._left_s = now_s
