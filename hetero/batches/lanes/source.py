"""The lanes of one data set in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

from hetero.batches.failures import Cancelled, check_not_exit, dataset_error, exception_line
from hetero.batches.lanes.iterator import LaneIterator, LaneOrigin
from hetero.batches.lanes.pieces import LanePiece, LaneRules, PieceReport
from hetero.errors import ConfigError, DatasetError

__all__ = ["GUARANTEE_LINES", "LaneSource", "iterable_problem"]

GUARANTEE_LINES = """\
  guarantee="exactly-once"  needs an iterator with a state (state_dict, load_state_dict). It is tested at the start
  guarantee="replay"        a lane that moves begins anew, and passes over what was delivered. Exact, if the source
                            gives the same samples again. It takes longer at later positions
  guarantee="at-most-once"  a lane that moves begins anew. What was in flight is lost, and counted
"""
_UNREPEATABLE = (
    "lane {} gave other samples before sample {} when it was begun anew: the source cannot be replayed. Typical "
    "causes: shuffling with a seed of the time or the process, threads, a stream that goes on. Give the source a fixed "
    'seed, or the generator of the random module, which hetero seeds. Or pass the loader guarantee="at-most-once"'
)
_OTHER_GUARANTEES = 'Or pass the loader guarantee="replay" or "at-most-once", see docs/streams.md'


def iterable_problem(name: str) -> str:
    """Return the error for a loader of an iterable without a guarantee."""
    return (
        f"{name} is iterable, and has no index\n"
        "  Say what a restart or the loss of a data host may cost, with one of these arguments of the loader:\n"
        f"{GUARANTEE_LINES}"
        "  If the data are files, hetero.shards gives them an index, and nothing of this is needed."
    )


class LaneSource:
    """The iterators over an iterable in this process. Only one thread at a time may use it.

    Args:
        source: The user's iterable.
        name: Name of the data set, for messages.
        info_seed: Seed in torch's worker info.

    Raises:
        ConfigError: If the source is already a part for one rank.
    """

    def __init__(self, source: Any, *, name: str, info_seed: int) -> None:
        if getattr(source, "_distributed", None) is not None:  # of Hugging Face's data sets
            raise ConfigError(
                "the data set is a part for one rank already (split_dataset_by_node)\n"
                "  Leave this out. The loader divides the lanes over the ranks."
            )
        self.source = source
        self._info_seed = info_seed
        self._name = name
        self._iterators: dict[int, LaneIterator] = {}
        """The latest iterator of each lane."""
        self._is_tested = False
        """Whether a state was loaded and compared."""

    def take(
        self,
        rules: LaneRules,
        piece: LanePiece,
        *,
        seed: int,
        epoch: int,
        seed_all: Callable[[int], None],
        host: str,
        cancelled: Callable[[], bool] | None,
    ) -> tuple[list[Any], PieceReport]:
        """Return the samples of a piece, and its report. `seed_all` seeds all generators with a key.

        Raises:
            Cancelled: If ``cancelled()`` was true between two samples.
            DatasetError: If the user's code raises, or the source does not give what the guarantee says.
        """
        part = piece.part
        error = partial(
            dataset_error, dataset=self._name, host=host, stage="sample", sample_index=(part.lane, part.place)
        )
        try:
            origin = LaneOrigin(
                source=self.source,
                seed_all=seed_all,
                info_seed=self._info_seed,
                lane=part.lane,
                num_lanes=rules.layout.num_lanes,
                seed=seed,
                epoch=epoch,
                wraps=rules.end == "wrap",
            )
            return self._take(rules, piece, origin, cancelled)
        except (Cancelled, DatasetError):
            raise
        except BaseException as exc:
            # A generator that has raised is over, so the next request begins the lane anew.
            self._iterators.pop(part.lane, None)
            check_not_exit(exc, in_worker=True)
            found = str(exc) if isinstance(exc, ConfigError) else exc
            raise error(found) from exc

    def _take(
        self, rules: LaneRules, piece: LanePiece, origin: LaneOrigin, cancelled: Callable[[], bool] | None
    ) -> tuple[list[Any], PieceReport]:
        part = piece.part
        iterator, begun_at = self._at(rules, piece, origin, cancelled)
        chunk = rules.layout.chunk_samples
        # With "stop", all ranks must know one chunk ahead that the lane goes on.
        ahead = (part.place // chunk + 2) * chunk
        end = part.place + part.num_samples
        iterator.read_until(ahead if rules.end == "stop" else end, cancelled)
        if part.lane == part.place == 0 and rules.guarantee != "at-most-once" and not self._is_tested:
            self._test(rules, iterator, cancelled)
        digests = iterator.digests_ahead[: part.num_samples]
        samples = iterator.take(part.num_samples)
        snapshot = iterator.snapshot
        num_left = None
        if rules.end == "stop":
            # The part may be in the middle of its chunk.
            num_left = max(0, iterator.read_place - (part.place // chunk + 1) * chunk)
        is_judged = part.place == 0 and len(set(digests)) > 1
        return samples, PieceReport(
            num_samples=len(samples),
            num_left=num_left,
            chain=iterator.chain,
            snapshot=None if snapshot == piece.snapshot else snapshot,
            begun_at=begun_at,
            first=blake2b(b"".join(digests), digest_size=16).digest() if is_judged else b"",
        )

    def _at(
        self, rules: LaneRules, piece: LanePiece, origin: LaneOrigin, cancelled: Callable[[], bool] | None
    ) -> tuple[LaneIterator, int | None]:
        """Return the iterator of a lane at the place of a piece, and where it was begun if it was not there."""
        lane, place = piece.part.lane, piece.part.place
        iterator = self._iterators.get(lane)
        begun_at = None
        is_lost = rules.guarantee == "at-most-once"  # then it goes on wherever it is
        goes_on = is_lost and place > 0  # an iterator of an earlier pass may have the same origin
        if iterator is None or iterator.origin != origin or not (goes_on or iterator.place <= place):
            snapshot = piece.snapshot
            every = rules.layout.chunk_samples * rules.snapshot_every if rules.guarantee == "exactly-once" else 0
            iterator = self._iterators[lane] = LaneIterator(origin, snapshot, every=every)
            begun_at = iterator.place
            if every and not iterator.has_state:
                raise ConfigError(
                    f'guarantee="exactly-once" needs a state, and the iterator of {type(origin.source).__name__} has '
                    f"no state_dict() and load_state_dict(). {_OTHER_GUARANTEES}"
                )
        if not is_lost:
            self._pass_over(piece, iterator, place, cancelled)
        return iterator, begun_at

    def _pass_over(
        self, piece: LanePiece, iterator: LaneIterator, place: int, cancelled: Callable[[], bool] | None
    ) -> None:
        """Read up to a place without keeping the samples, and compare them with what was delivered before.

        Raises:
            ConfigError: If they differ.
        """
        known_place, known_chain = piece.known or (-1, b"")
        for stop in sorted({known_place, place}):
            # In pieces, so that few samples are in memory.
            while iterator.place < stop:
                iterator.read_until(iterator.place + 1, cancelled)
                if not iterator.take(1):
                    break
            if stop == known_place == iterator.place and iterator.chain != known_chain:
                raise ConfigError(_UNREPEATABLE.format(piece.part.lane, stop))

    def _test(self, rules: LaneRules, iterator: LaneIterator, cancelled: Callable[[], bool] | None) -> None:
        """Begin a lane a second time, from a snapshot if there are any, and compare the samples.

        Raises:
            ConfigError: If they differ.
        """
        chunk, place, snapshot = rules.layout.chunk_samples, 0, None
        if rules.guarantee == "exactly-once":
            place = chunk * rules.snapshot_every
            iterator.read_until(place + chunk, cancelled)
            snapshot = iterator.snapshot_at(place)
            if iterator.read_place <= place:
                return  # the lane is too short
        try:
            other = LaneIterator(iterator.origin, snapshot, every=0)
            other.read_until(iterator.read_place, cancelled)
        except Cancelled:
            raise
        except Exception as error:
            raise ConfigError(
                f"lane 0 cannot go on after its state at sample {place} is loaded: {exception_line(error)}. "
                f"{_OTHER_GUARANTEES}"
            ) from error
        self._is_tested = True
        if other.read_chain == iterator.read_chain:
            return
        if snapshot is None:
            raise ConfigError(_UNREPEATABLE.format(0, iterator.read_place))
        raise ConfigError(
            f"lane 0 gives other samples after its state at sample {place} is loaded. The state does not hold all that "
            f"the samples depend on, such as the buffer of a shuffle. Leave the shuffle out. {_OTHER_GUARANTEES}"
        )
