"""The batches of a pass over an iterable, without their reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.batches.lanes.pieces import LaneReport
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest
from hetero.errors import ProtocolError
from hetero.loaders.lanes.passes import Lanes
from hetero.loaders.prefetching import Batches, EpochRequests

__all__ = ["LaneBatches"]


class LaneBatches:
    """The batches of a pass, without their reports. See `Batches`.

    Args:
        batches: The batches with their reports.
        lanes: The loader's lanes.
        requests: The requests of the batches.
    """

    def __init__(self, batches: Batches, lanes: Lanes, requests: EpochRequests) -> None:
        self._batches = batches
        self._lanes = lanes
        self._requests = requests
        self.request: BatchRequest | None = None
        """Request of the batch that `next` returned or raised an exception for. Its work is what the batch has."""

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived, and until all ranks have theirs."""
        try:
            return self._next()
        except StopIteration:
            raise
        except BaseException:
            self.request = self._batches.request
            # Without this batch, the ranks cannot agree on an end. So the pass is over.
            if self._lanes.lose():
                self.close()
            raise

    def _next(self) -> Any:
        """Return the next batch."""
        while True:
            try:
                answer = next(self._batches)
            except StopIteration:
                self._lanes.agree_on_end()
                self._lanes.note_end()
                raise
            request = self._batches.request
            assert request is not None
            assert isinstance(request.work, LaneWork)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise ProtocolError("the batch of an iterable came without its report")
            batch, content = answer
            report = LaneReport.from_array(content, request.work.pieces)
            step = request.position
            self._lanes.received(request.work, report, step=step)
            self._lanes.agree(step)
            if self._lanes.is_over(step):
                self._lanes.note_end()
                self.close()
                raise StopIteration
            work = request.work.delivered(report)
            least = request.work.num_samples if self._lanes.options.drops_rest else 1
            if work.num_samples >= least:
                self.request = replace(request, work=work)
                return batch
            self._lanes.pass_over(step)
            self._requests.passed()  # the lanes of this batch are over

    def __iter__(self) -> LaneBatches:
        return self

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return self._batches.is_open

    @property
    def may_be_kept(self) -> bool:
        """Whether this object may stay open between two passes. The lanes of the next pass are not known yet."""
        return False

    def close(self) -> None:
        """Discard the batches in flight. Idempotent."""
        self._batches.close()
