"""Markdown from reports and comparisons. It is short, and readable as plain text.

Names of hosts, groups and loaders, commands and options come from users and other processes. They are in code spans,
where they cannot act as markup. Escape characters would do the same, but are hard to read on a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.documents.quantities import NOT_KNOWN, bytes_text, number_text, seconds_text
from hetero.documents.tables import MAX_ROWS, markdown_table
from hetero.documents.text import code_span, markdown_text
from hetero.metrics.figures import Figure
from hetero.metrics.hosts import HostUsage
from hetero.metrics.logged import LoggedMetric
from hetero.report.build import cost_objection
from hetero.report.compare import Comparison
from hetero.report.model import Cost, Expectation, Headline, Report, RunFacts
from hetero.report.samples import more_text, shard_section, skip_section, source_section
from hetero.report.verdict import answer_text, pace_text, saving_text, speedup_text

__all__ = [
    "PricePerformance",
    "host_table",
    "numbers_of",
    "price_performance_table",
    "render_comparison",
    "render_report",
]

_TEXT_COLUMNS = ("run", "hosts", "host", "role", "")
"""Columns without numbers."""


def render_report(report: Report) -> str:
    """Return a run's report as Markdown."""
    run, headline = report.run, report.headline
    simulated_note = " This run was simulated: see below." if run.simulated else ""
    sections = [
        f"# Run {code_span(run.run_id)}",
        markdown_text(report.verdict.advice) + simulated_note,
        _facts_table(report),
    ]
    if run.simulated:
        sections += ["## Simulated", _list(run.simulated)]
    sections += ["## Steps", _steps_table(headline) if headline else "No loader delivered a batch."]
    if run.decisions:
        sections += ["## Trainer endpoints", _list(run.decisions)]
    sections += _rank_section(report)
    sections += _traffic_section(report)
    sections += _metric_section(report)
    sections += skip_section(report)
    sections += source_section(report)
    sections += shard_section(report.run)
    sections += ["## Cost", _cost_text(report)]
    if run.expectation is not None:
        sections += ["## Plan", _plan_text(report, run.expectation)]
    sections += _host_section(run)
    if any(run.events.values()):
        sections += ["## Events", _list([f"{name}: {count}" for name, count in run.events.items() if count])]
    for title, entries in (("Options", run.options), ("Versions", run.versions)):
        if entries:
            sections.append(f"{title}: " + ", ".join(code_span(f"{key}={value}") for key, value in entries.items()))
    return "\n\n".join(sections) + "\n"


def render_comparison(comparison: Comparison) -> str:
    """Return a comparison as Markdown: the answer, the price-performance table, and the caveats."""
    reports = (comparison.baseline, comparison.candidate)
    has_same_step = comparison.per == "step"
    # Leave out costs that must not be compared, because readers would compare them.
    has_costs = not comparison.objections
    speedup_of_second = NOT_KNOWN if comparison.speedup is None else f"{speedup_text(comparison)}x"
    rows = [
        PricePerformance(
            name=f"{report.run.placement} {code_span(report.run.run_id)}",
            hosts=" + ".join(f"{group.count} x {code_span(group.instance_type)}" for group in report.run.groups),
            hourly_usd=_value(report.cost.hourly),
            step_time_s=_value(report.headline.step_time_mean if report.headline else None),
            samples_per_s=_value(report.headline.samples_per_s if report.headline else None),
            per_1k_steps_usd=_value(report.cost.per_1k_steps) if has_costs and has_same_step else None,
            per_million_samples_usd=_value(report.cost.per_million_samples) if has_costs else None,
            speedup=speedup,
            saving=saving,
            basis=report.run.basis,
        )
        for report, speedup, saving in zip(
            reports, (NOT_KNOWN, speedup_of_second), (NOT_KNOWN, saving_text(comparison)), strict=True
        )
    ]
    sections = ["# Price and performance", _answer(comparison), price_performance_table(rows)]
    missing = dict.fromkeys(line for report in reports for line in report.cost.missing)
    if missing:
        sections.append(_list(list(missing)))
    prices = _prices_text([report.cost for report in reports])
    if prices:
        sections.append(prices)
    planned = [
        f"{code_span(report.run.run_id)}: {_plan_text(report, report.run.expectation)}"
        for report in reports
        if report.run.expectation is not None
    ]
    if planned:
        sections += ["## Plan", _list(planned)]
    if comparison.caveats:
        sections += ["## Caveats", _list(comparison.caveats)]
    first, second = (report.run.simulated for report in reports)
    if first or second:
        sections += ["## Simulated", _simulated(first, second)]
    return "\n\n".join(sections) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePerformance:
    """One row of the price-performance table. None: the value is not known. Text is already Markdown."""

    name: str
    hosts: str
    hourly_usd: float | None
    step_time_s: float | None
    samples_per_s: float | None = None
    per_1k_steps_usd: float | None
    per_million_samples_usd: float | None = None
    speedup: str = NOT_KNOWN
    """Speed-up against the baseline row, as text. A dash in the baseline row."""
    saving: str = NOT_KNOWN
    """Saving against the baseline row, as text. A dash in the baseline row."""
    basis: str


