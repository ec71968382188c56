"""Lets other endpoints compute parts of a batch that takes long.

A reader that has fewer batches in flight than endpoints names idle endpoints in its request: the helpers. The endpoint
that has the request begins alone. If the batch then turns out to take long, it asks each helper for a part, and
computes its own part meanwhile. Then it computes what has not arrived, from the end. So a helper that is slow, busy or
dead costs nothing but the time of its part, and two endpoints that help each other cannot wait for each other for ever.
Only the asking endpoint collates.

The samples are the same wherever they are computed, and whatever part of them each endpoint computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hetero.batches.build import BuiltDataset
from hetero.batches.request import BatchRequest, Helper
from hetero.batches.structure.plain import is_plain
from hetero.dataplane.endpoint.failures import record_of
from hetero.dataplane.endpoint_link import Call, EndpointLink
from hetero.errors import DatasetError
from hetero.wire import requests
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import Limits

__all__ = ["Division"]

_ASK_AFTER_S = 0.05
"""A batch that is computed in this time is never divided."""
_WORTH_S = 0.2
"""Time that the rest of a batch must take."""
_MIN_PART_S = 0.05
"""Time that each part must take. To ask a helper takes about 20 ms."""
_FETCH_TIMEOUT_S = 600.0
_POLL_S = 0.1
_PATIENCE = 0.25
"""How long to wait for the last parts, as a share of the time for this endpoint's own part."""
_MIN_PATIENCE_S = 0.05
_SPARE_BYTES = 2**20

logger = logging.getLogger(__name__)


