"""Parts of hetero that other packages may bring."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path

import pytest

from hetero.cluster import find_platform
from hetero.errors import ConfigError
from hetero.system import extensions

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
KINDS = sorted(extensions.OWN)


def entry_points_of_the_project() -> dict[str, dict[str, str]]:
    """Return the tables of entry points. Read by hand, because Python 3.10 lacks tomllib."""
    tables: dict[str, dict[str, str]] = {}
    for line in PYPROJECT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = tables.setdefault(line.partition('"')[2].partition('"')[0], {})
        elif " = " in line and not line.startswith(" "):
            name, _, value = line.partition(" = ")
            table[name] = value.strip('"')
    return tables


def test_table_is_that_of_the_project() -> None:
    tables = entry_points_of_the_project()
    assert {kind: tables[kind] for kind in KINDS} == extensions.OWN


@pytest.mark.parametrize("kind", KINDS)
def test_each_own_part_is_found(kind: str) -> None:
    for name in extensions.OWN[kind]:
        assert callable(extensions.find(kind, name))


def test_part_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.metadata.EntryPoint("mine", "collections:Counter", extensions.PLATFORMS)

    def entry_points(*, group: str, name: str = theirs.name) -> list[importlib.metadata.EntryPoint]:
        return [theirs] if (group, name) == (theirs.group, theirs.name) else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert extensions.names(extensions.PLATFORMS)[-1] == "mine"
    assert extensions.find(extensions.PLATFORMS, "mine") is Counter


def test_unknown_platform_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'nothing': unknown name, expected one of sagemaker, .*slurm.*, ray"):
        find_platform({}, name="nothing")