def price_performance_table(rows: Sequence[PricePerformance]) -> str:
    """Return the table that compares runs. Costs are per 1,000 steps, as the published costs of docs/results.md."""
    times, costs = ("step", "samples/s"), ("USD/1,000 steps", "USD/million samples")
    header = ("run", "hosts", "USD/h", *times, *costs, "speed-up", "saving", "")
    cells = [
        (
            row.name,
            row.hosts,
            _usd(row.hourly_usd),
            seconds_text(row.step_time_s),
            number_text(row.samples_per_s),
            _usd(row.per_1k_steps_usd),
            _usd(row.per_million_samples_usd),
            row.speedup,
            row.saving,
            row.basis,
        )
        for row in rows
    ]
    shown, rows_shown = _known_columns(header, cells)
    return markdown_table(shown, rows_shown, right=numbers_of(shown))


def _plan_text(report: Report, expected: Expectation) -> str:
    """Return sentences that compare step time and cost of the plan with those of the run."""
    interval = f"{seconds_text(expected.step_time_low_s)} to {seconds_text(expected.step_time_high_s)}"
    text = f"The plan expected a step time of {seconds_text(expected.step_time_s)} ({interval})"
    times_s = report.headline.step_time_range_s if report.headline else None
    if report.plan_error is None or times_s is None:
        return f"{text}. The run measured no step."
    # Of the two bounds of the step time, the upper one is the measured time.
    error = report.plan_error.value
    share = f"{100 * abs(error):.1f} % {'more' if error > 0 else 'less'}"
    text += (
        f", {share} than the {seconds_text(times_s[1])} of the run, which is {_place_in_interval(times_s, expected)}."
    )
    usd = _value(report.cost.per_1k_steps)
    if expected.usd_per_1k_steps is not None and usd is not None:
        text += f" It expected USD {_usd(expected.usd_per_1k_steps)} per 1,000 steps. The run took USD {_usd(usd)}."
    return text


def _place_in_interval(times_s: tuple[float, float], expected: Expectation) -> str:
    """Return in words whether the real step time is inside the interval that the plan expected.

    The bounds ``times_s`` of the step time differ if other work of the machine may have made steps longer. If the
    answer depends on this, the text gives the answer for the longer time and adds "perhaps not".
    """
    low_s, high_s = times_s
    if low_s > expected.step_time_high_s or high_s < expected.step_time_low_s:
        return "outside the interval"
    if expected.step_time_low_s <= low_s and high_s <= expected.step_time_high_s:
        return "inside the interval"
    place = "inside" if high_s <= expected.step_time_high_s else "above"
    return f"{place} the interval, and perhaps not without this machine's other work ({seconds_text(low_s)} or more)"


