"""One pass over a loader: its requests, its deliveries, and its end."""

from __future__ import annotations

import copy
import logging
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from hetero.batches.failures import printable_cause, with_user_type
from hetero.batches.request import BatchRequest
from hetero.control.rank import session as control
from hetero.epochs import epoch_text
from hetero.errors import DatasetError
from hetero.loaders import auditing
from hetero.loaders.checks import check_not_importing
from hetero.loaders.prefetching import Batches, EpochRequests
from hetero.loaders.sampling import PlannedBatch
from hetero.loaders.state import Start
from hetero.torch.lightning_states import is_prefetched, load_pending_state
from hetero.torch.order.made_anew import warn_of_same_order
from hetero.torch.pipeline import Pipeline

__all__ = ["Pass"]

logger = logging.getLogger(__name__)

_PREFETCH_ONE = frozenset({"ray.train.torch.train_loop_utils", "timm.data.loader"})
"""Modules that take the next batch before they give the present one to the loop
(tests/ray/test_prepared_loader.py)."""


class _Feed:
    """Begins one pass, and records its deliveries in the loader.

    The loader's timer refers to this object and not to the pass. Therefore a pass that the script drops can end.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._number = 0
        """Number of the pass in `Progress`. 0 before the pass begins."""
        self._start = Start(0)
        self._prefetched: deque[PlannedBatch] = deque()
        """The batches that a wrapper of the loader has taken, and the loop has not got yet."""
        self.num_prefetched = 0
        """How many batches a wrapper of the loader takes ahead of the loop."""
        self._num_lost = 0
        """Batches that have raised."""
        self._requests: EpochRequests | None = None

    def open(self) -> Batches:
        """Begin the pass, and return its batches. The batches of the next epochs may follow."""
        pipeline = self.pipeline
        # Load the state before anything else, because it decides where this pass begins.
        load_pending_state(pipeline)
        self._number, self._start, planned = pipeline.begin(pipeline.plan)
        # The latest pass is now this one, which no tool consumes. So the loader knows its position again.
        pipeline.consumed_elsewhere = False
        kept = pipeline.prefetched.take(self._start, pipeline.shard())
        if kept is None:
            self._requests = EpochRequests(pipeline, self._start, planned, adds_next_epochs=pipeline.adds_next_epochs)
            batches = pipeline.open(self._requests)
        else:
            batches, self._requests = kept
        return batches

    @property
    def default_order(self) -> tuple[object, ...] | None:
        """The values that decide the order of a whole shuffled epoch with the default seed. None for other passes."""
        options = self.pipeline.options
        if not options.shuffle or not self.pipeline.has_own_order or options.has_seed or self._start.batches:
            return None
        return self._start.num_samples, self._number, options.order

    def keep(self, batches: Batches) -> None:
        """Let the loader keep the source of the batches after the pass, if the batches of the next epoch follow."""
        assert self._requests is not None
        self.pipeline.prefetched.keep(batches, self._requests)

    @property
    def is_pass_over(self) -> bool:
        """Whether all batches of the pass were delivered or have raised. False also if this is not known yet."""
        return self._requests is not None and self._requests.is_pass_over()

    def delivered(self, request: BatchRequest, batch: Any) -> int:
        """Record in the ledger and in the position that a batch is delivered. Return the number of its samples."""
        auditing.enter(self.pipeline, request, batch)
        self._passed()
        return request.work.num_samples

    def lost(self, request: BatchRequest) -> None:
        """Record that a batch raised, and log the first such batch.

        Both this pass and a pass that resumes from a state taken now continue with the next batch.
        """
        self._num_lost += 1
        self._passed()
        if self._num_lost == 1:
            logger.warning(
                "loader %s: batch %d of epoch %s raised an exception. If the script continues, the pass leaves it out",
                self.pipeline.name,
                request.position,
                epoch_text(request.epoch),
            )

    def _passed(self) -> None:
        """Count a batch in the loader's position, or an earlier batch if a wrapper takes batches ahead of the loop."""
        assert self._requests is not None
        self._prefetched.append(self._requests.passed())
        if len(self._prefetched) > self.num_prefetched:
            self._count_oldest()

    def _count_oldest(self) -> None:
        """Set the loader's position after the oldest batch in `_prefetched`, which the loop has got now."""
        oldest = self._prefetched.popleft()
        state = oldest.sampler_state
        self.pipeline.progress.advance(
            self._number, batches=oldest.position + 1, sampler=state, num_drawn=oldest.num_drawn
        )
        self.pipeline.note_delivered(self._number, state)

    def exhausted(self) -> None:
        """Record the end of the pass, and log how many of its batches have raised."""
        # The loop has got all batches, also those that a wrapper of the loader had taken ahead.
        while self._prefetched:
            self._count_oldest()
        if self._num_lost:
            logger.warning(
                "loader %s: epoch %s ended without %d batches that raised exceptions",
                self.pipeline.name,
                epoch_text(self._start.number),
                self._num_lost,
            )
        # Without padding, this rank may have one batch fewer than other ranks. The position must be the same on all.
        if self.pipeline.sampler_order is None:
            count = self.pipeline.num_global_batches(self._start)
            self.pipeline.progress.advance(self._number, batches=count)
        self.pipeline.note_completed(self._number)


