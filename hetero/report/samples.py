"""Sections of a report about samples: those that were skipped, those of each source, and shards that were slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from hetero.documents.quantities import seconds_text
from hetero.documents.tables import MAX_ROWS, markdown_table
from hetero.documents.text import code_span
from hetero.epochs import epoch_text
from hetero.metrics.reading import slowest_shards
from hetero.report.model import Report, RunFacts

__all__ = ["more_text", "shard_section", "skip_section", "source_section"]


def skip_section(report: Report) -> Iterator[str]:
    """Yield the section about skipped samples. Nothing if none was skipped."""
    summaries = [(rank, summary) for rank in report.run.ranks for summary in rank.loaders]
    num_skips = sum(summary.num_skips for _, summary in summaries)
    if not num_skips:
        return
    rows = [
        (
            str(rank.rank),
            code_span(summary.name),
            code_span(skip.index),
            epoch_text(skip.epoch),
            code_span(skip.host),
            code_span(skip.exception),
        )
        for rank, summary in summaries
        for skip in summary.skips
    ]
    yield "## Skipped samples"
    times = "Once" if num_skips == 1 else f"{num_skips} times"
    yield f"{times} a sample raised, and another sample of its batch replaced it."
    if rows:
        header = ("rank", "loader", "sample", "epoch", "host", "exception")
        yield markdown_table(header, rows[:MAX_ROWS], right=(0, 3)) + more_text(len(rows))
    if num_skips > len(rows):
        yield f"{num_skips - len(rows)} were only counted."


def source_section(report: Report) -> Iterator[str]:
    """Yield the section about the sources of mixtures, and the lanes that were begun anew. Nothing without them."""
    counts: Counter[tuple[str, str]] = Counter()
    begun: Counter[str] = Counter()
    for summary in [summary for rank in report.run.ranks for summary in rank.loaders]:
        begun[summary.name] += summary.num_lanes_begun
        counts.update({(summary.name, source.name): source.num_samples for source in summary.by_source})
    if counts:
        totals: Counter[str] = Counter()
        for (loader, _), count in counts.items():
            totals[loader] += count
        yield "## Sources"
        rows = [
            (code_span(loader), code_span(source), f"{count:,}", f"{100 * count / max(1, totals[loader]):.2f} %")
            for (loader, source), count in list(counts.items())[:MAX_ROWS]
        ]
        yield markdown_table(("loader", "source", "samples", "share"), rows, right=(2, 3)) + more_text(len(counts))
    for loader, count in begun.items():
        if count:
            yield f"Lanes of loader {code_span(loader)} were begun anew {count} times: hosts were lost, or it resumed."


def shard_section(run: RunFacts) -> Iterator[str]:
    """Yield the section about the shards that processes waited for longest. Nothing if no shard was read."""
    waits_s: defaultdict[str, float] = defaultdict(float)
    parts = [usage.shard_waits_s for usage in run.hosts]  # endpoints
    parts += [summary.shard_waits_s for rank in run.ranks for summary in rank.loaders]
    for part in parts:
        for name, wait_s in part.items():
            waits_s[name] += wait_s
    if slowest := slowest_shards(waits_s):
        yield "## Slowest shards"
        rows = [(code_span(name), seconds_text(wait_s)) for name, wait_s in slowest.items()]
        yield markdown_table(("shard", "all processes waited"), rows, right=(1,))


def more_text(num_entries: int) -> str:
    """Return how many entries a table leaves out. Empty if it has all."""
    return f"\n\n{num_entries - MAX_ROWS} more are in the JSON." if num_entries > MAX_ROWS else ""
