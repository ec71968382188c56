"""Views of a loader's attributes, for accelerate, Lightning and other tools that rebuild loaders.

These tools read ``dataset``, ``batch_sampler``, ``sampler`` and ``collate_fn`` and make a new loader from them, often
torch's own. The views make the new loader yield the right batches, prefetched:

- ``batch_sampler`` yields lists of indices that carry their request,
- ``dataset`` returns the whole batch for such a list, fetched as the hetero loader itself would fetch it,
- ``collate_fn`` returns a whole batch unchanged.

accelerate shards a batch sampler by taking every R-th batch. Therefore ``batch_sampler`` yields the batches of all
ranks in turn. ``sampler`` is a ``DistributedSampler``, which tells Lightning that sharding is done. Tools set the epoch
on the sampler, on the batch sampler, or on the data set (accelerate, for a loader that skips the first batches). All
three calls reach the hetero loader.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

from hetero.errors import ConfigError
from hetero.loaders.pipeline import is_remote
from hetero.spec import DatasetSpec
from hetero.torch.local_dataset import LocalDataset
from hetero.torch.pipeline import Pipeline
from hetero.torch.view_pass import RequestedBatch, ViewPass

__all__ = [
    "BatchSamplerView",
    "CollateView",
    "DatasetView",
    "SamplerView",
    "ShownAttribute",
    "UserSamplerView",
    "WorkerAttribute",
    "fetches_for_rebuilt",
    "is_asked_by_tool",
    "unwrap_collate_fn",
    "unwrap_dataset",
]

_TOOLS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})


class _Attribute:
    """An attribute of torch's loader whose value depends on who reads it."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __set__(self, loader: Any, value: Any) -> None:
        loader.__dict__[self._name] = value


class ShownAttribute(_Attribute):
    """An attribute that shows the user's argument or torch's default to the script, and a view to a tool.

    A tool (accelerate, Lightning) rebuilds loaders from their attributes. It gets a view in place of the user's object.
    The view makes the rebuilt loader yield batches that this loader fetches: see `hetero.torch.views`.
    """

    def __get__(self, loader: Any, _: type | None = None) -> Any:
        """Return the view if a tool or torch's constructor reads the attribute, else the value for the script."""
        # The attribute was read from the class.
        if loader is None:
            return self
        gets_view = not loader.__dict__.get("_is_made") or is_asked_by_tool()
        return loader.__dict__[self._name] if gets_view else loader._values_for_script[self._name]


class WorkerAttribute(_Attribute):
    """An attribute as in torch. It has another value if a loader rebuilt from this one must not start workers.

    The rebuilt loader gets batches that this loader has fetched, so workers of its own would only hide them from the
    step timer: see `fetches_for_rebuilt`.

    Args:
        without_workers: The other value, which a loader without workers has.
    """

    def __init__(self, without_workers: Any) -> None:
        self._without_workers = without_workers

    def __get__(self, loader: Any, _: type | None = None) -> Any:
        """Return the stored value, or ``without_workers`` if rebuilt loaders must not start workers."""
        # The attribute was read from the class.
        if loader is None:
            return self
        return self._without_workers if fetches_for_rebuilt() else loader.__dict__[self._name]


class FetchedBatch:
    """A whole batch on its way from `DatasetView` to `CollateView`."""

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class CollateView:
    """The loader's ``collate_fn``. It returns a whole batch unchanged."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        """The user's function, for samples that were not fetched as a batch."""

    def __call__(self, samples: Any) -> Any:
        """Return the fetched batch, or collate samples that were not fetched as a batch."""
        return samples.batch if isinstance(samples, FetchedBatch) else self.collate_fn(samples)


