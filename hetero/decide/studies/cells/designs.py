"""Which combinations of levels a study runs, and how independent its factors are in them.

A fraction is chosen from the full grid by coordinate exchange. It starts with random rows. Then it replaces one level
of one row at a time by the level that raises the determinant of the information matrix of the main effects most
(D-optimality), until no replacement helps. The best of several starts wins. Then two levels of a factor change places
if this lowers the largest correlation. The seed makes the result repeatable. A combination may occur more than once.

No library replaces this. pydoe 1.6 was compared with this search on eight designs. Both had the same columns, and pydoe
used its own exchange algorithms. On six designs, pydoe's best D-efficiency is equal to that of this search to four
digits. On two of these six, pydoe's largest correlation is higher: 0.12 instead of 0.01 for 12 runs of four factors
with three levels, and 0.09 instead of 0.03 for 20 runs of factors with 5, 4 and 3 levels. pydoe cannot repeat a
combination, so it finds nothing for 15 runs of a grid of 3 x 3. For 16 runs of 14 factors with two levels its designs
are singular, where this search has a D-efficiency of 0.96. pyoptex 1.2 needs numba, pandas, plotly, kaleido,
scikit-learn and statsmodels.

R. K. Meyer, C. J. Nachtsheim: The Coordinate-Exchange Algorithm for Constructing Exact Optimal Experimental Designs.
Technometrics 37 (1995).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.decide.studies.runs import Level
from hetero.decide.studies.study_file import MAX_RUNS, Design, Factor
from hetero.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

__all__ = ["Correlations", "correlations", "rows_of"]

_NUM_STARTS = 24
"""Starts of a search. A large search has fewer starts, because it should take a minute at most."""
_MAX_WORK = 4e6
"""Work of a search with all starts: runs x levels of all factors x the square of the main effects."""
_MAX_PASSES = 50
_MAX_RELABELLED = 5
"""If a factor has at most this number of levels, all of their orders are tried, which are 120."""
_MAX_RELABELLING_WORK = 4e6
"""Orders of levels x pairs of columns. With more, levels do not change places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlations:
    """Pearson's correlations between the columns of a design.

    A factor with numbers is one column. Any other factor has a column for each level except the first. The column is 1
    in the rows with this level, and 0 in all other rows.
    """

    columns: tuple[str, ...]
    factors: tuple[str, ...]
    """Factor of each column."""
    values: tuple[tuple[float | None, ...], ...]
    """Correlation of each column (row of this table) with each other one. None if a column does not vary."""

    @property
    def largest(self) -> tuple[float, str, str] | None:
        """The largest absolute correlation between columns of different factors, with both columns.

        None without such a pair.
        """
        pairs = [
            (abs(value), self.columns[first], self.columns[second])
            for first, second in itertools.combinations(range(len(self.columns)), 2)
            if self.factors[first] != self.factors[second] and (value := self.values[first][second]) is not None
        ]
        return max(pairs, key=lambda pair: pair[0], default=None)


def rows_of(design: Design, factors: Sequence[Factor], *, seed: int) -> list[Mapping[str, Level]]:
    """Return the rows of a design: a level of each factor.

    Args:
        design: The design.
        factors: Its factors.
        seed: Seed of a fraction.

    Raises:
        ConfigError: If there are too many rows, or too few for a fraction, or its search would take too long.
    """
    if design.kind == "table":
        return list(design.table)
    if design.kind == "full":
        size = math.prod(len(factor.levels) for factor in factors)
        if size > MAX_RUNS:
            raise ConfigError(
                f"design: full has {size} combinations of levels, expected at most {MAX_RUNS}\n"
                "  to do: use design: {fraction: RUNS}, or fewer factors or levels"
            )
        names = [factor.name for factor in factors]
        return [
            dict(zip(names, levels, strict=True)) for levels in itertools.product(*(each.levels for each in factors))
        ]
    return _named_levels(_fraction(factors, design.num_runs, seed=seed), factors)


def _named_levels(rows: Sequence[Sequence[int]], factors: Sequence[Factor]) -> list[Mapping[str, Level]]:
    """Return rows of levels by factor, for rows with the number of each factor's level."""
    return [{factor.name: factor.levels[at] for factor, at in zip(factors, row, strict=True)} for row in rows]


def _fraction(factors: Sequence[Factor], num_runs: int, *, seed: int) -> list[list[int]]:
    """Return the rows of a fraction of the full grid, each with the number of each factor's level.

    Several searches begin with random rows, and exchange levels until no exchange raises the determinant of the
    information matrix (D-optimality). The larger it is, the better the runs tell the effects of the factors apart. The
    best of the designs is returned.

    Raises:
        ConfigError: If there are fewer runs than main effects, or the search would take too long.
    """
    sizes = [len(factor.levels) for factor in factors]
    # The mean, and one effect for each level but the first.
    num_effects = 1 + sum(size - 1 for size in sizes)
    if num_runs < num_effects:
        raise ConfigError(
            f"design.fraction: found {num_runs} runs, but the factors have {num_effects} main effects with the mean\n"
            f"  to do: give at least {num_effects} runs, or fewer levels"
        )
    # A search tries each level in each run. Each time, it computes the determinant of a matrix with a row per effect.
    # 16 runs of 14 factors take 2 s, and 40 runs of 12 factors with 4 levels take half a minute.
    work = num_runs * sum(sizes) * num_effects**2
    num_starts = min(_NUM_STARTS, int(_NUM_STARTS * _MAX_WORK / work))
    if num_starts < 1:
        raise ConfigError(
            f"design.fraction: the search for {num_runs} runs of {len(sizes)} factors with {sum(sizes)} levels would "
            "take many minutes\n"
            "  to do: give fewer runs or levels, or list the combinations with design: {table: [...]}"
        )
    codes = [_contrasts(size) for size in sizes]
    generator = random.Random(seed)
    best: tuple[tuple[float, float, float], list[list[int]]] | None = None
    for _ in range(num_starts):
        rows = [[generator.randrange(size) for size in sizes] for _ in range(num_runs)]
        log_determinant = _exchange(rows, sizes, codes)
        # Of designs with equal determinants, the one with the most even pairs of levels is the best, then the one with
        # the smallest correlation. Equal determinants differ in their rounding errors, so round them.
        merit = round(log_determinant, 9), -_imbalance(rows, sizes), -_largest(rows, factors)
        if best is None or merit > best[0]:
            best = merit, rows
    assert best is not None
    return sorted(_relabelled(best[1], factors))


def _relabelled(rows: list[list[int]], factors: Sequence[Factor]) -> list[list[int]]:
    """Return the design. Levels of a factor change places if this lowers the largest correlation.

    Another order of a factor's levels does not change the determinant. One factor after the other gets its best order,
    in two rounds, because the best order of a factor depends on the others.
    """
    num_columns = sum(1 if factor.is_numeric else len(factor.levels) - 1 for factor in factors)
    num_orders = sum(math.factorial(n) for factor in factors if (n := len(factor.levels)) <= _MAX_RELABELLED)
    # Two rounds try each order, and compute the correlations of all pairs of columns each time.
    if 2 * num_orders * num_columns**2 > _MAX_RELABELLING_WORK:
        return rows
    least = _largest(rows, factors)
    for _ in range(2):
        for at, factor in enumerate(factors):
            if len(factor.levels) > _MAX_RELABELLED:
                continue
            for order in itertools.permutations(range(len(factor.levels))):
                candidate = [[*row[:at], order[row[at]], *row[at + 1 :]] for row in rows]
                correlation = _largest(candidate, factors)
                if correlation < least:
                    least, rows = correlation, candidate
    return rows


def _contrasts(size: int) -> Matrix:
    """Return a matrix with a row for each level of a factor: Helmert's contrasts.

    It has one column fewer than levels. The columns are orthogonal, and the mean square of each is 1. Column c compares
    level c + 1 with the mean of the levels before it.
    """
    import numpy as np

    codes = np.zeros((size, size - 1))
    for column in range(size - 1):
        codes[: column + 1, column] = 1.0
        codes[column + 1, column] = -(column + 1.0)
        codes[:, column] *= math.sqrt(size / ((column + 1.0) * (column + 2.0)))
    return codes


def _model(row: Sequence[int], codes: Sequence[Matrix]) -> Matrix:
    """Return the row of the model matrix for a row of levels: 1 for the mean, then the contrasts of each level."""
    import numpy as np

    return np.concatenate([np.ones(1), *(code[at] for code, at in zip(codes, row, strict=True))])


def _exchange(rows: list[list[int]], sizes: Sequence[int], codes: Sequence[Matrix]) -> float:
    """Improve the rows in place. Return the logarithm of the determinant of their information matrix."""
    import numpy as np

    # The information matrix is the sum over rows of the outer products of their model rows. The matrix of random rows
    # may be singular, which gives minus infinity as the logarithm of its determinant. So add a little to its diagonal.
    ridge = 1e-9 * np.eye(1 + sum(size - 1 for size in sizes))
    information = ridge + sum(np.outer(model, model) for model in (_model(row, codes) for row in rows))
    best = float(np.linalg.slogdet(information)[1])
    for _ in range(_MAX_PASSES):
        before = best
        for row in rows:
            own_model = _model(row, codes)
            # To exchange a row, compute the sum of the other rows once.
            other_rows = information - np.outer(own_model, own_model)
            for at, size in enumerate(sizes):
                for level in range(size):
                    model = _model([*row[:at], level, *row[at + 1 :]], codes)
                    value = float(np.linalg.slogdet(other_rows + np.outer(model, model))[1])
                    # An improvement must be larger than rounding errors, or the search would not end.
                    if value > best + 1e-9:
                        best, row[at] = value, level
            own_model = _model(row, codes)
            information = other_rows + np.outer(own_model, own_model)
        if best <= before + 1e-9:
            break
    return best


def _largest(rows: Sequence[Sequence[int]], factors: Sequence[Factor]) -> float:
    """Return the largest absolute correlation between two factors without its rounding error. 0 for a single factor."""
    largest = correlations(_named_levels(rows, factors), factors).largest
    return 0.0 if largest is None else round(largest[0], 9)


def _imbalance(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Return how unevenly pairs of levels of two factors occur: the sum of the squares of their numbers of rows."""
    total = 0
    for first, second in itertools.combinations(range(len(sizes)), 2):
        num_rows = Counter((row[first], row[second]) for row in rows)
        total += sum(number * number for number in num_rows.values())
    return total


def correlations(rows: Sequence[Mapping[str, Level]], factors: Sequence[Factor]) -> Correlations:
    """Return the correlations between the columns of a design."""
    import numpy as np

    names, owners, columns = [], [], []
    for factor in factors:
        if factor.is_numeric:
            named: list[tuple[str, list[Any]]] = [(factor.name, [row[factor.name] for row in rows])]
        else:
            others = factor.levels[1:]
            named = [(f"{factor.name}={level}", [row[factor.name] == level for row in rows]) for level in others]
        for name, values in named:
            names.append(name)
            owners.append(factor.name)
            columns.append(np.asarray(values, dtype=float))
    return Correlations(
        columns=tuple(names),
        factors=tuple(owners),
        values=tuple(tuple(_pearson(one, other) for other in columns) for one in columns),
    )


def _pearson(one: Matrix, other: Matrix) -> float | None:
    """Return Pearson's correlation of two columns. None if one of them does not vary."""
    first, second = one - one.mean(), other - other.mean()
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return None if scale == 0 else float(first @ second) / scale
