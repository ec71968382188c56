"""The planner under test, behind one function."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.metrics.profile.profile import Profile
from hetero.pricing import Catalogue, InstanceTypeInfo, Price
from hetero.report.plan import Plan
from planning.choices import NOTHING, Choice
from planning.machines import MachineType
from planning.scenarios import Reason, Scenario

__all__ = ["Decision", "choose"]

_REASONS = {
    "data hosts pay": Reason.DATA_HOSTS,
    "accelerator": Reason.ACCELERATOR,
    "trainer network": Reason.NETWORK,
    "data network": Reason.NETWORK,
    "storage": Reason.STORAGE,
    "memory": Reason.MEMORY,
    "window": Reason.MEMORY,
    "break-even": Reason.BREAK_EVEN,
    "free CPUs": Reason.FREE_CPUS,
}
"""Our words by those of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the planner says about a scenario."""

    choice: Choice
    reason: Reason | None
    """None if no word of ours fits."""
    form: str
    """How batches travel."""
    step_s: tuple[float, float, float]
    """Predicted step time of the chosen cluster, and its 90 % interval."""
    answer: str
    wall_s: float
    """Seconds that the planner took."""


def choose(profile: Profile, scenario: Scenario) -> Decision:
    """Return the planner's decision for the cheapest cluster.

    Args:
        profile: All that the planner learns about the workload.
        scenario: For the facts and prices of its machines. Their speeds and the workload are not passed on.
    """
    machines = (scenario.trainer, *scenario.menu)
    catalogue = Catalogue({machine.name: _facts(machine) for machine in machines})
    options = PlanOptions(menu=tuple(machine.name for machine in scenario.menu))
    begin_s = time.process_time()
    plan = make_plan(profile, catalogue, options)
    wall_s = time.process_time() - begin_s
    chosen = plan.chosen
    return Decision(
        choice=_choice(plan),
        reason=Reason.UINT8 if chosen.form == "uint8" else _REASONS.get(plan.reason),
        form=chosen.form,
        step_s=(chosen.step_time.value, chosen.step_time_low_s, chosen.step_time_high_s),
        answer=plan.answer,
        wall_s=wall_s,
    )


def _facts(machine: MachineType) -> InstanceTypeInfo:
    gbit = machine.nic_bytes_per_s * 8e-9
    return InstanceTypeInfo(
        instance_type=machine.name,
        vcpus=machine.vcpus,
        memory_gib=machine.memory_bytes / 2**30,
        num_accelerators=machine.num_accelerators,
        network_baseline_gbps=gbit,
        network_burst_gbps=gbit,
        num_network_cards=1,
        network_card_gbps=gbit,
        price=Price(hourly_usd=machine.hourly_usd, source="benchmark"),
    )


def _choice(plan: Plan) -> Choice:
    chosen = plan.chosen
    data = sorted((group.instance_type, group.count) for group in chosen.groups if group.role == "data")
    if not data and chosen.local_endpoints == plan.baseline.local_endpoints:
        return NOTHING
    return Choice(
        trainer_endpoints=chosen.local_endpoints,
        data=tuple(data),
        endpoints_per_host=chosen.endpoints_per_host or 0,
    )