def _facts_table(report: Report) -> str:
    """Return the table about the whole run: command, time, groups, bottleneck, vCPUs."""
    run = report.run
    rows = [
        ("command", code_span(run.command)),
        ("started", code_span(run.started_at)),
        ("wall time", f"{seconds_text(run.wall_s)} ({run.basis})"),
        ("exit code", run.exit_text),
        ("placement", run.placement),
        *(
            (
                f"{group.role} group",
                f"{code_span(group.name)}: {group.count} x {code_span(group.instance_type)}"
                + ("" if group.spot_usd is None else f", spot at USD {group.spot_usd:g} per hour"),
            )
            for group in run.groups
        ),
        *([("joined data hosts", _joined_text(run))] if run.joined_hosts else []),
        ("bottleneck", report.verdict.bottleneck),
    ]
    if report.verdict.vcpus is not None:
        rows.append(("vCPUs that preprocess", str(report.verdict.vcpus)))
    if report.verdict.vcpus_needed is not None:
        needed = report.verdict.vcpus_needed
        rows.append(("vCPUs that would suffice", f"{needed.value:.0f} ({needed.basis})"))
    return markdown_table(("", ""), rows)


def _joined_text(run: RunFacts) -> str:
    """Return how many hosts joined the running job, and for how long they were there together."""
    total_s = sum(joined.present_s for joined in run.joined_hosts)
    return f"{len(run.joined_hosts)}, present for {seconds_text(total_s)} together"


def _steps_table(headline: Headline) -> str:
    """Return the table of step time, data wait, utilisation and samples/s, with notes."""
    rows = [
        ("step time", headline.step_time_mean, headline.step_time_p50, headline.step_time_p95),
        ("data wait", headline.data_wait_mean, headline.data_wait_p50, headline.data_wait_p95),
    ]
    cells = [
        (name, *(seconds_text(_value(figure)) for figure in (mean, p50, p95)), mean.basis if mean else "")
        for name, mean, p50, p95 in rows
    ]
    if headline.utilisation is not None:
        utilisation = headline.utilisation
        cells.append(("utilisation", f"{100 * utilisation.value:.1f} %", "", "", utilisation.basis))
    if headline.samples_per_s is not None:
        cells.append(("samples/s", number_text(headline.samples_per_s.value), "", "", headline.samples_per_s.basis))
    ranks = "1 rank" if headline.num_ranks == 1 else f"slowest of {headline.num_ranks} ranks"
    note = (
        f"Loader {code_span(headline.loader)}, {ranks}; {headline.num_steps_measured} steps of "
        f"{headline.global_batch_samples} samples, after {headline.warmup_steps} of warm-up. Data wait is the time "
        "blocked in `next()`; utilisation is compute / step time."
    )
    times_s = headline.step_time_range_s
    # Show the bounds only if their texts differ.
    if times_s is not None and len(set(map(seconds_text, times_s))) > 1:
        note += (
            f" Other work of this machine showed: without it, the mean step time is at least "
            f"{seconds_text(times_s[0])}."
        )
    return markdown_table(("", "mean", "p50", "p95", ""), cells, right=(1, 2, 3)) + "\n\n" + note


def _rank_section(report: Report) -> Iterator[str]:
    """Yield the section with one row for each loader of each rank. Nothing for a single row."""
    entries = [
        (rank, label, summary)
        for rank in report.run.ranks
        for label, summary in rank.labelled
        if summary.num_steps_measured
    ]
    # A single row would repeat the table of steps.
    if len(entries) < 2:
        return
    rows = [
        (
            str(rank.rank),
            code_span(rank.host),
            code_span(label),
            str(summary.num_steps_measured),
            seconds_text(summary.step_time_mean_s),
            seconds_text(summary.step_time_p95_s),
            seconds_text(summary.data_wait_mean_s),
            seconds_text(summary.data_wait_p95_s),
            NOT_KNOWN if summary.utilisation is None else f"{100 * summary.utilisation:.1f} %",
        )
        for rank, label, summary in entries[:MAX_ROWS]
    ]
    header = ("rank", "host", "loader", "steps", "step", "step p95", "data wait", "wait p95", "utilisation")
    yield "## Ranks"
    yield markdown_table(header, rows, right=(0, 3, 4, 5, 6, 7, 8)) + more_text(len(entries))
    # Explain labels such as ``photos (2)``. A comparison may pair the second loader of one run with the first of the
    # other, unless loaders have different names.
    if any(label != summary.name for _, label, summary in entries):
        yield (
            "Loaders of the same name are numbered in the order of their creation. Pass `name=` to a loader to name it."
        )


