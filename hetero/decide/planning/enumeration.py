"""The clusters that a plan considers, in the order of spending."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hetero.decide.planning.candidates import Candidate, DataGroup
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.endpoints import MOST_PROCESSES_PER_CPU, processes_per_cpu
from hetero.decide.planning.steps.model import StepModel
from hetero.metrics.profile.profile import Profile, TrainingProfile
from hetero.report.plan import AS_IS, UINT8

__all__ = [
    "MAX_HOSTS",
    "free_cpus",
    "mixtures",
    "neighbours",
    "refined",
    "spending_of",
    "with_data",
    "with_other_endpoints",
    "without_data",
]

MAX_HOSTS = 64
"""Largest number of data hosts of one type that a plan considers."""


def spending_of(candidate: Candidate, base: Candidate) -> str:
    """Return the step of spending that a candidate belongs to, one of `STEPS_OF_SPENDING`."""
    if candidate.has_spot:
        return "spot data hosts"
    if len(candidate.data) > 1:
        return "two types"
    if candidate.data:
        return "data hosts"
    if candidate.trainer is not base.trainer:
        return "bigger machine"
    return "as it is" if candidate.local_endpoints == base.local_endpoints else "free CPUs"


def free_cpus(training: TrainingProfile, machine: Machine) -> int:
    """Return the whole CPUs that the ranks of a trainer host leave free."""
    cpus_per_rank = training.rank_cpu_cores.value if training.rank_cpu_cores else 0.0
    return max(0, math.floor(machine.vcpus - cpus_per_rank * training.ranks_per_host))


def _process_counts(profile: Profile, machine: Machine) -> list[int]:
    """Return numbers of processes that may preprocess beside the ranks of a trainer host, in ascending order.

    Processes that wait for storage leave their CPU to others, so there may be more of them than free CPUs.
    """
    # The first supply is that of the trainer hosts' type, if this type was measured.
    training, supply = profile.training, profile.supply[0]
    free = free_cpus(training, machine)
    per_cpu = processes_per_cpu(supply.sample_cpu_s.mean + supply.batch_cpu_s.mean, supply.sample_wait_s.mean)
    most = math.floor(free * per_cpu)
    # Return the number of the profile, one process per free CPU, and eighths of the largest number. These suffice,
    # because `Finals` also tries all numbers near the best one.
    eighths = {math.ceil(most * eighth / 8) for eighth in range(1, 9)}
    return sorted({training.num_local_processes, free} | eighths)


def without_data(profile: Profile, base: Candidate, bigger: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield the baseline, then clusters without data hosts, with the baseline's trainer type and with bigger ones."""
    yield base
    for machine in (base.trainer, *bigger):
        for count in _process_counts(profile, machine):
            # With 0 processes, each rank fetches its own batches between two steps. Plan this only for a job that
            # already runs in this way.
            if count or profile.training.num_local_processes == 0:
                yield replace(base, trainer=machine, local_endpoints=count)


def with_data(
    profile: Profile, model: StepModel, best_local: Candidate, menu: Sequence[Machine]
) -> Iterator[Candidate]:
    """Yield clusters with data hosts of one type.

    If the accelerators cannot use the batches of more hosts, more hosts only cost more. So larger numbers of hosts are
    left out.
    """
    smaller_forms = [codec.name for codec in profile.codecs]
    if any(leaf.fits_uint8 for leaf in profile.leaves):
        smaller_forms.append(UINT8)
    for machine in menu:
        # Smaller forms are candidates only where bytes may limit the steps. A plan over 80 types took 6 to 18 s when
        # there were more candidates.
        for form in (AS_IS, *(smaller_forms if model.has_bytes_limit(best_local.trainer, machine) else ())):
            # Number of hosts that make batches as fast as the accelerators use them. Try one host more than these,
            # because hosts also wait for each other.
            num_enough = model.hosts_for_headspace(machine, form)
            for count in range(1, min(MAX_HOSTS, num_enough + 1) + 1):
                groups = (DataGroup(machine=machine, count=count),)
                # Without local endpoints, and with as many as are best without data hosts. `refined` tries numbers
                # between these two, only for the best clusters.
                for local_endpoints in dict.fromkeys((0, best_local.local_endpoints)):
                    yield replace(best_local, local_endpoints=local_endpoints, data=groups, form=form)


