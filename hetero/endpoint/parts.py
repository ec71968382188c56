"""Asks other endpoints for parts of a batch: for some of its samples, uncollated.

The samples are the same, no matter which endpoint computes which of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hetero.batches.request import BatchRequest, Helper
from hetero.endpoint.link import Call, EndpointLink
from hetero.errors import DatasetError
from hetero.system.waits import MAX_BACKOFF_S
from hetero.wire import requests
from hetero.wire.faults import CallFailedError
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import MAX_HELPERS, Limits

__all__ = ["Links", "Part", "Parts"]

_SPARE_BYTES = 2**20
_SMALL_PART = 128
"""Samples of one part. The answer to a request has at most 1,024 arrays."""
_MAX_PER_HELPER = 8
"""Largest number of parts that one helper is asked for. If the helper has more samples, its parts are larger."""

logger = logging.getLogger(__name__)


class Links:
    """This endpoint's links to other endpoints, which stay open for later parts. Thread-safe.

    At most `MAX_HELPERS` links without a part in progress stay open. The least recently used links are closed first.

    Args:
        connect: Opens a link to an endpoint.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, connect: Callable[[Helper], EndpointLink], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[Helper, EndpointLink] = {}
        """Open links, the least recently used first."""
        self._num_users: Counter[EndpointLink] = Counter()
        """Number of parts in progress over each link that is in use."""
        self._avoided_until_s: dict[Helper, float] = {}
        """Monotonic time until which a helper that was late is not asked."""
        self._logged_as_late: set[Helper] = set()

    def fetch(self, helper: Helper, message: bytes, decoder: BatchDecoder, *, on_call: Callable[[Call], None]) -> None:
        """Ask an endpoint for a part and receive it into ``decoder``. Blocks.

        Raises:
            DatasetError, ProtocolError, CallFailedError, AuthenticationError: As in `EndpointLink`.
        """
        with self._attended(helper) as link:
            try:
                # No timeout is needed, because the asking endpoint cancels the call when it no longer needs the part.
                link.fetch(message, decoder, timeout_s=math.inf, on_call=on_call)
            except CallFailedError as error:
                # If the endpoint only failed to compute this part, the link stays open for later parts.
                if error.fault.is_loss:
                    self._forget(helper, link)
                raise

    def avoid(self, helper: Helper) -> None:
        """Do not ask an endpoint for ten seconds, because its part was late. Log this the first time."""
        with self._lock:
            self._avoided_until_s[helper] = self._clock() + MAX_BACKOFF_S
            is_new = helper not in self._logged_as_late
            self._logged_as_late.add(helper)
        if is_new:
            logger.warning(
                "samples from %s did not come in time. They are computed here, and it is not asked for %g s",
                helper.endpoint_id,
                MAX_BACKOFF_S,
            )

    def is_avoided(self, helper: Helper) -> bool:
        """Return whether a part of an endpoint was late in the last ten seconds."""
        with self._lock:
            if self._avoided_until_s.get(helper, 0.0) > self._clock():
                return True
            self._avoided_until_s.pop(helper, None)
            return False

    @contextlib.contextmanager
    def _attended(self, helper: Helper) -> Iterator[EndpointLink]:
        """Yield a link that is ready for a fetch."""
        with self._lock:
            link = self._links.pop(helper, None)
            if link is None:
                link = self._connect(helper)
            # Put the link at the end of the dict, because `_release` closes unused links from the beginning.
            self._links[helper] = link
            self._num_users[link] += 1
        try:
            try:
                link.attend()
            except CallFailedError:
                # The link has failed, so the next part gets a new link.
                self._forget(helper, link)
                raise
            yield link
        finally:
            self._release(link)

    def _release(self, link: EndpointLink) -> None:
        """Record that a part no longer uses the link. Close the oldest unused links beyond `MAX_HELPERS`."""
        with self._lock:
            self._num_users[link] -= 1
            if not self._num_users[link]:
                del self._num_users[link]
            idle = [helper for helper, each in self._links.items() if each not in self._num_users]
            dropped = [self._links.pop(helper) for helper in idle[: max(0, len(idle) - MAX_HELPERS)]]
        for each in dropped:
            each.close()

    def _forget(self, helper: Helper, link: EndpointLink) -> None:
        """Close a link that has failed. The next part for the helper gets a new link."""
        with self._lock:
            if self._links.get(helper) is link:
                del self._links[helper]
        link.close()


