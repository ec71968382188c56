"""Enters what a loader delivers into this rank's ledger, if there is one."""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import Any

from hetero.audit import ledger as ledgers
from hetero.audit.indices import indices_digest, samples_sum
from hetero.audit.ledger import BatchEntry, LoaderFacts, Writer
from hetero.batches.fetch import describe
from hetero.batches.purity import digest
from hetero.control import session as control
from hetero.datasets import DatasetSpec
from hetero.errors import HeteroError
from hetero.torch.pipeline import Pipeline, current_shard, is_remote
from hetero.torch.sampling import PlannedBatch

__all__ = ["enter", "note_unseen"]

logger = logging.getLogger(__name__)

_MAX_NAME_LENGTH = 200


def enter(pipeline: Pipeline, planned: PlannedBatch, epoch: int, batch: Any) -> None:
    """Enter a batch that is about to be delivered; costs a lookup where no ledger is asked for.

    Args:
        pipeline: Of the loader.
        planned: What was asked for.
        epoch: Its epoch.
        batch: What came, before it moves to a device.
    """
    ledger = ledgers.current(_identify)
    if ledger is None:
        return
    try:
        entry = BatchEntry(
            epoch=epoch,
            position=planned.position,
            size=len(planned.indices),
            indices=indices_digest(planned.indices, planned.occurrences),
            samples=samples_sum(planned.indices, planned.occurrences, leave_out_repeats=pipeline.sampler_order is None),
            content=digest(batch),
        )
    except Exception as error:  # noqa: BLE001 - objects of the user's that do not let themselves be looked at
        what = f"it ends before loader {pipeline.name}, epoch {epoch}, position {planned.position}"
        ledger.give_up(f"cannot take a batch: {type(error).__name__}: {error}", what)
        return
    if pipeline.audited_as is None:
        pipeline.audited_as = _facts(pipeline)
    ledger.add(pipeline.audited_as, entry)


def note_unseen(pipeline: Pipeline) -> None:
    """Say that a tool has its own processes fetch batches, where no ledger sees them."""
    ledger = ledgers.current(_identify)
    if ledger is not None:
        what = f"batches of loader {pipeline.name} are missing in it"
        ledger.give_up("does not see what the processes of a tool's loader fetch", what)


def _identify() -> Writer:
    session = control.current()
    shard = current_shard()
    return Writer(job="" if session is None else session.job_id, rank=shard.rank, world_size=shard.world_size)


def _facts(pipeline: Pipeline) -> LoaderFacts:
    state = pipeline.state()
    subject = pipeline.subject
    is_spec = isinstance(subject, DatasetSpec)
    return LoaderFacts(
        name=pipeline.name[:_MAX_NAME_LENGTH],
        dataset=(subject.name if is_spec else type(subject).__qualname__)[:_MAX_NAME_LENGTH],
        arguments=blake2b(subject.arguments_json.encode(), digest_size=8).hexdigest() if is_spec else "",
        fingerprint=_fingerprint(pipeline),
        num_samples=state.num_samples,
        seed=state.seed,
        global_batch=state.global_batch,
        order=state.order,
    )


def _fingerprint(pipeline: Pipeline) -> str | None:
    """Return what tells the data set's content, None if this process cannot tell without building it."""
    subject = pipeline.subject
    try:
        if is_remote() and isinstance(subject, DatasetSpec):
            from hetero.torch import remote  # the data plane, of no use locally

            return remote.fingerprint(subject)
        local = pipeline.local
        return describe(local.built).fingerprint if "built" in local.__dict__ else None
    except HeteroError as error:
        logger.warning("the ledger has no fingerprint of %s: %s", subject, error)
        return None
