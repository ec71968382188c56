"""Gathers the samples of a batch from the hosts that keep them.

With a cache, each sample is kept by one host: its owner. The reader names one endpoint of each owner, a helper, in its
request. The endpoint that gets the request asks the helpers for their samples at once, on the thread of the connection.
The samples of one helper are a *part* of the batch. When the parts have arrived, the endpoint's compute thread computes
the samples that its own host keeps, and collates the batch. So compute threads never wait for each other.

If a part does not come for 5 s while the endpoint has nothing else to do, the endpoint computes the samples of the part
too. It does not ask that helper again for a while. So a slow host does not slow the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetero.batches.request import BatchRequest
from hetero.endpoint.parts import Links, Parts
from hetero.system.waits import SHORT_POLL_S
from hetero.wire.limits import Limits

__all__ = ["Gathering"]

_PATIENCE_S = 5.0
"""Longest time to wait for parts while the endpoint has nothing else to do."""
_MAX_WAIT_S = 30.0
"""Longest time to wait for parts in any case."""


class Gathering:
    """The samples of one batch that other hosts keep. A context manager, which asks for them at its entry.

    Pass `positions` to `hetero.batches.fetch.fetch`.

    Args:
        request: The batch, with owners.
        limits: Bounds of the batch.
        links: Links to the endpoints of the owners.
        on_refused: Called if the samples of this data set cannot be sent.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        request: BatchRequest,
        *,
        limits: Limits,
        links: Links,
        on_refused: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert request.owners is not None
        self._owners = request.owners
        """For each sample, the number of its owner in `_helpers`, from 1. 0 for a sample of this host."""
        self._helpers = request.helpers
        """One endpoint of each other host that keeps samples of the batch."""
        self._clock = clock
        self._links = links
        self._parts = Parts(request, limits=limits, links=links, on_refused=on_refused)
        self._was_iterated = False
        """Whether `positions` was called."""
        self._begin_s = self._latest_busy_s = clock()
        """When the wait for parts began, and when this endpoint last had something else to do."""

    @property
    def num_parts(self) -> int:
        """Number of answers that the batch is made of: this endpoint's own, and the parts of other endpoints."""
        return 1 + self._parts.num_taken

    def __enter__(self) -> Gathering:
        """Ask the helpers for their samples. Does not block."""
        for number, helper in enumerate(self._helpers, 1):
            # A helper that was late is not asked. This endpoint then computes the helper's samples.
            if not self._links.is_avoided(helper):
                self._parts.ask(helper, np.flatnonzero(self._owners == number).tolist())
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.give_up()

    def wait(self, *, is_busy: bool) -> bool:
        """Block for at most 50 ms. Return whether to compute the batch now, with or without the missing parts.

        Args:
            is_busy: Whether this endpoint has something else to do.
        """
        if self._parts.wait(SHORT_POLL_S):
            return True
        now_s = self._clock()
        if is_busy:
            # The wait costs nothing while this endpoint computes something else. So `_PATIENCE_S` counts from the
            # latest moment when it had something else to do.
            self._latest_busy_s = now_s
        late_helpers = [part.helper for part in self._parts.missing if not part.has_ended]
        # If all these helpers are avoided, another batch has already waited for them in vain. Do not wait again.
        if all(map(self._links.is_avoided, late_helpers)):
            return True
        is_over = now_s - self._latest_busy_s > _PATIENCE_S or now_s - self._begin_s > _MAX_WAIT_S
        if is_over:
            for helper in late_helpers:
                self._links.avoid(helper)
        return is_over

    def positions(self, samples: list[Any]) -> Iterator[int]:
        """Yield the positions of the samples to compute here, and put the samples of other endpoints into the list.

        If called a second time, yield the positions of all samples.

        Args:
            samples: The samples of the batch.
        """
        if self._was_iterated:
            # `fetch` computes a batch again if the first time imported torch, because torch was not seeded until then.
            self._parts.begin_again()
            yield from range(len(samples))
            return
        self._was_iterated = True
        # Compute this host's own samples first, because parts of other endpoints may still arrive meanwhile.
        yield from self._positions_not_asked_for
        # Take the parts that have arrived, and compute the samples of the other parts.
        yield from self._parts.take_or_compute(samples)

    @property
    def _positions_not_asked_for(self) -> list[int]:
        """Positions of the samples that no other endpoint was asked for."""
        asked = {position for part in self._parts.asked for position in part.positions}
        return [position for position in range(len(self._owners)) if position not in asked]
