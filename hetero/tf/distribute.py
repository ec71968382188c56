"""`distribute`: runs a script's own `tf.data.Dataset` on the tf.data.service that the launcher starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.checks import check_not_importing
from hetero.metrics.names import check_name
from hetero.tf.requirement import check_tensorflow

if TYPE_CHECKING:
    from hetero.tf.measured import MeasuredDataset

__all__ = ["distribute"]

_SHARED = ("dynamic", "off")
_STATIC = ("data", "file", "file_or_data", "hint")
_PLACEMENTS = ("any", "local", "remote")
_DEFAULT_NAME = "data"


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
    """Return a dataset whose elements the data hosts make with tf.data.service. Its steps are measured.

    ::

        data = hetero.tf.distribute(files.interleave(...).map(decode).batch(64).repeat())
        model.fit(data, steps_per_epoch=500, epochs=3, shuffle=False, callbacks=[data.callback()])

    In a job with ``--data-service tf`` the ranks share one job of the service. Each element goes to one rank: the one
    that asks first. In a job without data hosts, and without a launcher, the elements are those of ``dataset``,
    unchanged. Therefore one script works in all cases. The result is a `tf.data.Dataset` that Keras accepts. See
    `MeasuredDataset` for the steps that it counts and measures.

    Every rank must call this function equally often for a name, in the same order and with the same dataset. Do not
    shard the dataset by rank before. Transformations of the result (``.map``, ``.prefetch``) run on the trainer host.

    **Which elements come, and how often.** This follows TensorFlow's documentation of the module
    ``tf.data.experimental.service``, sections "Processing Modes", "Dynamic Sharding", "Static Sharding" and "Fault
    Tolerance". The guarantees hold over all ranks, per pass:

    - ``"dynamic"``: The dispatcher hands each piece of the source (a file name, an index) to the worker that asks
      next. Each element comes exactly once while no worker restarts. A worker that restarts loses the pieces that it
      was working on, and then each element comes at most once. If the dispatcher restarts, this still holds with
      ``--tf-work-dir``. Without this option, the job ends. The dataset must have one source that can be split, not
      several zipped sources. A ``shuffle`` before this call mixes only the elements of one worker.
    - ``"off"``: Every worker makes the whole dataset. Each element comes once per worker. A worker that restarts or
      joins begins again from the start. Use this for sources that cannot be split. Shuffle without a seed, because
      workers then use different orders.
    - ``"file"``, ``"data"``, ``"file_or_data"``, ``"hint"``: Each worker has a fixed part, which its place in the list
      of all workers determines. With ``"file"`` the part consists of files, and each worker needs at least one. With
      ``"data"`` it consists of elements, and the worker makes and drops all other elements. ``"file_or_data"`` uses
      files if possible, else elements. ``"hint"`` follows ``shard(tf.data.experimental.SHARD_HINT, ...)`` in the
      dataset. Each element comes once while no worker restarts. A worker that restarts begins its part again, and then
      each element comes at least once. The part of a worker that never appeared is missing. Ranks read from every
      worker, and ignore ``placement="remote"``.

    With ``"dynamic"`` and ``"file"`` each worker runs the pipeline on its part of the source. Therefore ``take(n)``
    before this call takes n elements on each worker. Likewise ``skip`` and ``batch(drop_remainder=True)`` drop elements
    on each worker. The elements that ``window`` gathers were not together in the source.

    No policy keeps the order or can be resumed. `hetero.tf.from_dataset` does both. If one rank leaves a pass early,
    the pass goes on for the other ranks, which get the rest.

    **Passes.** A pass is an epoch of the service. It begins when its first element is asked for. The n-th passes of all
    ranks are the same epoch, and they end after unequal numbers of elements. If ranks train in step, or if several
    ranks use ``fit``, pass an infinite dataset (``.repeat()`` before this call, not behind it) and ``steps_per_epoch``.

    **Coordinated reads** (section "Coordinated Data Read"). In every round, each rank gets one of several consecutive
    elements of one worker. The batches of a step have equal lengths if the dataset yields such batches in groups of the
    world size. The dataset must be infinite. All ranks must read equally many elements, because a rank that stops
    reading, or that alone looks at an element, blocks the others. Coordinated reads work only with ``"dynamic"`` and
    ``"off"``, and keep their guarantees. Ranks read from every worker, and ignore ``placement="remote"``.

    Args:
        dataset: A `tf.data.Dataset` of TensorFlow's own operations. Each element is the batch for one step of a rank.
        sharding: The part of the dataset that each tf.data worker makes, see above.
        compression: ``"auto"`` for snappy where TensorFlow decides to use it. None costs less CPU time on a fast
            network.
        placement: Place where elements are made. ``"remote"`` means on data hosts. ``"any"`` means also by the workers
            on any trainer host (``--trainer-tf-workers``). ``"local"`` means in this process, by `dataset` itself, as
            in a job without data hosts. Then every rank gets the whole dataset. TensorFlow's
            ``target_workers="LOCAL"`` is not used, because it means workers inside this process, and their servers
            would have to end with it.
        coordinated: Whether the ranks read in rounds.
        max_outstanding_requests: Elements that are requested at a time, which bounds memory. None for one per worker.
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
            "distribute in a job whose data hosts serve registered data sets; it needs their tf.data.service\n"
            "  Launch with --data-service tf; or use hetero.tf.from_dataset; or pass placement='local'."
        )
    check_tensorflow()
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
            # AUTO skips workers with the tag COLOCATED. The launcher gives it to the workers on trainer hosts.
            target_workers="ANY" if placement == "any" or reads_all else "AUTO",
            coordinated=coordinated,
            max_outstanding_requests=max_outstanding_requests,
        )
    return MeasuredDataset(elements, name or _DEFAULT_NAME)


