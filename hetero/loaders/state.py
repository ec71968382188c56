"""The position of a loader: which epoch comes next, how many batches were delivered, and both as a checkpoint."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hetero.documents.records import decode, limits
from hetero.epochs import MAX_EPOCHS, pass_number
from hetero.errors import ConfigError

__all__ = ["LoaderState", "Progress", "Start"]

logger = logging.getLogger(__name__)

_VERSION = 1
_ORDERS = ("sequential", "shuffled", "torch", "window", "mixture", "lanes", "sampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A loader's position in its order, the same on every rank."""

    epoch: int
    """The epoch that is being delivered."""
    again: int | None = None
    """How many passes of this epoch had begun before this pass, see `Start.earlier_passes`."""
    batches: int
    """Number of global batches of this epoch that were delivered."""
    order: str = field(metadata=limits(choices=_ORDERS))
    """``sequential``, ``shuffled``, ``torch`` (as torch's samplers shuffle), ``window``, ``mixture``, ``lanes`` or
    ``sampler``."""
    seed: int = field(metadata=limits(minimum=-(2**63)))
    """The loader's seed."""
    num_samples: int | None = None
    """Length of the data set when the epoch began. None for a user's sampler."""
    global_batch: int | None = None
    """Samples per step over all ranks. None for a user's batch sampler."""
    plan: str | None = None
    """Digest of the plan of the order, see `hetero.plans`. None for a permutation of all samples."""
    lanes: Mapping[str, Any] | None = None
    """The lanes of an iterable, see `hetero.loaders.lanes.passes.Lanes.state`. None for a data set with an index."""
    sampler: object = None
    """State of the user's sampler, if the sampler is stateful."""
    num_drawn: int = 0
    """Number of indices that a stateful sampler had yielded in this epoch."""
    left: Mapping[str, object] | None = None
    """Where the last pass left a stateful sampler, if the next pass has not begun. The keys are ``epoch``, the epoch of
    the last pass, and ``sampler``, the sampler's state before the last delivered batch of that pass."""
    sampler_epoch: int | None = field(default=None, metadata=limits(minimum=-(2**63)))
    """The epoch that was last set on the user's sampler. None if unknown."""
    sampler_length: int | None = None
    """Length of the user's sampler in the epoch that is being delivered. None without a length or with a state."""
    world_size: int | None = None
    """Number of ranks when the state was taken, because the length of a user's sampler may depend on it. None without
    a user's sampler."""
    sampler_class: str | None = None
    """Classes of the user's sampler and of the samplers that it wraps."""
    dataset: str | None = None
    """Registered name of the data set, or the class of a data set object."""
    arguments: str | None = None
    """Digest of the data set's arguments."""
    completed: bool = True
    """Whether the pass had ended when the state was taken. In the loop's last step this is False, although nothing is
    left of the epoch. The next pass is then empty, so a script that counts passes trains as many epochs as without the
    restart."""

    def to_dict(self) -> dict[str, object]:
        """Return plain values, smaller than 1 KiB apart from the states of lanes and of a user's sampler."""
        return {"version": _VERSION, **{each.name: getattr(self, each.name) for each in fields(self)}}

    @classmethod
    def from_dict(cls, value: object) -> LoaderState:
        """Return the state from which `to_dict` made these values.

        Raises:
            ConfigError: If `to_dict` did not return the value.
        """
        if not isinstance(value, Mapping) or "version" not in value:
            found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise ConfigError(f"not the state of a hetero DataLoader: found {found}\n  Pass what state_dict returned.")
        rest = dict(value)
        if rest.pop("version") != _VERSION:
            raise ConfigError(f"loader state has version {value['version']!r}, this hetero reads {_VERSION}")
        # The state of a user's sampler may be anything, so it is not checked. It is in ``sampler``, and in ``left`` if
        # the state was taken between two passes.
        sampler, left = rest.pop("sampler", None), rest.pop("left", None)
        lanes = rest.pop("lanes", None)
        if lanes is not None and not _is_lanes(lanes):
            raise ConfigError(f"loader state: lanes is {str(lanes)[:80]!r}, expected their number and snapshots")
        if left is not None and not _is_left(left):
            raise ConfigError(f"loader state: left is {str(left)[:80]!r}, expected an epoch and a sampler's state")
        state = replace(decode(cls, rest, path="loader state"), sampler=sampler, left=left, lanes=lanes)
        _check_epoch(state.epoch)
        return state

    def check_fits(self, here: LoaderState) -> None:
        """Check that a loader whose `LoaderPipeline.facts` are ``here`` can continue from this state.

        Raises:
            ConfigError: If seed, data set length, order or global batch differ.
        """
        advice = {
            "order": "Use the same shuffle= or sampler=.",
            "seed": "Pass the same seed=.",
            "num_samples": "The data set has changed.",
            "plan": "Pass the same Mixture, and the same lanes=, window_bytes= and chunk_rows= of the shards.",
            "global_batch": "Keep batch_size x world size: halve the one where you double the other.",
        }
        for name, what_to_do in advice.items():
            saved, found = getattr(self, name), getattr(here, name)
            # A loader lacks some of these values. For example, a loader with a sampler has no data set length.
            if saved != found and None not in (saved, found):
                raise ConfigError(f"loader state has {name} {saved}, this loader has {found}\n  {what_to_do}")

    def doubts(self, here: LoaderState) -> list[str]:
        """Return texts about differences that may be mistakes, or changes that the user wants.

        Args:
            here: As for `check_fits`.
        """
        found = []
        for name, words in (("dataset", "data set"), ("sampler_class", "sampler")):
            saved, own = getattr(self, name), getattr(here, name)
            if saved != own and None not in (saved, own):
                found.append(f"{words} {saved}, and this loader has {own}")
        if self.dataset == here.dataset and self.arguments not in (None, here.arguments):
            found.append(f"data set {self.dataset} with other arguments than this loader's")
        return found