class Part:
    """The samples that one endpoint is asked for.

    Args:
        helper: The endpoint.
        positions: Positions of the samples in the batch.
    """

    def __init__(self, helper: Helper, positions: Sequence[int]) -> None:
        self.helper = helper
        self.positions = tuple(positions)
        self.missing = list(positions)
        """Positions that neither the helper nor this endpoint has computed."""
        self.decoder: BatchDecoder | None = None
        """The answer that has arrived. None before that, and after its samples were taken."""
        self.problem = ""
        """Why the part did not arrive."""
        self.is_refused = False
        """Whether the helper has computed the samples, and cannot send them uncollated."""
        self.has_ended = False
        """Whether the part has arrived or its helper has failed."""
        self.is_failed = False
        """Whether the part has ended without samples that can be used, so this endpoint computes them."""
        self._is_cancelled = False
        self._call: Call | None = None

    def conclude(self, problem: str) -> None:
        """Record that the part has arrived, or why it did not."""
        self.problem = problem
        self.has_ended = True

    def on_call(self, call: Call) -> None:
        """Keep the call for `cancel`, or end the call if `cancel` came first.

        No lock is needed. Each of the two methods sets its attribute before it reads the other's.
        """
        self._call = call
        if self._is_cancelled:
            call.cancel()

    def cancel(self) -> None:
        """End the call for the part, if it has begun or will begin. Idempotent. Any thread."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()


class Parts:
    """The parts of one batch. For each part a thread waits.

    All methods except `give_up` are for one thread at a time.

    Args:
        request: The batch.
        limits: Bounds of the batch.
        links: Links to the other endpoints.
        on_refused: Called if the samples of this data set cannot be sent.
    """

    def __init__(
        self, request: BatchRequest, *, limits: Limits, links: Links, on_refused: Callable[[], object]
    ) -> None:
        self._request = request
        self._limits = limits
        self._links = links
        self._on_refused = on_refused
        self._changed = threading.Condition()
        self.asked: list[Part] = []
        """The parts that were asked for."""
        self.num_taken = 0
        """Parts whose samples are in the batch."""

    @property
    def missing(self) -> list[Part]:
        """The parts whose samples are not in the batch yet."""
        return [part for part in self.asked if part.missing]

    def ask(self, helper: Helper, positions: Sequence[int]) -> None:
        """Ask an endpoint for the samples at some positions, in one or several parts. Does not block.

        Args:
            helper: The endpoint.
            positions: The positions, which no other part has.
        """
        # A helper with many samples gets larger parts, so that it has `_MAX_PER_HELPER` parts at most.
        part_samples = max(_SMALL_PART, math.ceil(len(positions) / _MAX_PER_HELPER))
        for begin in range(0, len(positions), part_samples):
            part = Part(helper, positions[begin : begin + part_samples])
            self.asked.append(part)
            thread = threading.Thread(target=self._fetch, args=(part,), name=f"part-{helper.endpoint_id}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the host runs out of threads
                part.conclude(str(error))

    def wait(self, timeout_s: float) -> bool:
        """Block until all parts have ended. Return False if the time was over first."""
        with self._changed:
            return self._changed.wait_for(lambda: all(part.has_ended for part in self.missing), timeout_s)

    def take_or_compute(self, samples: list[Any]) -> Iterator[int]:
        """Put the parts that have arrived into the list, and yield the positions of samples to compute here instead.

        If a part arrives while its samples are computed here, the samples that are still missing are taken from it.

        Args:
            samples: The samples of the batch.
        """
        while True:
            for part in self.missing:
                if part.has_ended and not part.is_failed:
                    self._take(part, samples)
            missing = self.missing
            if not missing:
                return
            # Compute samples of a part that has failed first, because the other parts may still arrive. If none has
            # failed, take the part that was asked for last, because it will probably arrive last.
            part = next((part for part in missing if part.is_failed), missing[-1])
            yield part.missing.pop()
            # All samples of the part are computed here, so the part is no longer needed.
            if not part.missing:
                part.cancel()

    def give_up(self) -> None:
        """Cancel the parts that have not arrived. Any thread."""
        for part in self.asked:
            part.cancel()

    def begin_again(self) -> None:
        """Cancel the parts that have not arrived, and forget all."""
        self.give_up()
        self.asked = []
        self.num_taken = 0

    def _take(self, part: Part, samples: list[Any]) -> None:
        """Put the samples of a part that has ended into the list. If the part has failed, set ``is_failed`` instead."""
        found, problem = None, part.problem
        if part.decoder is not None:
            try:
                found = part.decoder.result()
            except Exception as error:  # noqa: BLE001 - this endpoint computes the part then
                problem = str(error)
            # Drop the decoder, also if the part failed, because it keeps samples in memory.
            part.decoder = None
        if type(found) is not list or len(found) != len(part.positions):
            part.is_failed = True
            problem = problem or "the answer has another number of samples"
            logger.debug("%s did not help with batch %d: %s", part.helper.endpoint_id, self._request.position, problem)
            if part.is_refused:
                self._on_refused()
            return
        self.num_taken += 1
        # This endpoint may have computed some samples of the part already. Take only the missing ones.
        by_position = dict(zip(part.positions, found, strict=True))
        for position in part.missing:
            samples[position] = by_position[position]
        part.missing.clear()

    def _fetch(self, part: Part) -> None:
        """Ask a helper for its part, and wait for the answer. Raises nothing. Runs in a thread of the part."""
        problem = ""
        try:
            limits = self._limits_of(part)
            # The part is the same request for fewer samples, without the options that are for whole batches.
            request = dataclasses.replace(
                self._request,
                work=self._request.work.part(part.positions),
                verify=False,
                compression=None,
                helpers=(),
                owners=None,
                is_part=True,
            )
            message = requests.serialize(request, limits)
            decoder = BatchDecoder(limits, request=message)
            self._links.fetch(part.helper, message, decoder, on_call=part.on_call)
            part.decoder = decoder
        except Exception as error:  # noqa: BLE001 - the asking endpoint computes the part then
            # Keep only the text, because the exception refers to frames that hold the samples.
            problem = str(error) or type(error).__name__
            # A failure in the stage "encode" means that the helper has computed the samples, and cannot send them. No
            # helper will be asked for parts of this data set again.
            part.is_refused = isinstance(error, DatasetError) and error.record.stage == "encode"
        with self._changed:
            part.conclude(problem)
            self._changed.notify_all()

    def _limits_of(self, part: Part) -> Limits:
        """Return the bounds of a part: twice its share of the batch, because samples may be larger before collation."""
        share = 2 * self._limits.max_batch_bytes * len(part.positions) // self._request.work.num_samples
        return self._limits.within(share + _SPARE_BYTES)
