"""The order of a pass over files: rows are shuffled within windows, and each file is read in one go.

A full shuffle of rows on disk reads each row from another place. Here the rows are divided into *units*, runs of rows
that are read together. The order of a pass comes from four steps:

1. The units are permuted. Their rows follow each other in this order.
2. These rows are cut into *lanes* of equal length. Chunk j of the pass comes from lane j mod L, so that a few lanes are
   read at the same time, each by another endpoint if there are enough.
3. Each lane is cut into *windows*, and the rows of a window are permuted.
4. What is left after the last whole round of chunks is one more window, at the end.

Each permutation is a function of a place, computed by a keyed network. So any position of a pass of 10^10 rows is found
at once, in the memory of the table of units.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hetero.errors import ConfigError
from hetero.plans.permutations import keys_of, mixed, permuted

__all__ = ["LaneRows", "WindowLayout", "WindowOrder", "WindowPlan"]

_Rows = npt.NDArray[np.int64]

_MAX_UNITS = 2**20
"""Units of 16 MiB then have 17 TB. The largest table that a review tried has 3.4 MB when it is sent, and an
answer may have 4 MiB (`hetero.wire.channels.MAX_REPLY_BYTES`)."""
_MAX_ROWS = 2**50
"""Sums of the rows of `_MAX_UNITS` units stay within int64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowLayout:
    """How the rows of a data set are divided. Equal on all hosts, and independent of their number.

    Raises:
        ConfigError: If a number is out of its bounds.
    """

    unit_begins: _Rows
    """First row of each unit."""
    unit_rows: _Rows
    """Rows of each unit, at least 1."""
    window_rows: int
    """Rows that are shuffled together."""
    num_lanes: int
    """How many windows are read at the same time."""
    chunk_rows: int
    """Rows that follow each other in the pass and come from one lane."""

    def __post_init__(self) -> None:
        for name in ("window_rows", "num_lanes", "chunk_rows"):
            if not 1 <= getattr(self, name) <= 2**40:
                raise ConfigError(f"{name} of a window order is {getattr(self, name)}, expected at least 1")
        if len(self.unit_begins) != len(self.unit_rows) or len(self.unit_rows) > _MAX_UNITS:
            raise ConfigError(f"a window order has {len(self.unit_rows)} units, expected at most {_MAX_UNITS}")

    @property
    def num_rows(self) -> int:
        """Rows of all units."""
        return int(self.unit_rows.sum())

    @classmethod
    def of_units(cls, unit_rows: _Rows, *, window_rows: int, num_lanes: int, chunk_rows: int) -> WindowLayout:
        """Return the layout of units that follow each other, from row 0 on."""
        return cls(
            unit_begins=np.cumsum(unit_rows) - unit_rows,
            unit_rows=unit_rows,
            window_rows=window_rows,
            num_lanes=num_lanes,
            chunk_rows=chunk_rows,
        )

    def part(self, fraction: float, generator: np.random.Generator) -> WindowLayout:
        """Return the layout of some units, drawn at random, and of the first rows of another. For canary runs.

        Args:
            fraction: Share of the rows, in (0, 1].
            generator: Draws the units.
        """
        drawn = generator.permutation(len(self.unit_rows))
        num_rows = np.cumsum(self.unit_rows[drawn])
        wanted = max(1, round(fraction * self.num_rows))
        num_units = int(np.searchsorted(num_rows, wanted)) + 1
        unit_rows = self.unit_rows.copy()
        unit_rows[drawn[num_units - 1]] -= num_rows[num_units - 1] - wanted
        chosen = np.sort(drawn[:num_units])
        return dataclasses.replace(self, unit_begins=self.unit_begins[chosen], unit_rows=unit_rows[chosen])

    def digest(self) -> str:
        """Return a digest of all numbers."""
        numbers = np.concatenate(
            [[self.window_rows, self.num_lanes, self.chunk_rows], self.unit_begins, self.unit_rows]
        ).astype("<i8")
        return blake2b(numbers.tobytes(), digest_size=8).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the layout of a whole data set in the form that `from_bytes` reads."""
        numbers = np.concatenate([[self.window_rows, self.num_lanes, self.chunk_rows], self.unit_rows])
        return zlib.compress(numbers.astype("<i8").tobytes(), 1)

    @classmethod
    def from_bytes(cls, content: bytes) -> WindowLayout:
        """Return a layout that another host has sent.

        Raises:
            ConfigError: If the bytes are not a layout.
        """
        max_bytes = 8 * (3 + _MAX_UNITS)
        try:
            unpacker = zlib.decompressobj()
            unpacked = unpacker.decompress(content, max_bytes)
            if not unpacker.eof:
                raise ValueError("it is cut off, or too long")
            numbers = np.frombuffer(unpacked, dtype="<i8").astype(np.int64)
            window_rows, num_lanes, chunk_rows = numbers[:3].tolist()
            unit_rows = numbers[3:]
            # The sum of many large numbers could be small.
            if len(unit_rows) and (unit_rows.min() < 1 or unit_rows.max() > _MAX_ROWS // len(unit_rows)):
                raise ValueError("the rows of its units are out of their bounds")
        except (ValueError, zlib.error) as error:
            raise ConfigError(f"the window order of the data set is damaged: {error}") from error
        return cls.of_units(unit_rows, window_rows=window_rows, num_lanes=num_lanes, chunk_rows=chunk_rows)


class WindowOrder:
    """The order of one pass over a data set, see `hetero.plans.plan.Order`. It takes a few ms to make for 10^5 units.

    Args:
        layout: The division of the rows.
        seed: Signed 64-bit seed.
        epoch: Number of the pass, at least 0.
    """

    def __init__(self, layout: WindowLayout, *, seed: int, epoch: int) -> None:
        self._layout = layout
        keys = keys_of("windows", seed, epoch)
        self._key = keys[0]
        self._units = _PermutedUnits(layout, keys[1])
        self._num_rows = layout.num_rows
        num_rounds = self._num_rows // (layout.num_lanes * layout.chunk_rows)
        self._lane_rows = num_rounds * layout.chunk_rows
        self._body_rows = self._lane_rows * layout.num_lanes
        """Rows in whole rounds of chunks."""

    def draw(self, positions: _Rows) -> tuple[_Rows, None]:
        """Return the row at each position of the pass. No row comes twice."""
        layout = self._layout
        chunks, offsets = np.divmod(positions, layout.chunk_rows)
        rounds, lanes = np.divmod(chunks, layout.num_lanes)
        places = rounds * layout.chunk_rows + offsets
        windows = places // layout.window_rows
        is_rest = positions >= self._body_rows
        # One number for each window of each lane. The rest is the window before all others.
        numbers = np.where(is_rest, 0, windows * layout.num_lanes + lanes + 1)
        begins = np.where(is_rest, self._body_rows, lanes * self._lane_rows + windows * layout.window_rows)
        # The last window of a lane may be shorter.
        ends = np.where(is_rest, self._num_rows, np.minimum(begins + layout.window_rows, (lanes + 1) * self._lane_rows))
        own = np.where(is_rest, positions - self._body_rows, places - windows * layout.window_rows)
        keys = mixed(numbers.astype(np.uint64) ^ self._key)
        return self._units.rows(begins + permuted(own, ends - begins, keys)), None

    def lane(self, position: int, num_samples: int) -> int | None:
        """Return the number of the lanes that a batch takes its rows from. None in the rest at the end."""
        if position >= self._body_rows:
            return None
        # A batch of several chunks has rows of as many lanes. Batches with the same lanes get the same number.
        num_chunks = -(-num_samples // self._layout.chunk_rows)
        num_groups = max(1, self._layout.num_lanes // num_chunks)
        return position // (self._layout.chunk_rows * num_chunks) % num_groups


class WindowPlan:
    """The plan of a loader with ``shuffle="window"``, see `hetero.plans.plan.Plan`.

    Args:
        layout: The division of the rows.
    """

    def __init__(self, layout: WindowLayout) -> None:
        self._layout = layout
        self.num_samples = layout.num_rows
        """Samples of a pass."""

    def digest(self) -> str:
        """Return a digest of the layout, for states."""
        return self._layout.digest()

    def order(self, *, seed: int, epoch: int, global_batch: int) -> WindowOrder:
        """Return the order of a pass."""
        return WindowOrder(self._layout, seed=seed, epoch=epoch)


class LaneRows:
    """The rows of one source of a mixture, lane by lane. A lane that has given all its rows begins again.

    Args:
        layout: The division of the rows. If it is not known which rows lie together, their number.
        keys: Two keys.
    """

    def __init__(self, layout: WindowLayout | int, keys: npt.NDArray[np.uint64]) -> None:
        self._key = keys[0]
        if isinstance(layout, WindowLayout):
            num_rows = layout.num_rows
            # A lane without rows could not give any.
            self.num_lanes = min(layout.num_lanes, num_rows)
            self._window_rows = layout.window_rows
            self._units: _PermutedUnits | None = _PermutedUnits(layout, keys[1])
        # One lane with one window of all rows.
        else:
            num_rows, self.num_lanes, self._window_rows, self._units = layout, 1, layout, None
        self._begins = [lane * num_rows // self.num_lanes for lane in range(self.num_lanes + 1)]
        """First row of each lane in the sequence of the permuted units, and the end of the last one."""

    def size(self, lane: int) -> int:
        """Return the number of rows of a lane. 0 if there is no such lane."""
        return self._begins[lane + 1] - self._begins[lane] if lane < self.num_lanes else 0

    def draw(self, lane: int, places: _Rows) -> tuple[_Rows, _Rows]:
        """Return rows of a lane, and how often the lane has given each of them before.

        Args:
            lane: In [0, num_lanes).
            places: How many rows the lane has given before each of these.
        """
        begin, size = self._begins[lane], self._begins[lane + 1] - self._begins[lane]
        passes, own = np.divmod(places, size)
        windows = own // self._window_rows
        firsts = windows * self._window_rows
        sizes = np.minimum(firsts + self._window_rows, size) - firsts
        numbers = (windows * self.num_lanes + lane).astype(np.uint64)
        keys = mixed(mixed(passes.astype(np.uint64) ^ self._key) ^ numbers)
        found = begin + firsts + permuted(own - firsts, sizes, keys)
        return (found if self._units is None else self._units.rows(found)), passes


class _PermutedUnits:
    """The rows of permuted units, one unit after the other."""

    def __init__(self, layout: WindowLayout, key: np.uint64) -> None:
        num_units = len(layout.unit_rows)
        units = np.arange(num_units, dtype=np.int64)
        order = permuted(units, np.full(num_units, num_units), np.full(num_units, key))
        self._begins = layout.unit_begins[order]
        self._ends = np.cumsum(layout.unit_rows[order])
        """Where each unit ends in the sequence."""
        self._firsts = self._ends - layout.unit_rows[order]

    def rows(self, places: _Rows) -> _Rows:
        """Return the rows at some places of the sequence."""
        units = np.searchsorted(self._ends, places, side="right")
        rows: _Rows = self._begins[units] + places - self._firsts[units]
        return rows
