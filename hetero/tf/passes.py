"""The passes over one dataset that TensorFlow has begun: where each starts, and what was produced and consumed of it.

A pass goes through these stages:

- *begun*: TensorFlow made an iterator and asks it for a batch.
- *consumed* (``taken`` in names): The training has consumed at least one batch of it.
- *complete*: Its last batch was produced. This may come before or after the first batch is consumed.

A pass that is complete or consumed has happened, and the next pass is the next epoch. A pass that ends before both is
*void*: it did not happen, and the next pass begins where this one began.

There is one exception. While the script reports consumed batches, a pass that ends stays open if it has produced
batches that the script may still report. For example, ``take(3)`` ends a pass after three batches, and a ``prefetch``
behind it may hold all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hetero.audit.ledger import BatchEntry
from hetero.errors import ConfigError
from hetero.loaders.sampling import BuiltInOrder, Shard
from hetero.loaders.state import Progress, Start

__all__ = ["Claim", "PassLog", "TensorFlowPass"]

_MAX_UNTOLD = 2**16
"""Maximum number of batches to remember of passes that are not reported. With a ledger each batch takes 300 bytes."""


class TensorFlowPass:
    """One pass that TensorFlow has begun.

    Args:
        start: Place where the pass begins.
        num_batches: Number of this rank's batches from the start on.
        num_global_batches: Number of global batches of the whole epoch.
        previous: The pass before this one.
    """

    def __init__(
        self, start: Start, *, num_batches: int, num_global_batches: int, previous: TensorFlowPass | None
    ) -> None:
        self.start = start
        self.num_batches = num_batches
        self.num_global_batches = num_global_batches
        self.previous = previous
        """Pass that the next pass follows if this one is void. Kept only while this pass can become void."""
        self.num_produced = 0
        self.num_taken = 0
        self.number: int | None = None
        """Number of this pass in `Progress`. None before a batch of it was consumed."""
        self.is_counted = False
        """Whether an iterator of the script counts the consumed batches. Other reports do not refer to this pass."""
        self.is_promised = False
        """Whether the script promised, before the pass began, to report its consumed batches."""
        self.is_void = False
        self.has_ended = False
        """Whether TensorFlow asks for no more batches of it."""
        self.failure: Exception | None = None
        """Exception that ended it."""
        self._sizes: deque[int] = deque()
        """Number of samples of each batch that was produced and not yet consumed."""
        self._entries: deque[BatchEntry] = deque()
        """Ledger entry of each of these batches. Empty without a ledger."""

    @property
    def is_complete(self) -> bool:
        """Whether the last batch of the pass was produced."""
        return self.num_produced >= self.num_batches

    @property
    def has_happened(self) -> bool:
        """Whether the next pass is the next epoch."""
        return self.num_taken > 0 or self.is_complete

    @property
    def next_size(self) -> int:
        """Samples of the next batch to consume. 0 if the batch was forgotten or is not yet produced."""
        return self._sizes[0] if self._sizes else 0

    def produced(self, size: int, entry: BatchEntry | None) -> None:
        """Record that a batch goes to TensorFlow.

        Args:
            size: Number of samples.
            entry: Entry for the ledger when the batch is consumed. None without a ledger.
        """
        self.num_produced += 1
        self._sizes.append(size)
        if entry is not None:
            self._entries.append(entry)

    def taken(self) -> BatchEntry | None:
        """Record that the next batch was consumed, and return its ledger entry."""
        self.num_taken += 1
        self.previous = None
        if self._sizes:
            self._sizes.popleft()
        return self._entries.popleft() if self._entries else None

    def let_go(self) -> None:
        """Forget the batches that are not yet consumed."""
        self.previous = None
        self._sizes.clear()
        self._entries.clear()

    def take_failure(self) -> Exception | None:
        """Return the exception that ended the pass and forget it, because its traceback refers to this pass."""
        failure, self.failure = self.failure, None
        return failure


class Claim:
    """Claim of an iterator on the pass that its first batch begins."""

    def __init__(self) -> None:
        self.found: TensorFlowPass | None = None


class PassLog:
    """The passes whose batches may still be consumed, and the place where the next pass starts.

    Call the methods inside `hold`. The exceptions are `expect` and `begin`, which enter `hold` themselves, and `end`,
    which never waits.

    Args:
        progress: Position of the script in the data. `PassLog` updates it when batches are consumed.
    """

    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._ended: deque[TensorFlowPass] = deque()
        """Passes that TensorFlow has ended and that `hold` has yet to process."""
        self.is_told = False
        """Whether the script has ever reported consumed batches of passes that iterators do not count."""
        self.is_promised = False
        """Whether the script promised to report the consumed batches of passes that begin from now on."""
        self.is_training = False
        """Whether the script is in a training that reports consumed batches."""
        self._progress = progress
        self._open: list[TensorFlowPass] = []
        """Passes that have batches left to consume, in the order in which they began."""
        self._latest: TensorFlowPass | None = None
        """Last pass that has happened or may still happen. None if `Progress` knows where the next pass starts."""
        self._dropped: TensorFlowPass | None = None
        """Latest pass, if it became void because it ended before a batch of it was consumed."""
        self._claim: Claim | None = None
        """Claim on the next pass that begins."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock out other threads, and first process the passes that have ended."""
        with self._lock:
            self._take_in_ended()
            yield

    def expect(self, claim: Claim | None) -> None:
        """Give the next pass that begins to ``claim``. None withdraws an earlier claim."""
        with self.hold():
            self._claim = claim

    def begin(self, order: BuiltInOrder, shard: Shard) -> TensorFlowPass:
        """Begin a pass."""
        num_global_batches = order.num_global_batches(shard.world_size)
        with self.hold():
            self._forget_untold()
            start = self._next_start(num_global_batches)
            begun = TensorFlowPass(
                start,
                num_batches=max(0, order.num_batches(shard) - start.batches),
                num_global_batches=num_global_batches,
                previous=self._latest,
            )
            if self._claim is not None:
                self._claim.found = begun
                begun.is_counted = True
                self._claim = None
            begun.is_promised = self.is_promised
            self._latest = begun
            self._dropped = None
            self._open.append(begun)
        return begun

    def end(self, found: TensorFlowPass) -> None:
        """Record that TensorFlow asks for no more batches of a pass. Never waits for the lock.

        The garbage collector may drop an iterator in a thread that holds the lock. That thread waits for this call.
        """
        self._ended.append(found)
        if self._lock.acquire(blocking=False):
            try:
                self._take_in_ended()
            finally:
                self._lock.release()

    def oldest_untaken(self) -> TensorFlowPass | None:
        """Return the oldest pass with a produced batch to consume, or None. Ignores passes that an iterator counts."""
        waiting = (each for each in self._open if not each.is_counted and each.num_taken < each.num_produced)
        return next(waiting, None)

    def told(self) -> TensorFlowPass | None:
        """Return the pass that a report of a consumed batch refers to, if the report does not name a pass."""
        found = self.oldest_untaken()
        if found is None and self._dropped is not None:  # a buffer still had its batches, so it did happen
            found, self._dropped = self._dropped, None
            found.is_void = False
            self._open.append(found)
            self._latest = found
        return found

    def take(self, found: TensorFlowPass) -> BatchEntry | None:
        """Record that the next batch of a pass was consumed, and return its ledger entry."""
        entry = found.taken()
        if found in self._open:  # not if it began before `set_epoch` or `load_state` chose another place
            self._advance(found)
        return entry

    def forget(self) -> None:
        """Start the next pass where `Progress` says. Batches of earlier passes no longer change `Progress`."""
        self._open.clear()
        self._latest = self._dropped = None

    def leave_behind(self) -> None:
        """Discard the unconsumed batches of passes that iterators do not count. Passes that have not happened are void.

        A complete pass is void too if the script had promised to report it and no batch of it was consumed. TensorFlow
        only looked at such a pass.
        """
        self._dropped = None
        for each in reversed(self._open[:]):
            if each.is_counted:
                continue
            if each.num_taken or (each.is_complete and not each.is_promised):
                self._open.remove(each)
            else:
                self._void(each)

    def check_is_told(self) -> None:
        """Check that the place behind the last consumed batch is known.

        Raises:
            ConfigError: If batches were produced, and neither an iterator nor the script reports which were consumed.
        """
        if self.is_told or not any(each.num_produced and not each.is_counted for each in self._open):
            return
        raise ConfigError(
            "nobody said which batches the training has taken: TensorFlow asks for more than that\n"
            "  Pass callbacks=[data.callback()] to fit; or iterate over the dataset itself, or over\n"
            "  data.measure(one made of it); or call data.mark_taken() after each step."
        )

    def _forget_untold(self) -> None:
        """Forget the oldest passes that are not reported, because passes of `fit` over a validation set never are."""
        untold = [] if self.is_told else [each for each in self._open if not each.is_counted]
        num_kept = sum(each.num_produced for each in untold)
        for oldest in untold[:-1]:
            if num_kept <= _MAX_UNTOLD:
                return
            num_kept -= oldest.num_produced
            self._open.remove(oldest)
            oldest.let_go()

    def _take_in_ended(self) -> None:
        while self._ended:
            self._take_in(self._ended.popleft())

    def _take_in(self, found: TensorFlowPass) -> None:
        """Decide whether a pass that has ended stays open, becomes void, or is over."""
        found.has_ended = True
        is_left = found.num_taken < found.num_produced
        if is_left and (self.is_training or found.is_complete or found.failure is not None):
            return  # the batches that were produced may still be consumed
        if not found.has_happened:
            if is_left and found is self._latest:
                self._dropped = found
            self._void(found)
        elif found in self._open and not found.num_batches:
            self._advance(found)  # this rank has nothing left, though others may, so the pass is over once it was begun
        elif found in self._open:
            self._open.remove(found)

    def _advance(self, found: TensorFlowPass) -> None:
        """Report to `Progress` how far a pass was consumed."""
        if found.number is None:
            found.number = self._progress.begin_at(found.start)
        is_over = found.num_taken >= found.num_batches  # without padding, other ranks may have one batch more
        batches = found.num_global_batches if is_over else found.start.batches + found.num_taken
        self._progress.advance(found.number, batches=batches)
        if is_over or (found.has_ended and found.num_taken >= found.num_produced):
            self._open.remove(found)

    def _next_start(self, num_global_batches: int) -> Start:
        if self._latest is not None:
            return Start(self._latest.start.epoch + 1)
        start = self._progress.next_start()
        is_over = start.may_skip and start.batches >= num_global_batches > 0
        return Start(start.epoch + 1) if is_over else start

    def _void(self, found: TensorFlowPass) -> None:
        found.is_void = True
        if found in self._open:
            self._open.remove(found)
        while self._latest is not None and self._latest.is_void:
            self._latest = self._latest.previous
