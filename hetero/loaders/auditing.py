"""Records the batches that a loader delivers: the sources of a mixture, and this rank's ledger if there is one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from hetero.audit import ledger as ledgers
from hetero.audit.ledger import BatchEntry, Ledger, LoaderFacts, Writer
from hetero.batches.purity.comparison import digest
from hetero.batches.request import BatchRequest
from hetero.control.rank import session as control
from hetero.epochs import epoch_text
from hetero.errors import HeteroError
from hetero.loaders.pipeline import LoaderPipeline, shard_of_environment

__all__ = ["Record", "add", "enter", "note_skipped", "note_unseen", "record_of"]

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """What `add` records of a batch."""

    by_source: Mapping[str, int] | None = None
    """Samples of each source of a `hetero.Mixture`. None without one."""
    entry: BatchEntry | None = None
    """Entry of the ledger. None without a ledger."""


def enter(pipeline: LoaderPipeline, request: BatchRequest, batch: Any) -> None:
    """Record a batch just before it is delivered. Without a mixture and a ledger this costs only two lookups.

    Args:
        pipeline: The loader's pipeline.
        request: The request of the batch.
        batch: The batch as it arrived, before it moves to a device.
    """
    add(pipeline, record_of(pipeline, request, batch))


def record_of(pipeline: LoaderPipeline, request: BatchRequest, batch: Any) -> Record:
    """Return what `enter` would record. An error here ends the ledger."""
    by_source = pipeline.samples_by_source(request.work)
    return Record(by_source, _entry_of(pipeline, request, batch, by_source))


def add(pipeline: LoaderPipeline, record: Record) -> None:
    """Record the delivery of a batch for which `record_of` returned ``record``."""
    if record.by_source is not None:
        pipeline.extent.by_source.update(record.by_source)
    if record.entry is None or (ledger := _ledger(pipeline)) is None:
        return
    if pipeline.audited_as is None:
        pipeline.audited_as = _facts(pipeline)
    ledger.add(pipeline.audited_as, record.entry)


def _entry_of(
    pipeline: LoaderPipeline, request: BatchRequest, batch: Any, by_source: Mapping[str, int] | None
) -> BatchEntry | None:
    """Return the ledger's entry of a batch. None without a ledger, and after an error."""
    ledger = _ledger(pipeline)
    if ledger is None:
        return None
    try:
        return BatchEntry(
            epoch=request.epoch,
            position=request.position,
            size=request.work.num_samples,
            indices=request.work.digest(),
            # Leave out repeats for padding, which only the loader's own order has. They depend on the world size, and
            # the sums of runs with different world sizes are compared.
            samples=request.work.samples_sum(leave_out_repeats=pipeline.has_own_order),
            # This digest is what a ledger costs: 70 us for a batch of 10 KB, and 10.6 ms for a batch of 10 MB.
            content=digest(batch),
            by_source=by_source,
        )
    except Exception as error:  # noqa: BLE001 - a user's object may raise when it is read
        what = f"it ends before loader {pipeline.name}, epoch {epoch_text(request.epoch)}, position {request.position}"
        ledger.give_up(f"cannot record a batch: {type(error).__name__}: {error}", what)
        return None


def note_skipped(pipeline: LoaderPipeline, epoch: int, position: int, num_batches: int) -> None:
    """Record that `skip` passes over batches, up to a position of an epoch."""
    ledger = _ledger(pipeline)
    if ledger is not None:
        ledger.skip(pipeline.name, epoch, position, num_batches)


def note_unseen(pipeline: LoaderPipeline) -> None:
    """End the ledger because processes of a tool fetch batches, which the ledger cannot see."""
    ledger = _ledger(pipeline)
    if ledger is not None:
        what = f"batches of loader {pipeline.name} are missing in it"
        ledger.give_up("cannot see what the processes of a tool's loader fetch", what)


def _ledger(pipeline: LoaderPipeline) -> Ledger | None:
    """Return this rank's ledger, which is made on first use. None if the job keeps none."""
    return ledgers.current(functools.partial(_identify, pipeline))


def _identify(pipeline: LoaderPipeline) -> Writer:
    """Return the job and the rank that write the ledger."""
    session = control.current()
    # Each rank of the job writes one ledger, so use its rank in the job. The loader's shard may differ from it, for
    # example if each rank reads another data set.
    shard = shard_of_environment()
    # The environment may name only one rank although there are more, for example after `mp.spawn`. Then the process
    # group knows them.
    if shard.world_size == 1:
        shard = pipeline.shard()
    return Writer(job="" if session is None else session.job_id, rank=shard.rank, world_size=shard.world_size)


def _facts(pipeline: LoaderPipeline) -> LoaderFacts:
    """Return the facts that identify a loader in the ledger."""
    state = pipeline.facts()
    return LoaderFacts(
        name=pipeline.name,
        dataset=pipeline.dataset_name,
        arguments=pipeline.arguments_digest,
        fingerprint=_fingerprint(pipeline),
        num_samples=state.num_samples,
        seed=state.seed,
        global_batch=state.global_batch,
        order=state.order,
    )


def _fingerprint(pipeline: LoaderPipeline) -> str | None:
    """Return the fingerprint of the loader's data set. If it is not known, return None, as a ledger needs none."""
    try:
        return pipeline.fingerprint()
    except HeteroError as error:
        logger.warning("the ledger has no fingerprint of %s: %s", pipeline.subject, error)
        return None
