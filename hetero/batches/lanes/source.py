"""The lanes of one data set in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from hetero.batches.failures import Cancelled, check_not_exit, dataset_error, exception_line
from hetero.batches.lanes.iterator import LaneIterator, LaneOrigin, Snapshot
from hetero.batches.lanes.pieces import LanePiece, LaneRules, PieceReport
from hetero.errors import ConfigError, DatasetError
from hetero.plans.sources import IterableSources

__all__ = ["GUARANTEE_LINES", "LaneSource", "iterable_problem"]

GUARANTEE_LINES = """\
  guarantee="exactly-once"  needs an iterator with a state (state_dict, load_state_dict). It is tested at the start
  guarantee="replay"        a lane that moves begins anew, and passes over what was delivered. Exact, if the source
                            gives the same samples again. It takes longer at later positions
  guarantee="at-most-once"  for queues. A lane that moves goes on with a new iterator, which should not give the same
                            samples again. What was in flight is lost. The report counts moves
"""
_UNREPEATABLE = (
    "lane {} gave other samples before sample {} when it was begun anew: the source cannot be replayed. Typical "
    "causes: shuffling with a seed of the time or the process, threads, a stream that goes on. Give the source a fixed "
    'seed, or the generator of the random module, which hetero seeds. Or pass the loader guarantee="at-most-once"'
)
_UNREADABLE = (
    "lane {} cannot be read a second time: {}. Let the source open its files and connections anew each time that it is "
    'iterated. Or pass the loader guarantee="at-most-once"'
)
_COMPARED_SAMPLES = 8
"""First samples of a lane that are compared with those of other lanes. One sample would be too few: lanes of a good
source may begin with equal ones, as texts with the same first token do. tests/lanes/test_public_reports.py
has the report (astroPT 64)."""
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
        parts = source.datasets if isinstance(source, IterableSources) else (source,)
        if any(getattr(part, "_distributed", None) is not None for part in parts):  # of Hugging Face's data sets
            raise ConfigError(
                "the data set is a part for one rank already (split_dataset_by_node)\n"
                "  Leave this out. The loader divides the lanes over the ranks."
            )
        self.source = source
        self._info_seed = info_seed
        self._name = name
        self._iterators: dict[tuple[int, int, int], LaneIterator] = {}
        """The latest iterators by seed, epoch and lane. The one that was used last is the last."""
        self._tested: set[tuple[str, int]] = set()
        """Guarantees that were tested, each with the number of a lane."""

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
        place = ""
        try:
            number, lane = divmod(part.lane, rules.layout.num_lanes)
            source = self._sources(rules.layout.num_sources)[number]
            if isinstance(self.source, IterableSources):
                place = f"source {self.source.sources[number].name}, "
            origin = LaneOrigin(
                source=source,
                seed_all=seed_all,
                info_seed=self._info_seed,
                number=part.lane,
                lane=lane,
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
            self._iterators.pop((seed, epoch, part.lane), None)
            check_not_exit(exc, in_worker=True)
            if isinstance(exc, ConfigError):
                raise error(f"{place}{exc}") from exc
            # A packer may raise in a lane without a shard, before the lane itself would be found empty.
            num_lanes, note = rules.layout.num_lanes, ""
            if not part.place:
                note = f" (lane {part.lane % num_lanes} of {num_lanes} begins here, and may have no shard)"
            raise error(exc, note=note) from exc

    def _sources(self, num_sources: int) -> Sequence[Any]:
        """Return the iterables, one for each source of a mixture.

        Raises:
            ConfigError: If the data set has another number of sources.
        """
        found = self.source.datasets if isinstance(self.source, IterableSources) else (self.source,)
        if len(found) != num_sources:
            raise ConfigError(
                f"the data set has {len(found)} iterables, and the loader has {num_sources}\n"
                "  For hetero.Sources of iterables, pass the loader shuffle=hetero.Mixture(...) with their shares."
            )
        return found

    def _take(
        self, rules: LaneRules, piece: LanePiece, origin: LaneOrigin, cancelled: Callable[[], bool] | None
    ) -> tuple[list[Any], PieceReport]:
        part, chunk = piece.part, rules.layout.chunk_samples
        iterator, begun_at = self._at(rules, piece, origin)
        # Requests of a lane may overtake each other. What the rank had received when it sent the request is not needed
        # again. Chunks that are larger than a batch have samples for several ranks.
        place, chain = piece.known
        keep_from = place - chunk
        if chain and rules.guarantee != "at-most-once" and iterator.first_place <= place:
            # Compared by each request, because the first one may have been cancelled.
            iterator.read_until(place, cancelled, keep_from=keep_from)
            if iterator.read_place < place or iterator.chain_at(place) != chain:
                raise ConfigError(_UNREPEATABLE.format(origin.lane, place))
        iterator.read_until(part.place, cancelled, keep_from=keep_from)
        end = part.place + part.num_samples
        # With "stop", all ranks must know one chunk ahead that the lane goes on.
        iterator.read_until((part.place // chunk + 2) * chunk if rules.end == "stop" else end, cancelled)
        is_first = origin.lane == part.place == 0
        if is_first and rules.guarantee != "at-most-once" and (rules.guarantee, origin.number) not in self._tested:
            self._test(rules, iterator, cancelled)
        first = b""
        if part.place == 0:
            # One sample may be equal in two lanes by chance.
            count = max(part.num_samples, _COMPARED_SAMPLES)
            iterator.read_until(count, cancelled)
            digests = iterator.digests(count)
            first = blake2b(b"".join(digests), digest_size=16).digest() if len(set(digests)) > 1 else b""
        samples = iterator.take(part.place, part.num_samples)
        end = min(end, iterator.read_place)
        snapshot = iterator.snapshot_until(end)
        report = PieceReport(
            num_samples=len(samples),
            # The part may be in the middle of its chunk.
            num_left=max(0, iterator.read_place - (part.place // chunk + 1) * chunk) if rules.end == "stop" else None,
            chain=iterator.chain_at(end),
            snapshot=None if snapshot == piece.snapshot else snapshot,
            begun_at=begun_at,
            first=first,
        )
        return samples, report

    def _at(self, rules: LaneRules, piece: LanePiece, origin: LaneOrigin) -> tuple[LaneIterator, int | None]:
        """Return an iterator of a lane up to the place of a piece, and where it was begun if it was not there."""
        part, chunk = piece.part, rules.layout.chunk_samples
        key = (origin.seed, origin.epoch, part.lane)
        iterator = self._iterators.pop(key, None)
        is_lost = rules.guarantee == "at-most-once"
        if iterator is not None and iterator.origin == origin:
            # With at-most-once, samples that were taken cannot come again, so the lane goes on. But a pass that begins
            # has a new iterator.
            is_held = iterator.holds(part.place, part.num_samples)
            if is_held or (is_lost and part.place):
                self._iterators[key] = iterator
                if is_held:
                    return iterator, None
                iterator.go_on_at(part.place)
                return iterator, part.place
        every = chunk * rules.snapshot_every if rules.guarantee == "exactly-once" else 0
        snapshot = piece.snapshot
        if snapshot is None and not is_lost:
            # It names the library, so a resume with another version is refused before the first state, too.
            snapshot = Snapshot.of_beginning(origin.source)
        self._keep_two_passes(key)
        # With at-most-once, a new iterator goes on after what was delivered.
        iterator = LaneIterator(origin, snapshot, every=every, place=piece.known[0] if is_lost else 0)
        self._iterators[key] = iterator
        if every and not iterator.has_state:
            raise ConfigError(
                f'guarantee="exactly-once" needs a state, and the iterator of {type(origin.source).__name__} has '
                f"no state_dict() and load_state_dict(). {_OTHER_GUARANTEES}"
            )
        return iterator, iterator.first_place

    def _keep_two_passes(self, key: tuple[int, int, int]) -> None:
        """Close the iterators of old passes if the lane is the first of a pass, because iterators hold files.

        Two passes may be open: those of a training and of a validation, or two that follow each other.
        """
        if self._iterators and not any(other[:2] == key[:2] for other in self._iterators):
            latest = next(reversed(self._iterators))[:2]
            self._iterators = {other: each for other, each in self._iterators.items() if other[:2] == latest}

    def _test(self, rules: LaneRules, iterator: LaneIterator, cancelled: Callable[[], bool] | None) -> None:
        """Begin a lane a second time, and compare the samples.

        With snapshots, begin it at the first one, and then at one that was taken after this. In datasets 5.0, the state
        stayed at its place after it was loaded. So the second resume began anew (datasets#8308).

        Raises:
            ConfigError: If they differ.
        """
        chunk, origin = rules.layout.chunk_samples, iterator.origin
        place = 0
        try:
            if rules.guarantee == "exactly-once":
                # Two resumes, each a chunk after the one before.
                iterator = other = LaneIterator(origin, None, every=chunk)
                iterator.read_until(3 * chunk, cancelled)
                for place in (chunk, 2 * chunk):
                    if iterator.read_place > place:
                        other = LaneIterator(origin, other.snapshot_until(place), every=chunk)
                        other.read_until(iterator.read_place, cancelled)
            else:
                other = LaneIterator(origin, None, every=0)
                other.read_until(iterator.read_place, cancelled)
        except Cancelled:
            raise
        except Exception as error:
            why = exception_line(error)
            if rules.guarantee == "replay":
                raise ConfigError(_UNREADABLE.format(origin.lane, why)) from error
            raise ConfigError(
                f"lane {origin.lane} cannot go on after its state at sample {place} is loaded: {why}. Leave out steps "
                f"whose state cannot be loaded, such as a shuffle. {_OTHER_GUARANTEES}"
            ) from error
        self._tested.add((rules.guarantee, origin.number))
        if other.chain_at(other.read_place) == iterator.chain_at(iterator.read_place):
            return
        if not place:
            raise ConfigError(_UNREPEATABLE.format(origin.lane, iterator.read_place))
        raise ConfigError(
            f"lane {origin.lane} gives other samples after its state at sample {chunk} is loaded. The state does not "
            "hold all that the samples depend on, such as the buffer of a shuffle. Leave the shuffle out. "
            f"{_OTHER_GUARANTEES}"
        )
