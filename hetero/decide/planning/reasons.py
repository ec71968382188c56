"""The words of a plan: the sentence that answers, the reason for it, and why each alternative was rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.machines import family_of
from hetero.decide.planning.ranking import WORTH_SPENDING
from hetero.decide.planning.search import Alternative, Search, chance_to_pay
from hetero.decide.planning.steps.model import INTERVAL
from hetero.documents.text import counted
from hetero.metrics.profile.profile import NEARLY_BUSY, Profile, TrainingProfile
from hetero.metrics.profile.text import reading_sentence
from hetero.report.plan import AS_IS, REASONS, UINT8

__all__ = [
    "answer_of",
    "form_text",
    "notes_of",
    "processes_text",
    "reason_of",
    "rejection_of",
    "resized_note",
    "seconds_text",
    "usd_text",
]


_BECAUSE = {
    "storage": "their processes would wait for storage most of the time",
    "window": "the ranks' memory holds too few batches at the same time to use them",
    "data network": "their network interfaces limit what they can send",
}


def reason_of(profile: Profile, found: Search) -> str:
    """Return the reason for the choice, one of `REASONS`."""
    chosen, base = found.chosen, found.baseline
    if chosen.candidate.data:
        return "data hosts pay"
    if chosen.candidate != base.candidate:
        # More processes than CPUs help a job that waits for storage.
        if base.prediction.bottleneck == "storage" and chosen.spending == "free CPUs":
            return "storage"
        return chosen.spending
    # The chosen cluster is the baseline, so the reason says why no data hosts are added.
    if _waiting_share(profile, base) < NEARLY_BUSY:
        return "accelerator"
    if not profile.has_registered_dataset:
        return "not registered"
    if base.prediction.bottleneck == "storage":
        return "storage"
    return found.prevented_by if found.prevented_by in REASONS else "break-even"


def answer_of(profile: Profile, found: Search, reason: str) -> str:
    """Return one sentence: what to do, with the figures that decide it."""
    chosen, base = found.chosen, found.baseline
    change = _change(chosen, base)
    match reason:
        case "data hosts pay":
            form = chosen.candidate.form
            send = "" if form == AS_IS else f", and send batches {form_text(form)}"
            return f"Add {hosts_text(chosen.candidate)} as data hosts{send}: {change}."
        case "free CPUs":
            return f"Use {_processes(chosen, base)}: {change}."
        case "bigger machine":
            old, new = base.candidate.trainer.instance_type, chosen.candidate.trainer.instance_type
            return f"Train on {new} instead of {old}: {change}."
        case "storage" if chosen is not base:
            processes = _processes(chosen, base)
            return (
                "Do not add data hosts: processes wait for storage most of the time. If storage can serve them, use "
                f"{processes}: {change}."
            )
        case "accelerator":
            busy = 100 * (1 - _waiting_share(profile, base))
            return f"Do not add data hosts: the accelerator is busy {busy:.0f} % of each step."
        case "not registered":
            return (
                "Data hosts cannot build the data set, because no @hetero.dataset registers its factory. Register it, "
                "then run hetero profile again."
            )
        case _:
            return _refusal(found, reason)


def _refusal(found: Search, reason: str) -> str:
    """Return the sentence that rejects data hosts although the job waits for data."""
    best, base = _cheapest_with_data(found), found.baseline
    if best is None:
        return "Do not add data hosts: no type of the menu can make batches."
    # Most sentences end with the cheapest data hosts, and what 1,000 steps would cost with them.
    cost = _cost_text(found, best, f" with {hosts_text(best.candidate)}")
    machine = base.candidate.trainer
    fastest = min(_with_data(found), key=lambda each: each.prediction.step_s)
    match reason:
        case "trainer network" if machine.network_bytes_per_s is not None:
            # Name a cluster whose batches fill the interface, if the table has one.
            limited = (each for each in _with_data(found) if each.prediction.bottleneck == "trainer network")
            hosts = hosts_text(next(limited, fastest).candidate)
            return (
                f"Do not add data hosts: the network interface of {machine.instance_type} carries "
                f"{machine.network_bytes_per_s / 1e6:,.0f} MB/s, which {hosts} fill{cost}."
            )
        case "memory":
            kind = best.candidate.data[0].machine.instance_type
            number = counted(best.endpoints_per_host or 0, "endpoint")
            return f"Do not add data hosts: the memory of {kind} holds only {number}{cost}."
        case "trainer CPU":
            return (
                f"Do not add data hosts: the CPUs of {machine.instance_type} cannot receive batches faster, even from "
                f"{hosts_text(fastest.candidate)}{cost}."
            )
        case "storage" | "window" | "data network":
            return f"Do not add data hosts: {_BECAUSE[reason]}{cost}."
        case _:
            change = best.prediction.step_s / base.prediction.step_s - 1
            # Without this sentence, a longer step was once "-764 % shorter".
            if change >= 0:
                return (
                    f"Do not add data hosts: with the cheapest, {hosts_text(best.candidate)}, a step takes "
                    f"{100 * change:,.0f} % longer{_cost_text(found, best)}."
                )
            return (
                f"Do not add data hosts: even the cheapest, {hosts_text(best.candidate)}, makes a step "
                f"{-100 * change:.0f} % shorter{_cost_text(found, best, conjunction='but')}."
            )


def rejection_of(alternative: Alternative, found: Search) -> str:
    """Return why the plan does not choose an alternative, as a phrase."""
    return f"{_verdict(alternative, found)}; {_limit_text(alternative)}"


def _verdict(alternative: Alternative, found: Search) -> str:
    """Return how an alternative compares with the chosen cluster in what the goal minimises, as a phrase."""
    limits = found.constraints
    own, best = alternative.prediction, found.chosen.prediction
    own_hourly_usd, best_hourly_usd = alternative.candidate.hourly_usd, found.chosen.candidate.hourly_usd
    if not limits.allow(own.step_s, own_hourly_usd):
        return "breaks a limit"
    verb, comparative, price_ratio = "a step takes", "longer", 1.0
    if limits.goal == "cost":
        if own_hourly_usd is None or best_hourly_usd is None:
            return "its price is not known"
        verb, comparative, price_ratio = "costs", "more per step", own_hourly_usd / best_hourly_usd
    # First compare the step times that the table shows, which have the mean figures of the profile. The search compares
    # means over all draws of the figures instead. An uncertain step time makes such a mean larger.
    extra = price_ratio * own.step_s / best.step_s - 1
    if extra > WORTH_SPENDING:
        return f"{verb} {extra:.0%} {comparative}"
    mean_extra = price_ratio * float(own.draws_s.mean() / best.draws_s.mean()) - 1
    if mean_extra > WORTH_SPENDING:
        return f"{verb} {mean_extra:.1%} {comparative} on average, because its step time is less certain"
    return "saves too little" if extra < 0 else "saves nothing"


def notes_of(profile: Profile, found: Search, vcpu_speeds: Mapping[str, float]) -> tuple[str, ...]:
    """Return what the reader of a plan must know about its figures."""
    notes = []
    chosen = found.chosen
    measured_families = {family_of(supply.instance_type) for supply in profile.supply if supply.instance_type}
    for group in chosen.candidate.data:
        name = group.machine.instance_type
        if name not in vcpu_speeds and group.machine.family not in measured_families:
            notes.append(
                f"The speed of {name}'s vCPUs was not measured. The plan assumes that of "
                f"{profile.supply[0].instance_type or 'the profiled host'}, with a standard deviation of 25 %. "
                f"Run hetero profile on {name}, or give --vcpu-speed {name}=RATIO."
            )
        if group.machine.network_bytes_per_s is None:
            notes.append(f"The network bandwidth of {name} is not known, so the interval is wider.")
        if group.machine.is_spot:
            notes.append(f"{name} is a spot instance. The job goes on without a host that is taken back, but slower.")
    best = _cheapest_with_data(found)
    claim, event, chance = "this pays", "", found.chance_to_pay
    # The answer "do not add data hosts" may be wrong too, so state the chance that data hosts pay.
    if not chosen.candidate.data and best is not None:
        claim, event = "data hosts do not pay", f" that {hosts_text(best.candidate)} cost less per step"
        chance = chance_to_pay(best, found.baseline)
    # Outside of the interval, the answer counts as certain.
    least, most = INTERVAL
    if chance is not None and least < chance < most:
        notes.append(
            f"It is not certain that {claim}: the chance{event} is {chance:.0%}. A profile on the data hosts' type "
            "decides it."
        )
    form = chosen.candidate.form
    if form == UINT8:
        notes.append("To send uint8, return the images as uint8 from the data set and normalise on the accelerator.")
    elif form != AS_IS:
        notes.append(f'To compress batches, pass compression="{form}" to the loader.')
    processes = chosen.candidate.local_endpoints
    # Ranks start `num_workers` processes only in a job without data hosts.
    if not chosen.candidate.data and processes != profile.training.num_local_processes:
        per_rank = math.ceil(processes / profile.training.ranks_per_host)
        notes.append(
            f"The plan counts on {processes_text(processes, 'loader process')} per trainer host: pass "
            f"num_workers={per_rank} to the loader."
        )
    if profile.origin == "report":
        notes.append("The profile comes from the report of a finished run, which knows less than hetero profile.")
    if profile.simulated:
        notes.append(f"The profile was measured with emulated parts. {'. '.join(profile.simulated)}.")
    # A plan assumes that storage serves more processes as fast.
    reading = filter(None, [reading_sentence(profile.supply[0])])
    return tuple(dict.fromkeys([*notes, *reading, *profile.notes]))


def resized_note(measured: TrainingProfile, planned: TrainingProfile) -> str:
    """Return what the reader must know about a plan for other numbers of hosts or ranks than the profile's."""
    measured_text, planned_text = (
        f"{counted(training.num_hosts, 'trainer host')} with {counted(training.ranks_per_host, 'rank')} each"
        for training in (measured, planned)
    )
    return (
        f"The profile has {measured_text}, and the plan has {planned_text}. So the step time of the baseline is "
        f"modelled, with {processes_text(planned.num_local_processes, 'loader process')} per trainer host and without "
        "the communication that more ranks add."
    )


