"""How well is an order shuffled? A full shuffle, windows, and a buffer of 10,000 rows side by side.

    python -m tests.plans.shuffle_quality

A million rows of 1 kB lie in units of 16 MiB, as `hetero.shards` makes them. Displacement is the mean distance between
a row's place in the files and its place in the pass, relative to the number of rows. Neighbours is the correlation
between the places in the files of rows that follow each other in the pass. Units is how many units a batch of 256 rows
has on average. Spread is how far apart the rows of a batch lie in the files, relative to a full shuffle.

Result:

    order                                       displacement  neighbours  units per batch  spread
    full shuffle                                       0.333      -0.001             59.2    1.00
    windows, 8 lanes of 64 MiB, chunks of 64           0.317       0.164             18.4    0.98
    windows, 8 lanes of 64 MiB, chunks of 8            0.317       0.141             35.9    0.99
    windows, 32 lanes of 64 MiB, chunks of 8           0.333       0.323             59.8    1.00
    files in a random order, buffer of 10,000          0.311       0.564              4.4    0.59
    files in order, buffer of 10,000                   0.007       0.999              4.4    0.03
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hetero.loaders.sampling import epoch_permutation
from hetero.plans.windows import WindowLayout, WindowOrder

NUM_ROWS, ROW_BYTES, BATCH = 1_000_000, 1_000, 256
UNIT_ROWS = 16 * 2**20 // ROW_BYTES

Order = npt.NDArray[np.int64]


def windows(num_lanes: int, window_mib: int, chunk_rows: int) -> Order:
    """Return the order of a pass in windows."""
    units = np.full(NUM_ROWS // UNIT_ROWS, UNIT_ROWS, np.int64)
    units = np.append(units, NUM_ROWS - units.sum())
    window_rows = window_mib * 2**20 // ROW_BYTES
    layout = WindowLayout.of_units(units, window_rows=window_rows, num_lanes=num_lanes, chunk_rows=chunk_rows)
    return WindowOrder(layout, seed=1, epoch=0).draw(np.arange(NUM_ROWS))[0]


def buffer(size: int, *, shuffles_files: bool) -> Order:
    """Return the order of a buffer that gives a random row for each row that comes in, as streams shuffle."""
    chance = random.Random(1)
    units = list(range(-(-NUM_ROWS // UNIT_ROWS)))
    if shuffles_files:
        chance.shuffle(units)
    kept: list[int] = []
    found = []
    for unit in units:
        for row in range(unit * UNIT_ROWS, min((unit + 1) * UNIT_ROWS, NUM_ROWS)):
            if len(kept) < size:
                kept.append(row)
                continue
            place = chance.randrange(size)
            found.append(kept[place])
            kept[place] = row
    chance.shuffle(kept)
    return np.array(found + kept)


def figures(order: Order) -> tuple[float, float, float, float]:
    """Return displacement, correlation of neighbours, units per batch, and spread of a batch."""
    displacement = float(np.abs(order - np.arange(NUM_ROWS)).mean() / NUM_ROWS)
    neighbours = float(np.corrcoef(order[:-1], order[1:])[0, 1])
    batches = order[: NUM_ROWS // BATCH * BATCH].reshape(-1, BATCH)
    units = float(np.mean([len(np.unique(batch // UNIT_ROWS)) for batch in batches]))
    spread = float(batches.std(axis=1).mean() / (NUM_ROWS / 12**0.5))
    return displacement, neighbours, units, spread


ORDERS: dict[str, Callable[[], Order]] = {
    "full shuffle": lambda: epoch_permutation(NUM_ROWS, seed=1, epoch=0),
    "windows, 8 lanes of 64 MiB, chunks of 64": lambda: windows(8, 64, 64),
    "windows, 8 lanes of 64 MiB, chunks of 8": lambda: windows(8, 64, 8),
    "windows, 32 lanes of 64 MiB, chunks of 8": lambda: windows(32, 64, 8),
    "files in a random order, buffer of 10,000": lambda: buffer(10_000, shuffles_files=True),
    "files in order, buffer of 10,000": lambda: buffer(10_000, shuffles_files=False),
}


def main() -> None:
    """Print the table."""
    print(f"{'order':44}{'displacement':>14}{'neighbours':>12}{'units per batch':>17}{'spread':>8}")
    for name, make in ORDERS.items():
        displacement, neighbours, units, spread = figures(make())
        print(f"{name:44}{displacement:14.3f}{neighbours:12.3f}{units:17.1f}{spread:8.2f}")


if __name__ == "__main__":
    main()
