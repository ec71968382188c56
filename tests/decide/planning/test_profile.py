from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.documents.records import encode
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import MAX_VALUES, Spread, load_profile, write_profile
from tests.support.planning import make_profile


def test_profile_written_and_read_is_the_same(tmp_path: Path) -> None:
    profile = make_profile(headspace_s=0.2, cpu_s=0.01)
    write_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path) == load_profile(tmp_path / "profile.json") == profile


def test_profile_of_another_schema_is_rejected_for_its_version_with_what_to_do(tmp_path: Path) -> None:
    value = encode(make_profile(headspace_s=0.2, cpu_s=0.01)) | {"schema_version": 2, "new": 1}
    (tmp_path / "profile.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError) as caught:
        load_profile(tmp_path)
    problem = "schema_version: found 2, expected 1; make one with hetero profile SCRIPT"
    assert str(caught.value) == f"profile {tmp_path / 'profile.json'}: {problem}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected an object"),
        ("{", "not valid JSON: Expecting property name"),
        ('{"schema_version": 1}', "missing"),
        (None, r"cannot read profile .*make one with hetero profile SCRIPT"),
    ],
)
def test_profile_that_is_malformed_is_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_profile(tmp_path)


def test_profile_with_an_impossible_number_names_its_path(tmp_path: Path) -> None:
    value = encode(make_profile(headspace_s=0.2, cpu_s=0.01))
    value["training"]["headspace_s"]["mean"] = -1  # type: ignore[index]
    (tmp_path / "profile.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"training\.headspace_s\.mean: found -1"):
        load_profile(tmp_path)


def test_spread_of_values_has_their_quantiles() -> None:
    found = Spread.of([float(value) for value in range(1, 101)], "s", "measured")
    assert (found.num_measured, found.mean, found.p50, found.p95) == (100, 50.5, 50.0, 95.0)
    assert found.variation == pytest.approx(28.866 / 50.5, rel=1e-3)
    assert found.values == tuple(range(1, 101))


def test_spread_of_many_values_keeps_some_at_equal_distances() -> None:
    found = Spread.of(map(float, range(10 * MAX_VALUES)), "s", "measured")
    assert found.values == tuple(float(value) for value in range(0, 10 * MAX_VALUES, 10))


@pytest.mark.parametrize("values", [[], [float("nan")], [-1.0], [float("inf")]])
def test_spread_of_no_or_impossible_values_is_rejected(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="expected at least one, all finite and at least 0"):
        Spread.of(values, "s", "measured")