def _traffic_section(report: Report) -> Iterator[str]:
    """Yield a section with the bytes that compression saved each loader, summed over all ranks."""
    batch_bytes: Counter[tuple[str, str]] = Counter()
    saved_bytes: Counter[tuple[str, str]] = Counter()
    for summary in [summary for rank in report.run.ranks for summary in rank.loaders]:
        if summary.compression is not None and summary.batch_bytes:
            batch_bytes[summary.name, summary.compression] += summary.batch_bytes
            saved_bytes[summary.name, summary.compression] += summary.saved_bytes
    if not batch_bytes:
        return
    lines = [
        f"- Loader {code_span(name)}: {bytes_text(total)} of batches came as "
        f"{bytes_text(max(0, total - saved_bytes[name, compression]))} with {code_span(compression)}"
        for (name, compression), total in batch_bytes.items()
    ]
    yield "## Compression"
    yield "\n".join(lines[:MAX_ROWS]) + more_text(len(lines))


def _metric_section(report: Report) -> Iterator[str]:
    """Yield a section with one row for each metric of each rank: its number of values, and some of them."""
    series: dict[tuple[int, str], list[LoggedMetric]] = {}
    for value in report.run.metrics:
        series.setdefault((value.rank, value.name), []).append(value)
    if not series:
        return
    rows = [
        (
            code_span(name),
            str(rank),
            str(len(values)),
            f"{values[-1].value:.6g}",
            f"{min(each.value for each in values):.6g}",
            f"{max(each.value for each in values):.6g}",
            NOT_KNOWN if values[-1].step is None else str(values[-1].step),
            seconds_text(values[-1].at_s),
        )
        for (rank, name), values in list(series.items())[:MAX_ROWS]
    ]
    yield "## Logged metrics"
    header = ("metric", "rank", "values", "last", "lowest", "highest", "last step", "after")
    yield markdown_table(header, rows, right=tuple(range(1, 8))) + more_text(len(series))


def _cost_text(report: Report) -> str:
    """Return the costs of a run, or why they are not known, and the prices."""
    cost = report.cost
    figures = [("All hosts, per hour", cost.hourly)]
    objection = cost_objection(report.run)
    # A report of an earlier version may have costs although there is an objection. Do not show them.
    if not objection:
        figures = [
            ("Per 1,000 steps", cost.per_1k_steps),
            ("Per million samples", cost.per_million_samples),
            ("This run, start-up included", cost.run),
            *figures,
        ]
    lines = [objection] if objection else []
    lines += [f"{title}: {_usd(figure.value)} USD ({figure.basis})" for title, figure in figures if figure is not None]
    lines += cost.missing
    prices = _prices_text([cost])
    return "\n\n".join([_list(lines), prices] if prices else [_list(lines)])


def _prices_text(costs: Sequence[Cost]) -> str:
    """Return one paragraph for each origin of list prices, or an empty text without prices."""
    # The inner dictionaries are ordered sets of texts, because equal prices of several runs are shown once.
    by_origin: dict[str, dict[str, None]] = {}
    for price in dict.fromkeys(price for cost in costs for price in cost.prices):
        origin = ", ".join(code_span(part) for part in (price.region, price.as_of, price.source) if part)
        by_origin.setdefault(origin, {})[f"{code_span(price.instance_type)} {price.hourly_usd:g} USD/h"] = None
    return "\n\n".join(f"List prices ({origin}): {', '.join(prices)}." for origin, prices in by_origin.items())


