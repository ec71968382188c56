"""The clusters that a plan considers, in the order of spending."""

from __future__ import annotations

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
    cores = training.rank_cpu_cores.value if training.rank_cpu_cores else 0.0
    return max(0, math.floor(machine.vcpus - cores * training.ranks_per_host))


def _process_counts(profile: Profile, machine: Machine) -> list[int]:
    """Return numbers of processes that may preprocess beside the ranks of a trainer host, in ascending order.

    Processes that wait for storage leave their CPU to others, so there may be more of them than free CPUs.
    """
    training, supply = profile.training, profile.supply[0]
    free = free_cpus(training, machine)
    per_cpu = processes_per_cpu(supply.sample_cpu_s.mean + supply.batch_cpu_s.mean, supply.sample_wait_s.mean)
    most = max(free, math.floor(free * per_cpu))
    counts = {training.num_local_processes, free, most}
    # Eighths suffice, because `Finals` looks near the best cluster in steps down to one process.
    counts |= {math.ceil(most * eighth / 8) for eighth in range(1, 8)}
    return sorted(count for count in counts if count >= 0)


def without_data(profile: Profile, base: Candidate, bigger: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield the baseline, then clusters without data hosts."""
    yield base
    for machine in (base.trainer, *bigger):
        for count in _process_counts(profile, machine):
            # With 0 processes, each rank fetches its own batches between two steps. Plan this only for a job that
            # already runs in this way.
            if count or profile.training.num_local_processes == 0:
                yield replace(base, trainer=machine, local_endpoints=count)


def _forms(profile: Profile) -> list[str]:
    forms = [codec.name for codec in profile.codecs]
    if any(leaf.fits_uint8 for leaf in profile.leaves):
        forms.append(UINT8)
    return forms


def with_data(
    profile: Profile, model: StepModel, best_local: Candidate, menu: Sequence[Machine]
) -> Iterator[Candidate]:
    """Yield clusters with data hosts of one type.

    If the accelerators cannot use the batches of more hosts, more hosts only cost more. So the counts end there.
    """
    base = replace(best_local, local_endpoints=0)
    for machine in menu:
        # The other forms are candidates only where bytes may limit the steps. Fewer candidates, and no hashes of
        # candidates, shortened a plan over 80 types from 6 to 18 s to 0.1 to 0.4 s.
        forms = [AS_IS, *(_forms(profile) if model.has_bytes_limit(base.trainer, machine) else ())]
        for form in forms:
            enough = model.hosts_for_headspace(machine, form)
            for count in range(1, min(MAX_HOSTS, enough + 1) + 1):
                groups = (DataGroup(machine=machine, count=count),)
                # `refined` tries the numbers between these two, only for the best clusters.
                for local_endpoints in dict.fromkeys((0, best_local.local_endpoints)):
                    yield replace(base, local_endpoints=local_endpoints, data=groups, form=form)


def refined(profile: Profile, leaders: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield good clusters with other numbers of processes on the trainer hosts, and one host more or less."""
    for leader in leaders:
        (group,) = leader.data
        for count in range(max(1, group.count - 1), min(MAX_HOSTS, group.count + 1) + 1):
            groups = (DataGroup(machine=group.machine, count=count),)
            for local_endpoints in _process_counts(profile, leader.trainer):
                yield replace(leader, local_endpoints=local_endpoints, data=groups)


def mixtures(leaders: Iterable[Candidate], menu: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield each good cluster with some of its data hosts replaced by a few hosts of another type."""
    for leader in leaders:
        (group,) = leader.data
        for fewer in range(1, 3):
            if group.count > fewer:
                for machine in menu:
                    if machine != group.machine:
                        for count in range(1, 3):
                            rest = DataGroup(machine=group.machine, count=group.count - fewer)
                            yield replace(leader, data=(rest, DataGroup(machine=machine, count=count)))


def neighbours(candidate: Candidate, distance: int, menu: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield clusters that differ from one in a single number of processes or hosts."""
    for change in (-distance, distance):
        number = candidate.local_endpoints + change
        if 0 <= number <= candidate.trainer.vcpus * MOST_PROCESSES_PER_CPU and (number or candidate.data):
            yield replace(candidate, local_endpoints=number)
    groups = candidate.data
    for index, group in enumerate(groups):
        for change in (-1, 1):
            count = group.count + change
            changed = (replace(group, count=count),) if 0 < count <= MAX_HOSTS else ()
            rest = (*groups[:index], *changed, *groups[index + 1 :])
            # Skip clusters in which no process makes batches, neither on data hosts nor on trainer hosts.
            if (changed or count == 0) and (rest or candidate.local_endpoints):
                yield replace(candidate, data=rest, form=candidate.form if rest else AS_IS)
    if len(groups) == 1:
        for machine in menu:
            if machine != groups[0].machine:
                other = DataGroup(machine=machine, count=1)
                yield replace(candidate, data=(*groups, other))
                if groups[0].count > 1:
                    yield replace(candidate, data=(replace(groups[0], count=groups[0].count - 1), other))


def with_other_endpoints(candidate: Candidate, endpoints_per_host: int) -> Iterator[Candidate]:
    """Yield a cluster with fewer and more endpoints per data host than the present number."""
    most = MOST_PROCESSES_PER_CPU * max(group.machine.vcpus for group in candidate.data)
    # The waits of endpoints differ, so the number that keeps the CPUs busy on average need not be the best. A job of
    # bench_planner had a regret of 33 % with that number alone, and has 5 % if these numbers are tried too.
    for quarters in (2, 3, 5, 6):
        number = min(most, endpoints_per_host * quarters // 4)
        if number not in (0, endpoints_per_host):
            yield replace(candidate, endpoints_per_host=number)
