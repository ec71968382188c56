"""The cells of bench_auto_hybrid.py, and what becomes of its runs. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hetero import cli, config
from hetero.pricing import Catalogue
from hetero.simulate.simulate import parse_group

Load = Callable[[str], ModuleType]


@pytest.fixture
def auto_hybrid(load: Load) -> ModuleType:
    """The benchmark."""
    return load("bench_auto_hybrid")


def vcpus(group: str) -> tuple[int, int]:
    """Return the vCPUs of a host of a group, and the number of hosts."""
    parsed = parse_group(f"any_group={group}")
    return Catalogue.load().get(parsed.instance_type).vcpus or 0, parsed.count


def step_s(cell: Any, *, remote: bool, local: int) -> float:
    """Return what arithmetic says of a step with this number of vCPUs of each trainer host."""
    (remote_vcpus, _), (local_vcpus, num_ranks) = vcpus(cell.data_group), vcpus(cell.trainer_group)
    supply = (remote_vcpus * remote + num_ranks * local) / cell.batch_s / num_ranks
    return max(1 / supply, float(cell.step_s) * (1 + cell.slowdown * local / local_vcpus))


def test_each_cell_is_best_where_it_claims(auto_hybrid: ModuleType) -> None:
    assert len(auto_hybrid.CELLS) == 6
    for cell in auto_hybrid.CELLS:
        all_vcpus = vcpus(cell.trainer_group)[0]
        all_local_s = step_s(cell, remote=False, local=all_vcpus)
        all_remote_s = step_s(cell, remote=True, local=0)
        mix_s = min(step_s(cell, remote=True, local=local) for local in range(1, all_vcpus + 1))
        best = "all-local" if all_local_s < all_remote_s else "all-remote"
        assert ("a mix" if mix_s < 0.95 * min(all_local_s, all_remote_s) else best) == cell.best, cell


def test_jobs_of_a_cell_are_understood(auto_hybrid: ModuleType) -> None:
    for cell in auto_hybrid.CELLS:
        for mode in auto_hybrid.MODES:
            command = auto_hybrid.command(cell, mode, "runs/x", ["ml.c5.xlarge=0.2"])
            assert config.parse(cli._make_parser(), command[: command.index("--")]).run is not None


def test_table_has_the_ratio_to_the_better_placement_and_the_last_change(auto_hybrid: ModuleType) -> None:
    cell = next(cell for cell in auto_hybrid.CELLS if cell.name == "mix")
    times_s = {"all-local": 0.10, "all-remote": 0.09, "auto": 0.045}
    facts = {"hourly_usd": 3.6, "decisions": ("step 1",)}
    runs = {
        mode: [auto_hybrid.Outcome(step_s=found_s, last_change=70 if mode == "auto" else 0, **facts)]
        for mode, found_s in times_s.items()
    }
    text = auto_hybrid.render([cell], {"mix": runs})
    assert "| 100.0 (0.1000) | 90.0 (0.0900) | 45.0 (0.0450) | 0.500 | 70 |" in text
    assert "- mix: USD per step, auto / the better: 0.500, at most 1.01 wanted: met" in text
    assert "- mix: last change at step: 70.0, at most 200 wanted: met" in text