def refined(profile: Profile, leaders: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield each of the best clusters with other numbers of processes on its trainer hosts, and one host more or less.

    Args:
        profile: The figures of the job.
        leaders: Clusters with one type of data hosts.
    """
    for leader in leaders:
        (group,) = leader.data
        for count in range(max(1, group.count - 1), min(MAX_HOSTS, group.count + 1) + 1):
            groups = (DataGroup(machine=group.machine, count=count),)
            for local_endpoints in _process_counts(profile, leader.trainer):
                yield replace(leader, local_endpoints=local_endpoints, data=groups)


def mixtures(leaders: Iterable[Candidate], menu: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield each of the best clusters with one or two of its data hosts replaced by one or two of another type.

    Args:
        leaders: Clusters with one type of data hosts.
        menu: The other types.
    """
    for leader in leaders:
        (group,) = leader.data
        other_machines = [machine for machine in menu if machine != group.machine]
        for num_replaced, machine, count in itertools.product((1, 2), other_machines, (1, 2)):
            # A mixture needs hosts of both types.
            if group.count > num_replaced:
                rest = replace(group, count=group.count - num_replaced)
                yield replace(leader, data=(rest, DataGroup(machine=machine, count=count)))


def neighbours(candidate: Candidate, num_processes: int, menu: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield clusters with a few processes more or less, or one host more or less, or one host of another type.

    Args:
        candidate: The cluster.
        num_processes: Difference in processes per trainer host.
        menu: Machines that may become data hosts.
    """
    for number in (candidate.local_endpoints - num_processes, candidate.local_endpoints + num_processes):
        # Without data hosts, some processes must make the batches.
        if 0 <= number <= candidate.trainer.vcpus * MOST_PROCESSES_PER_CPU and (number or candidate.data):
            yield replace(candidate, local_endpoints=number)
    groups = candidate.data
    for index, group in enumerate(groups):
        for count in (group.count - 1, group.count + 1):
            # A group without hosts is left out.
            changed = (replace(group, count=count),) if count else ()
            data = (*groups[:index], *changed, *groups[index + 1 :])
            if count <= MAX_HOSTS and (data or candidate.local_endpoints):
                # Without data hosts, no batch is sent in a smaller form.
                yield replace(candidate, data=data, form=candidate.form if data else AS_IS)
    # One host of another type, added or instead of one host. A plan has at most two types.
    if len(groups) == 1:
        (group,) = groups
        for machine in menu:
            if machine != group.machine:
                other = DataGroup(machine=machine, count=1)
                yield replace(candidate, data=(group, other))
                if group.count > 1:
                    yield replace(candidate, data=(replace(group, count=group.count - 1), other))


def with_other_endpoints(candidate: Candidate, endpoints_per_host: int) -> Iterator[Candidate]:
    """Yield a cluster with half, three quarters, 5 / 4 and 6 / 4 of its present number of endpoints per data host."""
    most = MOST_PROCESSES_PER_CPU * max(group.machine.vcpus for group in candidate.data)
    # The waits of endpoints differ, so the number that keeps the CPUs busy on average need not be the best. With that
    # number alone, the cluster chosen for a job of bench_planner cost 33 % more than the cheapest one. With these
    # numbers too, it costs 5 % more.
    for quarters in (2, 3, 5, 6):
        number = min(most, endpoints_per_host * quarters // 4)
        if number not in (0, endpoints_per_host):
            yield replace(candidate, endpoints_per_host=number)
