"""`distribute`: a script's own `tf.data.Dataset`, made by the tf.data.service that the launcher runs."""

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
    """Return a dataset whose elements the data hosts make, with tf.data.service; measured, and ready for Keras.

    ::

        data = hetero.tf.distribute(files.interleave(...).map(decode).batch(64).repeat())
        model.fit(data, steps_per_epoch=500, epochs=3, shuffle=False, callbacks=[data.callback()])

    In a job with ``--data-service tf`` its ranks share one job of the service: each element goes to one of them, who
    asks first. In a job without data hosts, and without a launcher, the elements are those of ``dataset``, unchanged:
    one script serves both. The result is a `tf.data.Dataset`; see `MeasuredDataset` for what it counts and measures.

    Every rank must call it equally often for a name, in the same order and with the same dataset: do not shard by rank
    before. What is behind it (``.map``, ``.prefetch``) runs on the trainer host.

    **Which elements come, how often.** After TensorFlow's documentation of the module ``tf.data.experimental.service``,
    sections "Processing Modes", "Dynamic Sharding", "Static Sharding" and "Fault Tolerance"; over all ranks, per pass:

    - ``"dynamic"``: the dispatcher hands each piece of the source (a file name, an index) to the worker that asks
      next. Exactly once while no worker restarts; what one that restarts was at is lost then: at most once. If the
      dispatcher restarts, that holds with ``--tf-work-dir``; without it, the job ends. The source must be one, not
      several that are zipped, and one that can be split; ``shuffle`` before it mixes what one worker has.
    - ``"off"``: every worker makes the whole dataset: each element once per worker, and again from the beginning by
      one that restarts or joins. For sources that cannot be split; shuffle without a seed, so that workers differ.
    - ``"file"``, ``"data"``, ``"file_or_data"``, ``"hint"``: each worker has a fixed part, by its place in the list of
      all workers: of the files, at least one per worker; of the elements, the others of which it makes and drops;
      of files or else elements; or what the ``shard(tf.data.experimental.SHARD_HINT, ...)`` in the dataset says. Once
      while no worker restarts; one that does begins its part again: at least once. The part of one that never came
      is missing. Read from every worker, whatever ``placement`` says.

    With ``"dynamic"`` and ``"file"`` a worker runs the pipeline on its part of the source: ``take(n)`` before this call
    takes so many on each worker, so it is with ``skip`` and with what ``batch(drop_remainder=True)`` drops, and what
    ``window`` gathers was not together in the source.

    None of them keeps the order, and none can be resumed: `hetero.tf.from_dataset` does both. A pass that one rank
    leaves early goes on for the others, which then get the rest.

    **Passes.** A pass is an epoch of the service, begun when its first element is asked for; the n-th passes of all
    ranks are one. They end with unequal numbers of elements: for ranks that train in step, and for ``fit`` on several
    ranks, pass an infinite dataset (``.repeat()`` before, not behind) and ``steps_per_epoch``.

    **Coordinated reads** (section "Coordinated Data Read"): in every round each rank gets one of consecutive elements
    of one worker, so that batches of a step have equal lengths if the dataset yields them in groups of the world size.
    The dataset must be infinite. All ranks must read equally many elements: one that stops reading, or looks at an
    element alone, holds up the others. Only with ``"dynamic"`` and ``"off"``, whose guarantees hold; reads from every
    worker, whatever ``placement`` says.

    Args:
        dataset: A `tf.data.Dataset` of TensorFlow's own operations; batched, for what one step of a rank takes.
        sharding: What a tf.data worker makes: see above.
        compression: ``"auto"``, snappy as TensorFlow sees fit; or None, which costs less CPU time on a fast network.
        placement: Where elements are made. ``"remote"``: on data hosts. ``"any"``: also by the workers on trainer hosts
            (``--trainer-tf-workers``), on any of them. ``"local"``: in this process, by `dataset` itself, as in a job
            without data hosts: every rank has all of it. TensorFlow's ``target_workers="LOCAL"`` is not used: it means
            workers inside of this process, which would need servers that share its fate.
        coordinated: Whether the ranks read in rounds.
        max_outstanding_requests: Elements that are asked for at a time, which bounds memory; None: one per worker.
        name: For reports, at most 200 printable characters, and for jobs of the service; ``"data"`` by default.

    Raises:
        ImportError: There is no TensorFlow.
        ConfigError: Arguments cannot work in this job; or the dataset runs Python, or is another one on other ranks.
        EndpointUnavailableError: There is no dispatcher for the data timeout.
        SystemExit: If the job was asked to stop while waiting for it.
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
            # AUTO passes over workers that say to be colocated with trainers: the launcher's on trainer hosts.
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