# Phrases


def processes_text(number: int, noun: str = "process") -> str:
    """Return a number of processes in words: ``1 process``, ``5 processes``."""
    return f"{number} {noun}{'' if number == 1 else 'es'}"


def hosts_text(candidate: Candidate) -> str:
    """Return the data hosts in words: ``3 x ml.c5.4xlarge and 1 x ml.m5.xlarge``."""
    parts = [
        f"{group.count} x {group.machine.instance_type}{' (spot)' if group.machine.is_spot else ''}"
        for group in candidate.data
    ]
    return " and ".join(parts)


def form_text(form: str) -> str:
    """Return how batches travel, as the end of a sentence."""
    return {AS_IS: "as they are", UINT8: "as uint8"}.get(form, f"compressed with {form}")


def seconds_text(seconds: float) -> str:
    """Return a step time in ms or s with three digits."""
    # From 0.9995 s on, three digits of ms would have an exponent: 1e+03 ms.
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def usd_text(usd: float) -> str:
    """Return an amount with three digits, or in whole dollars from 100."""
    # Three digits of large amounts would have an exponent: 1.04e+05 instead of 104,321.
    return f"{usd:.3g}" if usd < 99.95 else f"{usd:,.0f}"


def _change(chosen: Alternative, base: Alternative) -> str:
    """Return what a step takes and costs with the choice, compared with the baseline."""
    prediction = chosen.prediction
    text = (
        f"a step takes {seconds_text(prediction.step_s)} ({seconds_text(prediction.low_s)} to "
        f"{seconds_text(prediction.high_s)}) instead of {seconds_text(base.prediction.step_s)}"
    )
    own, other = chosen.usd_per_1k_steps, base.usd_per_1k_steps
    if own is not None and other is not None:
        text += f", and 1,000 steps cost USD {usd_text(own)} instead of {usd_text(other)} ({own / other - 1:+.0%})"
    return text