def host_table(run: RunFacts) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of hosts, as plain texts, without columns that no host has."""
    # A name for each cell of `_host_row`. "endpoints' own" and "shared by them" are private and shared memory.
    header = (
        *("host", "role", "batches made", "waits, mostly for storage", "time of its vCPUs", "CPUs busy", "peak"),
        *("memory peak", "endpoints' own"),
        *("shared by them", "sent", "received", "GPU", "GPU memory"),
    )
    roles = run.host_roles
    # A report has the options as texts, so an option that was not given is the text "None".
    is_emulated = run.options.get("emulate_sample_s", "None") != "None"
    rows = [_host_row(usage, roles.get(usage.host, NOT_KNOWN), is_emulated=is_emulated) for usage in run.hosts]
    return _known_columns(header, rows)


def _host_row(usage: HostUsage, role: str, *, is_emulated: bool) -> tuple[str, ...]:
    """Return the cells of a host in the table of hosts.

    Args:
        usage: The resources that the host used.
        role: Role of the host.
        is_emulated: Whether samples were emulated. Only then a slot (one batch at a time) is one emulated vCPU.
    """
    busy_s, num_slots, wait_s = usage.endpoints_busy_s, usage.endpoint_slots, usage.endpoints_wait_s
    return (
        usage.host,
        role,
        NOT_KNOWN if usage.batches_computed is None else f"{usage.batches_computed:,}",
        f"{seconds_text(wait_s)}, {100 * wait_s / busy_s:.0f} % of batches" if wait_s and busy_s else NOT_KNOWN,
        f"{busy_s:,.0f} s of {num_slots} vCPUs" if is_emulated and busy_s is not None and num_slots else NOT_KNOWN,
        NOT_KNOWN if usage.cpu_percent_mean is None else f"{usage.cpu_percent_mean / 100:.2f} of {usage.num_cpus}",
        NOT_KNOWN if usage.cpu_percent_peak is None else f"{usage.cpu_percent_peak / 100:.2f}",
        bytes_text(usage.memory_peak_bytes),
        bytes_text(usage.endpoints_private_bytes),
        bytes_text(usage.endpoints_shared_bytes),
        bytes_text(usage.network_sent_bytes),
        bytes_text(usage.network_received_bytes),
        NOT_KNOWN if usage.gpu_percent_mean is None else f"{usage.gpu_percent_mean:.0f} %",
        bytes_text(usage.gpu_memory_peak_bytes),
    )


def _host_section(run: RunFacts) -> Iterator[str]:
    """Yield the section with one row for each host. Nothing if no host was measured."""
    if not run.hosts:
        return
    header, rows = host_table(run)
    yield "## Hosts"
    cells = [[code_span(row[0]), *row[1:]] for row in rows[:MAX_ROWS]]
    yield markdown_table(header, cells, right=numbers_of(header)) + more_text(len(rows))
    note = "Measured."
    if any(usage.scope == "tree" for usage in run.hosts):
        note += (
            " The hosts share one machine: CPU and memory are those of each host's processes (shared pages count in "
            "each), GPU those of the machine."
        )
    yield note


def _answer(comparison: Comparison) -> str:
    """Return which run is faster and cheaper, or the reasons why this cannot be said."""
    if not comparison.objections:
        return answer_text(comparison)
    answer = "Which run is faster and which is cheaper cannot be said:"
    if comparison.speedup is not None:
        answer = f"The second run has {pace_text(comparison)}. Whether it is cheaper cannot be said:"
    sections = [answer, _list(comparison.objections)]
    if comparison.break_even_speedup is not None:
        sections.append(
            f"By list prices the second run is the cheaper one above {comparison.break_even_speedup.value:.2f} times "
            f"the pace of the first ({comparison.break_even_speedup.basis})."
        )
    return "\n\n".join(sections)


def _known_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table without the columns whose values are all unknown."""
    known = [i for i in range(len(header)) if any(row[i] != NOT_KNOWN for row in rows)]
    return [header[i] for i in known], [[row[i] for i in known] for row in rows]


def numbers_of(header: Sequence[str]) -> list[int]:
    """Return the columns with numbers, which are aligned to the right."""
    return [at for at, name in enumerate(header) if name not in _TEXT_COLUMNS]


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)


def _simulated(first: Sequence[str], second: Sequence[str]) -> str:
    """Return what two runs emulated, as a list that names the run of each entry."""
    # The keys say whether the first run and the second run have the entry.
    names = {(True, True): "Both runs", (True, False): "First run", (False, True): "Second run"}
    lines = dict.fromkeys((*first, *second))
    return "\n".join(f"- {names[line in first, line in second]}: {markdown_text(line)}" for line in lines)


def _value(figure: Figure | None) -> float | None:
    return figure.value if figure else None


def _usd(value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    return f"{value:.4g}" if value < 1 else f"{value:.3f}"
