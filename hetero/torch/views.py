"""What tools see of a loader: accelerate, Lightning and others rebuild loaders from its attributes.

They read ``dataset``, ``batch_sampler``, ``sampler`` and ``collate_fn`` and make
a new loader of these, often torch's own. So that this one too yields the right
batches, prefetched,

- ``batch_sampler`` yields lists of indices that carry their request,
- ``dataset`` answers such a list with the whole batch, fetched as the loader
  itself would have,
- ``collate_fn`` lets a whole batch pass.

accelerate shards a batch sampler by taking every R-th batch, so ``batch_sampler``
yields the batches of all ranks, interleaved. ``sampler`` is a
``DistributedSampler``, which tells Lightning that sharding is done.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np
import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

from hetero.batches.request import BatchRequest, as_indices
from hetero.control import session as control
from hetero.datasets import DatasetSpec
from hetero.errors import ConfigError
from hetero.torch.local import LocalDataset
from hetero.torch.pipeline import Pipeline, current_shard
from hetero.torch.sampling import PlannedBatch
from hetero.torch.state import Start

__all__ = ["BatchSamplerView", "CollateView", "DatasetView", "SamplerView", "unwrap_collate_fn", "unwrap_dataset"]

_MARGIN = 64  # batches kept behind the first that may still be wanted


class RequestedBatch(list[Any]):
    """The indices of one batch as tools expect them, with what is needed to fetch it."""

    def __init__(
        self, planned: PlannedBatch, number: int, source: _ViewPass | None, request: BatchRequest | None = None
    ) -> None:
        indices = planned.indices
        super().__init__(indices if isinstance(indices, tuple) else indices.tolist())
        self.planned = planned
        self.number = number
        """Of this batch in what the batch sampler yields."""
        self.source = source
        """Who fetches it; None in a worker process."""
        self._request = request

    @property
    def request(self) -> BatchRequest:
        """What to fetch; made when it is asked for, since most batches of all ranks are other ranks'."""
        if self._request is None:
            assert self.source is not None
            self._request = self.source.request(self.planned)
        return self._request

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        if isinstance(key, slice):
            raise ConfigError(
                "a batch of a hetero DataLoader cannot be split over ranks (accelerate's split_batches=True)\n"
                "  Leave split_batches out: batch_size is that of one rank."
            )
        return super().__getitem__(key)

    def __iadd__(self, others: Iterable[Any]) -> RequestedBatch:  # type: ignore[misc]
        """Return the batch filled up with indices that came before, as accelerate's even_batches does."""
        filled = as_indices([*self, *others])
        occurrences = np.ones(len(filled), dtype=np.uint32)
        occurrences[: len(self)] = 0 if self.planned.occurrences is None else self.planned.occurrences
        planned = dataclasses.replace(self.planned, indices=filled, occurrences=occurrences)
        return RequestedBatch(planned, self.number, self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestedBatch, (self.planned, self.number, None, self.request)


class FetchedBatch:
    """A whole batch on its way from `DatasetView` to `CollateView`."""

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class CollateView:
    """The loader's ``collate_fn``; lets through what is a batch already."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        """Return the fetched batch, or collate samples that came another way."""
        return samples.batch if isinstance(samples, FetchedBatch) else self.collate_fn(samples)


class DatasetView(torch.utils.data.Dataset[Any]):
    """The loader's data set: answers requests, and otherwise behaves like the user's object or spec."""

    def __init__(self, local: LocalDataset) -> None:
        self.local = local
        self._is_worker = False

    @property
    def subject(self) -> Any:
        """The user's object or spec."""
        return self.local.subject

    def __len__(self) -> int:
        return len(self.subject)

    def __getitem__(self, index: Any) -> Any:
        """Return a requested batch, or a sample of a data set object."""
        if isinstance(index, RequestedBatch):
            return self._fetch(index)
        return self._samples()[index]

    def __getitems__(self, indices: Any) -> Any:
        """Return a requested batch, or samples of a data set object."""
        if isinstance(indices, RequestedBatch):
            return self._fetch(indices)
        samples = self._samples()
        batched = getattr(samples, "__getitems__", None)
        return [samples[index] for index in indices] if batched is None else batched(indices)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "local":
            raise AttributeError(name)
        return getattr(self.local.subject, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _fetch(self, batch: RequestedBatch) -> FetchedBatch:
        if batch.source is not None:
            return FetchedBatch(batch.source.fetch(batch))
        info = torch.utils.data.get_worker_info()
        if info is not None and not self._is_worker:
            self.local.start_worker(info.id)
            self._is_worker = True
        return FetchedBatch(self.local.fetch(batch.request))

    def _samples(self) -> Any:
        """Return the data set object, for indices that this loader did not plan."""
        if isinstance(self.subject, DatasetSpec):
            raise ConfigError(
                f"data set {self.subject} was asked for samples that its loader did not plan\n"
                "  A tool rebuilt the loader without its batch sampler, or the script indexes loader.dataset.\n"
                "  Pass the hetero DataLoader itself, or fetch samples through one with batch_size=None."
            )
        return self.subject


class SamplerView(DistributedSampler[Any]):
    """The loader's own order over the samples of this rank."""

    def __init__(self, pipeline: Pipeline, dataset: DatasetView) -> None:
        # Not the base's __init__: it reads the process group, which may not be there yet.
        self.pipeline = pipeline
        self.dataset = dataset
        self.shuffle = pipeline.shuffle
        self.seed = pipeline.seed
        self.drop_last = pipeline.drop_last

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """World size."""
        return current_shard().world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank."""
        return current_shard().rank

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the next pass."""
        return self.pipeline.progress.next_start().epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.pipeline.set_epoch(epoch, by_tool=True)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's indices in order; where samples come single, with their requests."""
        if not self.pipeline.collate:
            yield from _ViewPass(self.pipeline, all_ranks=False)
            return
        for planned in self.pipeline.plan(self.pipeline.progress.next_start()):
            yield from planned.indices if isinstance(planned.indices, tuple) else planned.indices.tolist()

    def __len__(self) -> int:
        return self.pipeline.order().num_samples_of(current_shard())


class BatchSamplerView(torch.utils.data.BatchSampler):
    """The loader's batches; a loader's own yields those of all ranks, a rebuilt one those of this rank.

    Args:
        sampler: A `SamplerView`, or any other sampler, over which it works like torch's class.
        batch_size: As torch's; may be None with a `SamplerView`, whose own is taken.
        drop_last: As torch's.
    """

    def __init__(self, sampler: Any, batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self.pipeline: Pipeline | None = getattr(sampler, "pipeline", None)
        self.all_ranks = False
        if batch_size is None:
            if self.pipeline is None:
                raise ConfigError("a tool replaced the sampler of a hetero DataLoader without its batch size")
            batch_size = self.pipeline.batch_size
        if self.pipeline is not None and drop_last != self.pipeline.drop_last:
            # Lightning predicts for every sample.
            self.pipeline = copy.copy(self.pipeline)
            self.pipeline.drop_last = drop_last
        self._batch_size = batch_size
        self._drop_last = drop_last

    @classmethod
    def of_loader(cls, pipeline: Pipeline, sampler: Any) -> BatchSamplerView:
        """Return the view that a loader shows; ``sampler`` is the user's, or a `SamplerView`."""
        view = cls(sampler, pipeline.batch_size or 1, pipeline.drop_last)
        view.pipeline = pipeline
        view.all_ranks = True
        return view

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """As torch's; None where the last batches of several ranks are shorter.

        accelerate then takes batches as they are, instead of filling up the last of
        each rank with samples of others, which is not the order of this loader.
        """
        pipeline = self.pipeline
        if self.all_ranks and pipeline is not None and pipeline.sampler_order is None:
            world_size = current_shard().world_size
            if world_size > 1 and pipeline.order().is_ragged(world_size):
                return None
        return self._batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """As torch's."""
        return self._drop_last

    @property
    def rank_batch_size(self) -> int | None:
        """Samples per batch and rank."""
        return self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        if self.pipeline is not None:
            self.pipeline.set_epoch(epoch, by_tool=True)

    def __iter__(self) -> Iterator[list[Any]]:
        if self.pipeline is not None:
            return iter(_ViewPass(self.pipeline, all_ranks=self.all_ranks))
        assert self._batch_size is not None
        return iter(torch.utils.data.BatchSampler(self.sampler, self._batch_size, self._drop_last))

    def __len__(self) -> int:
        if self.pipeline is None:
            assert self._batch_size is not None
            return len(torch.utils.data.BatchSampler(self.sampler, self._batch_size, self._drop_last))
        if self.all_ranks and self.pipeline.sampler_order is None:
            order = self.pipeline.order()
            world_size = current_shard().world_size
            shards = (type(current_shard())(rank, world_size) for rank in range(world_size))
            return sum(order.num_batches(shard) for shard in shards)
        return self.pipeline.num_batches()


class _ViewPass:
    """One pass over a view: hands out requests, and fetches those that come back.

    A tool may pass over batches and takes every n-th of the others; those after the
    first that it fetches are prefetched on the assumption that it goes on like this.
    """

    def __init__(self, pipeline: Pipeline, *, all_ranks: bool) -> None:
        self._pipeline = pipeline
        self._all_ranks = all_ranks
        self._planned: Iterator[PlannedBatch] = iter(())
        self._batches: deque[RequestedBatch] = deque()
        self._epoch = 0
        self._num_planned = 0
        self._num_handed_out = 0
        self._expected: int | None = None
        self._last: int | None = None
        self._reader: Iterator[Any] | None = None
        self._is_over = False
        self._timing = object()

    def __iter__(self) -> Iterator[RequestedBatch]:
        pipeline = self._pipeline
        plan = pipeline.plan_of_all_ranks if self._all_ranks else pipeline.plan
        _number, start, self._planned = pipeline.begin(plan)
        self._begin(start)
        try:
            while (batch := self._get(self._num_handed_out)) is not None:
                self._num_handed_out += 1
                yield batch
        finally:
            self._is_over = True
            self._close_reader()
            pipeline.end_timing(self._timing)

    def request(self, planned: PlannedBatch) -> BatchRequest:
        """Return the request for a batch of this pass."""
        return self._pipeline.request(planned, self._epoch)

    def fetch(self, batch: RequestedBatch) -> Any:
        """Return the batch; blocks.

        Raises:
            ConfigError: If it is another rank's.
            DatasetError: If the user's code raises.
        """
        own_rank = current_shard().rank
        if batch.planned.rank not in (None, own_rank):
            raise ConfigError(
                f"rank {own_rank} was asked to fetch a batch of rank {batch.planned.rank}\n"
                "  loader.batch_sampler yields the batches of all ranks in turn, for tools that shard it as accelerate "
                "does.\n  Iterate over the hetero DataLoader itself; with accelerate leave out dispatch_batches=True, "
                "and pass even_batches=False where the loader has padding=False."
            )
        timer = self._pipeline.begin_wait(self._timing)
        control.check_stop()
        try:
            fetched = next(self._reader_at(batch))
        except StopIteration:
            raise ConfigError("the reader ended before the tool that uses it") from None
        except BaseException:
            self._close_reader()
            self._pipeline.end_timing(self._timing)
            raise
        timer.end_wait(len(batch))
        self._last = batch.number
        if self._is_over:  # handed out late, by accelerate's even_batches=False
            self._close_reader()
            self._pipeline.end_timing(self._timing)
        return fetched

    def _begin(self, start: Start) -> None:
        self._epoch = start.epoch
        self._pipeline.consumed_elsewhere = True
        if self._pipeline.stride is None:
            own_order = self._pipeline.sampler_order is None and self._all_ranks
            self._pipeline.stride = current_shard().world_size if own_order else 1

    def _reader_at(self, batch: RequestedBatch) -> Iterator[Any]:
        """Return the reader whose next batch is this one."""
        was_filled_up = self._get(batch.number) is not batch
        if self._reader is None or batch.number != self._expected or was_filled_up:
            self._close_reader()
            if self._last is not None and batch.number > self._last:
                self._pipeline.stride = batch.number - self._last
            self._reader = self._pipeline.open(self._requests(batch, self._pipeline.stride or 1))
        self._expected = batch.number + (self._pipeline.stride or 1)
        return self._reader

    def _requests(self, batch: RequestedBatch, stride: int) -> Iterator[BatchRequest]:
        following: RequestedBatch | None = batch
        while following is not None:
            yield following.request
            following = self._get(following.number + stride)

    def _get(self, number: int) -> RequestedBatch | None:
        """Return a batch by its number, planning up to there; None past the end."""
        while self._num_planned <= number:
            planned = next(self._planned, None)
            if planned is None:
                return None
            self._batches.append(RequestedBatch(planned, self._num_planned, self))
            self._num_planned += 1
        oldest = self._batches[0].number
        if number < oldest:
            return None
        found = self._batches[number - oldest]
        while self._batches[0].number < min(self._num_handed_out, number) - _MARGIN:
            self._batches.popleft()
        return found

    def _close_reader(self) -> None:
        close = getattr(self._reader, "close", None)
        self._reader = None
        if close is not None:
            close()


def unwrap_dataset(dataset: Any) -> Any:
    """Return the user's data set or spec from what may be a view of it."""
    return dataset.subject if type(dataset) is DatasetView else dataset


def unwrap_collate_fn(collate_fn: Any) -> Any:
    """Return the user's function from what may be a view of it."""
    return collate_fn.collate_fn if isinstance(collate_fn, CollateView) else collate_fn
