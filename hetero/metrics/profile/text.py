"""Markdown from a profile. It is short, and readable as plain text on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero.documents.quantities import bytes_text, number_text, seconds_text
from hetero.documents.tables import markdown_table
from hetero.documents.text import code_span, counted, markdown_text
from hetero.metrics.excess import MAX_EXCESS, RUN_AGAIN, SMALL_EXCESS, excess_text
from hetero.metrics.figures import Figure
from hetero.metrics.profile.profile import LeafProfile, Profile, Spread, SupplyProfile, TrainingProfile

__all__ = ["first_sentence", "reading_sentence", "render_profile", "supply_rate"]

_ONE_BYTE = ("uint8", "int8", "bool")


def render_profile(profile: Profile) -> str:
    """Return a profile as Markdown: one sentence, then every figure with its basis."""
    sections = ["# Profile", first_sentence(profile), *filter(None, [reading_sentence(profile.supply[0])])]
    sections += [_facts(profile), "## Training", _training(profile.training)]
    for supply in profile.supply:
        of_type = f" on {code_span(supply.instance_type)}" if supply.instance_type else ""
        sections += [f"## Samples{of_type}", _supply(supply)]
        if supply.concurrency:
            sections.append(_concurrency(supply))
    if profile.leaves or profile.wire_bytes_per_sample is not None:
        sections += ["## Bytes", _bytes(profile)]
    for title, lines in (("## Simulated", profile.simulated), ("## Notes", profile.notes)):
        if lines:
            sections += [title, "\n".join(f"- {markdown_text(line)}" for line in lines)]
    if profile.versions:
        sections.append(
            "Versions: " + ", ".join(code_span(f"{key}={value}") for key, value in profile.versions.items())
        )
    return "\n\n".join(sections) + "\n"


def first_sentence(profile: Profile) -> str:
    """Return one sentence with three figures.

    The figures are the samples/s that the accelerators could use, the samples/s that the CPUs of a host make, and the
    share of each step that is a wait for data. If other work of the machine may have taken much of the measured times,
    the sentence states that instead.
    """
    # The trainer host's own measurement of samples comes first, if there is one.
    training, supply = profile.training, profile.supply[0]
    disturbed = least = ""
    if training.excess_share > MAX_EXCESS:
        return f"{excess_text(training.excess_share)}, so the profile gives no answer. Profile again {RUN_AGAIN}."
    if training.excess_share > SMALL_EXCESS:
        # Other work takes CPU time, so the measured rate is a lower bound.
        disturbed, least = f"{excess_text(training.excess_share)}. ", "at least "
    num_ranks = training.num_hosts * training.ranks_per_host
    wanted = num_ranks * training.batch_samples / training.headspace_s.mean if training.headspace_s.mean else None
    share = training.data_wait_s.mean / training.step_s.mean if training.step_s.mean else 0.0
    # Samples may have been measured on another instance type than the type of the trainer hosts.
    if supply.instance_type != training.instance_type:
        host = f"the {supply.instance_type}'s"
    else:
        host = "this host's" if training.num_hosts == 1 else "each host's"
    makes = f"{host} {counted(supply.vcpus, 'vCPU')} {'makes' if supply.vcpus == 1 else 'make'}"
    # Round first, because the words and the number must agree. An earlier limit of 2 % hid smaller waits.
    percent = f"{100 * share:.0f}"
    waits = "no step waits" if percent == "0" else f"{percent} % of each step is waiting"
    waits = f"with the job's data hosts, {waits}" if training.has_data_hosts else waits
    takes = "any number of samples" if wanted is None else f"{number_text(wanted)} samples/s"
    return (
        f"{disturbed}The accelerators could take {takes}; {makes} {least}{number_text(supply_rate(supply))}; {waits} "
        "for data."
    )


def reading_sentence(supply: SupplyProfile) -> str:
    """Return a sentence if a sample waits for storage longer than it computes. Else an empty text."""
    wait_s, cpu_s = supply.sample_wait_s.mean, supply.sample_cpu_s.mean + supply.batch_cpu_s.mean
    if wait_s <= cpu_s:
        return ""
    return (
        f"The bottleneck of samples is reading, not CPU: a sample waits {_duration(wait_s)}, mostly for storage, and "
        f"computes for {_duration(cpu_s)}. Faster storage or copies on local disks help. More processes or hosts help "
        "only while the storage can give more."
    )


def supply_rate(supply: SupplyProfile) -> float | None:
    """Return the samples per second that all CPUs of a host make, measured or computed from one process.

    None if a sample took no time.
    """
    if supply.concurrency:
        # If processes wait for storage, a profile also measures numbers of processes above the number of CPUs. Leave
        # these out, because their processes share CPUs, and the result is for one process per CPU. Take the rate of a
        # process from the largest number that is left, because processes slow each other down.
        points = [point for point in supply.concurrency if point.num_processes <= supply.vcpus]
        largest = max(points, key=lambda point: point.num_processes)
        return largest.samples_per_s / largest.num_processes * supply.vcpus
    # All three times are per sample, also that of collating a batch.
    sample_s = supply.sample_cpu_s.mean + supply.sample_wait_s.mean + supply.batch_cpu_s.mean
    return supply.vcpus / sample_s if sample_s else None


def _facts(profile: Profile) -> str:
    """Return the table about the profile: command, hosts, batch, processes."""
    training = profile.training
    ranks = f"{counted(training.num_hosts, 'host')} with {counted(training.ranks_per_host, 'rank')}"
    origin = " from the report of a run" if profile.origin == "report" else ""
    rows = [
        ("command", code_span(profile.command)),
        ("measured", f"{code_span(profile.measured_at)}{origin}"),
        ("trainer hosts", f"{ranks}, {counted(training.vcpus, 'vCPU')}, type {code_span(training.instance_type)}"),
        ("batch", f"{counted(training.batch_samples, 'sample')} per rank"),
        ("processes that fetch", f"{training.num_local_processes} per trainer host"),
    ]
    if training.steps_per_epoch is not None:
        rows.append(("epoch", counted(training.steps_per_epoch, "step")))
    if not profile.has_registered_dataset:
        rows.append(("data set", "an object, which data hosts cannot build: register its factory with @hetero.dataset"))
    return markdown_table(("", ""), rows)


def _training(training: TrainingProfile) -> str:
    """Return the table about the ranks: step times, data wait, CPU, GPU."""
    rows = [
        _times("step without waiting", training.headspace_s),
        _times("step as it runs", training.step_s),
        _times("data wait as it runs", training.data_wait_s),
    ]
    figures = (
        ("CPUs busy per rank", training.rank_cpu_cores, "{:.2f}".format),
        ("CPU per GB received", training.receive_cpu_s_per_gb, "{:.2f} s".format),
        ("GPU utilisation", training.gpu_percent, "{:.0f} %".format),
    )
    return _table(rows, figures, counted_things="steps")


def _supply(supply: SupplyProfile) -> str:
    """Return the table about the cost of samples: CPU, waits, storage, memory."""
    rows = [
        _times("CPU per sample", supply.sample_cpu_s),
        _times("wait per sample, mostly for storage", supply.sample_wait_s),
        _times("CPU of collating and encoding, per sample", supply.batch_cpu_s),
    ]
    figures = (
        ("read from storage per sample", supply.storage_bytes_per_sample, _short_bytes),
        ("building the data set", supply.build_s, seconds_text),
        ("memory of one process", supply.endpoint_private_bytes, bytes_text),
        ("memory that processes share", supply.endpoint_shared_bytes, bytes_text),
    )
    return _table(rows, figures, counted_things="values")


def _concurrency(supply: SupplyProfile) -> str:
    """Return the table of samples/s with different numbers of processes, compared with the lowest number."""
    lowest = supply.concurrency[0]
    rows = [
        (
            str(point.num_processes),
            number_text(point.samples_per_s),
            f"{point.samples_per_s / (lowest.samples_per_s / lowest.num_processes):.2f}",
            _duration(point.cpu_s_per_sample),
            supply.sample_cpu_s.basis,
        )
        for point in supply.concurrency
    ]
    return markdown_table(("processes", "samples/s", "times one", "CPU per sample", ""), rows, right=(0, 1, 2, 3))


def _bytes(profile: Profile) -> str:
    """Return the section about the bytes of a sample: its arrays, and what compression would save."""
    wire = profile.wire_bytes_per_sample
    rows = [
        (code_span(leaf.path), leaf.dtype, _short_bytes(leaf.bytes_per_sample), _uint8_text(leaf))
        for leaf in profile.leaves
    ]
    sections = []
    if wire is not None:
        sections.append(f"A sample has {_short_bytes(wire.value)} on the network ({wire.basis}).")
    if rows:
        sections.append(markdown_table(("array", "dtype", "per sample", "fits uint8"), rows, right=(2,)))
    if profile.codecs:
        codec_rows = [
            (
                codec.name,
                f"{100 * codec.ratio:.0f} %",
                _duration(codec.encode_cpu_s_per_sample),
                _duration(codec.decode_cpu_s_per_sample),
                "measured",
            )
            for codec in profile.codecs
        ]
        header = ("codec", "of the size", "CPU of an endpoint per sample", "CPU of a rank per sample", "")
        sections.append(markdown_table(header, codec_rows, right=(1, 2, 3)))
    return "\n\n".join(sections)


def _times(name: str, spread: Spread) -> tuple[str, ...]:
    times = (_duration(spread.mean), _duration(spread.p50), _duration(spread.p95))
    return name, *times, str(spread.num_measured), spread.basis


def _table(
    rows: Sequence[tuple[str, ...]],
    figures: Sequence[tuple[str, Figure | None, Callable[[float], str]]],
    counted_things: str,
) -> str:
    """Return a table of distributions, and of figures that are known."""
    known = [(name, text(each.value), "", "", "", each.basis) for name, each, text in figures if each is not None]
    return markdown_table(("", "mean", "p50", "p95", counted_things, ""), [*rows, *known], right=(1, 2, 3, 4))


def _duration(value: float) -> str:
    return f"{1e6 * value:.1f} us" if 0 < value < 0.00095 else seconds_text(value)


def _short_bytes(value: float) -> str:
    return f"{value:,.0f} B" if value < 10_000 else bytes_text(value)


def _uint8_text(leaf: LeafProfile) -> str:
    """Return whether uint8 would make an array smaller without loss. A dash if its values have one byte already."""
    if leaf.dtype in _ONE_BYTE:
        return "-"
    return "yes" if leaf.fits_uint8 else "no"
