"""`DataLoader`: torch's, with batches from endpoints where the job has some."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.utils.data

from hetero.datasets import get_factory
from hetero.errors import ConfigError
from hetero.loaders.checks import check_compression, check_prefetch_factor, check_sample_errors
from hetero.loaders.pipeline import LoaderOptions, answer_lengths, is_remote
from hetero.metrics.skips import DEFAULT_MAX_SKIPS
from hetero.metrics.steps import StepTimer
from hetero.spec import DatasetSpec
from hetero.torch.checks import (
    check_functions,
    check_order,
    check_shard,
    check_subject,
    effective_seed,
    user_collate_fn,
)
from hetero.torch.drawing import SamplerOrder
from hetero.torch.local import LocalDataset, WorkerOptions, accelerator_is_available
from hetero.torch.passes import Pass
from hetero.torch.pipeline import Pipeline
from hetero.torch.tools import fetches_for_rebuilt, is_asked_by_tool
from hetero.torch.views import (
    BatchSamplerView,
    CollateView,
    DatasetView,
    SamplerView,
    unwrap_collate_fn,
    unwrap_dataset,
)

__all__ = ["DataLoader"]

_T_co = TypeVar("_T_co", covariant=True)
_ARGUMENTS = frozenset(
    {
        *("dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last"),
        *("timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"),
        *(
            "persistent_workers",
            "seed",
            "padding",
            "name",
            "compression",
            "on_sample_error",
            "max_skips",
            "order",
            "shard",
        ),
    }
)
_TORCH_TAKES_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Deliver batches in order, exactly once, the same wherever they are computed.

    A ``torch.utils.data.DataLoader`` that takes its arguments. What differs most; docs/data.md has the whole list:

    **Where.** In a job with endpoints batches come from them, else from torch's own
    ``num_workers`` processes (0: this one, from whose random generators samples do not draw). Order and random
    draws are the same, and so are the bytes where library versions and CPU capability are.

    **Order.** The order of an epoch depends on ``seed`` and the epoch only. The first pass is epoch 0 and every
    pass, completed or left early, is followed by the next epoch; `set_epoch` chooses another one. A pass begins with
    its first batch: ``iter(loader)`` alone only draws from the generator what torch's loader draws. Iterators are
    independent of each other.

    **Ranks.** With a process group of ``torch.distributed``, global batch k is elements [k R B, (k + 1) R B) of the
    epoch's order, and rank r takes every R-th of them, so no DistributedSampler is needed. Without a process group
    pass ``shard``; else every rank gets all samples, and a warning says so. A ``sampler`` or ``batch_sampler`` of
    the user's is drawn on every rank as it is, under generators seeded from (seed, epoch), the same on every rank;
    a generator in its ``generator`` attribute is seeded anew for each epoch, and left as it was. A sampler that keeps
    its place (it has ``state_dict`` and ``load_state_dict``) goes on from what was delivered, also after a pass that
    was left early.

    **Tools.** accelerate, Lightning and Hugging Face's Trainer rebuild loaders. What they make of this one delivers
    batches that are fetched and prefetched here (next to an Accelerator `num_workers` and its like read as if there
    were none). Lightning's ranks get the batches described above. accelerate's get what it deals out of torch's loader:
    the same global batches, of which rank r gets the r-th ``batch_size`` consecutive elements, and a last one that is
    filled up to its full size. ``gather_for_metrics`` therefore returns every sample once, in order. To resume
    under accelerate, load the state into this loader, or use ``skip_first_batches``.

    **Samples that raise.** By default a `DatasetError` that is of the exception's type too is raised here, with
    traceback, index and host. With ``on_sample_error="skip"`` the next sample of the same batch that works stands in
    (after the last comes the first): it is in the batch twice, computed anew from the same seed, so the same bit for
    bit; with ``seeding="batch"`` it has draws of its own. Batch sizes and step counts stay equal on all ranks, and
    bytes do not depend on where a batch is computed, as long as a sample raises on all hosts or on none.
    Skips are in the report and, 10 lines in 10 s at most, in the log. Still raised are: a batch of which no sample
    works, more than ``max_skips`` of them, an index outside of the data set, what collation raises, and a batch that
    three times ended the process that computed it (out of memory, a crash in native code).

    **State.** `state_dict` counts the batches that the user received, not those in flight; of skips it
    says nothing: a resumed loader repeats none, and counts from 0.

    Args:
        dataset: What a function decorated with ``@hetero.dataset`` returned, or a map-style
            data set object, which can be served in this process only.
        batch_size: Per rank; None for single samples.
        shuffle: Permute the samples of every epoch.
        sampler: Yields indices: integers, floats, bool, str, bytes, None, or tuples and lists of these.
        batch_sampler: Yields lists of indices.
        num_workers: Local processes; without effect where batches come from endpoints.
        collate_fn: As torch's. For a registered data set it belongs into ``@hetero.dataset(collate_fn=...)``:
            endpoints take it from there.
        pin_memory: As torch's, silently without effect where there is no accelerator.
        drop_last: Drop the last incomplete global batch.
        timeout: Seconds to wait for a local worker.
        worker_init_fn: As torch's; for a registered data set see ``collate_fn``. Every sample is seeded anew after it,
            so a seed that it sets has no effect on samples.
        multiprocessing_context: As torch's.
        generator: Its initial seed is the ``seed``.
        prefetch_factor: Batches in flight per active endpoint, or per local worker.
        persistent_workers: As torch's.
        pin_memory_device: Without effect: memory is pinned for the current accelerator.
        in_order: Without effect: batches are always in order.
        seed: Signed 64-bit.
        padding: With ``drop_last=False``, repeat at most world size - 1 samples so that all ranks get equally many.
            False gives uneven ends, for validation without collectives.
        name: For reports, at most 200 printable characters; the data set's name by default.
        order: ``"torch"`` shuffles as ``DistributedSampler(seed=seed)`` does after ``set_epoch``, on any number of
            ranks; ``"hetero"`` as all earlier versions did.
        shard: This process's rank and the world size, where there is no process group (Horovod, MPI), or where the
            ranks that share the samples are not those of the process group. (0, 1): all samples.
        snapshot_every_n_steps: Without effect, for scripts that used torchdata's StatefulDataLoader: every state is
            exact.
        compression: Of batches on their way from endpoints, bit for bit the same afterwards: ``"lz4"`` or ``"zstd"``,
            which need ``hetero[compression]`` on every host. For networks slower than the codec; without effect where
            fetching is local. A data host without the package sends as it is, with a warning.
        on_sample_error: ``"raise"``, or ``"skip"``, which needs batches.
        max_skips: With ``"skip"``, how many this loader bears on this rank over its life; a sample that always raises
            counts in every epoch. More raise a DatasetError that lists them.

    Raises:
        ConfigError: If arguments contradict each other or cannot work in this job.
        ValueError: As torch's.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        padding: bool = True,
        name: str | None = None,
        compression: str | None = None,
        on_sample_error: str = "raise",
        max_skips: int = DEFAULT_MAX_SKIPS,
        order: str = "hetero",
        shard: tuple[int, int] | None = None,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        if is_remote():
            answer_lengths()
        subject = unwrap_dataset(dataset)
        collate_fn = unwrap_collate_fn(collate_fn)
        if type(batch_sampler) is BatchSamplerView:  # rebuilt by Lightning
            batch_size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
            sampler, batch_sampler = batch_sampler.sampler, None
        if isinstance(sampler, SamplerView):
            shuffle, sampler = sampler.shuffle, None
        check_subject(subject)
        makes_batches = batch_size is not None or batch_sampler is not None
        user_function = user_collate_fn(collate_fn, makes_batches=makes_batches)
        check_functions(subject, user_function, worker_init_fn)
        check_prefetch_factor(prefetch_factor)
        check_compression(compression)
        policy = check_sample_errors(on_sample_error, max_skips, makes_batches=makes_batches)
        pin_memory = pin_memory and accelerator_is_available()
        local = LocalDataset(subject, collate_fn=user_function, worker_init_fn=worker_init_fn)
        key = effective_seed(seed, generator)
        user_sampler = sampler if batch_sampler is None else batch_sampler
        pipeline = Pipeline(
            subject,
            LoaderOptions(
                batch_size=None if batch_sampler is not None else batch_size,
                shuffle=bool(shuffle),
                drop_last=drop_last,
                padding=padding,
                seed=key,
                compression=compression,
                on_sample_error=policy,
                max_skips=max_skips,
                name=name,
                order=check_order(order),
                shard=check_shard(shard),
            ),
            sampler_order=None
            if user_sampler is None
            else SamplerOrder(
                user_sampler,
                is_batch_sampler=batch_sampler is not None,
                batch_size=batch_size or 1,
                drop_last=drop_last,
                seed=key,
            ),
            local=local,
            workers=WorkerOptions(
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory=pin_memory,
                timeout=timeout,
                multiprocessing_context=multiprocessing_context,
            ),
        )
        view = DatasetView(local, pipeline)
        # torch checks the arguments; of what it makes of them only the samplers are replaced.
        own_order = user_sampler is None
        super().__init__(
            view,
            batch_size,
            None if own_order else shuffle,
            SamplerView(pipeline, view) if own_order else sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,  # type: ignore[arg-type]
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _TORCH_TAKES_IN_ORDER else {}),
        )
        self._pipeline = pipeline
        shown = self.__dict__
        registered = get_factory(subject.name).collate_fn if isinstance(subject, DatasetSpec) else None
        self._of_user = {
            "dataset": subject,
            "sampler": shown["sampler"],
            "batch_sampler": shown["batch_sampler"],
            "collate_fn": registered if user_function is None and registered is not None else shown["collate_fn"],
        }
        if shown["batch_sampler"] is not None and batch_sampler is None:
            shown["batch_sampler"] = BatchSamplerView.of_loader(pipeline, shown["sampler"])
        shown["collate_fn"] = CollateView(shown["collate_fn"])
        # Under the names of the arguments: Lightning rebuilds from attributes.
        self.seed = seed
        self.padding = padding
        self.name = name
        self.compression = compression
        self.on_sample_error = on_sample_error
        self.max_skips = max_skips
        self.order = order
        self.shard = shard
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._has_workers = False
        self._is_made = True

    def __iter__(self) -> Pass:  # type: ignore[override]
        """Return an iterator over the next epoch; it begins with its first batch."""
        self._draw_as_torch()
        return Pass(self._pipeline)

    def _draw_as_torch(self) -> None:
        """Draw from the generator what torch's loader draws here: what the script draws next is the same with both.

        That is the base seed of the workers and, where torch would make a RandomSampler, the seed of that. The rest of
        an epoch, after `load_state_dict`, draws nothing: the epoch's beginning did, and a script that puts back the
        generator too goes on with the numbers that it would have drawn.
        """
        keeps_workers = self.__dict__["persistent_workers"] and self.__dict__["num_workers"] > 0
        had_workers, self._has_workers = keeps_workers and self._has_workers, keeps_workers
        if self._pipeline.progress.resumes_within_epoch:
            return
        if not had_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        options = self._pipeline.options
        # With order="torch" the order is that of a sampler with a seed of its own.
        is_drawn = options.shuffle and options.order != "torch" and self._pipeline.has_own_order
        if is_drawn and self.generator is None and self._pipeline.shard().world_size == 1:
            torch.empty((), dtype=torch.int64).random_()

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's loader takes some of these later, too. Here they have gone to other places, and would do nothing.
        if name in _ARGUMENTS and self.__dict__.get("_is_made") and not is_asked_by_tool():
            raise ConfigError(
                f"{name} of a hetero DataLoader cannot be changed; pass it when the loader is made\n"
                "  Make another loader, and load_state_dict(state_dict()) of this one if it is to go on here."
            )
        super().__setattr__(name, value)

    def _as_asked(self, name: str) -> Any:
        """Return what the user passed, or torch made of it; to a tool that rebuilds loaders, the view."""
        is_shown = not self.__dict__.get("_is_made") or is_asked_by_tool(depth=3)
        return self.__dict__[name] if is_shown else self._of_user[name]

    @property
    def dataset(self) -> Any:
        """The data set object or spec that was passed."""
        return self._as_asked("dataset")

    @dataset.setter
    def dataset(self, value: Any) -> None:
        self.__dict__["dataset"] = value

    @property
    def sampler(self) -> Any:
        """The sampler that was passed; without one, this loader's order over the samples of this rank."""
        return self._as_asked("sampler")

    @sampler.setter
    def sampler(self, value: Any) -> None:
        self.__dict__["sampler"] = value

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler that was passed; without one, torch's over `sampler`, and None with ``batch_size=None``.

        accelerate is shown one whose batches are fetched as this loader fetches them.
        """
        shown = self.__dict__["batch_sampler"]
        reader = sys._getframe(1)
        is_made = self.__dict__.get("_is_made", False)
        if shown is None or not is_made or reader.f_globals.get("__name__") != "accelerate.data_loader":
            return self._as_asked("batch_sampler")
        # skip_first_batches of a loader that was not prepared: nothing shards its batches afterwards.
        shards = reader.f_code.co_name != "skip_first_batches"
        user_sampler = self.__dict__["sampler"] if isinstance(shown, BatchSamplerView) else shown
        return BatchSamplerView.of_loader(self._pipeline, user_sampler, all_ranks=shards)

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        self.__dict__["batch_sampler"] = value

    @property
    def collate_fn(self) -> Any:
        """The function that makes batches: that was passed, is registered with the data set, or torch's."""
        return self._as_asked("collate_fn")

    @collate_fn.setter
    def collate_fn(self, value: Any) -> None:
        self.__dict__["collate_fn"] = value

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank.

        Raises:
            TypeError: If the user's sampler has no length.
        """
        return self._pipeline.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; passes after it go on from there.

        After `load_state_dict`, the state's own epoch continues where the state was taken, any other starts at its
        beginning. Forwarded to a user's sampler.

        Raises:
            ConfigError: If ``epoch`` is no integer of at least 0.
        """
        self._pipeline.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the place of this loader: the same on every rank, plain values, under 1 KiB but for a sampler's state.

        Valid at any time, inside the loop too, and for any world size with the same
        ``batch_size`` x world size. With two iterators alive it is that of the one begun last.
        The state of a user's sampler that has a ``state_dict`` is part of it.

        Raises:
            ConfigError: If batches are taken through a loader that a tool rebuilt from this one.
        """
        if self._pipeline.consumed_elsewhere:
            raise ConfigError(
                "batches are taken through a loader that a tool (accelerate) rebuilt from this one: how many it has "
                "delivered is not known here\n  Count steps in the script and use accelerate.skip_first_batches, "
                "or iterate over the hetero DataLoader itself."
            )
        return self._pipeline.state().to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue with the batch after the last one delivered when the state was taken.

        A state taken after the loop continues with the next epoch. One taken in the loop's last step first gives an
        empty pass, what is left of its epoch. Living iterators are not affected.

        Raises:
            ConfigError: If it is no state, or of another seed, data set length, order or global batch.
        """
        self._pipeline.load_state(state_dict)

    @property
    def step_timer(self) -> StepTimer:
        """Measures step time and data wait."""
        return self._pipeline.timer

    @property
    def num_workers(self) -> int:
        """As torch's; 0 where a loader rebuilt from this one must not start workers of its own."""
        return 0 if fetches_for_rebuilt() else self.__dict__["num_workers"]

    @num_workers.setter
    def num_workers(self, value: int) -> None:
        self.__dict__["num_workers"] = value

    @property
    def prefetch_factor(self) -> int | None:
        """As torch's; None where `num_workers` is 0."""
        return None if fetches_for_rebuilt() else self.__dict__["prefetch_factor"]

    @prefetch_factor.setter
    def prefetch_factor(self, value: int | None) -> None:
        self.__dict__["prefetch_factor"] = value

    @property
    def persistent_workers(self) -> bool:
        """As torch's; False where `num_workers` is 0."""
        return False if fetches_for_rebuilt() else self.__dict__["persistent_workers"]

    @persistent_workers.setter
    def persistent_workers(self, value: bool) -> None:
        self.__dict__["persistent_workers"] = value

    @property
    def timeout(self) -> float:
        """As torch's; 0 where `num_workers` is 0."""
        return 0 if fetches_for_rebuilt() else self.__dict__["timeout"]

    @timeout.setter
    def timeout(self, value: float) -> None:
        self.__dict__["timeout"] = value

    @property
    def multiprocessing_context(self) -> Any:
        """As torch's; None where `num_workers` is 0."""
        return None if fetches_for_rebuilt() else super().multiprocessing_context

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: Any) -> None:
        # torch checks it against num_workers, which may be shown as 0.
        stored: Any = torch.utils.data.DataLoader.multiprocessing_context
        stored.fset(self, None if fetches_for_rebuilt() else value)