def _check_arguments(
    sharding: str,
    compression: str | None,
    placement: str,
    coordinated: bool,
    max_outstanding_requests: int | None,
    name: str | None,
) -> None:
    for argument, value, choices in (
        ("sharding", sharding, (*_SHARED, *_STATIC)),
        ("compression", compression, ("auto", None)),
        ("placement", placement, _PLACEMENTS),
        ("coordinated", coordinated, (False, True)),
    ):
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
            f"coordinated=True with sharding={sharding!r}: workers with fixed parts end at different times\n"
            "  Pass sharding='dynamic' or 'off'."
        )
    if coordinated and placement == "local":
        raise ConfigError("coordinated=True with placement='local': there are no workers to read from in rounds")


def _check_dataset(dataset: Any, *, coordinated: bool) -> None:
    import tensorflow as tf

    from hetero.tf.dataset import FedDataset
    from hetero.tf.measured import MeasuredDataset
    from hetero.tf.movable import parts_of

    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            f"distribute was given a {type(dataset).__name__}, expected a tf.data.Dataset\n"
            "  What a function decorated with @hetero.dataset returns is for hetero.tf.from_dataset."
        )
    if any(isinstance(each, MeasuredDataset) for each in parts_of(dataset)):
        raise ConfigError("distribute was given what it returned before, or a dataset made of that; call it once, last")
    if any(isinstance(each, FedDataset) for each in parts_of(dataset)):
        raise ConfigError("distribute was given what from_dataset returned: data hosts make that, and it is measured")
    if not tf.executing_eagerly():
        raise ConfigError("distribute was called inside of a tf.function; call it outside, and pass in the dataset")
    if coordinated and (num_elements := int(dataset.cardinality())) >= 0:
        raise ConfigError(
            f"coordinated=True with a dataset of {num_elements} elements; expected an infinite one\n"
            "  The ranks read in rounds, and the last round would wait for ever: end the dataset with .repeat()."
        )
