"""The plans for the published examples (reference.md section 2), from the homogeneous step time and vCPU speeds."""

from __future__ import annotations

import pytest

from hetero.decide.planning.candidates import Candidate, DataGroup
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.decide.planning.steps.model import StepModel
from hetero.pricing.catalog import Catalogue
from tests.support.planning import make_profile

VCPU_SPEED = 1.55
"""Speed of a vCPU of ml.c5, compared with those of ml.p3 and ml.p4d. The same in both examples."""


@pytest.mark.parametrize(
    ("trainer", "data", "count", "processes", "endpoints", "step_s", "published_s"),
    [
        # The published script used 32 of the 36 vCPUs.
        ("ml.p3.2xlarge", "ml.c5.9xlarge", 1, 8, 32, 1.193, 0.184),
        ("ml.p4d.24xlarge", "ml.c5.18xlarge", 2, 96, None, 0.192, 0.086),
    ],
)
def test_step_time_of_the_published_clusters_is_predicted(
    trainer: str,
    data: str,
    count: int,
    processes: int,
    endpoints: int | None,
    step_s: float,
    published_s: float,
    catalogue: Catalogue,
) -> None:
    profile = make_profile(
        headspace_s=0.01,
        cpu_s=step_s * processes / 64,
        vcpus=processes,
        processes=processes,
        trainer=trainer,
        sample_bytes=1000.0,
    )
    model = StepModel(profile, vcpu_speeds={data: VCPU_SPEED}, endpoints_per_host=endpoints)
    group = DataGroup(machine=Machine.from_info(catalogue.get(data)), count=count)
    candidate = Candidate(
        trainer=Machine.from_info(catalogue.get(trainer)), num_trainer_hosts=1, local_endpoints=0, data=(group,)
    )
    (found,) = model.predict([candidate])
    assert found.step_s == pytest.approx(published_s, rel=0.05)


def test_worked_example_needs_one_data_host_instead_of_two(catalogue: Catalogue) -> None:
    """8 accelerators need 20 vCPUs each. The host has 96, so they are busy 60 % of the time."""
    headspace_s, batch = 0.1, 64
    profile = make_profile(
        headspace_s=headspace_s,
        cpu_s=160 * headspace_s / (8 * batch),
        ranks=8,
        vcpus=96,
        processes=96,
        trainer="ml.p4d.24xlarge",
        sample_bytes=1000.0,
    )
    assert profile.training.step_s.mean == pytest.approx(headspace_s / 0.6)
    plan = make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.18xlarge",), vcpu_speeds={"ml.c5.18xlarge": 1.0}))
    assert [(group.instance_type, group.count) for group in plan.chosen.groups] == [
        ("ml.c5.18xlarge", 1),
        ("ml.p4d.24xlarge", 1),
    ]
    assert plan.chosen.step_time.value == pytest.approx(headspace_s, rel=0.02)