def _cost_text(found: Search, best: Alternative, with_hosts: str = "", *, conjunction: str = "and") -> str:
    """Return what 1,000 steps would cost compared with the baseline, as the end of a sentence.

    Empty if prices are missing, or if the goal is not the cost.

    Args:
        found: The search.
        best: The alternative with data hosts that costs the least.
        with_hosts: Words that name its data hosts. Empty if the sentence has named them before.
        conjunction: Word that joins the text to the sentence.
    """
    best_usd, base_usd = best.usd_per_1k_steps, found.baseline.usd_per_1k_steps
    if best_usd is None or base_usd is None or found.constraints.goal != "cost":
        return ""
    more = best_usd / base_usd - 1
    change = f"{more:.0%} more" if more >= 0 else f"only {-more:.1%} less"
    return f", {conjunction} 1,000 steps would cost {change}{with_hosts}"


def _limit_text(alternative: Alternative) -> str:
    """Return what limits the step time of an alternative."""
    candidate = alternative.candidate
    return {
        "accelerator": "the accelerator limits it",
        "preprocessing": "too few vCPUs preprocess",
        "trainer network": f"the network interface of {candidate.trainer.instance_type} is full",
        "data network": "the network interfaces of the data hosts are full",
        "storage": "its processes wait for storage",
        "memory": "too few endpoints fit into the memory of its data hosts",
        "trainer CPU": f"the CPUs of {candidate.trainer.instance_type} are full",
        "window": "too few batches fit into the ranks' memory",
        "epoch start": "each epoch starts with a wait for its first batches",
    }[alternative.prediction.bottleneck]


def _processes(chosen: Alternative, base: Alternative) -> str:
    number = processes_text(chosen.candidate.local_endpoints)
    return f"{number} per trainer host to preprocess instead of {base.candidate.local_endpoints}"


def _waiting_share(profile: Profile, base: Alternative) -> float:
    """Return the share of a step of the baseline that better data loading could save."""
    return max(0.0, 1 - profile.training.headspace_s.mean / max(base.prediction.step_s, 1e-12))


def _with_data(found: Search) -> list[Alternative]:
    return [alternative for alternative in found.alternatives if alternative.candidate.data]


def _cheapest_with_data(found: Search) -> Alternative | None:
    priced = [a for a in _with_data(found) if a.usd_per_1k_steps is not None]
    return min(priced, key=lambda a: a.usd_per_1k_steps or 0.0, default=None)
