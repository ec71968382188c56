"""Records the passes over one dataset that TensorFlow has begun: their starts, and their produced and consumed batches.

TensorFlow begins a pass when it makes an iterator and asks it for a batch. A pass *has happened* if at least one of its
batches was consumed, or if its last batch was produced. Then the next pass is the next epoch. A pass that ends before
it has happened is *void*. The next pass then begins at the same position as the void pass.

There is one exception. While the script reports consumed batches, a pass that has ended stays open if the script may
still report some of its batches. For example, ``take(3)`` ends a pass after three batches, and a ``prefetch`` after the
``take`` may hold all three batches.

`Stage` is the state of a pass. `Reporting` is whether the script reports consumed batches. Both list their transitions.
If an iterator of the script reads a pass, this iterator counts the consumed batches. All other reports ignore such a
pass. This module does not use TensorFlow.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero.errors import ConfigError
from hetero.loaders.auditing import Record
from hetero.loaders.sampling import BuiltInOrder, Shard
from hetero.loaders.state import Progress, Start

__all__ = ["Claim", "PassLog", "ProducedBatch", "Reporting", "Stage", "Step", "TensorFlowPass"]

_MAX_UNREPORTED = 2**16
"""Maximum number of batches to remember if the script reports none. With a ledger each batch takes 300 bytes."""


class Stage(enum.Enum):
    """Stage of a pass.

    - RUNNING -> ENDED: TensorFlow asks for no more batches, but the script may still report produced batches.
    - RUNNING or ENDED -> CLOSED, for one of three reasons. All batches were consumed. Or the pass has happened and its
      other batches will not be reported, because the pass ended, or because a training begins or ends. Or the script
      chose another position, or reports nothing while the log has too many batches, and the log forgot the pass.
    - RUNNING, ENDED or CLOSED -> VOID: The pass ended, or a training began or ended, before the pass had happened.
    - VOID -> ENDED: The script reports a batch of the latest pass, which a buffer still held.

    ::

        RUNNING -------> ENDED -------> CLOSED    A pass may go from RUNNING to CLOSED at once.
           |             ^   |             |
           |             |   v             |
           +-----------> VOID <------------+

    Consumed batches change `Progress` only in RUNNING and ENDED.
    """

    RUNNING = enum.auto()
    ENDED = enum.auto()
    CLOSED = enum.auto()
    VOID = enum.auto()


class Reporting(enum.Enum):
    """Whether and how the script reports consumed batches, except the batches that its iterators count.

    - NEVER -> ANNOUNCED: The script called `callback` or `measure`, which announces reports.
    - Any state -> REPORTING: A report came, or a training of Keras began.
    - REPORTING -> PAUSED: The training ended.

    ::

        NEVER ---> ANNOUNCED ---> REPORTING <---> PAUSED
          |                           ^
          +---------------------------+  mark_taken, which nothing announces
    """

    NEVER = enum.auto()
    ANNOUNCED = enum.auto()
    REPORTING = enum.auto()
    PAUSED = enum.auto()

    @property
    def has_begun(self) -> bool:
        """Whether the script has ever reported consumed batches."""
        return self in (Reporting.REPORTING, Reporting.PAUSED)


@dataclass(slots=True)
class Step:
    """A step that has begun. Its batches are not yet reported as consumed."""

    begun_s: float
    waited_s: float | None
    """Seconds until the step's first batch was produced. None while the step waits for this batch."""


class ProducedBatch(NamedTuple):
    """A batch that TensorFlow received."""

    size: int
    """Number of samples."""
    record: Record
    """What to record when the batch is consumed."""
    batches: int
    """Global batches of the epoch up to this batch."""
    is_first: bool = False
    """Whether the batch is the first of its pass."""
    is_repeated: bool = False
    """Whether a profile run repeats the batch."""