class DatasetView(torch.utils.data.Dataset[Any]):
    """The loader's data set. It fetches requested batches, and otherwise behaves like the user's object or spec.

    Args:
        local: Holds the user's object or spec, and computes batches in a worker process of a tool's loader.
        pipeline: The loader's pipeline.
    """

    def __init__(self, local: LocalDataset, pipeline: Pipeline) -> None:
        self.local = local
        # Kept apart from the pipeline, because a worker process has no pipeline.
        self._skips = pipeline.skips
        self._pipeline: Pipeline | None = pipeline
        """The loader's pipeline. None in a worker process of a tool's loader."""
        self._is_worker = False
        """Whether this process is such a worker and has prepared the data set."""

    @property
    def subject(self) -> Any:
        """The user's object or spec."""
        return self.local.subject

    def __len__(self) -> int:
        return len(self.local)

    def __getitem__(self, index: Any) -> Any:
        """Return a requested batch, or a sample of a data set object."""
        if isinstance(index, RequestedBatch):
            return self._fetch(index)
        return self._samples()[index]

    def __getitems__(self, indices: Any) -> Any:
        """Return a requested batch, or samples of a data set object."""
        if isinstance(indices, RequestedBatch):
            return self._fetch(indices)
        # accelerate asks a rank that lacks a batch at the end for a batch of earlier samples.
        fill_up = None if self._pipeline is None else self._pipeline.fill_up
        if fill_up is not None:
            return self._fetch(fill_up(indices))
        samples = self._samples()
        batched = getattr(samples, "__getitems__", None)
        return [samples[index] for index in indices] if batched is None else batched(indices)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. If the data set object has ``set_epoch``, call that too."""
        if self._pipeline is not None:
            self._pipeline.set_epoch(epoch, by_tool=True)
        forward = None if isinstance(self.subject, DatasetSpec) else getattr(self.subject, "set_epoch", None)
        if callable(forward):
            forward(epoch)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's object or spec."""
        # pickle and copy look up special methods before `local` is set. Without this check, the lookup of `local` below
        # would call this method again without end.
        if name.startswith("__") or name == "local":
            raise AttributeError(name)
        return getattr(self.local.subject, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the user's object, unless the view itself has the attribute."""
        if name in ("local", "_skips", "_pipeline", "_is_worker"):
            self.__dict__[name] = value
        else:
            # If only the view had the attribute, its value would have no effect on samples.
            setattr(self.local.subject, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # The pipeline holds the user's sampler, which may not be picklable.
        return {**self.__dict__, "_pipeline": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _fetch(self, batch: RequestedBatch) -> FetchedBatch:
        """Return a requested batch.

        The pass that planned the batch fetches it. In another process than that of the pass, such as a worker process
        of accelerate's or Lightning's loader, this process computes the batch.
        """
        if batch.source is not None:
            return FetchedBatch(batch.source.fetch(batch))
        # A worker process prepares the data set before its first batch.
        info = torch.utils.data.get_worker_info()
        if info is not None and not self._is_worker:
            self.local.start_worker(info.id)
            self._is_worker = True
        # This process counts only its own skips, and reports them only in the log.
        return FetchedBatch(self.local.fetch(batch.request, on_skips=self._skips.note))

    def _samples(self) -> Any:
        """Return the data set object, for a tool or script that asks for samples which this loader did not plan."""
        if isinstance(self.subject, DatasetSpec):
            raise ConfigError(
                f"data set {self.subject} was asked for samples that its loader did not plan\n"
                "  A tool rebuilt the loader without its batch sampler, or the script indexes loader.dataset.\n"
                "  Pass the hetero DataLoader itself, or fetch samples through one with batch_size=None."
            )
        return self.subject


class SamplerView(DistributedSampler[Any]):
    """Sampler that yields this rank's samples in the loader's own order.

    It is a ``DistributedSampler``, because Lightning would otherwise shard the samples a second time.

    Args:
        pipeline: The loader's pipeline, which has the order.
        dataset: The loader's data set, for tools that read the attribute ``dataset``.
    """

    def __init__(self, pipeline: Pipeline, dataset: DatasetView) -> None:
        # Set the attributes of a DistributedSampler here. Do not call its __init__, because that reads the process
        # group, which may not exist yet.
        self.pipeline = pipeline
        self.dataset = dataset
        self.shuffle = pipeline.options.shuffle
        self.seed = pipeline.options.seed
        self.drop_last = pipeline.options.drop_last

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """World size."""
        return self.pipeline.shard().world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank."""
        return self.pipeline.shard().rank

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the next pass."""
        return self.pipeline.progress.next_start().epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.pipeline.set_epoch(epoch, by_tool=True)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's indices in order. With single samples, each index carries the request of its sample."""
        # A loader of single samples has no batch sampler, so this method begins the pass. Otherwise `BatchSamplerView`
        # begins the pass, and this method only shows the indices of the next one.
        if not self.pipeline.collate:
            yield from ViewPass(self.pipeline, all_ranks=False)
            return
        for planned in self.pipeline.plan(self.pipeline.progress.next_start()):
            yield from planned.work.labels

    def __len__(self) -> int:
        return self.pipeline.order().num_samples_of(self.pipeline.shard())


class UserSamplerView(torch.utils.data.Sampler[Any]):
    """Wrapper that hides a user's sampler from accelerate. accelerate would replace or seed a ``RandomSampler``."""

    def __init__(self, pipeline: Pipeline, sampler: Any) -> None:
        self._pipeline = pipeline
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._pipeline.set_epoch(epoch, by_tool=True)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class BatchSamplerView(torch.utils.data.BatchSampler):
    """Batch sampler that yields the batches of all ranks if the loader made it, or of this rank if a tool made it.

    Args:
        sampler: A `SamplerView`, or any other sampler. With another sampler this class works like torch's.
        batch_size: As in torch. May be None with a `SamplerView`, which then gives the batch size.
        drop_last: As in torch.
    """

    def __init__(self, sampler: Any, batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self.pipeline: Pipeline | None = getattr(sampler, "pipeline", None)
        self.all_ranks = False
        if batch_size is None:
            if self.pipeline is None:
                raise ConfigError("a tool replaced the sampler of a hetero DataLoader without its batch size")
            batch_size = self.pipeline.options.batch_size
        if self.pipeline is not None and drop_last != self.pipeline.options.drop_last:
            # Lightning passes another drop_last when it predicts for every sample. Change only a copy of the pipeline,
            # because the script's loader keeps its own drop_last.
            self.pipeline = copy.copy(self.pipeline)
            self.pipeline.options = dataclasses.replace(self.pipeline.options, drop_last=drop_last)
        self.batch_size: int | None = batch_size  # type: ignore[assignment]
        self.drop_last = drop_last

    @classmethod
    def of_loader(cls, pipeline: Pipeline, sampler: Any, *, all_ranks: bool = True) -> BatchSamplerView:
        """Return the view that a loader passes to tools.

        Args:
            pipeline: The loader's pipeline.
            sampler: A `SamplerView`, or the user's sampler or batch sampler.
            all_ranks: Whether the view yields the batches of all ranks, or only the batches of this rank.
        """
        batch_size, drop_last = pipeline.options.batch_size, pipeline.options.drop_last
        # The user's batch sampler decides, and may have neither attribute.
        if pipeline.sampler_order is not None and pipeline.sampler_order.is_batch_sampler:
            batch_size, drop_last = getattr(sampler, "batch_size", None), bool(getattr(sampler, "drop_last", False))
        # The constructor is for tools, which know neither the pipeline nor ``all_ranks``.
        view = cls.__new__(cls)
        view.sampler = sampler if isinstance(sampler, SamplerView) else UserSamplerView(pipeline, sampler)
        view.pipeline = pipeline
        view.all_ranks = all_ranks
        view.batch_size = batch_size
        view.drop_last = drop_last
        return view

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        if self.pipeline is not None:
            self.pipeline.set_epoch(epoch, by_tool=True)

    def __iter__(self) -> Iterator[list[Any]]:
        if self.pipeline is not None:
            return iter(ViewPass(self.pipeline, all_ranks=self.all_ranks))
        # A tool passed another sampler than the loader's. In this case the constructor demands a batch size.
        assert self.batch_size is not None
        return iter(torch.utils.data.BatchSampler(self.sampler, self.batch_size, self.drop_last))

    def __len__(self) -> int:
        """Return the number of batches that this sampler yields in an epoch."""
        if self.pipeline is None:
            # A tool passed another sampler than the loader's. In this case the constructor demands a batch size.
            assert self.batch_size is not None
            return len(torch.utils.data.BatchSampler(self.sampler, self.batch_size, self.drop_last))
        # The loader's own order has batches for each rank. A user's sampler yields only the batches of this rank.
        if self.all_ranks and self.pipeline.sampler_order is None:
            return self.pipeline.order().num_whole_batches(self.pipeline.shard().world_size)
        return self.pipeline.num_batches()


def unwrap_dataset(dataset: Any) -> Any:
    """Return the user's data set or spec. If the argument is a view, return what the view shows."""
    return dataset.subject if type(dataset) is DatasetView else dataset


def unwrap_collate_fn(collate_fn: Any) -> Any:
    """Return the user's function. If the argument is a view, return the function that the view wraps."""
    return collate_fn.collate_fn if isinstance(collate_fn, CollateView) else collate_fn


def is_asked_by_tool() -> bool:
    """Return whether the code that called this function's caller belongs to a tool that rebuilds loaders."""
    # Frame 0 is this function, frame 1 its caller, which is the getter of an attribute.
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module.partition(".")[0] in _TOOLS


def fetches_for_rebuilt() -> bool:
    """Return whether a torch loader rebuilt from a hetero loader must leave prefetching to the hetero loader.

    True with endpoints. True also if the script uses an Accelerator, which rebuilds every loader as torch's own. If
    that loader had workers, the step timer and the stop callbacks would not see the batches that the workers fetch.
    """
    accelerate_state: Any = sys.modules.get("accelerate.state")
    # The dictionary is empty until the script has made an Accelerator or a PartialState.
    return is_remote() or (accelerate_state is not None and bool(accelerate_state.PartialState._shared_state))
