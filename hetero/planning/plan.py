"""The answer to "which machines?" (`Plan`), with the reason for it and the rejected alternatives.

`make_plan` is what ``hetero plan`` and `hetero.sagemaker.plan` call. ``plan.json`` holds a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetero.documents.records import encode, limits, load
from hetero.errors import ConfigError
from hetero.metrics.excess import MAX_EXCESS, RUN_AGAIN, SMALL_EXCESS, excess_text
from hetero.metrics.figures import Figure
from hetero.planning.candidates import AS_IS, FORMS, UINT8, Candidate
from hetero.planning.enumeration import STEPS_OF_SPENDING, free_cpus
from hetero.planning.machines import Machine, bigger_machines, is_on_default_menu, menu_of
from hetero.planning.options import PlanOptions
from hetero.planning.parts import MIN_STEPS
from hetero.planning.profile import Profile, TrainingProfile, check_figures
from hetero.planning.ranking import GOALS, Constraints
from hetero.planning.reasons import REASONS, answer_of, notes_of, reason_of, rejection_of, resized_note
from hetero.planning.search import Alternative, Search, search
from hetero.planning.steps.model import BOTTLENECKS
from hetero.pricing.catalog import Catalogue

__all__ = [
    "PLAN_FILE_NAME",
    "PLAN_SCHEMA_VERSION",
    "Plan",
    "PlanOptions",
    "PlannedCluster",
    "PlannedGroup",
    "load_plan",
    "make_plan",
]

PLAN_SCHEMA_VERSION = 1
PLAN_FILE_NAME = "plan.json"
_MAX_FILE_BYTES = 4 << 20
_MAX_RANKS = 256
"""Limit of the ranks, because a plan takes about 0.05 s per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One instance group of a planned cluster."""

    name: str
    role: str = field(metadata=limits(choices=("data", "trainer")))
    instance_type: str
    count: int = field(metadata=limits(minimum=1))
    is_spot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """A cluster with its predicted step time and cost."""

    spending: str = field(metadata=limits(choices=STEPS_OF_SPENDING))
    groups: tuple[PlannedGroup, ...]
    """The trainer group and the data groups."""
    local_endpoints: int
    """Processes per trainer host that preprocess."""
    endpoints_per_host: int | None
    """Endpoints per data host. None means one per vCPU, which is the launcher's default."""
    form: str = field(metadata=limits(choices=FORMS))
    """How batches travel: unchanged, as uint8, or compressed."""
    step_time: Figure
    step_time_low_s: float
    """End of the 90 % interval."""
    step_time_high_s: float
    hourly_usd: float | None
    """Price of all hosts. None if a price is unknown."""
    usd_per_1k_steps: Figure | None
    usd_per_1k_steps_low: float | None
    usd_per_1k_steps_high: float | None
    bottleneck: str = field(metadata=limits(choices=BOTTLENECKS))
    rejected: str
    """Why the plan does not choose this cluster. Empty for the chosen one."""

    @property
    def flags(self) -> str:
        """Flags of ``hetero simulate`` and ``hetero launch`` for this cluster."""
        words = [f"--group {group.name}={group.instance_type}:{group.count}" for group in self.groups]
        # Without the flag, a job with data hosts chooses the number itself and would differ from the plan.
        if any(group.role == "data" for group in self.groups):
            words.append(f"--trainer-endpoints {self.local_endpoints}")
        if self.endpoints_per_host is not None:
            words.append(f"--endpoints-per-host {self.endpoints_per_host}")
        return " ".join(words)

    @property
    def instance_groups(self) -> str:
        """Argument for a SageMaker estimator. Empty if only a part of the groups are spot instances."""
        # On SageMaker, all groups of a job are spot instances, or none.
        if any(group.is_spot for group in self.groups):
            return ""
        rows = "".join(f'    InstanceGroup("{g.name}", "{g.instance_type}", {g.count}),\n' for g in self.groups)
        return f"instance_groups=[\n{rows}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen cluster, the reason for it, and the alternatives. Immutable. `make_plan` creates it."""

    schema_version: int = field(metadata=limits(minimum=PLAN_SCHEMA_VERSION, maximum=PLAN_SCHEMA_VERSION))
    command: str
    """The training script of the profile and its arguments."""
    goal: str = field(metadata=limits(choices=GOALS))
    answer: str
    """One sentence: what to do, with the figures that decide it."""
    reason: str = field(metadata=limits(choices=REASONS))
    chosen: PlannedCluster
    baseline: PlannedCluster
    """The trainer hosts as the profile used them, without data hosts."""
    alternatives: tuple[PlannedCluster, ...] = field(metadata=limits(max_items=100))
    headspace: Figure
    """Step time with batches always ready, in seconds."""
    speedup: float
    """Step time of the baseline / step time of the chosen cluster."""
    break_even_speedup: float | None
    """Speed-up above which the chosen cluster costs less per step than the baseline."""
    chance_to_pay: float | None = field(metadata=limits(maximum=1))
    """Probability that the chosen cluster costs less per step than the baseline, given the uncertain figures. 1 if they
    are the same. None if a price is unknown."""
    notes: tuple[str, ...]
    """What the reader of the plan must know."""

    def cluster_of(
        self, groups: Iterable[PlannedGroup], local_endpoints: int | None, *, compression: str | None = None
    ) -> PlannedCluster | None:
        """Return the prediction for a job's groups, or None if the plan has no such cluster.

        Names of groups and spot prices do not matter. In a job without data hosts the script decides how many processes
        preprocess, so their number does not matter there.

        Args:
            groups: The job's groups.
            local_endpoints: Endpoints per trainer host, or None for any number. With None, the chosen cluster comes
                first, then the others in their order.
            compression: Compression of the job's batches. Whether they are sent as uint8 does not matter.
        """
        wanted = _sizes(groups)
        forms = (AS_IS, UINT8) if compression is None else (compression,)
        is_any = local_endpoints is None or not any(role == "data" for role, _ in wanted)
        for cluster in (self.chosen, *self.alternatives):
            is_alike = is_any or cluster.local_endpoints == local_endpoints
            if is_alike and _sizes(cluster.groups) == wanted and cluster.form in forms:
                return cluster
        return None

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON values."""
        result: dict[str, object] = encode(self)
        return result


def make_plan(profile: Profile, catalogue: Catalogue, options: PlanOptions | None = None) -> Plan:
    """Return the best cluster for a job.

    Args:
        profile: The figures of the job.
        catalogue: Instance types with prices.
        options: Menu, goal and limits. None means the lowest cost.

    Raises:
        ConfigError: If a type or price is missing, the profile is of another type than the trainer hosts or of too few
            or too disturbed steps, or no cluster satisfies the limits.
    """
    # Check the figures and the options before anything is computed from them.
    options = options or PlanOptions()
    check_figures(profile)
    _check_measured(profile.training)
    _check_speeds(profile, catalogue, options)
    trainer = _trainer_of(profile, catalogue, options)
    profile, without_data_note = _without_data_hosts(profile, trainer)
    measured = replace(profile.training, instance_type=trainer.instance_type)
    profile = _resized(profile, trainer, options)
    is_resized = profile.training != measured
    # Find the cluster.
    max_step_s = None
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
        # Without it, the measured step time was shown as that of a cluster with other numbers of hosts or ranks.
        measured=measured if is_resized else None,
    )
    note = resized_note(measured, profile.training) if is_resized else without_data_note
    return _plan_of(profile, found, options, note)


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Args:
        path: ``plan.json``, or the directory that contains it.

    Raises:
        ConfigError: If the plan is missing or malformed. The message names the file and the key path.
    """
    return load(Plan, path, PLAN_FILE_NAME, max_bytes=_MAX_FILE_BYTES, to_do="make one with hetero plan PROFILE --json")