# Two passes are equal only if they are the same object, because `PassLog` looks passes up in a list.
@dataclass(eq=False, kw_only=True)
class TensorFlowPass:
    """One pass that TensorFlow has begun."""

    start: Start
    """First position of the pass."""
    num_batches: int
    """Number of this rank's batches from the start on."""
    num_global_batches: int
    """Number of global batches of the whole epoch."""
    previous: TensorFlowPass | None
    """Pass before this one. If this pass becomes void, the next pass follows the pass before. None if not needed."""
    is_counted: bool
    """Whether an iterator of the script counts the consumed batches. Other reports ignore the pass."""
    is_announced: bool
    """Whether the script had announced or begun its reports when the pass began. If not, it may never report."""
    stage: Stage = Stage.RUNNING
    num_produced: int = 0
    """Batches that TensorFlow has received."""
    num_consumed: int = 0
    """Batches that an iterator or a report of the script counts as consumed."""
    batches: int = field(init=False)
    """Global batches of the epoch up to the last consumed batch. This rank may have no batch in some of them."""
    number: int | None = None
    """Number of this pass in `Progress`. None until one of its batches is consumed."""
    failure: Exception | None = None
    """Exception that ended the pass."""
    _unconsumed: deque[ProducedBatch] = field(default_factory=deque)
    """Produced batches that are not yet consumed, the oldest first. `forget_batches` removes them, to limit memory."""

    def __post_init__(self) -> None:
        self.batches = self.start.batches

    @property
    def is_open(self) -> bool:
        """Whether consumed batches change `Progress`."""
        return self.stage in (Stage.RUNNING, Stage.ENDED)

    @property
    def is_complete(self) -> bool:
        """Whether the last batch of the pass was produced."""
        return self.num_produced >= self.num_batches

    @property
    def has_happened(self) -> bool:
        """Whether the pass counts as an epoch: a batch was consumed, or the last batch was produced."""
        return self.num_consumed > 0 or self.is_complete

    @property
    def has_rest(self) -> bool:
        """Whether a batch was produced and not yet consumed."""
        return self.num_consumed < self.num_produced

    def produce(self, batch: ProducedBatch) -> None:
        """Record that TensorFlow receives a batch."""
        self.num_produced += 1
        self._unconsumed.append(batch)

    def end_here(self) -> None:
        """Record that the last batch of the pass was produced. Call it if the number of batches was not known."""
        self.num_batches = self.num_produced
        self.num_global_batches = self._unconsumed[-1].batches if self._unconsumed else self.batches

    def consume(self) -> ProducedBatch:
        """Record that the next batch was consumed, and return the batch.

        If the record of the batch was removed (`forget_batches`), or the batch is not yet produced, return a batch
        without samples.
        """
        self.num_consumed += 1
        # ``previous`` is needed only if this pass becomes void, which means that it ends without a consumed batch. Drop
        # it, because each pass would otherwise keep all passes before it in memory.
        self.previous = None
        batch = self._unconsumed.popleft() if self._unconsumed else ProducedBatch(0, Record(), self.batches + 1)
        self.batches = batch.batches
        return batch

    def forget_batches(self) -> None:
        """Remove the records of batches that are not yet consumed, and the passes before this one, to limit memory."""
        self.previous = None
        self._unconsumed.clear()

    def pop_failure(self) -> Exception | None:
        """Return and forget the exception that ended the pass, because its traceback refers to this pass."""
        failure, self.failure = self.failure, None
        return failure


@dataclass
class Claim:
    """Connects an iterator to the pass that begins when the iterator asks for its first batch."""

    tf_pass: TensorFlowPass | None = None
    """The pass. None until the pass begins."""


