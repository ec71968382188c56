"""A dataset whose elements come from the tf.data.service that the launcher runs."""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
import time
from typing import Any

import tensorflow as tf

from hetero.control.directory import TF_DISPATCHER
from hetero.control.rank.session import RankSession
from hetero.errors import ConfigError, EndpointUnavailableError
from hetero.tf.movable import check_divisible, check_movable, check_whole

__all__ = ["served"]

logger = logging.getLogger(__name__)

_PROTOCOL = "grpc"
_TELL_AFTER_S = 5.0
_POLL_S = 0.5

_num_named: collections.Counter[str] = collections.Counter()
"""By name, the datasets of this process."""


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
    """Return a dataset that reads what the job's tf.data workers make of ``dataset``; blocks until it is registered.

    All ranks read from one job of the service, so each element goes to one of them. The n-th dataset of a name is the
    same one on all ranks; after a restart of the trainer group it is another.

    Args:
        dataset: What the workers run.
        session: Of this rank.
        name: Equal on all ranks.
        policy: The name of a `ShardingPolicy`.
        compression: As TensorFlow calls it.
        target_workers: As TensorFlow calls it.
        coordinated: Whether the ranks read in rounds.
        max_outstanding_requests: Elements that are asked for at a time; None: as TensorFlow thinks best.

    Raises:
        ConfigError: The dataset holds Python, cannot be sharded so, or is not that of the other ranks.
        EndpointUnavailableError: There is no dispatcher.
    """
    check_movable(dataset)
    check_whole(dataset, rank=session.rank, world_size=session.world_size)
    if policy == "DYNAMIC":
        check_divisible(dataset)
    service = f"{_PROTOCOL}://{_dispatcher_address(session)}"
    label = _label(session, name)
    dataset_id = hashlib.blake2b(label.encode(), digest_size=16).hexdigest()  # a file name in the dispatcher's work_dir
    api = tf.data.experimental.service
    try:
        api.register_dataset(service, dataset, compression=compression, dataset_id=dataset_id)
    except tf.errors.InvalidArgumentError as error:
        if "same ID" not in str(error):
            raise
        raise ConfigError(
            f"the elements of dataset {label!r} are not on all ranks the same\n"
            "  Every rank must call distribute in the same order, with the same dataset: not with a part of its own.\n"
            f"  TensorFlow says: {error.message}"
        ) from error
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


def _label(session: RankSession, name: str) -> str:
    _num_named[name] += 1
    return f"{session.job_id}/{session.generation}/{name}/{_num_named[name]}"


def _begun_when_read(elements: Any) -> Any:
    """Return the elements with an epoch of the service per pass that somebody reads from, and none for others.

    TensorFlow counts the iterators that every rank makes, and lets those of one number share an epoch. Keras makes more
    of them than it reads from, and not equally many on all ranks: an iterator at the end of an epoch, say. Inside of
    `flat_map` one is made when the first element is asked for.
    """

    def whole(_: Any) -> Any:
        return elements

    passes = tf.data.Dataset.range(1).flat_map(tf.autograph.experimental.do_not_convert(whole))
    if int(elements.cardinality()) == tf.data.INFINITE_CARDINALITY:
        passes = passes.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    options = tf.data.Options()
    # The ranks share the elements already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return passes.with_options(options)


def _dispatcher_address(session: RankSession) -> str:
    """Return where the dispatcher listens; blocks until it is known.

    Raises:
        EndpointUnavailableError: It is not, for the data timeout.
        SystemExit: If the job was asked to stop meanwhile.
    """
    timeout_s = session.options.data_timeout_s
    begun_s = time.monotonic()
    is_told = False
    changed = threading.Event()
    unsubscribe = session.tf_servers.subscribe(changed.set)
    try:
        while True:
            changed.clear()
            records = session.tf_servers.records()
            address = next((record.address for record in records if record.kind == TF_DISPATCHER), None)
            if address is not None:
                return address
            waited_s = time.monotonic() - begun_s
            known = ", ".join(record.endpoint_id for record in records) or "none"
            if waited_s >= timeout_s:
                raise EndpointUnavailableError(
                    f"no dispatcher of tf.data.service for {waited_s:.0f} s; servers that are there: {known}\n"
                    "  The launcher of the first data host starts it: look at what that host's log says of it. Bound: "
                    "--data-timeout."
                )
            if waited_s >= _TELL_AFTER_S and not is_told:
                is_told = True
                logger.info("waiting for the dispatcher of tf.data.service on the first data host; there: %s", known)
            if not changed.wait(min(_POLL_S, timeout_s - waited_s)):
                session.check_wait(is_starved=True)
    finally:
        unsubscribe()
