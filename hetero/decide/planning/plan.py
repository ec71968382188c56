"""The answer to "which machines?" (`Plan`), with the reason for it and the rejected alternatives.

`make_plan` is what ``hetero plan`` and `hetero.sagemaker.plan` call. ``plan.json`` holds a plan.
"""

from __future__ import annotations

from dataclasses import replace

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.enumeration import free_cpus
from hetero.decide.planning.machines import Machine, bigger_machines, is_on_default_menu, menu_of
from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.ranking import Constraints
from hetero.decide.planning.reasons import answer_of, notes_of, reason_of, rejection_of, resized_note
from hetero.decide.planning.search import Alternative, Search, search
from hetero.errors import ConfigError
from hetero.metrics.excess import MAX_EXCESS, RUN_AGAIN, SMALL_EXCESS, excess_text
from hetero.metrics.figures import Figure
from hetero.metrics.profile.parts import MIN_STEPS
from hetero.metrics.profile.profile import Profile, TrainingProfile, check_figures
from hetero.pricing.catalog import Catalogue
from hetero.report.plan import PLAN_SCHEMA_VERSION, Plan, PlannedCluster, PlannedGroup

__all__ = ["make_plan"]

_MAX_RANKS = 256
"""Limit of the ranks, because a plan takes about 0.05 s per rank."""


def make_plan(profile: Profile, catalogue: Catalogue, options: PlanOptions | None = None) -> Plan:
    """Return the best cluster for a job.

    Args:
        profile: The figures of the job.
        catalogue: Instance types with prices.
        options: Menu, goal and limits. None means the lowest cost.

    Raises:
        ConfigError: If a type or price is missing, or no cluster satisfies the limits. Also if the profile is of
            another type than the trainer hosts, has too few steps, or other work disturbed its steps too much.
    """
    # Check the figures and the options.
    options = options or PlanOptions()
    check_figures(profile)
    _check_measured(profile.training)
    _check_speeds(profile, catalogue, options)
    # The baseline of the plan has no data hosts, and the numbers of hosts and ranks that the user wants. Convert the
    # profile to that of the baseline.
    trainer = _trainer_of(profile, catalogue, options)
    profile, without_data_note = _without_data_hosts(profile, trainer)
    measured_training = replace(profile.training, instance_type=trainer.instance_type)
    profile = _resized(profile, trainer, options)
    is_resized = profile.training != measured_training
    # Find the cluster.
    max_step_s = None
    # `PlanOptions` rejects one of these options without the other.
    if options.max_hours is not None and options.num_steps is not None:
        max_step_s = options.max_hours * 3600 / options.num_steps
    found = search(
        profile,
        trainer,
        menu_of(catalogue, options.menu, spot_usd=options.spot_usd),
        bigger=bigger_machines(catalogue, trainer),
        constraints=Constraints(
            goal=options.goal, max_usd_per_1k_steps=options.max_usd_per_1k_steps, max_step_s=max_step_s
        ),
        vcpu_speeds=options.vcpu_speeds,
        endpoints_per_host=options.endpoints_per_host,
        # Without this argument, a cluster with another number of hosts or ranks was shown with the measured step time.
        measured=measured_training if is_resized else None,
    )
    # Both notes say that the baseline's step time is modelled, and with how many loader processes. So one suffices.
    note = resized_note(measured_training, profile.training) if is_resized else without_data_note
    return _plan_of(profile, found, options, note)


def _check_measured(training: TrainingProfile) -> None:
    """Reject step times that are mostly about other things than the job."""
    if training.excess_share > MAX_EXCESS:
        raise ConfigError(
            f"{excess_text(training.excess_share)}, so no plan follows from the profile\n"
            f"  to do: run hetero profile again {RUN_AGAIN}"
        )
    if training.step_s.num_measured < MIN_STEPS:
        raise ConfigError(
            f"the profile has {training.step_s.num_measured} measured steps; a plan needs at least {MIN_STEPS}\n"
            "  to do: let the script train for more steps, and run hetero profile again"
        )


