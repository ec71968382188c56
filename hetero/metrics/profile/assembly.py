"""Makes a profile from the measurements of ranks and hosts. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.metrics.excess import SMALL_EXCESS
from hetero.metrics.figures import Figure
from hetero.metrics.profile.parts import MIN_STEPS, Contents, HostPart, RankPart
from hetero.metrics.profile.profile import SCHEMA_VERSION, Profile, Spread, TrainingProfile

__all__ = ["JobFacts", "assemble_profile", "check_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the launcher of the first trainer host knows about the job."""

    command: str
    measured_at: str
    """ISO 8601 with time zone."""
    instance_type: str
    """Type of the trainer hosts, or empty if unknown."""
    vcpus: int
    """Usable (or emulated) CPUs of a trainer host."""
    num_hosts: int
    """Number of trainer hosts."""
    ranks_per_host: int
    num_endpoints: int
    """Processes of a trainer host that compute batches for its ranks: endpoints, or their emulated vCPUs."""
    has_data_hosts: bool = False
    warmup_steps: int
    is_sample_emulated: bool = False
    is_step_emulated: bool = False
    simulated: tuple[str, ...] = ()
    """One sentence for each thing that was emulated."""
    excess_share: float = 0.0
    """See `hetero.metrics.excess`."""
    excess_notes: tuple[str, ...] = ()
    """A sentence about work that made the times upper bounds, if there was any."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def check_ranks(ranks: Mapping[int, RankPart], facts: JobFacts) -> None:
    """Reject a job that has too few measured steps, or steps whose data wait is not known.

    A profile run first measures the job as it runs. Then the loader repeats batches that it has delivered, so steps
    never wait. If a step takes several batches at once, its wait cannot be measured. The wait is then the
    difference between the step times without and with repeated batches.

    Raises:
        ConfigError: If no rank used a loader of hetero, or a rank measured too few steps or no data wait.
    """
    if not ranks:
        raise ConfigError(
            "no rank took a batch from a loader of hetero, so there is nothing to profile\n"
            "  Use hetero.torch.DataLoader or hetero.tf.from_dataset in the ranks themselves."
        )
    for rank, part in sorted(ranks.items()):
        num_measured = 0 if part.step_s is None else part.step_s.num_measured
        # TensorFlow takes batches ahead, so hetero.tf counts a step only where the script consumes its batch.
        if not part.num_steps_total:
            raise ConfigError(
                f"the script reported no complete step of loader {part.loader} on rank {rank}; a profile needs at "
                f"least {MIN_STEPS}\n  Let the script train for more steps. With hetero.tf, pass "
                "callbacks=[data.callback()] to fit,\n  or loop over the dataset itself, or over data.measure(...)."
            )
        if num_measured < MIN_STEPS:
            raise ConfigError(
                f"the script ended after {part.num_steps_total} complete steps of loader {part.loader} on rank {rank}, "
                f"{num_measured} of them after the warm-up; a profile needs at least {MIN_STEPS}\n"
                f"  Let the script train for more steps, or give a smaller --warmup-steps than {facts.warmup_steps}."
            )
        if part.data_wait_s is None:
            raise ConfigError(
                f"the script ended before batches were repeated, and its steps of loader {part.loader} on rank {rank} "
                "take several batches at once\n  The waits of such steps follow only from steps on repeated batches. "
                "Let the script train for a minute,\n  or profile it without steps_per_execution."
            )


def assemble_profile(ranks: Mapping[int, RankPart], hosts: Sequence[HostPart], facts: JobFacts) -> Profile:
    """Return the profile of a job.

    Args:
        ranks: What each rank measured.
        hosts: What hosts measured, the trainer host first.
        facts: What the launcher knows.

    Raises:
        ConfigError: If there are too few measured steps, or no host and no rank could measure the samples.
    """
    check_ranks(ranks, facts)
    reasons = [part.note for part in ranks.values() if part.note]
    notes = [*facts.excess_notes]
    notes += [f"Samples were measured in one process of a rank, because {reason}." for reason in reasons]
    notes += [note for host in hosts for note in host.notes]
    # What a sample costs comes from the hosts. A data set that is only an object was measured in a rank instead.
    supply = [host.supply for host in hosts if host.supply is not None]
    rank_supply = next((part.supply for part in ranks.values() if part.supply is not None), None)
    if rank_supply is not None and not supply:
        supply = [dataclasses.replace(rank_supply, instance_type=facts.instance_type, vcpus=facts.vcpus)]
    if not supply:
        raise ConfigError(
            "what a sample costs could not be measured\n  "
            + ("\n  ".join(notes) or "No host could build the data set of the script.")
        )
    contents = next((host.contents for host in hosts if host.contents is not None), None)
    contents = contents or next((part.contents for part in ranks.values() if part.contents is not None), Contents())
    # Take the step times of the slowest rank, because all ranks end a step together.
    headspace = _headspace(ranks, facts, notes)
    receive_cpu = next((host.receive_cpu_s_per_gb for host in hosts if host.receive_cpu_s_per_gb is not None), None)
    run_basis = "simulated" if facts.is_sample_emulated or facts.is_step_emulated else "measured"
    step = _slowest([part.step_s for part in ranks.values()])
    wait = _slowest([part.data_wait_s for part in ranks.values()])
    # `check_ranks` has rejected ranks without these times.
    assert step is not None
    assert wait is not None
    if wait.basis == "modelled":
        notes.append(
            "Steps take several batches at once, so the wait for each of them is not known. The data wait is the time "
            "of the steps as the job ran minus that of the steps on repeated batches."
        )
    # All ranks run the same script, so take figures that the script decides from the first rank.
    first_rank = ranks[min(ranks)]
    cores = [part.cpu_cores for part in ranks.values() if part.cpu_cores is not None]
    gpu_percents = [part.gpu_percent for part in ranks.values() if part.gpu_percent is not None]
    training = TrainingProfile(
        instance_type=facts.instance_type,
        vcpus=facts.vcpus,
        num_hosts=facts.num_hosts,
        ranks_per_host=facts.ranks_per_host,
        # The field accepts no 0.
        batch_samples=max(1, *(part.batch_samples for part in ranks.values())),
        # Without endpoints, each rank's own loader processes compute the batches.
        num_local_processes=facts.num_endpoints or facts.ranks_per_host * first_rank.num_loader_processes,
        has_data_hosts=facts.has_data_hosts,
        headspace_s=headspace,
        step_s=dataclasses.replace(step, basis=run_basis),
        data_wait_s=wait if wait.basis == "modelled" else dataclasses.replace(wait, basis=run_basis),
        rank_cpu_cores=Figure(value=max(cores), unit="CPU", basis="measured") if cores else None,
        receive_cpu_s_per_gb=receive_cpu,
        excess_share=facts.excess_share,
        steps_per_epoch=first_rank.steps_per_epoch,
        requests_ahead=first_rank.requests_ahead,
        gpu_percent=Figure(value=max(gpu_percents), unit="%", basis="measured") if gpu_percents else None,
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        command=facts.command,
        measured_at=facts.measured_at,
        origin="profile",
        training=training,
        supply=tuple(supply),
        leaves=contents.leaves,
        wire_bytes_per_sample=contents.wire_bytes_per_sample,
        codecs=contents.codecs,
        has_registered_dataset=all(part.is_registered for part in ranks.values()),
        simulated=facts.simulated,
        notes=tuple(dict.fromkeys(notes)),
        versions=facts.versions,
    )


def _headspace(ranks: Mapping[int, RankPart], facts: JobFacts, notes: list[str]) -> Spread:
    """Return the step time of the slowest rank with batches always ready. Add remarks about it to ``notes``.

    At the end of a profile run, the loader repeats batches that it has delivered, so steps never wait.
    `RankPart.headspace_s` has the times of these steps. If a rank measured too few of them, subtract the data wait from
    each step of the run instead.
    """
    measured = [part.headspace_s for part in ranks.values()]
    basis = "simulated" if facts.is_step_emulated else "measured"
    if all(spread is not None and spread.num_measured >= MIN_STEPS for spread in measured):
        slowest = _slowest(measured)
        assert slowest is not None
        run_step = _slowest([part.step_s for part in ranks.values()])
        # Steps that never wait cannot take longer than the steps of the run, unless other work slowed them down.
        if run_step is not None and slowest.p50 * (1 - SMALL_EXCESS) > run_step.p50:
            notes.append(
                "Steps with batches always ready took longer than steps as the job ran. Other work on the host "
                "disturbed the measurement: profile again on an idle host."
            )
        return dataclasses.replace(slowest, basis=basis)
    notes.append(
        "The script ended before batches were repeated. The step time without waits is the time of the steps minus "
        "their waits, which is too short if the accelerator works during the waits."
    )
    computed_s = [
        Spread.of(
            [max(0.0, step - wait) for step, wait in zip(part.step_s.values, part.data_wait_s.values, strict=True)],
            unit="s",
            basis="modelled",
        )
        for part in ranks.values()
        if part.step_s is not None and part.data_wait_s is not None
    ]
    slowest = _slowest(computed_s)
    assert slowest is not None
    # A spread keeps only a part of the steps, so its number of values is not the number of measured steps.
    return dataclasses.replace(
        slowest, num_measured=max(part.step_s.num_measured for part in ranks.values() if part.step_s is not None)
    )


def _slowest(spreads: Sequence[Spread | None]) -> Spread | None:
    return max((spread for spread in spreads if spread is not None), key=lambda spread: spread.mean, default=None)
