"""The rules of others, each with the information that it has, on the scenarios of the planner.

A rule sees step times, because it may run the job. No rule sees a price. A rule that adds data hosts adds hosts of one
type. It is the type that a careful user would give it: the cheapest per vCPU, and of equal ones the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planning.choices import NOTHING, Choice
from planning.machines import MachineType
from planning.search import MAX_HOSTS, Truth

__all__ = ["RULES"]

CACHEW_GAIN = 1.07
FASTFLOW_RATIO = 1.3
BUSY_CPU_SHARE = 0.85
"""CPU utilisation that the flowchart calls "approximately 100 %"."""
BUSY_ACCELERATOR_SHARE = 0.9
SLACK = 0.03
"""Share of a host that is not worth another host. Without it, noise would add one."""


def usual_type(truth: Truth) -> MachineType:
    """Return the type that a user gives to a rule."""
    return min(truth.scenario.menu, key=lambda each: (round(each.hourly_usd / each.vcpus, 5), -each.vcpus))


def _hosts(machine: MachineType, count: int, trainer_endpoints: int = 0) -> Choice:
    data = ((machine.name, min(MAX_HOSTS, count)),) if count > 0 else ()
    return Choice(trainer_endpoints=trainer_endpoints, data=data)


def _batches_per_s(truth: Truth, choice: Choice) -> float:
    """Return the batches of all ranks per second."""
    return truth.scenario.workload.num_ranks / truth.result(choice).step_s


def _accelerator_batches_per_s(truth: Truth) -> float:
    return truth.scenario.workload.num_ranks / truth.result(NOTHING).headspace_s


def nothing(truth: Truth) -> Choice:
    """Add nothing."""
    return NOTHING


def cachew(truth: Truth) -> Choice:
    """Add one host after the other while each makes the job more than 7 % faster (Cachew).

    All batches come from the data hosts. If the job is then slower than with its loaders, it keeps them.
    """
    machine, count = usual_type(truth), 1
    while count < MAX_HOSTS:
        now_s, next_s = (truth.result(_hosts(machine, number)).step_s for number in (count, count + 1))
        if not now_s > CACHEW_GAIN * next_s:
            break
        count += 1
    return min(NOTHING, _hosts(machine, count), key=lambda choice: truth.result(choice).step_s)


def fastflow(truth: Truth) -> Choice:
    """Offload if the accelerator takes more than 1.3 times what the local processes make (FastFlow).

    The local processes go on, and the data hosts make the other batches.
    """
    local, accelerator = _batches_per_s(truth, NOTHING), _accelerator_batches_per_s(truth)
    if accelerator <= FASTFLOW_RATIO * local:
        return NOTHING
    machine, scenario = usual_type(truth), truth.scenario
    one_host = _batches_per_s(truth, _hosts(machine, 1))
    processes = scenario.workload.local_processes * scenario.workload.num_ranks // scenario.num_trainers
    if not one_host:
        return NOTHING
    return _hosts(
        machine,
        math.ceil((accelerator - local) / one_host - SLACK),
        trainer_endpoints=min(processes, scenario.fitting_endpoints(scenario.trainer)),
    )


def wanted_workers(truth: Truth) -> Choice:
    """Add the wanted number of hosts: consumption / throughput of one (tf.data service).

    All batches come from the data hosts. Nothing is added if the job's own loaders make enough.
    """
    machine = usual_type(truth)
    local, accelerator = _batches_per_s(truth, NOTHING), _accelerator_batches_per_s(truth)
    one_host = _batches_per_s(truth, _hosts(machine, 1))
    if local >= 0.95 * accelerator or not one_host:
        return NOTHING
    return _hosts(machine, math.ceil(accelerator / one_host - SLACK))


def flowchart(truth: Truth) -> Choice:
    """Match the number of vCPUs to the accelerators (the published flowchart).

    If the CPUs are busy and the accelerators are not, add the vCPUs that would keep them busy: vCPUs / utilisation of
    the accelerators. The trainer hosts' vCPUs go on, and a vCPU counts the same on all types.
    """
    job, scenario = truth.result(NOTHING), truth.scenario
    if job.utilisation >= BUSY_ACCELERATOR_SHARE or job.trainer_cpu_share < BUSY_CPU_SHARE:
        return NOTHING
    vcpus = scenario.trainer.vcpus * scenario.num_trainers
    machine = usual_type(truth)
    count = math.ceil(vcpus * (1.0 / job.utilisation - 1.0) / machine.vcpus - SLACK)
    return _hosts(machine, count, trainer_endpoints=min(scenario.trainer.vcpus, scenario.most_trainer_endpoints))


RULES: dict[str, Callable[[Truth], Choice]] = {
    "add nothing": nothing,
    "one more host while > 7 % faster (Cachew)": cachew,
    "offload above a ratio of 1.3 (FastFlow)": fastflow,
    "consumption / throughput (tf.data service)": wanted_workers,
    "vCPUs matched to accelerators (flowchart)": flowchart,
}
"""Rules by the title of their row."""