class Pass(Iterator[Any]):
    """One pass over a loader. Dropping or closing it discards the batches in flight.

    After a batch that raised, the next call returns the following batch, as with torch's loader. If the pass cannot
    continue after an exception (the endpoints are gone, the sampler raised), every further call raises the exception
    again. A loop that logs exceptions and continues therefore cannot mistake the failure for the end of the epoch.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._feed = _Feed(pipeline)
        self._batches: Batches | None = None
        self._failure: BaseException | None = None
        """Exception that ended the pass. Each further call of ``next`` raises it again."""
        self._has_delivered_all = False
        """Whether the last batch was delivered, and the loader has taken over the source of the batches."""
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank, as ``len(loader)``."""
        return self.pipeline.num_batches()

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived.

        Raises:
            ConfigError: If the script is only being imported.
            DatasetError: If the user's code raises. The error is also an instance of the user's exception type.
            SystemExit: If the job was asked to stop. The stop callbacks run before this is raised.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise StopIteration
        timer = self.pipeline.begin_wait(self._feed)
        try:
            control.check_stop(timer)
            if self._has_delivered_all:
                raise StopIteration
            # The pass begins with its first batch, not with ``iter(loader)``.
            if self._batches is None:
                check_not_importing()
                caller = sys._getframe(1).f_globals.get("__name__")
                # A prefetcher holds one batch that the loop has not got. The state must not count this batch, because a
                # resumed run would skip it.
                self._feed.num_prefetched = int(caller in _PREFETCH_ONE or is_prefetched())
                self._batches = self._feed.open()
                warn_of_same_order(self, self.pipeline, self._feed.default_order)
                # If nothing was left of the epoch, the pass has no batches and is over already.
                self._hand_over_source()
                if self._has_delivered_all:
                    raise StopIteration
            batch = next(self._batches)
            request = self._batches.request
        except StopIteration:
            self._feed.exhausted()
            self.close()
            raise
        except DatasetError as error:
            typed = with_user_type(error)
            # One batch has raised, and the batches after it may still come. Otherwise the pass has failed as a whole.
            if self._batches is not None and self._batches.is_open and self._batches.request is not None:
                # Count this batch in the state, because a resumed run must not request it again.
                self._feed.lost(self._batches.request)
                self._hand_over_source()
                self.pipeline.end_timing(self._feed)
            else:
                self._fail(typed)
            try:
                raise typed from printable_cause(error)
            finally:
                del typed  # its traceback holds this frame and the script's frames
        except BaseException as error:
            self._fail(error)
            raise
        assert request is not None
        timer.end_wait(self._feed.delivered(request, batch))
        # Do this now, because the script may not call ``next`` again after the last batch.
        self._hand_over_source()
        return batch

    def _hand_over_source(self) -> None:
        """If the last batch of the pass was delivered, let the loader keep the source of the batches.

        Do this with the last batch and not at the next call of ``next``, because the script may never make this call,
        as with ``for _ in range(len(loader))``.
        """
        if self._batches is not None and self._feed.is_pass_over:
            self._has_delivered_all = True
            batches, self._batches = self._batches, None
            self._feed.keep(batches)

    def _fail(self, error: BaseException) -> None:
        """Close the pass, and keep the exception for all further calls of ``next``."""
        self.close()
        # Keep a copy without the traceback, whose frames hold this pass and the variables of the training function.
        try:
            self._failure = copy.copy(error).with_traceback(None)
            # copy.copy leaves the cause out.
            self._failure.__cause__ = error.__cause__
        except Exception:  # noqa: BLE001 - a user's exception that cannot be copied
            self._failure = error

    def close(self) -> None:
        """Discard the batches in flight. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        batches, self._batches = self._batches, None
        self.pipeline.end_timing(self._feed)
        if batches is not None:
            batches.close()

    def __del__(self) -> None:
        # The reader is freed with this pass, and then closes itself. It is not closed here, because the garbage
        # collector may run this method, and must not wait for the reader's locks.
        self.pipeline.end_timing(self._feed)