def _check_speeds(profile: Profile, catalogue: Catalogue, options: PlanOptions) -> None:
    """Raise `ConfigError` for a speed that the plan would not use.

    The speed of a misspelt type, or of the profiled type, was once ignored.
    """
    # A plan uses the speeds of the profiled type, the trainer's type, bigger types of its family, and the menu.
    reference = profile.supply[0].instance_type or profile.training.instance_type or options.trainer_type
    trainer = options.trainer_type or profile.training.instance_type
    used = {reference, trainer, *options.spot_usd}
    trainer_info = catalogue.find(trainer)
    if trainer_info is not None and trainer_info.vcpus is not None:
        used.update(machine.instance_type for machine in bigger_machines(catalogue, Machine.from_info(trainer_info)))
    for name, ratio in options.vcpu_speeds.items():
        info = catalogue.get(name)
        if name == reference and ratio != 1:
            raise ConfigError(
                f"--vcpu-speed {name}={ratio:g}: the profile measured samples on {name}, so its speed is 1\n"
                f"  to do: leave it out, and give the speeds of other types compared with {name}"
            )
        is_on_menu = name in options.menu if options.menu else is_on_default_menu(info)
        if not is_on_menu and name not in used:
            to_do = f"add --menu {name}" if info.hourly_usd is not None else f"give its price with --price {name}=USD"
            raise ConfigError(
                f"--vcpu-speed {name}={ratio:g}: {name} is not one of the types that the plan chooses from\n"
                f"  to do: leave it out, or {to_do}"
            )


def _trainer_of(profile: Profile, catalogue: Catalogue, options: PlanOptions) -> Machine:
    """Return the machine of the trainer hosts, which must be of the profiled type.

    Raises:
        ConfigError: If the type is unknown, is not the profiled one, or lacks a price that the goal needs.
    """
    measured = profile.training.instance_type
    name = options.trainer_type or measured
    if not name:
        raise ConfigError(
            "the profile does not name the type of the trainer hosts\n"
            "  to do: give it with --baseline TYPE:COUNT, for example --baseline ml.p3.2xlarge:1"
        )
    if measured and name != measured:
        raise ConfigError(
            f"the profile was measured on {measured}, the baseline is {name}; the accelerators of another type take "
            "another time per step\n"
            f"  to do: run hetero profile on {name}, or plan for {measured}"
        )
    info = catalogue.get(name)
    if not measured and info.vcpus is not None and info.vcpus != profile.training.vcpus:
        raise ConfigError(
            f"the profile was measured on a host with {profile.training.vcpus} CPUs, but {name} has {info.vcpus} "
            "vCPUs\n"
            f"  to do: run hetero profile --instance-type {name} on {name}"
        )
    if info.hourly_usd is None and options.goal == "cost":
        raise ConfigError(f"{catalogue.explain(name)}, because the goal is cost")
    # A type such as GPU:8 states no vCPUs, so take the vCPUs of the host that was profiled.
    return Machine.from_info(info if info.vcpus is not None else replace(info, vcpus=profile.training.vcpus))


def _without_data_hosts(profile: Profile, trainer: Machine) -> tuple[Profile, str]:
    """Return a profile without data hosts, and a note for the user if the measured one had them.

    The baseline of a plan is a job without data hosts. If the profile did not measure such a job, it is assumed to have
    a loader process on each free CPU, at least one for each rank, and at least those of the profile.
    """
    training = profile.training
    if not training.has_data_hosts:
        return profile, ""
    # The steps of a job with data hosts were once taken for steps of the trainer hosts alone. A plan then advised
    # against data hosts that save 55 %.
    number = max(training.num_local_processes, free_cpus(training, trainer), training.ranks_per_host)
    note = (
        "Data hosts made the batches of the profile. So the step time of the trainer hosts alone is modelled, with "
        f"{number} loader processes per host."
    )
    return replace(profile, training=replace(training, num_local_processes=number)), note