def _sizes(groups: Iterable[PlannedGroup]) -> Counter[tuple[str, str]]:
    """Return the number of hosts by role and instance type."""
    sizes: Counter[tuple[str, str]] = Counter()
    for group in groups:
        sizes[group.role, group.instance_type] += group.count
    return sizes


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
    """Reject a speed that the plan would not use."""
    reference = profile.supply[0].instance_type or profile.training.instance_type or options.trainer_type
    trainer = options.trainer_type or profile.training.instance_type
    used = {reference, trainer, *options.spot_usd}
    info = catalogue.find(trainer)
    if info is not None and info.vcpus is not None:
        used.update(machine.instance_type for machine in bigger_machines(catalogue, Machine.from_info(info)))
    # A misspelt type, or the profiled one, was once ignored.
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
    """Return the machine of the trainer hosts."""
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
    # GPU:8 states no vCPUs, but the profile has those of its host.
    return Machine.from_info(info if info.vcpus is not None else replace(info, vcpus=profile.training.vcpus))


def _without_data_hosts(profile: Profile, trainer: Machine) -> tuple[Profile, str]:
    """Return the profile with loader processes on the free CPUs, if data hosts made its batches, and a note about it.

    The baseline of a plan is a job without data hosts, which this profile did not measure.
    """
    training = profile.training
    if not training.has_data_hosts:
        return profile, ""
    # Such steps were once taken for those of the trainer hosts alone. A plan then said not to add data hosts where they
    # save 55 %.
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
    # A plan for thousands of ranks did not end.
    if num_hosts * ranks_per_host > _MAX_RANKS:
        raise ConfigError(
            f"the plan is for {num_hosts} trainer hosts with {ranks_per_host} ranks each; expected at most "
            f"{_MAX_RANKS} ranks\n  to do: plan for a part of the trainer hosts, because all of them are alike"
        )
    supply = profile.supply
    if not training.instance_type and not supply[0].instance_type:
        supply = (replace(supply[0], instance_type=trainer.instance_type), *supply[1:])
    return replace(
        profile,
        training=replace(
            training,
            instance_type=trainer.instance_type,
            num_hosts=num_hosts,
            ranks_per_host=ranks_per_host,
        ),
        supply=supply,
    )