def _check_epoch(epoch: object) -> None:
    # Numbers of passes have 32 bits for the epoch (`hetero.epochs`). Epoch 2**32 had the order and the draws of the
    # second pass of epoch 0.
    if type(epoch) is not int or not 0 <= epoch < MAX_EPOCHS:
        raise ConfigError(f"epoch is {epoch!r}, expected an integer of at least 0 and less than 2**32")


def _is_left(left: object) -> bool:
    """Return whether a value has the form of `LoaderState.left`."""
    epoch = left.get("epoch") if isinstance(left, Mapping) and set(left) == {"epoch", "sampler"} else None
    return isinstance(epoch, int) and epoch >= 0


def _is_lanes(lanes: object) -> bool:
    """Return whether a value has the form of `LoaderState.lanes`."""
    if not isinstance(lanes, Mapping) or set(lanes) - {"mixture"} != {"num_lanes", "chunk_samples", "snapshots"}:
        return False
    numbers = lanes["num_lanes"], lanes["chunk_samples"]
    return all(type(number) is int and 1 <= number < 2**20 for number in numbers) and isinstance(
        lanes["snapshots"], str
    )


@dataclass(frozen=True, slots=True)
class Start:
    """The start position of a pass."""

    epoch: int
    batches: int = 0
    """Number of global batches to skip."""
    sampler: object = None
    num_drawn: int = 0
    may_become_next_epoch: bool = False
    """Whether the pass becomes the next epoch if nothing is left of this one."""
    completed: bool = False
    """Whether the pass that delivered the skipped batches had ended."""
    num_samples: int | None = None
    """Length of the data set when the epoch began. None for a user's sampler, and for an epoch that has not begun."""
    sampler_epoch: int | None = None
    """The epoch that was set on a user's sampler. Set only for a loaded state."""
    sampler_length: int | None = None
    """Length of the user's sampler in this epoch when the state was taken. Set only for a loaded state."""
    world_size: int | None = None
    """Number of ranks when the state was taken. Set only for a loaded state."""
    earlier_passes: int | None = None
    """How many passes had begun since `Progress.set_epoch` chose this epoch. None if no epoch was chosen. Then each
    pass is the next epoch."""

    @property
    def number(self) -> int:
        """The number of this pass in orders and random keys, see `hetero.epochs`."""
        return pass_number(self.epoch, self.earlier_passes or 0)

    @property
    def is_finished(self) -> bool:
        """Whether a loaded state is at the end of a pass over a user's sampler, whatever the sampler's length is now.

        Three kinds of states do not count. If no batch was delivered, the state is at the beginning of its epoch. If
        the sampler has a state, this state must be loaded first. The first versions of hetero saved neither
        ``world_size`` nor whether the pass had ended.
        """
        return self.completed and self.batches > 0 and self.sampler is None and self.world_size is not None

    def check_within(self, num_batches: int) -> None:
        """Reject a loaded or skipped position past the end of its epoch.

        Raises:
            ConfigError: If the epoch has fewer batches than were delivered and skipped.
        """
        if self.batches > num_batches:
            raise ConfigError(
                f"the next pass begins after batch {self.batches} of epoch {self.epoch}, an epoch has {num_batches}\n"
                "  Skip fewer batches, or load the state of a loader with the same data and drop_last=."
            )

    def following(self) -> Start:
        """Return the start of the next pass if the script chooses no epoch for it."""
        earlier = self.earlier_passes
        return Start(self.epoch + 1) if earlier is None else Start(self.epoch, earlier_passes=earlier + 1)


