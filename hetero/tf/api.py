"""What a script calls; TensorFlow is imported when it does."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.checks import (
    check_compression,
    check_not_child_of_rank,
    check_not_importing,
    check_prefetch_factor,
    check_sample_errors,
    check_seed,
)
from hetero.loaders.pipeline import LoaderOptions, answer_lengths, is_remote
from hetero.metrics.names import check_name
from hetero.metrics.skips import DEFAULT_MAX_SKIPS
from hetero.spec import DatasetSpec
from hetero.tf.requirement import check_tensorflow

if TYPE_CHECKING:
    from hetero.tf.dataset import FedDataset

__all__ = ["from_dataset"]

logger = logging.getLogger(__name__)


def from_dataset(
    spec: DatasetSpec,
    *,
    batch_size: int | None,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    padding: bool = True,
    num_workers: int = 1,
    prefetch_factor: int | None = None,
    element_spec: Any = None,
    compression: str | None = None,
    on_sample_error: str = "raise",
    max_skips: int = DEFAULT_MAX_SKIPS,
    name: str | None = None,
) -> FedDataset:
    """Return a registered data set as a `tf.data.Dataset` of batches: in order, exactly once, resumable.

    ::

        data = hetero.tf.from_dataset(photos(root=args.data), batch_size=64, shuffle=True)
        model.fit(data, epochs=3, shuffle=False, callbacks=[data.callback()])

    The same ``spec``, arguments, order, random draws and bytes as ``hetero.torch.DataLoader``: Python transforms that
    tf.data.service cannot run. Blocks until two batches of it are there, from which the element specification comes.

    **Elements.** Batches as ``collate_fn`` makes them: arrays and tensors of rank and dtype that do not vary; Python's
    numbers become scalars of int64, float64 or bool, text becomes tf.string. Dictionaries, tuples and namedtuples stay;
    a list of numbers, and a list or tuple of text, is one tensor, any other list a tuple. Refused, with the path inside
    the batch, are None, dataclasses, and lists whose length varies. Dimensions that vary are None; the one that grows
    with the batch is ``batch_size`` with ``drop_last=True`` and None without. Ragged tensors are not made: pad in
    ``collate_fn``.

    **Batches of the data set's own.** ``batch_size=None`` takes each item of the data set for a batch, as torch's
    loader does: a ``keras.utils.PyDataset`` (``Sequence``), returned by the registered function as it is. ``shuffle``,
    ranks, epochs and state then are about batches: an epoch permutes them, a rank gets every R-th one, and
    ``drop_last`` and ``padding`` even out what R does not divide. Before each epoch ``on_epoch_end`` and
    ``on_epoch_begin`` are called on a copy, under a seed of (seed, epoch); ``workers``, ``use_multiprocessing`` and
    ``max_queue_size`` are without effect. The first dimension of its arrays is None.

    **Epochs.** Each pass is the next epoch, with an order of its own; `FedDataset.set_epoch` chooses another. With
    ``steps_per_epoch`` pass ``data.repeat()``: epochs follow each other without a gap, whatever Keras counts as one.
    Other transformations (``map``, ``prefetch``, ``take``) may follow as for any dataset; what they ask for ahead does
    not count. ``cache`` and ``shuffle`` of tf.data after it give up what this is for.

    **What counts as taken.** Batches of a loop ``for batch in data``; in Keras those of steps that the callback saw; in
    loops over something made of it those that `FedDataset.measure` yields, or `FedDataset.mark_taken` names. State and
    ledger are made of them, but for `mark_taken` the steps of the report too, and a job that is asked to stop ends
    there. Use one dataset for training and another one for validation.

    **Ranks** are the launcher's, else those of ``RANK`` and ``WORLD_SIZE``, or mpirun's: every rank gets its own part,
    so automatic sharding is off. In a ``tf.distribute`` strategy over several processes use
    ``distribute_datasets_from_function``.

    Args:
        spec: What a function decorated with ``@hetero.dataset`` returned. Its batches need no torch with
            ``@hetero.dataset(collate_fn=hetero.collate_arrays)``.
        batch_size: Per rank; None: the items of the data set are batches.
        shuffle: Permute the samples of every epoch.
        drop_last: Drop the last incomplete global batch.
        seed: Signed 64-bit; order and random draws depend on it and the epoch only.
        padding: With ``drop_last=False``, repeat at most world size - 1 samples so that all ranks get equally many.
        num_workers: Processes of this rank that fetch where the job has no endpoints; they import the script. At least
            1: TensorFlow asks for batches in its own threads, where a fetch would draw from this process's generators.
        prefetch_factor: Batches in flight per endpoint; None: the reader's default.
        element_spec: Nested `tf.TensorSpec`, instead of looking at batches.
        compression: Of batches from data hosts: ``"lz4"`` or ``"zstd"``, see ``hetero.torch.DataLoader``; without
            effect where the job has none.
        on_sample_error: ``"raise"``, or ``"skip"``: the next sample of the batch that works stands in.
        max_skips: With ``"skip"``, how many are borne on this rank.
        name: For reports, at most 200 printable characters; the data set's name by default.

    Raises:
        ImportError: There is no TensorFlow.
        ConfigError: Arguments cannot work in this job, or batches cannot be elements.
        DatasetError: The data set raises.
        DataPlaneError: No endpoint answers.
    """
    if not isinstance(spec, DatasetSpec):
        raise ConfigError(
            f"from_dataset was given a {type(spec).__name__}, expected what a registered data set returns\n"
            "  Build it in a function decorated with @hetero.dataset at the top level of the script, and pass what "
            "calling that function returns."
        )
    for argument, value in {"batch_size": batch_size, "num_workers": num_workers}.items():
        if (type(value) is not int or value < 1) and (argument, value) != ("batch_size", None):
            raise ConfigError(f"{argument} is {value!r}, expected an integer of at least 1")
    check_prefetch_factor(prefetch_factor)
    check_not_importing()
    check_not_child_of_rank()
    check_seed(seed)
    check_name(name or spec.name)
    check_compression(compression)
    policy = check_sample_errors(on_sample_error, max_skips, makes_batches=batch_size is not None)
    check_tensorflow()
    session = control.current()
    if session is not None and session.options.data_service == "tf":
        logger.warning(
            "data hosts run tf.data.service: this host makes the batches of %s by itself; without --data-service tf "
            "they make them",
            name or spec.name,
        )
    if session is not None and session.world_size > 1 and not _has_strategy_facts():
        logger.warning(
            "%d ranks and no TF_CONFIG: a tf.distribute strategy spans this rank alone, and each trains a model of its "
            "own; start the job with --framework tensorflow",
            session.world_size,
        )
    if is_remote():
        answer_lengths()
    from hetero.tf.dataset import FedDataset
    from hetero.tf.feed import Feed

    options = LoaderOptions(
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        padding=padding,
        seed=seed,
        compression=compression,
        on_sample_error=policy,
        max_skips=max_skips,
        name=name,
    )
    return FedDataset(Feed(spec, options, num_workers=num_workers, prefetch_factor=prefetch_factor), element_spec)


def _has_strategy_facts() -> bool:
    """Whether ranks can find each other by TensorFlow's own means, or by MPI's, as Horovod's do."""
    return "TF_CONFIG" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ
