"""`DataLoader`: a subclass of torch's, whose batches come from endpoints if the job has them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
import torch.utils.data

from hetero.batches.lanes.pieces import End, Guarantee
from hetero.datasets import get_factory
from hetero.errors import ConfigError
from hetero.loaders import auditing
from hetero.loaders.checks import check_compression, check_prefetch_factor, check_sample_errors
from hetero.loaders.lanes.options import check_lanes, check_no_order
from hetero.loaders.pipeline import LoaderOptions
from hetero.metrics.skips import DEFAULT_MAX_SKIPS
from hetero.metrics.steps import StepTimer
from hetero.plans.mixtures import Mixture
from hetero.spec import DatasetSpec
from hetero.torch.checks import (
    check_functions,
    check_order,
    check_shard,
    check_subject,
    effective_seed,
    user_collate_fn,
)
from hetero.torch.lanes.pipeline import LanePipeline
from hetero.torch.local import WorkerOptions, accelerator_is_available
from hetero.torch.local_dataset import LocalDataset
from hetero.torch.order.sampler import SamplerOrder
from hetero.torch.passes import Pass
from hetero.torch.pipeline import Pipeline
from hetero.torch.views import (
    BatchSamplerView,
    CollateView,
    DatasetView,
    SamplerView,
    ShownAttribute,
    WorkerAttribute,
    fetches_for_rebuilt,
    is_asked_by_tool,
    unwrap_collate_fn,
    unwrap_dataset,
)

__all__ = ["DataLoader"]

_T_co = TypeVar("_T_co", covariant=True)
_TORCH_TAKES_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Deliver batches in order, exactly once, with contents that do not depend on where they are computed.

    A subclass of ``torch.utils.data.DataLoader`` that takes the same arguments. The main differences follow here,
    docs/torch_loader.md lists all of them.

    **Where.** In a job with endpoints, batches come from the endpoints. In any other job they come from torch's own
    ``num_workers`` processes, or from this process if ``num_workers`` is 0. Samples never draw from the random
    generators of this process. Order and random draws do not depend on where batches are computed. With the same
    library versions and CPU capability, the bytes of a batch do not either.

    **Order.** The order of an epoch depends only on ``seed`` and the epoch. The first pass is epoch 0. Each later pass
    is the next epoch, whether the pass before was completed or left early. A script that chooses the epoch with
    `set_epoch` may take several passes in it, and each of them has another order and other draws. A pass begins when
    its first batch is requested. ``iter(loader)`` alone only draws the random numbers that torch's loader draws there.
    Iterators are independent of each other.

    **Ranks.** With a process group of ``torch.distributed``, global batch k is elements [k R B, (k + 1) R B) of the
    epoch's order, where R is the world size and B the batch size. Rank r takes every R-th of these elements, starting
    at the r-th, so a DistributedSampler is not needed. Without a process group, pass ``shard``. Otherwise every rank
    gets all samples, and the loader logs a warning.

    A user's ``sampler`` or ``batch_sampler`` is not sharded. Every rank draws the whole sampler. During the draws, the
    generators are seeded from (seed, epoch), so every rank draws the same numbers. A generator in the sampler's
    ``generator`` attribute is seeded anew for each epoch, and restored after each draw. A stateful sampler (one with
    ``state_dict`` and ``load_state_dict``) continues after the last delivered batch, even if a pass was left early.

    **Tools.** accelerate, Lightning and Hugging Face's Trainer rebuild loaders. A loader that they build from this one
    delivers batches that this loader fetches and prefetches. If the script uses an Accelerator, `num_workers` and
    related attributes therefore have the values of a loader without workers. Lightning's ranks get the batches
    described above. Ranks under accelerate get the batches that accelerate makes from torch's loader. The global
    batches are those described above, but rank r gets the r-th run of ``batch_size`` consecutive elements, and the last
    global batch is filled up to its full size. ``gather_for_metrics`` therefore returns every sample once, in order. To
    resume under accelerate, load the state into this loader, or use ``skip_first_batches``.

    **Samples that raise.** By default the loader raises a `DatasetError` that is also an instance of the exception's
    type, with traceback, index and host. With ``on_sample_error="skip"`` the loader substitutes the next sample of the
    same batch that works. After the last sample it tries the first. The substitute is then in the batch twice. The
    second copy is computed again from the same seed, so both copies are the same bit for bit. With ``seeding="batch"``
    the second copy has different random draws. Batch sizes and step counts stay equal on all ranks. If a sample raises
    either on all hosts or on none, the bytes of a batch do not depend on where the batch is computed. The loader
    reports and logs the skipped samples, with at most 10 log lines in 10 s.

    The loader still raises an exception if no sample of a batch works, there are more than ``max_skips`` skips, an
    index is outside of the data set, collation raises, or a batch has three times ended the process that computed it
    (out of memory, a crash in native code).

    **State.** `state_dict` counts the batches that the user received, not those in flight. It does not contain skips. A
    resumed loader does not report earlier skips, and counts new ones from 0.

    Args:
        dataset: The return value of a function decorated with ``@hetero.dataset``, or a map-style data set object.
            Endpoints cannot serve such an object.
        batch_size: Samples per batch on each rank. None delivers single samples.
        shuffle: Whether to permute the samples of every epoch. ``"window"`` shuffles the rows of files that
            `hetero.shards` reads within windows, so each file is read in one go. A `hetero.Mixture` draws from sources.
        sampler: Yields indices: integers, floats, bool, str, bytes, None, or tuples and lists of these.
        batch_sampler: Yields lists of indices.
        num_workers: Local processes. Ignored if batches come from endpoints.
        collate_fn: As in torch. For a registered data set, pass the function to the decorator,
            ``@hetero.dataset(collate_fn=...)``, because endpoints take it from there.
        pin_memory: As in torch. Silently ignored without an accelerator.
        drop_last: Whether to drop the last global batch if it is incomplete.
        timeout: Seconds to wait for a local worker.
        worker_init_fn: As in torch. For a registered data set, pass it to the decorator, like ``collate_fn``. The
            generators are seeded for every sample, so a seed that this function sets does not affect samples.
        multiprocessing_context: As in torch.
        generator: Generator whose initial seed is used as ``seed``.
        prefetch_factor: Batches in flight per active endpoint, or per local worker.
        persistent_workers: As in torch, but workers start anew if the script has changed what they read.
        pin_memory_device: Ignored, because memory is pinned for the current accelerator.
        in_order: Ignored, because batches are always in order.
        seed: Signed 64-bit seed of the order and of all random draws. None: the seed of ``generator``, or 0.
        padding: With ``drop_last=False``, whether to repeat at most world size - 1 samples. Then all ranks get the same
            number of samples. False lets ranks end at different batches, for validation without collectives.
        name: Name in reports, at most 200 printable characters. The default is the data set's name.
        order: ``"torch"`` shuffles as ``DistributedSampler(seed=seed)`` does after ``set_epoch``, on any number of
            ranks. ``"hetero"`` shuffles as all earlier versions of hetero did.
        shard: This process's rank and the world size. Needed without a process group (Horovod, MPI), or if the ranks
            that share the samples are not the ranks of the process group. (0, 1) gives this rank all samples.
        requests_next_epoch: Whether the first batches of an epoch are requested while the epoch before it ends. Pass
            False if the script changes files or databases between epochs that the data set reads.
        snapshot_every_n_steps: For an iterable, a state of the iterator travels with every n-th batch of a lane.
            Ignored otherwise, because every state is exact.
        guarantee: Only for an iterable, and needed there: ``"exactly-once"``, ``"replay"`` or ``"at-most-once"``. See
            docs/streams.md.
        lanes: Number of iterators over an iterable, over all ranks. It stays the same for a whole epoch. None: those of
            a loaded state, or ``num_workers`` for each rank, at least one.
        end: What happens at the end of a lane. ``"stop"``: the pass ends on all ranks. ``"wrap"``: the lane
            begins again, so the pass never ends. ``"rest"``: the other lanes go on, so ranks may end at different
            batches, for validation without collectives.
        chunk_samples: Samples of a lane that follow each other in the pass. None: that of a loaded state, or
            ``batch_size``. Jobs with other numbers of ranks have the same global batches if this is the same.
        allow_version_change: Whether a state of another version of the source's library may be loaded.
        compression: Lossless compression of batches that endpoints send: ``"lz4"`` or ``"zstd"``. It needs
            ``hetero[compression]`` on every host. It helps on networks that are slower than the codec. Ignored if
            fetching is local. A data host without the package sends batches uncompressed and logs a warning.
        on_sample_error: ``"raise"``, or ``"skip"``, which is not possible with single samples.
        max_skips: With ``"skip"``, how many skips this loader allows on this rank in its lifetime. A sample that always
            raises counts again in every epoch. One more skip raises a DatasetError that lists the skips.

    Raises:
        ConfigError: If arguments contradict each other or cannot work in this job.
        ValueError: As in torch.
    """

    dataset: Any = ShownAttribute()
    """The data set object or spec that was passed."""
    sampler: Any = ShownAttribute()
    """The sampler that was passed, or a view of this loader's own order over the samples of this rank."""
    collate_fn: Any = ShownAttribute()
    """The function that makes batches: the argument, the function registered with the data set, or torch's default."""
    num_workers: Any = WorkerAttribute(0)
    prefetch_factor: Any = WorkerAttribute(None)
    persistent_workers: Any = WorkerAttribute(False)
    timeout: Any = WorkerAttribute(0)

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | Literal["window"] | Mixture | None = None,
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
        seed: int | None = None,
        padding: bool = True,
        name: str | None = None,
        compression: str | None = None,
        on_sample_error: str = "raise",
        max_skips: int = DEFAULT_MAX_SKIPS,
        order: str = "hetero",
        shard: tuple[int, int] | None = None,
        requests_next_epoch: bool = True,
        snapshot_every_n_steps: int | None = 1,
        guarantee: Guarantee | None = None,
        lanes: int | None = None,
        end: End = "stop",
        chunk_samples: int | None = None,
        allow_version_change: bool = False,
    ) -> None:
        # When Lightning rebuilds a loader, it passes the views that it has read from the attributes of the first one
        # (`hetero.torch.views`). Get the user's objects out of them.
        subject = unwrap_dataset(dataset)
        collate_fn = unwrap_collate_fn(collate_fn)
        if type(batch_sampler) is BatchSamplerView:  # rebuilt by Lightning
            batch_size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
            sampler, batch_sampler = batch_sampler.sampler, None
        if isinstance(sampler, SamplerView):
            options = sampler.pipeline.options
            shuffle, sampler = options.mixture or (options.order == "window" and "window") or options.shuffle, None
        # Check the arguments that hetero restricts.
        check_subject(subject, guarantee)
        makes_batches = batch_size is not None or batch_sampler is not None
        user_function = user_collate_fn(collate_fn, makes_batches=makes_batches)
        check_functions(subject, user_function, worker_init_fn)
        check_prefetch_factor(prefetch_factor)
        check_compression(compression)
        policy = check_sample_errors(on_sample_error, max_skips, makes_batches=makes_batches)
        pin_memory = pin_memory and accelerator_is_available()
        # Build the pipeline, which plans and fetches the batches.
        local = LocalDataset(subject, collate_fn=user_function, worker_init_fn=worker_init_fn)
        order_seed = effective_seed(seed, generator)
        user_sampler = sampler if batch_sampler is None else batch_sampler
        lane_options = check_lanes(
            guarantee,
            lanes,
            end,
            chunk_samples=chunk_samples,
            lanes_per_rank=num_workers,
            snapshot_every=snapshot_every_n_steps,
            drop_last=drop_last,
            allow_version_change=allow_version_change,
            shuffle=shuffle,
        )
        if lane_options is not None:
            check_no_order(shuffle=shuffle, sampler=user_sampler, batch_size=batch_size, policy=policy)
        loader_options = LoaderOptions(
            batch_size=None if batch_sampler is not None else batch_size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            padding=padding,
            seed=order_seed,
            has_seed=seed is not None or generator is not None,
            compression=compression,
            on_sample_error=policy,
            max_skips=max_skips,
            name=name,
            lanes=lane_options,
            order=check_order(order, shuffle),
            mixture=shuffle if isinstance(shuffle, Mixture) else None,
            shard=check_shard(shard),
            requests_next_epoch=bool(requests_next_epoch),
        )
        worker_options = WorkerOptions(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
        )
        if lane_options is not None:
            pipeline: Pipeline = LanePipeline(subject, loader_options, local=local, workers=worker_options)
        else:
            sampler_order = None
            if user_sampler is not None:
                sampler_order = SamplerOrder(
                    user_sampler,
                    is_batch_sampler=batch_sampler is not None,
                    batch_size=batch_size or 1,
                    drop_last=drop_last,
                    seed=order_seed,
                )
            pipeline = Pipeline(
                subject, loader_options, sampler_order=sampler_order, local=local, workers=worker_options
            )
        view = DatasetView(local, pipeline)
        has_own_order = user_sampler is None
        # torch checks the arguments and sets the attributes. The batch sampler and collate function are replaced below.
        super().__init__(
            view,
            batch_size,
            # With its own order, this loader passes a sampler, and torch rejects both together.
            None if has_own_order else bool(shuffle),
            SamplerView(pipeline, view) if has_own_order else sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,  # type: ignore[arg-type]
            multiprocessing_context,
            generator,
            # torch rejects a prefetch_factor without workers. Endpoints use the factor also without workers.
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _TORCH_TAKES_IN_ORDER else {}),
        )
        self._pipeline = pipeline
        # torch's constructor has stored the arguments in the attributes. Keep what the script reads there, and then
        # replace the stored values by views, for tools.
        stored = self.__dict__
        registered = get_factory(subject.name).collate_fn if isinstance(subject, DatasetSpec) else None
        self._values_for_script = {
            "dataset": subject,
            "sampler": stored["sampler"],
            "batch_sampler": stored["batch_sampler"],
            "collate_fn": registered if user_function is None and registered is not None else stored["collate_fn"],
        }
        # torch has made a batch sampler over the sampler. Without a batch size, it makes none.
        if stored["batch_sampler"] is not None and batch_sampler is None:
            stored["batch_sampler"] = BatchSamplerView.of_loader(pipeline, stored["sampler"])
        stored["collate_fn"] = CollateView(stored["collate_fn"])
        # These attributes have the names of the arguments because Lightning rebuilds a loader from its attributes.
        self.seed = seed
        self.padding = padding
        self.name = name
        self.compression = compression
        self.on_sample_error = on_sample_error
        self.max_skips = max_skips
        self.order = order
        self.shard = shard
        self.requests_next_epoch = requests_next_epoch
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.guarantee, self.lanes = guarantee, lanes
        self.end = end
        self.chunk_samples = chunk_samples
        self.allow_version_change = allow_version_change
        self._has_iterator = False
        """Whether torch's loader would have kept the iterator of the last pass, because its workers are persistent."""
        self._is_made = True
        """Whether this constructor has ended. Until then, torch's constructor reads and sets the attributes."""

    def __iter__(self) -> Pass:  # type: ignore[override]
        """Return an iterator over the next epoch. The pass begins when its first batch is requested."""
        self._draw_as_torch()
        return Pass(self._pipeline)

    def _draw_as_torch(self) -> None:
        """Draw the random numbers that torch's loader draws here. The script's next draws are then as with torch.

        torch draws a base seed for the workers and, if it makes a RandomSampler, a seed for that sampler. A pass that
        resumes within an epoch draws nothing, because these numbers were drawn when the epoch began. A script that also
        restores the generator therefore continues with the numbers that it would have drawn.
        """
        # torch draws the base seed when it makes an iterator. With persistent workers, it makes only one iterator.
        # Read the script's arguments from the dictionary, because the attributes hide the workers from tools
        # (`WorkerAttribute`).
        keeps_iterator = self.__dict__["persistent_workers"] and self.__dict__["num_workers"] > 0
        makes_iterator = not (keeps_iterator and self._has_iterator)
        self._has_iterator = keeps_iterator
        # The script may have set an epoch on its sampler. This epoch decides whether the next pass resumes.
        self._pipeline.take_sampler_epoch()
        if self._pipeline.resumes_within_epoch:
            return
        if makes_iterator:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        options = self._pipeline.options
        # A RandomSampler draws its seed from the global generator, unless it was given a generator. On several
        # ranks, and with order="torch", a script would use torch's DistributedSampler, which draws no seed.
        replaces_random_sampler = options.shuffle and options.order != "torch" and self._pipeline.has_own_order
        if replaces_random_sampler and self.generator is None and self._pipeline.shard().world_size == 1:
            torch.empty((), dtype=torch.int64).random_()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Reject the name of an argument after the loader was made, unless a tool sets it."""
        # torch's loader allows assignments to some of its attributes. Here an assignment would not do anything, because
        # the pipeline already has the values.
        if name in _ARGUMENTS and self.__dict__.get("_is_made") and not is_asked_by_tool():
            raise ConfigError(
                f"{name} of a hetero DataLoader cannot be changed; pass it when the loader is made\n"
                "  Make another loader. To continue at this position, pass it this loader's state_dict()."
            )
        super().__setattr__(name, value)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler that was passed, or torch's batch sampler over `sampler`. None with ``batch_size=None``.

        A tool that rebuilds the loader gets a view instead (`hetero.torch.views`), whose batches this loader fetches.
        The view for accelerate yields the batches of all ranks, because accelerate shards them itself.
        """
        stored = self.__dict__["batch_sampler"]
        caller = sys._getframe(1)
        is_made = self.__dict__.get("_is_made", False)
        if stored is None or not is_made or caller.f_globals.get("__name__") != "accelerate.data_loader":
            # Before this loader is made, torch's constructor reads the attribute. It gets the value that it has stored.
            gets_stored = not is_made or is_asked_by_tool()
            return stored if gets_stored else self._values_for_script["batch_sampler"]
        # accelerate.skip_first_batches does not shard, if the script passes it a loader that accelerate has not
        # prepared. Then each rank needs its own batches.
        is_sharded = caller.f_code.co_name != "skip_first_batches"
        # Without a user's batch sampler, the stored one is a view over the sampler.
        user_sampler = self.__dict__["sampler"] if isinstance(stored, BatchSamplerView) else stored
        return BatchSamplerView.of_loader(self._pipeline, user_sampler, all_ranks=is_sharded)

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        self.__dict__["batch_sampler"] = value

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank.

        Raises:
            TypeError: If the user's sampler does not have a length.
        """
        return self._pipeline.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Later passes are further passes of this epoch, in other orders and with other draws, until the next call. After
        `load_state_dict`, the epoch of the state continues where the state was taken. Any other epoch starts at its
        beginning. The call is forwarded to a user's sampler.

        Raises:
            ConfigError: If ``epoch`` is not an integer of at least 0.
        """
        self._pipeline.set_epoch(epoch)

    def state_dict(self, *, num_batches_trained: int | None = None) -> dict[str, object]:
        """Return the position of this loader as plain values, the same on every rank.

        The state is smaller than 1 KiB plus the state of a user's stateful sampler. It may be taken at any time, also
        inside the loop. It can be loaded with another world size if ``batch_size`` x world size stays the same. If two
        iterators are alive, it is the position of the pass that began last.

        Args:
            num_batches_trained: How many batches of the latest pass the loop has trained on. A resumed pass counts from
                0. Pass this number if something takes batches ahead of the loop, such as a prefetcher onto a device.
                None: all batches that were delivered. hetero itself considers that the loaders of Ray Train and timm
                take one batch ahead.

        Raises:
            ConfigError: If batches are consumed through a loader that a tool rebuilt from this one, or if the pass has
                not delivered ``num_batches_trained`` batches.
        """
        if self._pipeline.consumed_elsewhere:
            raise ConfigError(
                "a tool (accelerate) rebuilt this loader, and the new loader does not report what it delivers\n"
                "  Count steps in the script and use accelerate.skip_first_batches, "
                "or iterate over the hetero DataLoader itself."
            )
        return self._pipeline.state(num_batches_trained).to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue with the batch after the last one that was delivered when the state was taken.

        If the state was taken after the loop, the next epoch follows. If it was taken in the loop's last step, an empty
        pass comes first, which is the rest of the state's epoch. Iterators that exist already are not affected.

        Raises:
            ConfigError: If the argument is not a state, or has another seed, data set length, order or global batch.
        """
        self._pipeline.load_state(state_dict)

    def skip(self, batches: int) -> None:
        """Pass over the next batches, for example those after a checkpoint that led to a spike of the loss.

        Call it on every rank before the loop, for example after `load_state_dict`. The ledger and the log name them.

        Raises:
            ConfigError: If a pass is in progress, a user's sampler has a state, or ``batches`` is not at least 1.
        """
        start = self._pipeline.skip(batches)
        auditing.note_skipped(self._pipeline, start.number, start.batches, batches)

    @property
    def step_timer(self) -> StepTimer:
        """Timer that measures step time and data wait."""
        return self._pipeline.timer

    @property
    def multiprocessing_context(self) -> Any:
        """As in torch. None if a loader rebuilt from this one must not start workers."""
        return None if fetches_for_rebuilt() else super().multiprocessing_context

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: Any) -> None:
        # torch's setter checks the value against num_workers, which reads as 0 if rebuilt loaders must not start
        # workers. In that case pass None, because the setter would reject any other value.
        stored: Any = torch.utils.data.DataLoader.multiprocessing_context
        stored.fset(self, None if fetches_for_rebuilt() else value)


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {
    *("self", "pin_memory_device", "in_order", "snapshot_every_n_steps")
}
"""Arguments that decide which batches the loader delivers. The other arguments are ignored."""