class Progress:
    """Decides which epoch a pass delivers, and counts the delivered batches. For one thread.

    - The first pass is epoch 0. Each later pass is the next epoch, whether the pass before was completed or left early.
      A pass begins with its first batch. An iterator whose first batch was never requested does not count.
    - `set_epoch` chooses the epoch of the next pass, which starts at its beginning. Later passes are further passes of
      this epoch, with another order and other draws, until `set_epoch` chooses again. If they were the following
      epochs, a script with two passes in each epoch would get the same batches in the second pass of an epoch and in
      the first pass of the next. With ``advances_chosen_epoch``, later passes are the following epochs, because Keras's
      ``fit`` takes many epochs after one call.
    - `resume` makes the next pass continue where the state was taken. If nothing is left of that epoch, the pass is the
      next epoch. The pass is empty instead if the state was taken in the loop's last step, before the pass ended, or if
      `set_epoch` names the finished epoch.
    """

    def __init__(self, *, advances_chosen_epoch: bool = False) -> None:
        self._earlier_passes_if_chosen = None if advances_chosen_epoch else 0
        """`Start.earlier_passes` of the first pass after a call of `set_epoch`. It decides what the second pass after
        the call is: the following epoch if this is None, another pass of the chosen epoch if this is 0."""
        self._num_passes = 0
        """Passes that have begun. This is the number of the latest pass."""
        self._latest: Start | None = None
        """Start of the latest pass. None before the first pass."""
        self._batches = 0
        """Global batches of the epoch up to the last delivered batch, with those that the latest pass has skipped."""
        self._sampler: object = None
        """State of the user's sampler after that batch, if the sampler is stateful."""
        self._num_drawn = 0
        """Number of indices drawn in the epoch up to that batch."""
        self.num_samples: int | None = None
        """Length of the data set when the latest pass was planned."""
        self.named_epoch: int | None = None
        """The epoch that `set_epoch` chose for the next pass. None if it chose none."""
        self.resumed: Start | None = None
        """Start of the next pass according to a loaded state. None after that pass has begun."""
        self._is_completed = False
        """Whether the latest pass was delivered to its end."""
        self._has_left = False
        """Whether another pass is about to begin, see `leave`. Then the latest pass is over, although it may not have
        been delivered to its end."""
        self._latest_resumed: Start | None = None
        """Start of the latest pass if it resumed a loaded state in the middle of an epoch."""
        self._has_warned = False
        """Whether a warning about an iterator from before the loaded state was logged."""
        self._tool_offset = 0
        """Epoch that a tool's epoch 0 means, see `set_epoch_by_tool`."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Raises:
            ConfigError: If ``epoch`` is not an integer of at least 0 and less than 2**32.
        """
        _check_epoch(epoch)
        # The state's own epoch continues where the state was taken. For the epoch after it, the loader itself decides
        # whether to warn (`LoaderPipeline.warn_of_rest`), because it knows whether a rest of the state's epoch is left.
        if self.resumed is not None and epoch not in (self.resumed.epoch, self.resumed.epoch + 1):
            logger.warning("set_epoch(%d) discards the loaded state, which is at epoch %d", epoch, self.resumed.epoch)
        # A tool's offset does not apply to the script's own numbers, see `set_epoch_by_tool`.
        self._tool_offset = 0
        self.named_epoch = epoch

    def set_epoch_by_tool(self, epoch: int) -> None:
        """Set the epoch of the next pass for a tool that counts epochs itself.

        accelerate and Fabric count from 0 in every process. If their first number after `resume` is 0, this 0 means the
        epoch of the state. Later numbers then count from that epoch.
        """
        if self.resumed is not None and self.named_epoch is None and epoch == 0:
            self._tool_offset = self.resumed.epoch
        offset = self._tool_offset
        # Lightning takes the first batch of a loader without a length before it names the epoch. The pass has begun.
        latest = self._latest
        if (
            self.is_within_pass
            and latest is not None
            and (epoch + offset, latest.batches)
            == (
                latest.epoch,
                self._batches,
            )
        ):
            return
        self.set_epoch(epoch + offset)
        # `set_epoch` has set the offset to 0, because a script's own numbers need none.
        self._tool_offset = offset

    def skip(self, batches: int, num_batches: Callable[[Start], int] | None = None) -> Start:
        """Let the next pass begin ``batches`` global batches later. Return its start.

        Raises:
            ConfigError: If ``batches`` is not an integer of at least 1, a pass is in progress, a user's sampler has a
                state, or the epoch has only ``num_batches(start)`` batches and that is fewer. Then nothing changes.
        """
        if type(batches) is not int or batches < 1:
            raise ConfigError(f"batches is {batches!r:.40}, expected an integer of at least 1")
        if self.is_within_pass:
            raise ConfigError(
                "skip was called within a pass\n  Call it before the loop, for example after load_state_dict."
            )
        start = self.next_start()
        if start.sampler is not None:
            raise ConfigError(
                "skip cannot pass over batches of a sampler with a state\n  Let the sampler itself pass over them."
            )
        if start.completed and start.batches:
            start = start.following()
        start = replace(start, batches=start.batches + batches, completed=False, may_become_next_epoch=False)
        if num_batches is not None:
            start.check_within(num_batches(start))
        self.resumed = start
        return start

    def resume(self, state: LoaderState) -> None:
        """Continue from ``state`` with the next pass."""
        self.resumed = Start(
            state.epoch,
            batches=state.batches,
            sampler=state.sampler,
            num_drawn=state.num_drawn,
            completed=state.completed,
            num_samples=state.num_samples,
            sampler_epoch=state.sampler_epoch,
            sampler_length=state.sampler_length,
            world_size=state.world_size,
            earlier_passes=state.again,
        )
        self._has_warned = False
        self.named_epoch = None
        self._tool_offset = 0

    @property
    def is_within_pass(self) -> bool:
        """Whether a pass has begun and not ended, with no call of `set_epoch`, `resume` or `leave` since it began."""
        return self._latest is not None and not (self._is_completed or self._has_left or self.is_between_passes)

    def leave(self) -> None:
        """Record that another pass is about to begin. The latest pass may have ended or not."""
        self._has_left = True

    @property
    def is_between_passes(self) -> bool:
        """Whether `set_epoch` or `resume` chose the start of the next pass, and that pass has not begun."""
        return self.named_epoch is not None or self.resumed is not None

    def next_start(self) -> Start:
        """Return where the next pass would begin, without beginning it."""
        # Continue at the loaded state, unless `set_epoch` chose another epoch than the state's.
        if self.resumed is not None and self.named_epoch in (None, self.resumed.epoch):
            earlier_passes = self.resumed.earlier_passes
            # When the state was taken, the script did not choose epochs. It chooses this epoch now, so this pass counts
            # as the first one after a call of `set_epoch`.
            if self.named_epoch is not None and earlier_passes is None:
                earlier_passes = self._earlier_passes_if_chosen
            # If the script names the state's epoch, the pass stays in this epoch, even if nothing is left of it. The
            # same applies to a state from the loop's last step, which is not ``completed``.
            may_become_next_epoch = self.named_epoch is None and self.resumed.completed
            return replace(self.resumed, may_become_next_epoch=may_become_next_epoch, earlier_passes=earlier_passes)
        if self.named_epoch is not None:
            return Start(self.named_epoch, earlier_passes=self._earlier_passes_if_chosen)
        return Start(0) if self._latest is None else self._latest.following()

    def begin(self) -> tuple[int, Start]:
        """Begin a pass. Return its number, for `advance`, and its start."""
        start = self.next_start()
        return self.begin_at(start), start

    def begin_at(self, start: Start) -> int:
        """Begin a pass at the given start. Return its number."""
        self._warn_of_probe(start)
        # When the next pass begins, `_warn_of_probe` compares it with this start.
        self._latest_resumed = start if self.resumed is not None and start.batches else None
        self.named_epoch = self.resumed = None
        self._num_passes += 1
        self._place(start)
        return self._num_passes

    def skip_to_next_epoch(self) -> Start:
        """Turn the latest pass into a pass of the next epoch, because nothing is left of the pass's own epoch."""
        assert self._latest is not None
        start = self._latest.following()
        self._place(start)
        return start

    def advance(self, pass_number: int, *, batches: int, sampler: object = None, num_drawn: int = 0) -> None:
        """Record the position of pass ``pass_number`` after a delivered batch. Ignored unless it is the latest pass.

        Args:
            pass_number: The number of the pass.
            batches: Global batches of the epoch up to this batch.
            sampler: State of the user's sampler after this batch.
            num_drawn: Number of indices drawn in this epoch, up to this batch.
        """
        if self.is_latest(pass_number):
            if self.resumed is not None and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "batches are still requested from an iterator that began before load_state_dict. It continues "
                    "where it was, and state_dict returns the loaded state. Make a new iterator to resume at epoch %d, "
                    "batch %d",
                    self.resumed.epoch,
                    self.resumed.batches,
                )
            self._batches, self._sampler, self._num_drawn = batches, sampler, num_drawn

    def complete(self, pass_number: int) -> None:
        """Record that pass ``pass_number`` was delivered to its end."""
        if self.is_latest(pass_number):
            self._is_completed = True

    def is_latest(self, pass_number: int) -> bool:
        """Return whether this is the pass that began last."""
        return pass_number == self._num_passes

    def position(self, num_trained: int | None = None) -> Start:
        """Return where a state taken now must resume.

        This is in the latest pass, unless `set_epoch` or `resume` has chosen another start since that pass began.

        Args:
            num_trained: Batches of the latest pass that the script has trained on. None: all delivered batches.

        Raises:
            ConfigError: If the pass has not delivered so many batches.
        """
        if self._latest is None or self.is_between_passes:
            if num_trained:
                raise ConfigError(f"num_batches_trained is {num_trained}, but no pass has begun")
            return self.next_start()
        num_skipped = self._latest.batches
        num_delivered = self._batches - num_skipped
        found = num_delivered if num_trained is None else num_trained
        # Accept integers of NumPy too, such as np.int64(1). -1 is out of range, so the check below rejects other types.
        num_trained = operator.index(found) if hasattr(found, "__index__") and not isinstance(found, bool) else -1
        if not 0 <= num_trained <= num_delivered:
            raise ConfigError(
                f"num_batches_trained is {found!r}, expected 0 to {num_delivered}: so many batches the latest "
                "pass has delivered"
            )
        if self._sampler is not None and num_trained < num_delivered:
            raise ConfigError(
                f"num_batches_trained is {num_trained}, and the pass has delivered {num_delivered} batches\n"
                "  The sampler's state is known after the last of them only. Do not prefetch batches."
            )
        return Start(
            self._latest.epoch,
            batches=num_skipped + num_trained,
            sampler=self._sampler,
            num_drawn=self._num_drawn,
            completed=self._is_completed and num_trained == num_delivered,
            num_samples=self.num_samples,
            earlier_passes=self._latest.earlier_passes,
        )

    def _warn_of_probe(self, start: Start) -> None:
        """Log a warning if the pass that resumed a loaded state was left at once, and its epoch now starts again.

        A script that looks at one batch, for example to build a model, uses up the loaded state by this.

        Args:
            start: Start of the pass that begins.
        """
        resumed = self._latest_resumed
        # The script did more than look at one batch, if the pass ended or delivered more than one batch.
        if resumed is None or self._is_completed or self._batches > resumed.batches + 1:
            return
        # Do not warn if the next epoch begins, because the one batch may have been the rest of the state's epoch.
        if start.epoch != resumed.epoch or start.batches:
            return
        logger.warning(
            "the pass that resumed at epoch %d, batch %d was left after its first batch, and the next pass begins at "
            "epoch %d, batch 0. Call load_state_dict after lines that only look at a batch, such as "
            "next(iter(loader))",
            resumed.epoch,
            resumed.batches,
            start.epoch,
        )

    def _place(self, start: Start) -> None:
        """Set the position to the start of a pass that begins."""
        self._latest, self._batches = start, start.batches
        self._is_completed = self._has_left = False
        self._sampler, self._num_drawn, self.num_samples = start.sampler, start.num_drawn, start.num_samples
