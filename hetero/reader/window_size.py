"""How many batches and bytes a window may have. Pure, and without imports, because a plan uses the same rules."""

from __future__ import annotations

__all__ = ["MAX_WINDOW_BYTES", "PREFETCH_FACTOR", "WindowGrowth", "window_bytes_of"]

# The default of torch's own loader. With three or four, throughput at batches of 10 MB was 1.08 times as high, but a
# larger window costs memory.
PREFETCH_FACTOR = 2
# Room for two batches of each of 13 endpoints, at the largest batches of bench_transport (40 MB). A rank received at
# most 3.3 GB/s there, so a full window lasts a third of a second.
MAX_WINDOW_BYTES = 2**30
"""Bound of the bytes in the windows of one rank, see `window_bytes_of`."""


def window_bytes_of(memory_bytes: float, num_readers: int) -> int:
    """Return the bound of each window of ``num_readers`` readers that share a memory: a quarter, at most 1 GiB each."""
    return int(min(MAX_WINDOW_BYTES, memory_bytes / 4 / num_readers))


class WindowGrowth:
    """Adds places to a window while its next batch is late. A place is room for one batch.

    A batch that takes 20 times as long as others delays the delivery of all batches after it. The window fills with
    batches that wait for delivery, and the endpoints idle. Therefore, if at least half of the window's batches wait,
    the window gets an additional place for each waiting batch. Then the number of batches in flight is the same as
    before. The window grows to at most eight times its size. It loses one additional place with every sixteenth
    delivery. If it lost all additional places at once, the endpoints would idle while the consumer takes the waiting
    batches. A window seldom grows if its batches take about equally long, or if the consumer is slower than the
    endpoints. All batches beyond the plan (two per endpoint by default, see `Window`) have at most 24 MiB together.

    A simulation made 5 % of batches 20 times slower. It used three seeds, 2, 4, 8 and 16 endpoints, and consumers from
    infinitely fast to 1.25 times slower than the endpoints. Throughput was 0.91 to 1.05 of the throughput of a window
    of fixed size that delivers batches in order of arrival. The ratio can exceed 1 because this window becomes larger.
    Without additional places, the ratio was 0.29 to 0.75.
    """

    MAX_FACTOR = 8
    # If the window lost one place with each delivery, the simulated throughput was only 0.63 to 0.70.
    DELIVERIES_PER_PLACE = 16
    # With 32 MiB, batches of 10 MB from four endpoints took 149 MB of the trainer's memory. The bound is 144 MB: the
    # window of 80 MB, and 64 MB.
    MAX_BYTES = 24 * 2**20

    def __init__(self) -> None:
        self._places = 0.0
        """Additional places. A delivery takes away a sixteenth of a place, and a float holds sixteenths exactly."""

    def is_held_up(self, *, num_waiting: int, size: int) -> bool:
        """Return whether the next batch holds up at least half a window, and add places if it does.

        Each waiting batch adds one place, so as many batches are in flight as before. The window grows to at most
        `MAX_FACTOR` times its size.

        Args:
            num_waiting: Batches that have arrived and wait for the next one.
            size: The window's size.
        """
        if 2 * num_waiting < size:
            return False
        self._places = max(self._places, min(num_waiting, (self.MAX_FACTOR - 1) * size))
        return True

    def delivered(self) -> None:
        """Record a delivery, which takes away a part of an additional place."""
        self._places = max(0.0, self._places - 1 / self.DELIVERIES_PER_PLACE)

    def limit(self, *, num_waiting: int, size: int) -> int:
        """Return how many undelivered batches there may be: ``size``, and those that wait, up to the added places."""
        return size + min(num_waiting, int(self._places))