def _plan_of(profile: Profile, found: Search, options: PlanOptions, note: str) -> Plan:
    basis = profile.training.step_s.basis

    def cluster(alternative: Alternative) -> PlannedCluster:
        rejected = "" if alternative is found.chosen else rejection_of(alternative, found)
        return _cluster_of(alternative, rejected, basis)

    chosen, baseline = found.chosen.prediction, found.baseline.prediction
    reason = reason_of(profile, found)
    share = profile.training.excess_share
    disturbed = f"{excess_text(share)}, so the intervals are wider. " if share > SMALL_EXCESS else ""
    return Plan(
        schema_version=PLAN_SCHEMA_VERSION,
        command=profile.command,
        goal=options.goal,
        answer=disturbed + answer_of(profile, found, reason),
        reason=reason,
        chosen=cluster(found.chosen),
        baseline=cluster(found.baseline),
        alternatives=tuple(map(cluster, found.alternatives)),
        headspace=Figure(value=profile.training.headspace_s.mean, unit="s", basis=profile.training.headspace_s.basis),
        speedup=baseline.step_s / chosen.step_s,
        break_even_speedup=found.break_even,
        chance_to_pay=found.chance_to_pay,
        notes=(*((note,) if note else ()), *notes_of(profile, found, options.vcpu_speeds)),
    )


def _cluster_of(alternative: Alternative, rejected: str, basis: str) -> PlannedCluster:
    candidate, prediction = alternative.candidate, alternative.prediction
    usd, interval = alternative.usd_per_1k_steps, alternative.usd_interval
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
        usd_per_1k_steps_low=interval[0] if interval else None,
        usd_per_1k_steps_high=interval[1] if interval else None,
        bottleneck=prediction.bottleneck,
        rejected=rejected,
    )


def _groups_of(candidate: Candidate) -> tuple[PlannedGroup, ...]:
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