class PassLog:
    """The passes whose batches may still be consumed, and the start position of the next pass.

    Call the methods inside `hold`. The exceptions are `expect` and `begin`, which enter `hold` themselves, and `end`,
    which never waits.

    Args:
        progress: Position of the script in the data. `PassLog` updates it when batches are consumed.
    """

    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        """Guards this object and its passes. `hold` takes it."""
        self._ended: deque[TensorFlowPass] = deque()
        """Passes that TensorFlow has ended and that `hold` has yet to process."""
        self._reporting = Reporting.NEVER
        self._progress = progress
        self._open: list[TensorFlowPass] = []
        """Open passes, the oldest first."""
        self._latest: TensorFlowPass | None = None
        """Latest pass that is not void. None if the next pass starts at the position that `Progress` gives."""
        self._dropped: TensorFlowPass | None = None
        """Latest pass, if it became void because it ended before one of its batches was consumed."""
        self._claim: Claim | None = None
        """Claim for the next pass that begins."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock out other threads, and first process the passes that have ended."""
        with self._lock:
            self._process_ended()
            yield

    # Reports of TensorFlow's threads

    def expect(self, claim: Claim | None) -> None:
        """Set the claim for the next pass that begins. None withdraws an earlier claim."""
        with self.hold():
            self._claim = claim

    def begin(self, order: BuiltInOrder, shard: Shard) -> TensorFlowPass:
        """Begin a pass. If `expect` has set a claim, the pass belongs to the iterator that has made the claim.

        That iterator then counts the consumed batches of the pass.
        """
        num_global_batches = order.num_global_batches(shard.world_size)
        with self.hold():
            # Limit memory, because a script that reports nothing never closes its passes.
            self._forget_unreported()
            start = self._next_start(num_global_batches)
            # A claim is for one pass. If the claim stayed, it would also claim the pass that fit reads next.
            claim, self._claim = self._claim, None
            begun = TensorFlowPass(
                start=start,
                # A start at the end of an epoch may be past this rank's last batch, if other ranks have one more batch.
                num_batches=max(0, order.num_batches(shard) - start.batches),
                num_global_batches=num_global_batches,
                previous=self._latest,
                is_counted=claim is not None,
                is_announced=self._reporting is not Reporting.NEVER,
            )
            if claim is not None:
                claim.tf_pass = begun
            self._latest = begun
            # Only the latest pass may open again after it became void, and this pass is the latest now.
            self._dropped = None
            self._open.append(begun)
        return begun

    def end(self, tf_pass: TensorFlowPass) -> None:
        """Record that TensorFlow asks for no more batches of a pass. Never waits for the lock.

        The garbage collector may call this in a thread that already holds the lock. Waiting would then be a deadlock.
        """
        # `_ended` is a deque, so `append` needs no lock. Process the pass now if the lock is free, else in `hold`.
        self._ended.append(tf_pass)
        if self._lock.acquire(blocking=False):
            try:
                self._process_ended()
            finally:
                self._lock.release()

    # Reports of the script

    def announce_reports(self) -> None:
        """Record that the script will report consumed batches, for the passes that begin from now on."""
        if self._reporting is Reporting.NEVER:
            self._reporting = Reporting.ANNOUNCED

    def begin_training(self) -> None:
        """Expect the reports of a training. Close the passes that began earlier, which the training does not use."""
        self._leave_behind()
        self._reporting = Reporting.REPORTING

    def end_training(self) -> None:
        """Close the passes that have begun, because their other batches will not be consumed."""
        self._leave_behind()
        if self._reporting is Reporting.REPORTING:
            self._reporting = Reporting.PAUSED

    def report(self, num_batches: int) -> list[ProducedBatch]:
        """Record the next batches as consumed, and return them. Ignores passes that an iterator counts.

        Args:
            num_batches: Number of batches. Batches that were not produced are ignored.
        """
        # Set the state here even if a training has ended (PAUSED), because a loop with mark_taken may follow it.
        self._reporting = Reporting.REPORTING
        batches: list[ProducedBatch] = []
        while len(batches) < num_batches and (tf_pass := self._pass_of_next_report()) is not None:
            batches.append(self.consume(tf_pass))
        return batches

    def consume(self, tf_pass: TensorFlowPass) -> ProducedBatch:
        """Record that the next batch of a pass was consumed, and return it."""
        batch = tf_pass.consume()
        # After `set_epoch` or `load_state`, a pass that began earlier no longer changes the position.
        if tf_pass.is_open:
            self._advance(tf_pass)
        return batch

    def forget(self) -> None:
        """Start the next pass at the position of `Progress`. Batches of earlier passes no longer change `Progress`."""
        for each in self._open[:]:
            self._close(each, Stage.CLOSED)
        self._latest = self._dropped = None

    # Queries

    def has_unreported(self) -> bool:
        """Return whether a batch was produced and not yet consumed. Ignores passes that an iterator counts."""
        return self._oldest_with_rest() is not None

    def check_is_reported(self) -> None:
        """Check that the position after the last consumed batch is known.

        Raises:
            ConfigError: If batches were produced, and neither an iterator nor the script reports which were consumed.
        """
        is_uncounted = any(each.num_produced and not each.is_counted for each in self._open)
        if is_uncounted and not self._reporting.has_begun:
            raise ConfigError(
                "the script does not report which batches the training has consumed, so their place is not known\n"
                "  TensorFlow asks for more batches than the training consumes. Use one of these:\n"
                "  - pass callbacks=[data.callback()] to fit\n"
                "  - iterate over the dataset itself, or over data.measure(a dataset made of it)\n"
                "  - call data.mark_taken() after each step"
            )

    # Transitions

    def _oldest_with_rest(self) -> TensorFlowPass | None:
        """Return the oldest open pass with an unconsumed batch, except passes that an iterator counts."""
        return next((each for each in self._open if each.has_rest and not each.is_counted), None)

    def _pass_of_next_report(self) -> TensorFlowPass | None:
        """Return the pass of the next batch that the script reports. A report does not say which pass it means."""
        found = self._oldest_with_rest()
        # If all batches of open passes are consumed, the batch is from the latest pass. That pass ended and became void
        # while a buffer of TensorFlow still held the batch. Open the pass again.
        if found is None and self._dropped is not None:
            found, self._dropped = self._dropped, None
            found.stage = Stage.ENDED
            self._open.append(found)
            self._latest = found
        return found

    def _leave_behind(self) -> None:
        """Close all open passes, except those that an iterator counts.

        - CLOSED, so the pass counts as an epoch: A batch of it was consumed. Or its last batch was produced, and the
          script had announced no reports when the pass began (``is_announced``), so the pass counts as used.
        - VOID, so its epoch comes again: Any other pass, because the training has not used it.
        """
        # A later report must not open the void pass again, because the script has left that pass behind.
        self._dropped = None
        # `_close` removes passes from the list, so iterate over a copy. The order of the passes does not matter.
        for each in self._open[:]:
            # Leave the pass open, because its iterator may go on after the training.
            if each.is_counted:
                continue
            if each.num_consumed or (each.is_complete and not each.is_announced):
                self._close(each, Stage.CLOSED)
            else:
                self._close(each, Stage.VOID)

    def _forget_unreported(self) -> None:
        """Forget the oldest passes if the script reports nothing, as for a validation set of `fit`, to limit memory."""
        # Keep many batches, because the script may report later. The first call of mark_taken reports the first batch,
        # and repeat() may have begun many passes by then.
        unreported = [] if self._reporting.has_begun else [each for each in self._open if not each.is_counted]
        num_kept = sum(each.num_produced for each in unreported)
        # Never forget the latest pass, because its batches are the ones to be reported next.
        for oldest in unreported[:-1]:
            if num_kept <= _MAX_UNREPORTED:
                return
            num_kept -= oldest.num_produced
            self._close(oldest, Stage.CLOSED)
            oldest.forget_batches()

    def _process_ended(self) -> None:
        """Process the passes that `end` has recorded. The caller holds the lock."""
        while self._ended:
            self._process_end(self._ended.popleft())

    def _process_end(self, ended: TensorFlowPass) -> None:
        """Decide which stage follows for a pass that has ended.

        - ENDED: It has produced batches that the script may still report as consumed.
        - VOID: Otherwise, if no batch was consumed and the last one was not produced.
        - CLOSED: Otherwise.
        """
        # If the script reports nothing now and TensorFlow left the pass early, the batches will not be reported. For
        # example, Keras takes one batch to build a model, and then drops the pass. But after a failure, the script
        # still gets the batches that were produced before the failure.
        is_reporting = self._reporting is Reporting.REPORTING
        may_be_reported = is_reporting or ended.is_complete or ended.failure is not None
        if ended.has_rest and may_be_reported:
            # The pass may be closed already, for example by `set_epoch`.
            if ended.is_open:
                ended.stage = Stage.ENDED
        elif not ended.has_happened:
            # A buffer of TensorFlow may still hold batches. If the script reports one after all, the pass opens again.
            if ended.has_rest and ended is self._latest:
                self._dropped = ended
            self._close(ended, Stage.VOID)
        elif ended.is_open and ended.num_consumed >= ended.num_batches:
            # This rank had no batches to consume in the pass, but other ranks may have had some. So the epoch is over.
            # Or the end of an iterable became known after its last batch was consumed.
            self._advance(ended)
        elif ended.is_open:
            self._close(ended, Stage.CLOSED)

    def _advance(self, tf_pass: TensorFlowPass) -> None:
        """Report to `Progress` the last consumed batch of an open pass. Close the pass if no batch is left."""
        if tf_pass.number is None:
            tf_pass.number = self._progress.begin_at(tf_pass.start)
        is_consumed = tf_pass.num_consumed >= tf_pass.num_batches
        # Without padding, other ranks may have one more batch than this rank. All ranks must have the same position
        # after the epoch, so a rank that has consumed its last batch counts all global batches.
        batches = tf_pass.num_global_batches if is_consumed else tf_pass.batches
        self._progress.advance(tf_pass.number, batches=batches)
        if is_consumed:
            self._progress.complete(tf_pass.number)
        # A pass that ended early, as with ``take(3)``, closes when the script has reported all its produced batches.
        if is_consumed or (tf_pass.stage is Stage.ENDED and not tf_pass.has_rest):
            self._close(tf_pass, Stage.CLOSED)

    def _close(self, tf_pass: TensorFlowPass, stage: Stage) -> None:
        """Move a pass to CLOSED or VOID. The next pass then follows the latest pass that is not void."""
        if tf_pass.is_open:
            self._open.remove(tf_pass)
        tf_pass.stage = stage
        while self._latest is not None and self._latest.stage is Stage.VOID:
            self._latest = self._latest.previous

    def _next_start(self, num_global_batches: int) -> Start:
        """Return where the next pass begins. ``num_global_batches``: number of global batches of an epoch."""
        if self._latest is not None:
            return Start(self._latest.start.epoch + 1)
        start = self._progress.next_start()
        # If nothing is left of a loaded state's epoch, begin the next epoch. With an empty data set nothing is left of
        # any epoch, so stay in the state's epoch.
        is_epoch_over = start.may_become_next_epoch and start.batches >= num_global_batches > 0
        return Start(start.epoch + 1) if is_epoch_over else start
