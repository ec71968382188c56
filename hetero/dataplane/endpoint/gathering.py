"""Gathers the samples of a batch from the hosts that keep them.

With a cache, each sample is kept by one host: its home. The reader names one endpoint of each home in its request. The
endpoint that has the request asks those for their samples at once, on the thread of the connection. When the parts have
arrived, its compute thread computes the samples that it keeps itself, and collates.

So compute threads do not wait for each other: each takes batches and parts in the order of their steps. Only an
endpoint that has nothing else to do begins before the parts have arrived. If they do not come soon, it computes them
too. So a slow host does not slow the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetero.batches.request import BatchRequest
from hetero.dataplane.endpoint.parts import Links, Parts
from hetero.wire.limits import Limits

__all__ = ["Gathering"]

_POLL_S = 0.02
_MIN_PATIENCE_S = 0.5
"""How long an endpoint waits for parts if it has nothing else to do. It waits at least as long as its own part took."""


class Gathering:
    """The samples of one batch that other hosts keep. Use it as a context manager, and `positions` with `fetch`.

    Args:
        request: The batch, with homes.
        limits: Bounds of the batch.
        links: Links to the endpoints of the homes.
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
        assert request.homes is not None
        self._homes = request.homes
        self._helpers = request.helpers
        self._clock = clock
        self._parts = Parts(request, limits=limits, links=links, on_refused=on_refused)
        self._is_used = False

    @property
    def num_parts(self) -> int:
        """Endpoints that have computed samples of the batch."""
        return 1 + self._parts.num_taken

    def __enter__(self) -> Gathering:
        for number, helper in enumerate(self._helpers, 1):
            positions = np.flatnonzero(self._homes == number).tolist()
            if positions:
                self._parts.ask(helper, positions, is_anew=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.give_up()

    def wait(self) -> bool:
        """Block until all parts have arrived or failed, at most 20 ms. Return whether that is so."""
        return self._parts.wait(_POLL_S, for_all=True)

    def positions(self, samples: list[Any], *, is_cancelled: Callable[[], bool]) -> Iterator[int]:
        """See `hetero.batches.request.ChoosePositions`. A second call computes all samples here.

        Args:
            samples: The samples of the batch.
            is_cancelled: Whether the batch is no longer wanted.
        """
        if self._is_used:
            yield from range(len(samples))
            return
        self._is_used = True
        begin_s = self._clock()
        yield from np.flatnonzero(self._homes == 0).tolist()
        patience_s = max(_MIN_PATIENCE_S, self._clock() - begin_s)
        yield from self._parts.rest(samples, patience_s=patience_s, clock=self._clock, is_cancelled=is_cancelled)
