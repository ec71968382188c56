"""`from_dataset`, the function that a script calls. The call imports TensorFlow."""

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
    """Return a registered data set as a `tf.data.Dataset` of batches, in order, exactly once and resumable.

    ::

        data = hetero.tf.from_dataset(photos(root=args.data), batch_size=64, shuffle=True)
        model.fit(data, epochs=3, shuffle=False, callbacks=[data.callback()])

    The ``spec``, arguments, order, random draws and bytes are the same as for ``hetero.torch.DataLoader``. The data set
    may use Python transforms, which tf.data.service cannot run. The call blocks until two batches have arrived, because
    the element specification comes from them, unless ``element_spec`` is given.

    **Elements.** An element is a batch as ``collate_fn`` makes it. The rank and dtype of its arrays and tensors must
    not vary. Python's numbers become scalars of int64, float64 or bool, and text becomes tf.string. Dictionaries,
    tuples and namedtuples stay. A list of numbers becomes one tensor, and so does a list or tuple of text. Any other
    list becomes a tuple, and its length must not vary. None and dataclasses are rejected. Errors name the path inside
    the batch. Dimensions that vary are None. The dimension that grows with the batch is ``batch_size`` with
    ``drop_last=True``, and None otherwise. Ragged tensors are not supported. Pad in ``collate_fn`` instead.

    **Data sets that make their own batches.** With ``batch_size=None`` each item of the data set is a batch, as in
    torch's loader. This is for a ``keras.utils.PyDataset`` (``Sequence``), which the registered function returns
    unchanged. ``shuffle``, ranks, epochs and state then apply to batches. An epoch permutes the batches, and each of R
    ranks gets every R-th batch. If R does not divide their number, ``drop_last`` drops the rest or ``padding`` repeats
    batches. Before each epoch ``on_epoch_end`` and ``on_epoch_begin`` are called on a copy, with generators that are
    seeded from (seed, epoch). ``workers``, ``use_multiprocessing`` and ``max_queue_size`` have no effect. The first
    dimension of the arrays is None.

    **Epochs.** Each pass is the next epoch and has another order. `FedDataset.set_epoch` chooses a different epoch. To
    use ``steps_per_epoch``, pass ``data.repeat()``. Then the data set's epochs follow each other without a gap,
    wherever Keras ends its own epochs. Other transformations (``map``, ``prefetch``, ``take``) may follow, as for any
    dataset. Batches that they ask for ahead are not counted. Do not use ``cache`` and ``shuffle`` of tf.data behind
    this dataset, because they break its order and its guarantees.

    **What counts as consumed.** A loop ``for batch in data`` consumes its batches. In Keras, the batches of steps that
    the callback saw are consumed. In loops over something made of this dataset, `FedDataset.measure` consumes what it
    yields, or `FedDataset.mark_taken` reports what was consumed. State and ledger contain consumed batches only. The
    report contains their steps, except those of `mark_taken`. A job that is asked to stop ends at such a point. Use one
    dataset for training and another one for validation.

    **Ranks** come from the launcher, else from ``RANK`` and ``WORLD_SIZE``, or from mpirun's variables. Every rank gets
    its own part, so automatic sharding is off. In a ``tf.distribute`` strategy over several processes use
    ``distribute_datasets_from_function``.

    Args:
        spec: Result of a function decorated with ``@hetero.dataset``. With
            ``@hetero.dataset(collate_fn=hetero.collate_arrays)`` its batches do not need torch.
        batch_size: Samples per batch and rank. None if the items of the data set are batches.
        shuffle: Permute the samples of every epoch.
        drop_last: Drop the last incomplete global batch.
        seed: Signed 64-bit. Order and random draws depend only on the seed and the epoch.
        padding: With ``drop_last=False``, repeat at most world size - 1 samples to give all ranks equally many.
        num_workers: Processes of this rank that fetch batches if the job has no endpoints. They import the script. At
            least 1, because TensorFlow asks for batches in its own threads, where a fetch would draw from this
            process's generators.
        prefetch_factor: Batches in flight per endpoint. None for the reader's default.
        element_spec: Nested `tf.TensorSpec`. If given, no batches are fetched to derive it.
        compression: ``"lz4"`` or ``"zstd"`` for batches from data hosts, see ``hetero.torch.DataLoader``. Ignored if
            the job has no data hosts.
        on_sample_error: ``"raise"``, or ``"skip"`` to substitute the next sample of the batch that works.
        max_skips: With ``"skip"``, the maximum number of skipped samples on this rank.
        name: Name in reports, at most 200 printable characters. The default is the data set's name.

    Raises:
        ImportError: If TensorFlow is not installed.
        ConfigError: If the arguments cannot work in this job, or if batches cannot be elements.
        DatasetError: If the data set raises.
        DataPlaneError: If no endpoint answers.
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
    """Return whether ranks can find each other, by TensorFlow's variable or, as Horovod's ranks do, by MPI's."""
    return "TF_CONFIG" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ
