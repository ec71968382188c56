"""Designs: the full grid, fractions, tables, and the correlations of the source's 15 runs."""

from __future__ import annotations

import itertools

import pytest

from hetero.decide.studies.cells.designs import correlations, rows_of
from hetero.decide.studies.study_file import Design, Factor
from hetero.errors import ConfigError

RANKS = Factor(name="ranks", levels=(1, 16, 32))
SAMPLES = Factor(name="samples", levels=(100_000, 600_000, 1_000_000))
RULE = Factor(name="rule", levels=("kept", "sqrt"))
PUBLISHED = [
    *((32, 600_000), (32, 100_000), (32, 1_000_000), (16, 1_000_000), (1, 100_000), (32, 600_000), (1, 1_000_000)),
    *((1, 100_000), (32, 1_000_000), (1, 600_000), (16, 100_000), (32, 100_000), (1, 1_000_000), (16, 100_000)),
    (16, 600_000),
]
"""Runs 0 to 14 of the source, as ranks and samples."""


def test_full_design_has_every_combination_once() -> None:
    rows = rows_of(Design(kind="full"), [RANKS, SAMPLES, RULE], seed=1)
    assert [tuple(row.values()) for row in rows] == list(itertools.product(RANKS.levels, SAMPLES.levels, RULE.levels))


def test_published_design_of_15_runs_is_orthogonal_as_the_source_states() -> None:
    table = tuple({"ranks": ranks, "samples": samples} for ranks, samples in PUBLISHED)
    rows = rows_of(Design(kind="table", table=table), [RANKS, SAMPLES], seed=1)
    assert rows == list(table)
    largest = correlations(rows, [RANKS, SAMPLES]).largest
    assert largest is not None
    assert largest[0] < 0.2


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("factors", "num_runs"), [([RANKS, SAMPLES], 15), ([RANKS, SAMPLES, RULE], 9)])
def test_fraction_separates_its_factors(factors: list[Factor], num_runs: int, seed: int) -> None:
    rows = rows_of(Design(kind="fraction", num_runs=num_runs), factors, seed=seed)
    assert len(rows) == num_runs
    largest = correlations(rows, factors).largest
    assert largest is not None
    assert largest[0] < 0.2
    counts = [sum(row[factor.name] == level for row in rows) for factor in factors for level in factor.levels]
    assert min(counts) >= num_runs // 3


def test_fraction_is_the_same_for_the_same_seed() -> None:
    design = Design(kind="fraction", num_runs=9)
    assert rows_of(design, [RANKS, SAMPLES, RULE], seed=5) == rows_of(design, [RANKS, SAMPLES, RULE], seed=5)


def test_fraction_of_two_levels_is_the_half_design_with_balanced_pairs() -> None:
    factors = [Factor(name=name, levels=(0, 1)) for name in "abc"]
    rows = rows_of(Design(kind="fraction", num_runs=4), factors, seed=1)
    for one, other in itertools.combinations("abc", 2):
        assert sorted((row[one], row[other]) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_fraction_with_fewer_runs_than_effects_is_rejected() -> None:
    with pytest.raises(ConfigError, match="found 4 runs, but the factors have 5 main effects"):
        rows_of(Design(kind="fraction", num_runs=4), [RANKS, SAMPLES], seed=1)


def test_too_many_combinations_are_rejected_before_they_are_made() -> None:
    factors = [Factor(name=f"f{at}", levels=tuple(range(10))) for at in range(9)]
    with pytest.raises(ConfigError, match="design: full has 1000000000 combinations"):
        rows_of(Design(kind="full"), factors, seed=1)


def test_fraction_is_chosen_from_a_grid_that_is_too_large_to_run() -> None:
    factors = [Factor(name=f"f{at}", levels=(0, 1)) for at in range(14)]  # 16,384 combinations
    rows = rows_of(Design(kind="fraction", num_runs=16), factors, seed=1)
    assert len(rows) == 16
    assert len({tuple(row.values()) for row in rows}) > 8


def test_search_that_would_take_too_long_is_rejected_before_it_begins() -> None:
    factors = [Factor(name=f"f{at}", levels=tuple(range(100))) for at in range(9)]
    with pytest.raises(ConfigError, match=r"design.fraction: the search for 1000 runs of 9 factors with 900 levels"):
        rows_of(Design(kind="fraction", num_runs=1000), factors, seed=1)


def test_correlation_of_a_column_that_does_not_vary_is_unknown() -> None:
    rows = [{"a": 1, "b": 1}, {"a": 1, "b": 2}]
    found = correlations(rows, [Factor(name="a", levels=(1, 2)), Factor(name="b", levels=(1, 2))])
    assert found.values[0][1] is None
    assert found.largest is None


def test_level_of_a_factor_with_names_is_a_column_unless_it_is_the_first() -> None:
    rows = rows_of(Design(kind="full"), [RULE, SAMPLES], seed=1)
    assert correlations(rows, [RULE, SAMPLES]).columns == ("rule=sqrt", "samples")
