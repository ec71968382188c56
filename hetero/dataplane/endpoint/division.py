"""Lets other endpoints compute parts of a batch that takes long.

A reader that has fewer batches in flight than endpoints names idle endpoints in its request: the helpers. The endpoint
that has the request begins alone. If the batch then turns out to take long, it asks each helper for a part, and
computes its own part meanwhile. Then it computes what has not arrived, from the end. So a helper that is slow, busy or
dead costs nothing but the time of its part, and two endpoints that help each other cannot wait for each other for ever.
Only the asking endpoint collates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from hetero.batches.build import BuiltDataset
from hetero.batches.request import BatchRequest
from hetero.batches.structure.plain import is_plain
from hetero.dataplane.endpoint.parts import Links, Parts
from hetero.wire.limits import Limits

__all__ = ["Division"]

_ASK_AFTER_S = 0.05
"""A batch that is computed in this time is never divided."""
_WORTH_S = 0.2
"""Time that the rest of a batch must take."""
_PATIENCE = 0.25
"""How long to wait for the last parts, as a share of the time for this endpoint's own part."""
_MIN_PATIENCE_S = 0.05
_MIN_PART_S = 0.05
"""Time that each part must take. To ask a helper takes about 20 ms."""

logger = logging.getLogger(__name__)


class Division:
    """Shares the samples of one batch with helpers. Use it as a context manager, and `positions` with `fetch`.

    For the compute thread.

    Args:
        request: The batch.
        built: Its data set, which is divisible.
        limits: Bounds of the batch.
        links: Links to the helpers.
        on_refused: Called if the samples of this data set cannot be sent.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        request: BatchRequest,
        built: BuiltDataset,
        *,
        limits: Limits,
        links: Links,
        on_refused: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._built = built
        self._on_refused = on_refused
        self._clock = clock
        self._parts = Parts(request, limits=limits, links=links, on_refused=on_refused)

    @property
    def num_parts(self) -> int:
        """Endpoints that have computed samples of the batch, in the latest computation."""
        return 1 + self._parts.num_taken

    def __enter__(self) -> Division:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.give_up()

    def positions(self, samples: list[Any], *, is_cancelled: Callable[[], bool]) -> Iterator[int]:
        """See `hetero.batches.request.ChoosePositions`. May be called again for the same batch.

        Args:
            samples: The samples of the batch.
            is_cancelled: Whether the batch is no longer wanted.
        """
        self._parts.begin_again()
        begin_s = self._clock()
        position, end = 0, len(samples)
        while position < end:
            yield position
            position += 1
            took_s = self._clock() - begin_s
            rest_s = took_s / position * (end - position)
            if not self._parts and took_s >= _ASK_AFTER_S and rest_s >= _WORTH_S:
                if not all(map(is_plain, samples[:position])):
                    self._on_refused()
                    yield from range(position, end)
                    return
                end = self._ask(position, end, max_parts=int(rest_s / _MIN_PART_S))
        if self._parts:
            patience_s = max(_MIN_PATIENCE_S, _PATIENCE * (self._clock() - begin_s))
            yield from self._parts.rest(samples, patience_s=patience_s, clock=self._clock, is_cancelled=is_cancelled)

    def _ask(self, begin: int, end: int, *, max_parts: int) -> int:
        """Ask the helpers for parts of the samples from ``begin`` to ``end - 1``. Return where the own part ends."""
        num_parts = min(len(self._request.helpers) + 1, end - begin, max_parts)
        bounds = [begin + (end - begin) * number // num_parts for number in range(num_parts + 1)]
        for helper, part_begin, part_end in zip(self._request.helpers, bounds[1:], bounds[2:], strict=False):
            self._parts.ask(helper, range(part_begin, part_end), is_anew=self._built.is_loading_anew)
        logger.debug("batch %d is computed in %d parts", self._request.position, num_parts)
        return bounds[1]
