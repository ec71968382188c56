"""`from_dataset` and `distribute`, the functions that a script calls. The calls import TensorFlow."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Literal

from hetero.batches.lanes.pieces import End, Guarantee
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.checks import (
    check_compression,
    check_not_child_of_rank,
    check_not_importing,
    check_prefetch_factor,
    check_sample_errors,
    check_seed,
    check_shuffle,
)
from hetero.loaders.lanes.options import check_lanes, check_no_order
from hetero.loaders.pipeline import LoaderOptions
from hetero.metrics.skips import DEFAULT_MAX_SKIPS
from hetero.metrics.steps import check_name
from hetero.plans.mixtures import Mixture
from hetero.spec import DatasetSpec

if TYPE_CHECKING:
    from hetero.tf.dataset import FedDataset
    from hetero.tf.measured import MeasuredDataset

__all__ = ["distribute", "from_dataset"]

logger = logging.getLogger(__name__)

_SHARED = ("dynamic", "off")
_STATIC = ("data", "file", "file_or_data", "hint")
_PLACEMENTS = ("any", "local", "remote")
_DEFAULT_NAME = "data"


def from_dataset(
    spec: DatasetSpec,
    *,
    batch_size: int | None,
    shuffle: bool | Literal["window"] | Mixture = False,
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
    requests_next_epoch: bool = True,
    guarantee: Guarantee | None = None,
    lanes: int | None = None,
    end: End = "stop",
    chunk_samples: int | None = None,
    allow_version_change: bool = False,
) -> FedDataset:
    """Return a `tf.data.Dataset` of a registered data set's batches, each exactly once and in order. It can be resumed.

    ::

        data = hetero.tf.from_dataset(photos(root=args.data), batch_size=64, shuffle=True)
        model.fit(data, epochs=3, shuffle=False, callbacks=[data.callback()])

    The ``spec``, arguments, order, random draws and bytes are the same as for ``hetero.torch.DataLoader``. The data set
    may use Python transforms, which tf.data.service cannot run. The call blocks until two batches have arrived, because
    the element specification comes from them, unless ``element_spec`` is given.

    **Elements.** An element is a batch as ``collate_fn`` makes it. The rank and dtype of its arrays and tensors must
    not vary. Python's numbers become scalars of int64, float64 or bool, and text becomes tf.string. Dictionaries,
    tuples and namedtuples are kept. A list of numbers becomes one tensor, and so does a list or tuple of text. Any
    other list becomes a tuple, and its length must not vary. None and dataclasses are rejected. Errors name the path
    inside the batch. Dimensions that vary are None. The dimension that grows with the batch is ``batch_size`` with
    ``drop_last=True``, and None otherwise. Ragged tensors are not supported. Pad in ``collate_fn`` instead.

    **Data sets that make their own batches.** With ``batch_size=None`` each item of the data set is a batch, as in
    torch's loader. This is for a ``keras.utils.PyDataset`` (``Sequence``), which the registered function returns
    unchanged. ``shuffle``, ranks, epochs and state then apply to batches. An epoch permutes the batches, and each of R
    ranks gets every R-th batch. If R does not divide the number of batches, ``drop_last`` drops the rest or ``padding``
    repeats batches. Before each epoch ``on_epoch_end`` and ``on_epoch_begin`` are called on a copy, with generators
    that are seeded from (seed, epoch). ``workers``, ``use_multiprocessing`` and ``max_queue_size`` have no effect. The
    first dimension of the arrays is None.

    **Epochs.** Each pass is the next epoch and has its own order. `FedDataset.set_epoch` chooses a different epoch. To
    use ``steps_per_epoch``, pass ``data.repeat()``. Then the data set's epochs follow each other without a gap,
    wherever Keras ends its own epochs. Other transformations (``map``, ``prefetch``, ``take``) may follow, as for any
    dataset. Batches that they only prefetch do not count as consumed. Do not use ``cache`` and ``shuffle`` of tf.data
    after this dataset, because they break its order and its guarantees.

    **What counts as consumed.** A loop ``for batch in data`` consumes its batches. In Keras, a step consumes its
    batches if `fit` has the callback. In a loop over a dataset made from this one, `FedDataset.measure` counts the
    batches that it yields, or the script reports batches with `FedDataset.mark_taken`. State and ledger contain
    consumed batches only. The report contains the steps of these batches, except steps of `mark_taken`. If a job is
    asked to stop, it ends between two steps. Use one dataset for training and another one for validation.

    **Ranks** come from the launcher, else from ``RANK`` and ``WORLD_SIZE``, or from mpirun's variables. Every rank gets
    its own part, so automatic sharding is off. In a ``tf.distribute`` strategy over several processes use
    ``distribute_datasets_from_function``.

    Args:
        spec: Result of a function decorated with ``@hetero.dataset``. With
            ``@hetero.dataset(collate_fn=hetero.collate_arrays)`` its batches do not need torch.
        batch_size: Samples per batch and rank. None if the items of the data set are batches.
        shuffle: Permute the samples of every epoch. ``"window"`` shuffles the rows of files that `hetero.shards` reads
            within windows, so that each file is read in one go. A `hetero.Mixture` draws from the sources of a data set
            in given shares.
        drop_last: Drop the last incomplete global batch.
        seed: Signed 64-bit. Order and random draws depend only on the seed and the epoch.
        padding: With ``drop_last=False``, repeat at most world size - 1 samples to give all ranks equally many.
        num_workers: Processes of this rank that fetch batches if the job has no endpoints. They import the script. At
            least 1, because a fetch in this process would run in TensorFlow's threads and draw from the script's
            random generators.
        prefetch_factor: Batches in flight per endpoint. None for the reader's default.
        element_spec: Nested `tf.TensorSpec`. If given, no batches are fetched to derive it.
        compression: ``"lz4"`` or ``"zstd"`` for batches from data hosts, see ``hetero.torch.DataLoader``. Ignored if
            the job has no data hosts.
        on_sample_error: ``"raise"``, or ``"skip"`` to replace a failing sample with the batch's next good sample.
        max_skips: With ``"skip"``, the maximum number of skipped samples on this rank.
        name: Name in reports, at most 200 printable characters. The default is the data set's name.
        requests_next_epoch: Whether the first batches of an epoch are requested while the epoch before it ends. Pass
            False if the script changes files or databases between epochs that the data set reads.
        guarantee: Only for an iterable, and needed there. It and the arguments below are as for
            ``hetero.torch.DataLoader``. With ``end="wrap"`` pass ``steps_per_epoch`` to `fit`.
        lanes: Number of iterators over an iterable, over all ranks. None: ``num_workers`` for each rank.
        end: What happens at the end of a lane. ``"stop"`` is for one rank only.
        chunk_samples: Samples of a lane that follow each other in the pass.
        allow_version_change: Whether a state of another version of the source's library may be loaded.

    Raises:
        ImportError: If TensorFlow is not installed.
        ConfigError: If the arguments cannot work in this job, or if batches cannot be elements.
        DatasetError: If the data set raises.
        DataPlaneError: If no endpoint answers.
    """
    if not isinstance(spec, DatasetSpec):
        raise ConfigError(
            f"from_dataset was given a {type(spec).__name__}, expected the result of a registered function\n"
            "  Build the data set in a function at the top level of the script, decorate the function with "
            "@hetero.dataset,\n  and pass the result of calling it."
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
    _check_tensorflow()
    session = control.current()
    # With this option, data hosts do nothing for this dataset. Without the warning, the job would only seem slow.
    if session is not None and session.options.data_service == "tf":
        logger.warning(
            "this host makes the batches of %s, because the data hosts run tf.data.service; to make the batches on the "
            "data hosts, start the job without --data-service tf",
            name or spec.name,
        )
    # A strategy finds the other ranks by TF_CONFIG, and Horovod finds them by MPI's variables.
    finds_ranks = "TF_CONFIG" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ
    if session is not None and session.world_size > 1 and not finds_ranks:
        logger.warning(
            "the job has %d ranks and no TF_CONFIG, so a tf.distribute strategy contains only this rank, and each rank "
            "trains a separate model; start the job with --framework tensorflow",
            session.world_size,
        )
    lane_options = check_lanes(
        guarantee,
        lanes,
        end,
        chunk_samples=chunk_samples,
        lanes_per_rank=num_workers,
        snapshot_every=1,
        drop_last=drop_last,
        allow_version_change=allow_version_change,
        shuffle=shuffle,
    )
    if lane_options is not None:
        check_no_order(shuffle=shuffle, sampler=None, batch_size=batch_size, policy=policy)
    from hetero.tf.dataset import FedDataset
    from hetero.tf.feed import Feed
    from hetero.tf.lanes import LaneFeed

    options = LoaderOptions(
        batch_size=batch_size,
        shuffle=bool(shuffle),
        order=check_shuffle(shuffle) or "hetero",
        mixture=shuffle if isinstance(shuffle, Mixture) else None,
        drop_last=drop_last,
        padding=padding,
        seed=seed,
        compression=compression,
        on_sample_error=policy,
        max_skips=max_skips,
        name=name,
        lanes=lane_options,
        requests_next_epoch=bool(requests_next_epoch),
    )
    kind = Feed if lane_options is None else LaneFeed
    return FedDataset(kind(spec, options, num_workers=num_workers, prefetch_factor=prefetch_factor), element_spec)


def distribute(
    dataset: Any,
    *,
    sharding: str = "dynamic",
    compression: str | None = "auto",
    placement: str = "remote",
    coordinated: bool = False,
    max_outstanding_requests: int | None = None,
    name: str | None = None,
) -> MeasuredDataset:
    """Return a dataset whose elements the data hosts make with tf.data.service. It measures the training steps.

    ::

        data = hetero.tf.distribute(files.interleave(...).map(decode).batch(64).repeat())
        model.fit(data, steps_per_epoch=500, epochs=3, shuffle=False, callbacks=[data.callback()])

    In a job with ``--data-service tf`` the ranks share one job of the service. Each element goes to the rank that asks
    first. In a job without data hosts, or without a launcher, the elements are the elements of ``dataset``, unchanged.
    Therefore one script works in all cases. The result is a `tf.data.Dataset` that Keras accepts. `MeasuredDataset`
    describes which steps it counts and measures.

    All ranks must call this function equally often for each ``name``, in the same order, with equal datasets. Do not
    shard the dataset by rank first. Transformations of the result (``.map``, ``.prefetch``) run on the trainer host.

    **Which elements the ranks get, and how often.** This follows TensorFlow's documentation of the module
    ``tf.data.experimental.service``, sections "Processing Modes", "Dynamic Sharding", "Static Sharding" and "Fault
    Tolerance". The guarantees hold over all ranks, per pass:

    - ``"dynamic"``: The dispatcher hands each piece of the source (a file name, an index) to the worker that asks
      next. Each element comes exactly once if no worker restarts. A worker that restarts loses the pieces that it was
      working on, and then each element comes at most once. If the dispatcher restarts, these guarantees still hold with
      ``--tf-work-dir``. Without this option, the job ends. The dataset must have one source that can be split, not
      several zipped sources. A ``shuffle`` before this call mixes only the elements of one worker.
    - ``"off"``: Every worker makes the whole dataset. Each element comes once per worker. A worker that restarts or
      joins begins again from the start. Use this for sources that cannot be split. Shuffle without a seed, because
      workers then use different orders.
    - ``"file"``, ``"data"``, ``"file_or_data"``, ``"hint"``: Each worker has a fixed part, given by its position in the
      list of all workers. With ``"file"`` the part consists of files, and each worker needs at least one. With
      ``"data"`` it consists of elements, and the worker makes and drops all other elements. ``"file_or_data"`` uses
      files if possible, else elements. ``"hint"`` follows ``shard(tf.data.experimental.SHARD_HINT, ...)`` in the
      dataset. Each element comes once if no worker restarts. A worker that restarts begins its part again, and then
      each element comes at least once. If a worker never appears, its part is missing. Ranks read from every worker,
      and ignore ``placement="remote"``.

    With ``"dynamic"`` and ``"file"`` each worker runs the pipeline on its part of the source. Therefore ``take(n)``
    before this call takes n elements on each worker. Likewise ``skip`` and ``batch(drop_remainder=True)`` drop elements
    on each worker. ``window`` gathers elements that do not follow each other in the source.

    No policy keeps the order, and no pass can be resumed. Use `hetero.tf.from_dataset` for both. If one rank leaves a
    pass early, the other ranks get the rest of the pass.

    **Passes.** A pass is an epoch of the service. It begins when a rank asks for its first element. The n-th passes of
    all ranks are the same epoch, and they end after unequal numbers of elements. If ranks train in step, or if several
    ranks use ``fit``, pass an infinite dataset (``.repeat()`` before this call, not after it) and ``steps_per_epoch``.

    **Coordinated reads** (section "Coordinated Data Read"). In every round, each rank gets one of several consecutive
    elements of one worker. If the dataset yields groups of as many batches as there are ranks, with one length per
    group, all batches of a step have the same length. The dataset must be infinite. All ranks must read equally many
    elements. A rank that stops reading, or that alone reads one more element, blocks the others. Only ``"dynamic"`` and
    ``"off"`` allow these reads. Their guarantees still hold. Ranks read from all workers, even with ``"remote"``.

    Args:
        dataset: A `tf.data.Dataset` of TensorFlow's own operations. Each element is the batch for one step of a rank.
        sharding: The part of the dataset that each tf.data worker makes, see above.
        compression: ``"auto"`` lets TensorFlow decide whether to compress with snappy. None turns compression off,
            which saves CPU time if the network is fast.
        placement: Where elements are made. ``"remote"`` means on data hosts. ``"any"`` means also by the workers on any
            trainer host (``--trainer-tf-workers``). ``"local"`` means in this process, by `dataset` itself, as in a job
            without data hosts. Then every rank gets the whole dataset. TensorFlow's ``target_workers="LOCAL"`` is not
            used. It needs workers inside this process, and their servers would end with the process.
        coordinated: Whether the ranks read in rounds.
        max_outstanding_requests: Maximum number of outstanding requests for elements, which bounds memory. None for one
            per worker.
        name: Name in reports and for jobs of the service, at most 200 printable characters. The default is ``"data"``.

    Raises:
        ImportError: If TensorFlow is not installed.
        ConfigError: If the arguments cannot work in this job, if the dataset runs Python, or if it differs between
            ranks.
        EndpointUnavailableError: If no dispatcher appears within the data timeout.
        SystemExit: If the job was asked to stop while this call waited for the dispatcher.
    """
    _check_arguments(sharding, compression, placement, coordinated, max_outstanding_requests, name)
    check_not_importing()
    session = control.current()
    service = "" if session is None or placement == "local" else session.options.data_service
    if service == "grpc":
        raise ConfigError(
            "distribute needs tf.data.service, but the data hosts of this job serve registered data sets\n"
            "  Start the job with --data-service tf, use hetero.tf.from_dataset, or pass placement='local'."
        )
    _check_tensorflow()
    _check_dataset(dataset, coordinated=coordinated)
    from hetero.tf.measured import MeasuredDataset

    elements = dataset
    if session is not None and service == "tf":
        from hetero.tf.served import served

        reads_all = coordinated or sharding in _STATIC
        elements = served(
            dataset,
            session,
            name=name or _DEFAULT_NAME,
            policy=sharding.upper(),
            compression=None if compression is None else compression.upper(),
            # AUTO skips workers with the tag COLOCATED, which the launcher gives to the workers on trainer hosts.
            target_workers="ANY" if placement == "any" or reads_all else "AUTO",
            coordinated=coordinated,
            max_outstanding_requests=max_outstanding_requests,
        )
    return MeasuredDataset(elements, name or _DEFAULT_NAME)


def _check_tensorflow() -> None:
    """Import TensorFlow.

    Raises:
        ImportError: If TensorFlow is not installed. The message has one line and names the package to install.
    """
    try:
        import tensorflow as tf  # noqa: F401
    except ModuleNotFoundError as error:
        # TensorFlow itself is installed, but a module that it needs is missing. The original error names this module.
        if error.name != "tensorflow":
            raise
        missing = "hetero.tf needs TensorFlow, which is not installed: pip install 'tensorflow>=2.16'"
        raise ImportError(missing) from None


def _check_arguments(
    sharding: str,
    compression: str | None,
    placement: str,
    coordinated: bool,
    max_outstanding_requests: int | None,
    name: str | None,
) -> None:
    """Reject invalid arguments of `distribute`, and arguments that contradict each other."""
    for argument, value, choices in (
        ("sharding", sharding, (*_SHARED, *_STATIC)),
        ("compression", compression, ("auto", None)),
        ("placement", placement, _PLACEMENTS),
        ("coordinated", coordinated, (False, True)),
    ):
        # Compare texts by value, and None and booleans by identity, because 0 and 1 equal False and True.
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            raise ConfigError(f"{argument} is {value!r}, expected one of {', '.join(map(repr, choices))}")
    if max_outstanding_requests is not None and (
        type(max_outstanding_requests) is not int or max_outstanding_requests < 1
    ):
        raise ConfigError(
            f"max_outstanding_requests is {max_outstanding_requests!r}, expected an integer of at least 1, or None"
        )
    if name is not None:
        check_name(name)
    if coordinated and sharding in _STATIC:
        raise ConfigError(
            f"coordinated=True does not work with sharding={sharding!r}\n"
            "  Workers with fixed parts end at different times. Pass sharding='dynamic' or 'off'."
        )
    if coordinated and placement == "local":
        raise ConfigError(
            "coordinated=True does not work with placement='local'\n"
            "  Ranks read from workers in rounds, and 'local' has no workers. Pass another placement."
        )


def _check_dataset(dataset: Any, *, coordinated: bool) -> None:
    """Reject a dataset that `distribute` cannot use."""
    import tensorflow as tf

    from hetero.tf.dataset import FedDataset
    from hetero.tf.measured import MeasuredDataset
    from hetero.tf.movable import parts_of

    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            f"distribute was given a {type(dataset).__name__}, expected a tf.data.Dataset\n"
            "  Pass the result of a function decorated with @hetero.dataset to hetero.tf.from_dataset instead."
        )
    # Reject a result of `distribute`, because the service would wait without end for a source that cannot be split.
    if any(isinstance(each, MeasuredDataset) for each in parts_of(dataset)):
        raise ConfigError(
            "distribute was given a result of distribute, or a dataset made of one\n"
            "  Call distribute once, after the transformations that data hosts run."
        )
    if any(isinstance(each, FedDataset) for each in parts_of(dataset)):
        raise ConfigError(
            "distribute was given a result of from_dataset, or a dataset made of one\n"
            "  Data hosts already make its batches, and its steps are already measured. Use it without distribute."
        )
    if not tf.executing_eagerly():
        raise ConfigError(
            "distribute was called inside a tf.function\n  Call it outside, and pass its result to the function."
        )
    if coordinated and (num_elements := int(dataset.cardinality())) >= 0:
        raise ConfigError(
            f"coordinated=True was given a dataset of {num_elements} elements, expected an infinite one\n"
            "  The ranks read in rounds, and the last round would never end. End the dataset with .repeat()."
        )