def _resized(profile: Profile, trainer: Machine, options: PlanOptions) -> Profile:
    """Return the profile with the plan's numbers of hosts and ranks, and the trainer's type."""
    training = profile.training
    num_hosts = options.num_trainer_hosts or training.num_hosts
    ranks_per_host = training.ranks_per_host
    if options.num_ranks is not None:
        if options.num_ranks % num_hosts:
            raise ConfigError(
                f"the number of ranks is {options.num_ranks}, the number of trainer hosts {num_hosts}; expected a "
                "multiple"
            )
        ranks_per_host = options.num_ranks // num_hosts
    # Limit the ranks, because a plan for thousands of ranks did not end.
    if num_hosts * ranks_per_host > _MAX_RANKS:
        raise ConfigError(
            f"the plan is for {num_hosts} trainer hosts with {ranks_per_host} ranks each; expected at most "
            f"{_MAX_RANKS} ranks\n  to do: plan for a part of the trainer hosts, because all of them are alike"
        )
    supply = profile.supply
    # If the profile names no type, the user has named it. The samples were measured on the same host.
    if not training.instance_type and not supply[0].instance_type:
        supply = (replace(supply[0], instance_type=trainer.instance_type), *supply[1:])
    return replace(
        profile,
        training=replace(
            training, instance_type=trainer.instance_type, num_hosts=num_hosts, ranks_per_host=ranks_per_host
        ),
        supply=supply,
    )


def _plan_of(profile: Profile, found: Search, options: PlanOptions, note: str) -> Plan:
    """Return the plan that states what the search found."""
    basis = profile.training.step_s.basis

    def cluster_of(alternative: Alternative) -> PlannedCluster:
        rejected = "" if alternative is found.chosen else rejection_of(alternative, found)
        return _cluster_of(alternative, rejected, basis)

    reason = reason_of(profile, found)
    # Share of the measured time that other work of the machine may have taken.
    excess = profile.training.excess_share
    about_excess = f"{excess_text(excess)}, so the intervals are wider. " if excess > SMALL_EXCESS else ""
    return Plan(
        schema_version=PLAN_SCHEMA_VERSION,
        command=profile.command,
        goal=options.goal,
        answer=about_excess + answer_of(profile, found, reason),
        reason=reason,
        chosen=cluster_of(found.chosen),
        baseline=cluster_of(found.baseline),
        alternatives=tuple(map(cluster_of, found.alternatives)),
        headspace=Figure(value=profile.training.headspace_s.mean, unit="s", basis=profile.training.headspace_s.basis),
        speedup=found.baseline.prediction.step_s / found.chosen.prediction.step_s,
        break_even_speedup=found.break_even,
        chance_to_pay=found.chance_to_pay,
        notes=(*filter(None, [note]), *notes_of(profile, found, options.vcpu_speeds)),
    )


def _cluster_of(alternative: Alternative, rejected: str, basis: str) -> PlannedCluster:
    """Return an alternative of the search in the form that a plan has.

    Args:
        alternative: The alternative.
        rejected: Why the plan does not choose it. Empty for the chosen one.
        basis: Basis of the profile's step time. The profiled cluster keeps this step time with its basis, and the step
            times of other clusters are modelled.
    """
    candidate, prediction = alternative.candidate, alternative.prediction
    usd = alternative.usd_per_1k_steps
    low_usd, high_usd = alternative.usd_interval or (None, None)
    step_basis = basis if prediction.is_measured else "modelled"
    return PlannedCluster(
        spending=alternative.spending,
        groups=_groups_of(candidate),
        local_endpoints=candidate.local_endpoints,
        endpoints_per_host=alternative.endpoints_per_host,
        form=candidate.form,
        step_time=Figure(value=prediction.step_s, unit="s", basis=step_basis),
        step_time_low_s=prediction.low_s,
        step_time_high_s=prediction.high_s,
        hourly_usd=candidate.hourly_usd,
        usd_per_1k_steps=None if usd is None else Figure(value=usd, unit="USD", basis=step_basis),
        usd_per_1k_steps_low=low_usd,
        usd_per_1k_steps_high=high_usd,
        bottleneck=prediction.bottleneck,
        rejected=rejected,
    )


def _groups_of(candidate: Candidate) -> tuple[PlannedGroup, ...]:
    """Return the instance groups of a candidate: the groups ``data``, ``data2`` and so on, then the trainer group."""
    data = [
        PlannedGroup(
            name="data" if index == 0 else f"data{index + 1}",
            role="data",
            instance_type=group.machine.instance_type,
            count=group.count,
            is_spot=group.machine.is_spot,
        )
        for index, group in enumerate(candidate.data)
    ]
    trainer = PlannedGroup(
        name="trainer",
        role="trainer",
        instance_type=candidate.trainer.instance_type,
        count=candidate.num_trainer_hosts,
    )
    return (*data, trainer)
