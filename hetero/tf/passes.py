"""The passes that TensorFlow has begun over one dataset: where each starts, and how far it was produced and taken.

What a pass is for the next one:

- *begun*: TensorFlow made an iterator and asks it for a batch;
- *complete*: its last batch was produced;
- *taken from*: the training has a batch of it.

The pass after one that is complete or taken from is the next epoch. One that ends before both did not happen, and the
next one begins where it did. But while somebody says what is taken, what was produced of a pass that ends is expected
to be taken yet: ``take(3)`` ends a pass after three batches, and a ``prefetch`` behind it may have all of them.
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
"""Batches that are remembered of passes that nobody counts: with a ledger each takes 300 bytes."""


class TensorFlowPass:
    """One pass, begun by TensorFlow.

    Args:
        start: Where it begins.
        num_batches: Of this rank from there on.
        num_global_batches: Of the whole epoch.
        previous: The one before.
    """

    def __init__(
        self, start: Start, *, num_batches: int, num_global_batches: int, previous: TensorFlowPass | None
    ) -> None:
        self.start = start
        self.num_batches = num_batches
        self.num_global_batches = num_global_batches
        self.previous = previous
        """Whose place the next pass takes if this one is void; kept as long as that can be."""
        self.num_produced = 0
        self.num_taken = 0
        self.number: int | None = None
        """What `Progress` knows it by, once something of it was taken."""
        self.is_counted = False
        """Whether one iterator of the script's counts what it takes, so that nobody else does."""
        self.is_promised = False
        """Whether somebody said, before it began, that he would say what is taken of it."""
        self.is_void = False
        self.has_ended = False
        """Whether TensorFlow asks no more of it."""
        self.failure: Exception | None = None
        """What ended it."""
        self._sizes: deque[int] = deque()
        """Samples of the batches that were produced and not taken."""
        self._entries: deque[BatchEntry] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether its last batch was produced."""
        return self.num_produced >= self.num_batches

    @property
    def has_happened(self) -> bool:
        """Whether the next pass is the next epoch."""
        return self.num_taken > 0 or self.is_complete

    @property
    def next_size(self) -> int:
        """Samples of the next batch to be taken; 0 if that was let go, or is yet to be produced."""
        return self._sizes[0] if self._sizes else 0

    def produced(self, size: int, entry: BatchEntry | None) -> None:
        """Note that a batch of ``size`` samples goes to TensorFlow; ``entry`` is for the ledger, once it is taken."""
        self.num_produced += 1
        self._sizes.append(size)
        if entry is not None:
            self._entries.append(entry)

    def taken(self) -> BatchEntry | None:
        """Note that the next batch was taken; return what the ledger is to have of it."""
        self.num_taken += 1
        self.previous = None
        if self._sizes:
            self._sizes.popleft()
        return self._entries.popleft() if self._entries else None

    def let_go(self) -> None:
        """Keep nothing of what might have been taken yet."""
        self.previous = None
        self._sizes.clear()
        self._entries.clear()

    def take_failure(self) -> Exception | None:
        """Return what ended it, once: its traceback leads back here."""
        failure, self.failure = self.failure, None
        return failure


class Claim:
    """An iterator's on the pass that its first batch begins."""

    def __init__(self) -> None:
        self.found: TensorFlowPass | None = None


class PassLog:
    """The passes whose batches may yet be taken, and where the next one starts.

    The caller is inside of `hold`. `expect` and `begin` enter it themselves, and `end` never waits.

    Args:
        progress: What was taken; changes with it.
    """

    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._ended: deque[TensorFlowPass] = deque()
        """Those of which TensorFlow asks no more; `hold` takes them in."""
        self.is_told = False
        """Whether anybody says what is taken, of passes that no iterator counts."""
        self.is_promised = False
        """Whether anybody will, from now on."""
        self.is_training = False
        """Whether anybody does so at present."""
        self._progress = progress
        self._open: list[TensorFlowPass] = []
        """Those of which something is left to be taken, in the order of their beginnings."""
        self._latest: TensorFlowPass | None = None
        """The last one that has happened, or may; None: `Progress` knows where the next one starts."""
        self._dropped: TensorFlowPass | None = None
        """The last one, if it is void because it ended before anything was taken."""
        self._claim: Claim | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other threads out; what has ended is taken in before."""
        with self._lock:
            self._take_in_ended()
            yield

    def expect(self, claim: Claim | None) -> None:
        """Have the next pass that begins belong to ``claim``; None: to nobody in particular."""
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
        """Note that TensorFlow asks no more of a pass. Never waits for the lock.

        The collector may have dropped an iterator in a thread that has it, and that waits there for this.
        """
        self._ended.append(found)
        if self._lock.acquire(blocking=False):
            try:
                self._take_in_ended()
            finally:
                self._lock.release()

    def oldest_untaken(self) -> TensorFlowPass | None:
        """Return the pass of which the next batch is taken by whom no iterator counts; None: nothing was produced."""
        waiting = (each for each in self._open if not each.is_counted and each.num_taken < each.num_produced)
        return next(waiting, None)

    def told(self) -> TensorFlowPass | None:
        """Return the pass of which somebody says that a batch was taken, without knowing of which."""
        found = self.oldest_untaken()
        if found is None and self._dropped is not None:  # its batches lay in a buffer: it did happen
            found, self._dropped = self._dropped, None
            found.is_void = False
            self._open.append(found)
            self._latest = found
        return found

    def take(self, found: TensorFlowPass) -> BatchEntry | None:
        """Note that the next batch of a pass was taken; return what the ledger is to have of it."""
        entry = found.taken()
        if found in self._open:  # else begun before another place was chosen
            self._advance(found)
        return entry

    def forget(self) -> None:
        """Let the next pass start where `Progress` says; what is taken of those begun before changes nothing there."""
        self._open.clear()
        self._latest = self._dropped = None

    def leave_behind(self) -> None:
        """Let nothing be taken any more of passes that no iterator counts; those that have not happened are void.

        So are, of passes that somebody would count, those that are complete and nothing was taken of: looked at only.
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
        """Refuse to tell a place that nobody knows.

        Raises:
            ConfigError: Batches went out, and no iterator counts them, nor does anybody else.
        """
        if self.is_told or not any(each.num_produced and not each.is_counted for each in self._open):
            return
        raise ConfigError(
            "nobody said which batches the training has taken: TensorFlow asks for more than that\n"
            "  Pass callbacks=[data.callback()] to fit; or iterate over the dataset itself, or over\n"
            "  data.measure(one made of it); or call data.mark_taken() after each step."
        )

    def _forget_untold(self) -> None:
        """Let go of the oldest passes that nobody counts; over a validation set under `fit` nobody ever does."""
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
        """Conclude from the end of a pass."""
        found.has_ended = True
        is_left = found.num_taken < found.num_produced
        if is_left and (self.is_training or found.is_complete or found.failure is not None):
            return  # what was produced is still to be taken
        if not found.has_happened:
            if is_left and found is self._latest:
                self._dropped = found
            self._void(found)
        elif found in self._open and not found.num_batches:
            self._advance(found)  # nothing is left for this rank, other than for others perhaps: asking for it is all
        elif found in self._open:
            self._open.remove(found)

    def _advance(self, found: TensorFlowPass) -> None:
        """Have `Progress` know how far a pass was taken."""
        if found.number is None:
            found.number = self._progress.begin_at(found.start)
        is_over = found.num_taken >= found.num_batches  # without padding with a batch less than others, perhaps
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
