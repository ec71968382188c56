"""Batches for a tool's loader. The tool first gets the indices of a batch, and passes them back to get the batch."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from hetero.batches.failures import printable_cause, with_user_type
from hetero.batches.indexed import IndexedWork
from hetero.batches.indices import as_indices
from hetero.batches.request import BatchRequest
from hetero.errors import ConfigError, DatasetError
from hetero.loaders import auditing
from hetero.loaders.checks import check_not_importing
from hetero.loaders.prefetching import Batches, EpochRequests
from hetero.loaders.sampling import PlannedBatch
from hetero.loaders.state import Start
from hetero.torch.pipeline import Pipeline

__all__ = ["RequestedBatch", "ViewPass"]

_MARGIN = 64  # number of yielded batches to keep, in case a tool fetches them late


class RequestedBatch(list[Any]):
    """The indices of one batch as tools expect them, and the data needed to fetch it."""

    def __init__(
        self, planned: PlannedBatch, number: int, source: ViewPass | None, request: BatchRequest | None = None
    ) -> None:
        super().__init__(planned.work.labels)
        self.planned = planned
        self.number = number
        """Number of this batch among those that the batch sampler yields."""
        self.source = source
        """Pass that fetches this batch. None in a worker process."""
        self._request = request

    @property
    def request(self) -> BatchRequest:
        """Request for this batch. It is made on first use, because most batches belong to other ranks."""
        if self._request is None:
            assert self.source is not None
            self._request = self.source.request(self.planned)
        return self._request

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        """Return one index. Reject a slice, because a part of a batch has no request."""
        if isinstance(key, slice):
            raise ConfigError(
                "a batch of a hetero DataLoader cannot be split over ranks (accelerate's split_batches=True)\n"
                "  Leave split_batches out: batch_size is that of one rank."
            )
        return super().__getitem__(key)

    def __iadd__(self, others: Iterable[Any]) -> RequestedBatch:  # type: ignore[misc]
        """Return the batch filled up with the indices of earlier samples. accelerate's even_batches calls this."""
        filled = as_indices([*self, *others])
        # The samples that are added came once before in this epoch, so they get other random draws now.
        occurrences = np.ones(len(filled), dtype=np.uint32)
        work = self.planned.work
        assert isinstance(work, IndexedWork)
        occurrences[: len(self)] = 0 if work.occurrences is None else work.occurrences
        planned = dataclasses.replace(self.planned, work=IndexedWork(filled, occurrences))
        return RequestedBatch(planned, self.number, self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.source is not None:
            # The pass cannot go with the batch to another process. That process fetches the batch itself.
            self.source.leaves_process()
        return RequestedBatch, (self.planned, self.number, None, self.request)


class ViewPass:
    """One pass over a view. It yields `RequestedBatch` objects. When the tool passes one back, fetch its batch.

    A tool may skip batches at the beginning. Then it consumes every n-th batch. From the first fetched batch on, the
    pass prefetches every n-th batch, with the n that the tool has used so far.
    """

    def __init__(self, pipeline: Pipeline, *, all_ranks: bool) -> None:
        self._pipeline = pipeline
        self._all_ranks = all_ranks
        self._planned: Iterator[PlannedBatch] = iter(())
        self._batches: deque[RequestedBatch] = deque()
        """The latest batches that were planned, in order."""
        self._num_planned = 0
        self._last_position = 0
        """Position of the global batch that was planned last."""
        self._num_handed_out = 0
        """Batches whose indices the tool has got."""
        self._expected: int | None = None
        """Number of the batch that the reader returns next. None before the first batch is fetched."""
        self._last: int | None = None
        """Number of the batch that was fetched last. None before the first one."""
        self._start = Start(0)
        self._reader: Batches | None = None
        self._requests: EpochRequests | None = None
        """Requests of the reader."""
        self._is_over = False
        """Whether the tool has got all indices, or has dropped the iterator over them."""
        self._timing = object()
        """Identifies this pass in the loader's timing."""

    def __iter__(self) -> Iterator[RequestedBatch]:
        """Begin the pass. Yield its batches, each of which the tool may pass to `fetch`.

        Raises:
            ConfigError: If the script is only being imported.
        """
        check_not_importing()
        pipeline = self._pipeline
        number, start, self._planned = pipeline.begin(functools.partial(pipeline.plan, all_ranks=self._all_ranks))
        self._begin(start)
        try:
            while (batch := self._get(self._num_handed_out)) is not None:
                self._num_handed_out += 1
                pipeline.note_delivered(number, batch.planned.sampler_state)
                yield batch
            pipeline.note_completed(number)
        # This also runs if the tool drops this iterator.
        finally:
            self._is_over = True
            self._end_reading()
            pipeline.end_timing(self._timing)

    def request(self, planned: PlannedBatch) -> BatchRequest:
        """Return the request for a batch of this pass."""
        return self._pipeline.request(planned, self._start.number)

    def filling(self, indices: Sequence[Any]) -> RequestedBatch:
        """Return a batch of earlier samples. accelerate's even_batches requests it for a rank without a batch."""
        # Each sample came once before in this epoch, so it gets other random draws now.
        occurrences = np.ones(len(indices), dtype=np.uint32)
        planned = PlannedBatch(self._last_position, IndexedWork(as_indices(indices), occurrences))
        return RequestedBatch(planned, self._num_planned, self)

    def leaves_process(self) -> None:
        """Record that a process of the tool fetches a batch, which the ledger cannot see."""
        auditing.note_unseen(self._pipeline)

    def fetch(self, batch: RequestedBatch) -> Any:
        """Return the batch. Block until it has arrived.

        Raises:
            ConfigError: If the batch belongs to another rank.
            DatasetError: If the user's code raises.
        """
        # Reject a batch that another rank has to fetch.
        own_rank = self._pipeline.shard().rank
        if batch.planned.rank not in (None, own_rank):
            raise ConfigError(
                f"rank {own_rank} was asked to fetch a batch of rank {batch.planned.rank}\n"
                "  loader.batch_sampler yields the batches of all ranks in turn, for tools that shard it as accelerate "
                "does.\n  Iterate over the hetero DataLoader itself; with accelerate leave out dispatch_batches=True."
            )
        # Wait for the batch, as `Pass` does.
        timer = self._pipeline.await_step(self._timing)
        try:
            fetched = next(self._reader_at(batch))
        except StopIteration:
            # The end of an iterable is known only now. It ends the tool's loop too.
            if self._pipeline.options.lanes is not None:
                self._pipeline.end_timing(self._timing)
                raise
            raise ConfigError(
                "the batches of the pass ended, but the tool that rebuilt the loader requests more"
            ) from None
        except BaseException as error:
            self._close_reader()
            self._pipeline.end_timing(self._timing)
            if isinstance(error, DatasetError):
                raise with_user_type(error) from printable_cause(error)
            raise
        assert self._reader is not None
        assert self._reader.request is not None
        # Record that the batch is delivered.
        auditing.enter(self._pipeline, self._reader.request, fetched)
        timer.end_wait(len(batch))
        self._last = batch.number
        assert self._requests is not None
        self._requests.passed()
        # accelerate with even_batches=False fetches its last batch after it has got all indices.
        if self._is_over or self._requests.is_pass_over():
            self._end_reading()
        if self._is_over:
            self._pipeline.end_timing(self._timing)
        return fetched

    def _begin(self, start: Start) -> None:
        """Prepare the pipeline for a pass of a tool, which begins at ``start``."""
        self._start = start
        self._pipeline.consumed_elsewhere = True
        self._pipeline.fill_up = self.filling if self._all_ranks else None
        # Guess the stride of the first pass. A tool that gets the batches of all ranks takes every R-th batch. A user's
        # sampler yields only the batches of this rank.
        if self._pipeline.stride is None:
            yields_all_ranks = self._pipeline.sampler_order is None and self._all_ranks
            self._pipeline.stride = self._pipeline.shard().world_size if yields_all_ranks else 1

    def _reader_at(self, batch: RequestedBatch) -> Batches:
        """Return a reader whose next batch is ``batch``. Open a new reader if the tool did not continue as expected."""
        # accelerate's even_batches may have added samples to the planned batch. `RequestedBatch.__iadd__` then returned
        # another batch with the same number. An open reader has requested the planned batch, so a new reader is needed.
        was_filled_up = self._get(batch.number) is not batch
        if self._reader is None or batch.number != self._expected or was_filled_up:
            self._close_reader()
            if self._last is not None and batch.number > self._last:
                # The tool has skipped batches, so the stride was wrong. Use the distance between its last two batches.
                self._pipeline.stride = batch.number - self._last
            # With `is_first`, a reader that was kept since the last epoch may be used, and requests of the next epoch
            # follow. The kept reader has requested the planned batch, so a filled-up batch never counts as first.
            self._open_reader(batch, self._pipeline.stride or 1, is_first=self._last is None and not was_filled_up)
            assert self._reader is not None
        self._expected = batch.number + (self._pipeline.stride or 1)
        return self._reader

    def _open_reader(self, batch: RequestedBatch, stride: int, *, is_first: bool) -> None:
        """Open a reader of ``batch`` and of every n-th batch after it, where n is ``stride``.

        The requests of the next epoch follow only if this is the first batch that the tool fetches in the pass
        (``is_first``), and the tool has skipped none. Such a tool takes its batches at the same places in the next
        epoch. A tool that skips batches to resume does so in one epoch only, so its places change.
        """
        pipeline, chosen = self._pipeline, (batch.number, stride, int(self._all_ranks))
        # A number of at least n means that the tool has skipped batches.
        adds_next = is_first and batch.number < stride and pipeline.adds_next_epochs
        kept = pipeline.prefetched.take(self._start, pipeline.shard(), selection=chosen) if adds_next else None
        if kept is None:
            # Batches that were kept for a pass with another start or other places will not be used.
            pipeline.prefetched.discard()
            planned = self._following(batch, stride)
            self._requests = EpochRequests(pipeline, self._start, planned, adds_next_epochs=adds_next, selection=chosen)
            self._reader = pipeline.open(self._requests)
        else:
            self._reader, self._requests = kept

    def _following(self, batch: RequestedBatch, stride: int) -> Iterator[PlannedBatch]:
        """Yield the plan of ``batch``, and of every ``stride``-th batch after it."""
        following: RequestedBatch | None = batch
        while following is not None:
            yield following.planned
            following = self._get(following.number + stride)

    def _end_reading(self) -> None:
        """Pass the reader to the loader, which keeps it for the next epoch or closes it (`Prefetched.keep`)."""
        reader, self._reader = self._reader, None
        if reader is not None and self._requests is not None:
            self._pipeline.prefetched.keep(reader, self._requests)

    def _get(self, number: int) -> RequestedBatch | None:
        """Return the batch with this number, and plan batches up to it.

        Return None if the pass has fewer batches, or if the batch was dropped because later batches were used.
        """
        while self._num_planned <= number:
            planned = next(self._planned, None)
            if planned is None:
                return None
            self._batches.append(RequestedBatch(planned, self._num_planned, self))
            self._last_position = planned.position
            self._num_planned += 1
        oldest = self._batches[0].number
        if number < oldest:
            return None
        found = self._batches[number - oldest]
        # Keep `_MARGIN` earlier batches, because the tool may fetch some late. Drop older ones, to limit memory.
        while self._batches[0].number < min(self._num_handed_out, number) - _MARGIN:
            self._batches.popleft()
        return found

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
