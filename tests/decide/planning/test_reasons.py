"""Why a plan rejects an alternative, or data hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero.decide.planning.candidates import Candidate, DataGroup
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.ranking import Constraints
from hetero.decide.planning.reasons import answer_of, rejection_of
from hetero.decide.planning.search import Alternative, Search
from hetero.decide.planning.steps.model import Prediction
from tests.support.planning import make_profile

TRAINER = Machine(instance_type="ml.p3.2xlarge", vcpus=8, hourly_usd=3.6)
DATA = Machine(instance_type="ml.c5.9xlarge", vcpus=36, hourly_usd=3.6)


def alternative(step_s: float, *, num_hosts: int = 1, mean_s: float | None = None) -> Alternative:
    prediction = Prediction(
        step_s=step_s,
        low_s=step_s,
        high_s=step_s,
        bottleneck="accelerator",
        draws_s=np.full(10, mean_s or step_s),
    )
    groups = (DataGroup(machine=DATA, count=num_hosts),) if num_hosts else ()
    return Alternative(
        candidate=Candidate(trainer=TRAINER, num_trainer_hosts=1, local_endpoints=0, data=groups),
        prediction=prediction,
        spending="data hosts",
        usd_per_1k_steps=step_s,
    )


def search_of(base: Alternative, own: Alternative, **limits: Any) -> Search:
    return Search(
        constraints=Constraints(**limits),
        baseline=base,
        chosen=base,
        alternatives=(base, own),
        chance_to_pay=1.0,
        prevented_by="",
    )


def verdict(own: Alternative, **limits: Any) -> str:
    text, _, limit = rejection_of(own, search_of(alternative(1.0), own, **limits)).partition("; ")
    assert limit == "the accelerator limits it"
    return text


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (alternative(1.2), "costs 20% more per step"),
        (alternative(1.01), "saves nothing"),
        (alternative(1.0), "saves nothing"),
        (alternative(0.99), "saves too little"),
        (alternative(1.0, mean_s=1.034), "costs 3.4% more per step on average, because its step time is less certain"),
        (alternative(0.9, mean_s=1.034), "costs 3.4% more per step on average, because its step time is less certain"),
    ],
)
def test_rejection_for_its_cost_states_what_decides(own: Alternative, words: str) -> None:
    assert verdict(own) == words


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (alternative(1.2), "a step takes 20% longer"),
        (alternative(1.0, mean_s=1.034), "a step takes 3.4% longer on average, because its step time is less certain"),
        (alternative(1.0), "saves nothing"),
    ],
)
def test_rejection_for_its_time_states_what_decides(own: Alternative, words: str) -> None:
    assert verdict(own, goal="time") == words


@pytest.mark.parametrize("limits", [{"max_step_s": 0.7}, {"goal": "time", "max_usd_per_1k_steps": 0.5}])
def test_alternative_that_breaks_a_limit_is_rejected_for_it(limits: dict[str, Any]) -> None:
    assert verdict(alternative(0.8), **limits) == "breaks a limit"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (alternative(0.8), "makes a step 20 % shorter, but 1,000 steps would cost only 20.0% less."),
        (alternative(0.996), "makes a step 0 % shorter, but 1,000 steps would cost only 0.4% less."),
        (alternative(3.0), "a step takes 200 % longer, and 1,000 steps would cost 200% more."),
    ],
)
def test_refusal_has_no_negative_figures(own: Alternative, words: str) -> None:
    base = alternative(1.0, num_hosts=0)
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    assert words in answer_of(job, search_of(base, own), "break-even")
