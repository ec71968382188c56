"""The controller on many clusters: never more than 1 % behind the better of two placements, and soon settled.

The cluster is given, and its price per hour with it. USD per step are therefore in the ratio of the step times.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hetero.launch.auto_endpoints.decisions import Action
from tests.support.launch.job_model import Cell, run_auto, run_fixed

PIPELINES = {
    "jpeg": {"batch_s": 1.3, "compute_s": 0.09, "sensitivity": 0.3},
    "light": {"batch_s": 0.3, "compute_s": 0.1},
    "heavy": {"batch_s": 4.0, "compute_s": 0.15, "sensitivity": 0.1, "memory": 0.1},
    "cpu-step": {"batch_s": 0.8, "compute_s": 0.12, "sensitivity": 3.0, "memory": 0.3, "step_spread": 0.05},
}
HOSTS = {
    "4-cpus": {"cpus": 4},
    "8-cpus": {"cpus": 8, "local_speed": 0.62},
    "32-cpus": {"cpus": 32, "num_ranks": 4, "local_speed": 0.62},
}
DATA_GROUPS = {"2-vcpus": 2, "8-vcpus": 8, "36-vcpus": 36, "72-vcpus": 72}
CELLS = [
    Cell(name=f"{pipeline}-{host}-{group}", remote_slots=DATA_GROUPS[group], **PIPELINES[pipeline], **HOSTS[host])  # type: ignore[arg-type]
    for pipeline, host, group in itertools.product(PIPELINES, HOSTS, DATA_GROUPS)
]
SOME_CELLS = [
    cell if number % 5 == 1 else pytest.param(cell, marks=pytest.mark.long) for number, cell in enumerate(CELLS)
]
"""All cells. `make test` takes every fifth of them. They have every pipeline, every host and every data group."""
NUM_STEPS = 600
SETTLED = 200
"""Steps until the number of endpoints must be final."""


@pytest.mark.parametrize("cell", SOME_CELLS, ids=lambda cell: cell.name)
def test_controller_is_as_good_as_the_better_of_all_local_and_all_remote(cell: Cell) -> None:
    all_local = run_fixed(cell, local=cell.cpus, has_data_hosts=False, num_steps=NUM_STEPS)
    all_remote = run_fixed(cell, local=0, num_steps=NUM_STEPS)
    auto = run_auto(cell, num_steps=NUM_STEPS)
    texts = [decision.text for decision in auto.decisions]
    better_s = min(all_local.mean_s(SETTLED), all_remote.mean_s(SETTLED))
    assert auto.mean_s(SETTLED) <= 1.01 * better_s, texts
    changes = [decision.step for decision in auto.decisions if decision.before != decision.endpoints]
    assert max(changes, default=0) <= SETTLED, texts
    assert auto.decisions[-1].action is Action.SETTLE, texts
    # A job that is not data-bound pays nothing from its first step on.
    if sum(step.wait_s for step in all_remote.steps[10:]) < 0.005 * sum(step.total_s for step in all_remote.steps[10:]):
        assert auto.mean_s(10) <= 1.01 * all_remote.mean_s(10), texts


@pytest.mark.long
def test_few_runs_with_other_seeds_are_behind_or_late() -> None:
    behind, late = [], []
    for cell, seed in itertools.product(CELLS, range(1, 15)):
        fixed = [
            run_fixed(cell, local=cell.cpus, has_data_hosts=False, num_steps=NUM_STEPS, seed=seed),
            run_fixed(cell, local=0, num_steps=NUM_STEPS, seed=seed),
        ]
        auto = run_auto(cell, num_steps=NUM_STEPS, seed=seed)
        if auto.mean_s(SETTLED) > 1.01 * min(each.mean_s(SETTLED) for each in fixed):
            behind.append((cell.name, seed))
        if any(each.step > SETTLED for each in auto.decisions if each.before != each.endpoints):
            late.append((cell.name, seed))
    # One of 672 is both, because its first measurement alone takes 144 steps.
    assert len(behind) <= 1, behind
    assert len(late) <= 1, late


@pytest.mark.parametrize("cell", SOME_CELLS, ids=lambda cell: cell.name)
def test_pauses_of_the_loop_do_not_mislead_the_controller(cell: Cell) -> None:
    cell = dataclasses.replace(cell, pause_steps=100, pause_s=20.0)
    better_s = min(
        run_fixed(cell, local=cell.cpus, has_data_hosts=False, num_steps=NUM_STEPS).mean_s(SETTLED),
        run_fixed(cell, local=0, num_steps=NUM_STEPS).mean_s(SETTLED),
    )
    auto = run_auto(cell, num_steps=NUM_STEPS)
    texts = [decision.text for decision in auto.decisions]
    pause_s = cell.pause_s / cell.pause_steps
    # Up to 2 %, because batches that become ready during a pause hide some of the data wait from the search.
    assert auto.mean_s(SETTLED) - pause_s <= 1.02 * (better_s - pause_s), texts
    assert max((each.step for each in auto.decisions if each.before != each.endpoints), default=0) <= SETTLED, texts


def test_storage_that_gives_no_more_leaves_no_endpoints_behind() -> None:
    cell = Cell(name="storage", batch_s=0.5, compute_s=0.05, remote_slots=8, cpus=8, storage_batches_per_s=6.0)
    auto = run_auto(cell, num_steps=800)
    assert auto.controller is not None
    assert (auto.decisions[-1].action, auto.controller.endpoints) == (Action.SETTLE, 0)
    assert auto.mean_s(500) <= 1.01 * run_fixed(cell, local=0, num_steps=800).mean_s(500)


def test_cells_contain_jobs_that_are_best_all_local_all_remote_and_mixed() -> None:
    best: dict[str, int] = {"local": 0, "remote": 0, "mixed": 0}
    for cell in CELLS:
        all_local_s = run_fixed(cell, local=cell.cpus, has_data_hosts=False, num_steps=300).mean_s(SETTLED)
        all_remote_s = run_fixed(cell, local=0, num_steps=300).mean_s(SETTLED)
        mixed_s = run_fixed(cell, local=cell.cpus // 2, num_steps=300).mean_s(SETTLED)
        better_s = min(all_local_s, all_remote_s)
        best["mixed" if mixed_s < 0.97 * better_s else "local" if all_local_s < all_remote_s else "remote"] += 1
    assert min(best.values()) >= 5, best