class Division:
    """Shares the samples of one batch with helpers. Use it as a context manager, and `positions` with `fetch`.

    For the compute thread. Each helper has a thread that waits for its part.

    Args:
        request: The batch.
        built: Its data set, which is divisible.
        limits: Bounds of the batch.
        connect: Opens a link to a helper.
        is_cancelled: Whether the batch is no longer wanted.
        on_refused: Called if the samples of this data set cannot be sent.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        request: BatchRequest,
        built: BuiltDataset,
        *,
        limits: Limits,
        connect: Callable[[Helper], EndpointLink],
        is_cancelled: Callable[[], bool],
        on_refused: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._built = built
        self._limits = limits
        self._connect = connect
        self._is_cancelled = is_cancelled
        self._on_refused = on_refused
        self._clock = clock
        self._changed = threading.Condition()
        self._parts: list[_Part] = []
        self.num_parts = 1
        """Endpoints that have computed samples of the batch, in the latest computation."""

    def __enter__(self) -> Division:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()

    def positions(self, samples: list[Any]) -> Iterator[int]:
        """See `hetero.batches.request.ChoosePositions`. May be called again for the same batch."""
        self._give_up()
        self.num_parts = 1
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
            yield from self._rest(samples, patience_s=max(_MIN_PATIENCE_S, _PATIENCE * (self._clock() - begin_s)))

    def _ask(self, begin: int, end: int, *, max_parts: int) -> int:
        """Ask the helpers for parts of the samples from ``begin`` to ``end - 1``. Return where the own part ends."""
        num_parts = min(len(self._request.helpers) + 1, end - begin, max_parts)
        bounds = [begin + (end - begin) * number // num_parts for number in range(num_parts + 1)]
        for helper, part_begin, part_end in zip(self._request.helpers, bounds[1:], bounds[2:], strict=False):
            part = _Part(helper, part_begin, part_end, is_anew=self._built.is_loading_anew)
            self._parts.append(part)
            thread = threading.Thread(target=self._fetch, args=(part,), name=f"part-{helper.endpoint_id}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the host runs out of threads
                part.conclude(str(error))
        logger.debug("batch %d is computed in %d parts", self._request.position, num_parts)
        return bounds[1]

    def _rest(self, samples: list[Any], *, patience_s: float) -> Iterator[int]:
        """Put the parts that arrive into the list, and yield the positions of those that do not."""
        patient_until_s = self._clock() + patience_s
        while True:
            for part in self._parts:
                if part.missing and part.has_ended:
                    self._take(part, samples)
            missing = [part for part in self._parts if part.missing]
            if not missing:
                return
            failed = next((part for part in missing if part.is_failed), None)
            remaining_s = patient_until_s - self._clock()
            if failed is None and remaining_s > 0 and not self._is_cancelled():
                with self._changed:
                    if not any(part.has_ended for part in missing):
                        self._changed.wait(min(_POLL_S, remaining_s))
                continue
            part = failed or missing[-1]
            yield part.missing.pop()
            if not part.missing:
                part.cancel()

    def _take(self, part: _Part, samples: list[Any]) -> None:
        """Put the samples of a part into the list, unless its helper has failed."""
        if part.is_failed:
            return
        found, problem = None, part.problem
        if part.decoder is not None:
            try:
                found = part.decoder.result()
            except Exception as error:  # noqa: BLE001 - this endpoint computes the part then
                problem = str(error)
            part.decoder = None
        if type(found) is not list or len(found) != part.end - part.begin:
            part.is_failed = True
            problem = problem or "the answer has another number of samples"
            logger.debug("%s did not help with batch %d: %s", part.helper.endpoint_id, self._request.position, problem)
            if part.is_refused:
                self._on_refused()
            return
        self.num_parts += 1
        for position in part.missing:
            samples[position] = found[position - part.begin]
        part.missing.clear()

    def _fetch(self, part: _Part) -> None:
        """Ask a helper for its part, and wait for it. Runs in a thread of the part."""
        problem = ""
        try:
            limits = self._limits_of(part)
            message = requests.serialize(
                dataclasses.replace(
                    self._request,
                    work=self._request.work.part(part.begin, part.end),
                    verify=False,
                    compression=None,
                    helpers=(),
                    is_part=True,
                    is_anew=part.is_anew,
                ),
                limits,
            )
            decoder = BatchDecoder(limits, request=message)
            with contextlib.closing(self._connect(part.helper)) as link:
                link.attend()
                link.fetch(message, decoder, timeout_s=_FETCH_TIMEOUT_S, on_call=part.on_call)
            part.decoder = decoder
        except Exception as error:  # noqa: BLE001 - the asking endpoint computes the part then
            # Keep only the text, because the exception refers to frames that hold the samples.
            problem = str(error) or type(error).__name__
            part.is_refused = isinstance(error, DatasetError) and record_of(error).stage == "encode"
        with self._changed:
            part.conclude(problem)
            self._changed.notify_all()

    def _limits_of(self, part: _Part) -> Limits:
        """Return the bounds of a part: twice its share of the batch, because samples may be larger before collation."""
        share = 2 * self._limits.max_batch_bytes * (part.end - part.begin) // self._request.work.num_samples
        return self._limits.within(share + _SPARE_BYTES)

    def _give_up(self) -> None:
        """Cancel the parts that have not arrived."""
        for part in self._parts:
            part.cancel()
        self._parts = []


class _Part:
    """The samples that one helper is asked for."""

    def __init__(self, helper: Helper, begin: int, end: int, *, is_anew: bool) -> None:
        self.helper = helper
        self.begin = begin
        self.end = end
        self.is_anew = is_anew
        self.missing = list(range(begin, end))
        """Positions that neither the helper nor this endpoint has computed."""
        self.decoder: BatchDecoder | None = None
        self.problem = ""
        """Why the part did not arrive."""
        self.is_refused = False
        """Whether the helper's samples cannot be sent."""
        self.has_ended = False
        """Whether the part has arrived or its helper has failed."""
        self.is_failed = False
        self._is_cancelled = False
        self._call: Call | None = None

    def conclude(self, problem: str) -> None:
        """Record that the part has arrived, or why it did not."""
        self.problem = problem
        self.has_ended = True

    def on_call(self, call: Call) -> None:
        """Note the call. This needs no lock: of this and `cancel`, at least one sees what the other has set."""
        self._call = call
        if self._is_cancelled:
            call.cancel()

    def cancel(self) -> None:
        """End the call for the part, if it has begun or will begin. Idempotent. Any thread."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()
