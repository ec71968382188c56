"""Makes a dataset whose elements come from the tf.data.service that the launcher runs."""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
import time
from typing import Any

import tensorflow as tf

from hetero.control.members.directory import TF_DISPATCHER
from hetero.control.rank.session import RankSession
from hetero.errors import ConfigError, EndpointUnavailableError
from hetero.system.waits import LOG_INTERVAL_S, POLL_S
from hetero.tf.movable import check_divisible, check_movable, check_whole

__all__ = ["served"]

logger = logging.getLogger(__name__)

_PROTOCOL = "grpc"

_num_named: collections.Counter[str] = collections.Counter()
"""Number of datasets that this process has made with each name."""


def served(
    dataset: Any,
    session: RankSession,
    *,
    name: str,
    policy: str,
    compression: str | None,
    target_workers: str,
    coordinated: bool,
    max_outstanding_requests: int | None,
) -> Any:
    """Return a dataset that reads the elements that the job's tf.data workers make. Blocks until it is registered.

    All ranks read from one job of the service, so each element goes to one rank. The n-th call with a name returns the
    same dataset on all ranks. After a restart of the trainer group it returns a new dataset.

    Args:
        dataset: Dataset that the workers run.
        session: Session of this rank.
        name: Name of the dataset, equal on all ranks.
        policy: Name of a `ShardingPolicy`.
        compression: Value of TensorFlow's argument.
        target_workers: Value of TensorFlow's argument.
        coordinated: Whether the ranks read in rounds.
        max_outstanding_requests: Maximum number of outstanding requests for elements. None lets TensorFlow decide.

    Raises:
        ConfigError: If the dataset runs Python, does not fit the sharding policy, or differs between ranks.
        EndpointUnavailableError: If no dispatcher appears within the data timeout.
        SystemExit: If the job was asked to stop during this call.
    """
    # Reject datasets that the service would process wrongly.
    check_movable(dataset)
    check_whole(dataset, rank=session.rank, world_size=session.world_size)
    if policy == "DYNAMIC":
        check_divisible(dataset)
    # Register the dataset under an id that is the same on all ranks, so that they share it. TensorFlow compares the
    # element types of their datasets.
    service = f"{_PROTOCOL}://{_dispatcher_address(session)}"
    _num_named[name] += 1
    label = f"{session.job_id}/{session.generation}/{name}/{_num_named[name]}"
    dataset_id = hashlib.blake2b(label.encode(), digest_size=16).hexdigest()  # a file name in the dispatcher's work_dir
    api = tf.data.experimental.service
    try:
        api.register_dataset(service, dataset, compression=compression, dataset_id=dataset_id)
    except tf.errors.InvalidArgumentError as error:
        # Any other invalid argument is not due to another rank's dataset.
        if "same ID" not in str(error):
            raise
        raise ConfigError(
            f"dataset {label!r} differs between ranks\n"
            "  Every rank must call distribute in the same order and with the whole dataset, not with a part of it.\n"
            f"  TensorFlow reports: {error.message}"
        ) from error
    # Read from the job of the service that all ranks share.
    elements = api.from_dataset_id(
        api.ShardingPolicy[policy],
        service,
        dataset_id,
        element_spec=dataset.element_spec,
        job_name=label,
        consumer_index=session.rank if coordinated else None,
        num_consumers=session.world_size if coordinated else None,
        max_outstanding_requests=max_outstanding_requests,
        target_workers=target_workers,
    )
    return _begun_when_read(elements)


def _begun_when_read(elements: Any) -> Any:
    """Return a dataset of the elements. A pass begins an epoch of the service only when the pass is read.

    TensorFlow numbers the iterators that each rank makes, and iterators with equal numbers share an epoch. Keras makes
    some iterators that it does not read, for example at the end of an epoch. How many it makes differs between ranks.
    Therefore the elements are inside a `flat_map`. There TensorFlow makes the iterator when the first element is read.
    """

    def whole(_: Any) -> Any:
        return elements

    passes = tf.data.Dataset.range(1).flat_map(tf.autograph.experimental.do_not_convert(whole))
    # flat_map makes the cardinality unknown. Set it again if it is infinite.
    if int(elements.cardinality()) == tf.data.INFINITE_CARDINALITY:
        passes = passes.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    options = tf.data.Options()
    # Do not shard, because the ranks already share the elements.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return passes.with_options(options)


def _dispatcher_address(session: RankSession) -> str:
    """Return the address of the dispatcher. Blocks until it is known.

    Raises:
        EndpointUnavailableError: If the address is not known within the data timeout.
        SystemExit: If the job was asked to stop during the wait.
    """
    timeout_s = session.options.data_timeout_s
    begun_s = time.monotonic()
    was_reported = False
    changed = threading.Event()
    unsubscribe = session.tf_servers.subscribe(changed.set)
    try:
        while True:
            # Clear the event before the records are read. Then a change after the reading still ends the wait below.
            changed.clear()
            records = session.tf_servers.records()
            address = next((record.address for record in records if record.kind == TF_DISPATCHER), None)
            if address is not None:
                return address
            waited_s = time.monotonic() - begun_s
            known = ", ".join(record.endpoint_id for record in records) or "none"
            if waited_s >= timeout_s:
                raise EndpointUnavailableError(
                    f"no dispatcher of tf.data.service appeared within {waited_s:.0f} s; known servers: {known}\n"
                    "  The launcher of the first data host starts it. See its log. --data-timeout sets the limit."
                )
            if waited_s >= LOG_INTERVAL_S and not was_reported:
                was_reported = True
                logger.info("waiting for the dispatcher of tf.data.service on the first data host; servers: %s", known)
            # After a wait without news, end this process if the job was asked to stop.
            if not changed.wait(min(POLL_S, timeout_s - waited_s)):
                session.check_wait(is_starved=True)
    finally:
        unsubscribe()
