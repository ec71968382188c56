"""The reasons to refuse a forecast. Each rule is a function of the canary runs. Pure.

A refusal is also an answer. It names what the canaries showed, and the number that shows it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from hetero.decide.canary.line import Line
from hetero.decide.canary.model import ForecastFigure, Refusal
from hetero.decide.canary.points import CanaryPoint, LoaderWork, mean_excess
from hetero.metrics.excess import MAX_EXCESS, RUN_AGAIN, excess_text

__all__ = [
    "MIN_GROWTH",
    "check_busy",
    "check_cache",
    "check_cpu_cache",
    "check_figure",
    "check_line",
    "check_script",
    "is_fixed_loader",
    "ran_out_of_memory",
]

MIN_GROWTH = 3.0
"""Growth / its standard error, below which a figure does not grow measurably. One of a hundred constant figures has
more. With 5, a certain growth of 4.9 was refused as not measurable. `check_figure` rejects what is too uncertain."""
MAX_P_VALUE = 0.003
_BENT = 0.12
"""Distance of the exponent's whole 98 % interval from 1 that bends the forecast more than its interval allows for."""
_FAST_TO = 2.0
"""Memory that grows with the data / level 2 caches. Up to this ratio, memory is fast. The growth includes copies and
temporary arrays, which inner loops do not read."""
_SLOW_FROM = 32.0
"""Memory that grows with the data / level 2 caches. From this ratio on, memory hardly becomes slower. Random reads of
rows of 400 bytes took 36 ns in 2 MB, 50 ns in 10 MB, 98 ns in 48 MB and 131 ns in 240 MB, on a machine with 4 MB of
level 2 caches."""
_CACHE_RATIO = 2.0
"""Memory of the whole / memory of the largest canary within this span, above which the forecast is refused."""
_MOSTLY_WAITING_PERCENT = 20.0
"""Use of one CPU below which a run mostly waits. If arithmetic takes 2.7 times as long, such a run takes a third
longer."""
_EQUAL = 0.02
_OUT_OF_MEMORY = ("out of memory", "memoryerror")
"""Words in the cause of a run that failed: Python's exception, and the messages of PyTorch, CUDA and SageMaker."""
_STATED_PEAK = re.compile(r"\(peak of [^:)]*: ([\d.]+) GiB")
_NEAR_LIMIT = 0.8
"""Least peak / limit of a killed run that counts as out of memory."""
_FLIGHTS = 1.5
"""Least batches of a pass / batches in flight, if the pass shows how fast batches follow each other. A loader of n
processes has 2 n batches in flight, so each process then makes three."""


def check_script(points: Sequence[CanaryPoint]) -> list[Refusal]:
    """Return refusals if the script may behave differently in the whole job than in the canary runs.

    There are three such cases: runs failed, runs used different loaders, or a loader breaks one of `_LOADER_RULES`.
    """
    reasons = [("failed", _failed(points))]
    names = [sorted(loader.name for loader in point.loaders) for point in points]
    if any(each != names[0] for each in names):
        reason = "some canary runs used loaders that others did not use, so the whole may use others too"
        reasons.append(("loaders", reason))
    for name in dict.fromkeys(loader.name for point in points for loader in point.loaders):
        fractions, works = _works(points, name)
        reasons += [(rule, reason_of(name, fractions, works)) for rule, reason_of in _LOADER_RULES]
    # A rule that does not refuse returns an empty reason. An empty figure means all figures.
    return [Refusal(rule=rule, figure="", reason=reason) for rule, reason in reasons if reason]


def check_line(
    figure: str, line: Line, points: Sequence[CanaryPoint], *, must_grow: bool, what: str = ""
) -> list[Refusal]:
    """Return a refusal if a straight line through a figure's points does not hold. Empty if it holds.

    The line does not hold if the figure hardly grows (``no-growth``), or if its growth is not in proportion to the data
    (``curved``). Two tests find a curve: the interval of the exponent, and replicates that agree better with each other
    than with the line.

    Args:
        figure: Name of the figure.
        line: Its fitted line.
        points: The finished runs.
        must_grow: Whether the figure must grow measurably.
        what: Name of the part of the figure that the line is about. Empty for all of it.
    """
    what = what or figure
    fractions = [point.fraction for point in points]
    span = f"between {percent(min(fractions))} and {percent(max(fractions))} of the data"
    exponent = line.exponent
    if must_grow and line.growth < MIN_GROWTH:
        reason = (
            f"the {what} does not grow measurably {span}: its growth is {max(0.0, line.growth):.1f} times its "
            "standard error. The work is either less than the noise, or does not depend on the data"
        )
        return [Refusal(rule="no-growth", figure=figure, reason=reason)]
    if exponent is not None and (exponent.low > 1 + _BENT or exponent.high < 1 - _BENT):
        reason = (
            f"the {what} does not grow in proportion to the data: {span} it grows with the power "
            f"{exponent.best:.1f} of it ({exponent.low:.1f} to {exponent.high:.1f})"
        )
        return [Refusal(rule="curved", figure=figure, reason=reason)]
    # Replicates may agree by chance. So this test refuses a line only if the line may also bend much.
    if line.lack_of_fit is not None and line.lack_of_fit < MAX_P_VALUE and _bends_much(line, points):
        reason = (
            f"the {what} is not on a line {span}: replicates that agree this much better than the line have a "
            f"probability of {line.lack_of_fit:.1g}"
        )
        return [Refusal(rule="curved", figure=figure, reason=reason)]
    return []


def check_figure(figure: ForecastFigure) -> list[Refusal]:
    """Return a refusal if the interval of a figure is too wide for an answer.

    Half of its width may be at most `MAX_EXCESS` times the value. `check_busy` has the same bound for other work of the
    machine.
    """
    if figure.half_width <= MAX_EXCESS:
        return []
    reason = (
        f"the runs vary too much to forecast the {figure.name}: the 90 % interval is {figure.half_width:.0%} of the "
        f"value to each side, more than {MAX_EXCESS:.0%}"
    )
    return [Refusal(rule="noise", figure=figure.name, reason=reason)]


def check_busy(points: Sequence[CanaryPoint]) -> list[Refusal]:
    """Return a refusal if too much of the runs' time may be due to other work of the machine."""
    share = mean_excess(points)
    if share <= MAX_EXCESS:
        return []
    reason = f"{excess_text(share)}. Run the canaries again, with --fresh and {RUN_AGAIN}"
    return [Refusal(rule="busy", figure="time", reason=reason)]


def check_cache(
    points: Sequence[CanaryPoint], *, data_bytes: float | None, memory_bytes: float | None
) -> list[Refusal]:
    """Return a refusal if later passes of the canaries read from memory what the whole job must read from storage."""
    passes = max((loader.num_passes for point in points for loader in point.loaders), default=0)
    # In a single pass, canaries and the whole job read all data from storage. Data that fits into memory is read from
    # memory by both in later passes.
    if data_bytes is None or memory_bytes is None or passes < 2 or data_bytes < memory_bytes:
        return []
    largest_canary_bytes = max(point.fraction for point in points) * data_bytes
    if largest_canary_bytes > memory_bytes:
        return []
    reason = (
        f"the script passes over the data {passes} times. The whole data ({data_bytes / 1e9:.1f} GB) does not fit into "
        f"the memory of a host ({memory_bytes / 1e9:.1f} GB), but that of the canaries does, so only the whole job "
        "reads from storage in each pass"
    )
    return [Refusal(rule="cache", figure="", reason=reason)]


def check_cpu_cache(
    points: Sequence[CanaryPoint], *, held_bytes: float, least_held_bytes: float, cache_bytes: float | None
) -> list[Refusal]:
    """Return a refusal if the whole job holds so much more data in memory that reading it becomes slower.

    Data in memory is read fast if it has at most `_FAST_TO` times the size of the CPUs' level 2 caches. Reading becomes
    slower with more data, up to `_SLOW_FROM` times this size. A size below this span counts as its lower end, and a
    size above it as its upper end. The forecast is refused if the whole then has more than `_CACHE_RATIO` times the
    size of the largest canary. Jobs of this kind took 1.3 to 2.7 times as long per byte. Runs that mostly sleep or wait
    are not affected.

    Args:
        points: The finished runs.
        held_bytes: Growth of the memory from no data to the whole.
        least_held_bytes: What this growth most probably exceeds. If it is small, the runs do not show a growth.
        cache_bytes: Level 2 caches of all CPUs together. None if unknown.
    """
    if cache_bytes is None:
        return []
    span_begin_bytes, span_end_bytes = _FAST_TO * cache_bytes, _SLOW_FROM * cache_bytes
    # The growth must be certain, so its least value must exceed the smallest size that is refused below. Memory that
    # varied by 3 MB between the runs was once extrapolated to 107 MB, so a right forecast was refused.
    if least_held_bytes <= _CACHE_RATIO * span_begin_bytes:
        return []
    # A run without a measured use counts as busy.
    cpu_percents = [point.resources.cpu_percent_mean for point in points]
    if statistics.median(100.0 if value is None else value for value in cpu_percents) < _MOSTLY_WAITING_PERCENT:
        return []
    # Beyond either end of the span, more or less data changes nothing.
    canary_bytes = max(point.fraction for point in points) * held_bytes
    whole_in_span, canary_in_span = min(held_bytes, span_end_bytes), max(canary_bytes, span_begin_bytes)
    if whole_in_span <= _CACHE_RATIO * canary_in_span:
        return []
    reason = (
        f"the script holds {held_bytes / 1e6:,.0f} MB of data in memory in the whole job and "
        f"{canary_bytes / 1e6:,.1f} MB in the largest canary. Between {span_begin_bytes / 1e6:,.0f} and "
        f"{span_end_bytes / 1e6:,.0f} MB, reading memory becomes slower on this machine (its level 2 caches "
        f"have {cache_bytes / 1e6:,.0f} MB), so the whole may take up to 2.7 times as long per byte. Runs on "
        f"{percent(whole_in_span / _CACHE_RATIO / held_bytes)} of the data would show it"
    )
    return [Refusal(rule="cpu-cache", figure="time", reason=reason)]


def ran_out_of_memory(point: CanaryPoint, limit_bytes: float | None = None) -> bool:
    """Return whether a run failed because of a lack of memory.

    If SIGKILL ended the run and the launcher does not exclude a lack of memory, the answer is yes only if the run's
    peak was near the limit. An operator may send SIGKILL too, and this machine may have less memory than the candidate.

    Args:
        point: The run.
        limit_bytes: Memory of the candidate's host. None if it is unknown.
    """
    cause = point.failure.lower()
    # The launcher's message about a SIGKILL only says that the run may have been out of memory. An operator's kill -9
    # of a run with 0.8 GiB, on a host of 384 GiB, once gave a probability of 100 %.
    is_uncertain = "killed by sigkill" in cause and "out of memory" in cause
    if not is_uncertain:
        return any(words in cause for words in _OUT_OF_MEMORY)
    if limit_bytes is None:
        return False
    # The peak is in the message, and in the report if the run wrote one.
    stated = _STATED_PEAK.search(point.failure)
    peaks_bytes = (0.0 if stated is None else float(stated[1]) * 2**30, point.resources.memory_peak_bytes or 0.0)
    return max(peaks_bytes) >= _NEAR_LIMIT * limit_bytes


def percent(fraction: float) -> str:
    """Return a fraction in percent, for a sentence."""
    return f"{100 * fraction:.3g} %"


def is_fixed_loader(works: Sequence[LoaderWork], fractions: Sequence[float]) -> bool:
    """Return whether a loader delivers the same samples whatever the fraction, as a validation set that stays whole."""
    samples = [work.num_samples for work in works]
    # With nearly equal fractions, every loader delivers the same samples.
    are_fractions_different = max(fractions) > 1.2 * min(fractions)
    return are_fractions_different and max(samples) - min(samples) <= _EQUAL * max(samples)


def _bends_much(line: Line, points: Sequence[CanaryPoint]) -> bool:
    """Return whether a line may bend much: its exponent is not 1, or too few runs show the exponent.

    The exponent is not 1 if its interval does not contain 1. With four or five runs, the interval is about twice as
    wide as with nine, so it may contain 1 although the growth is curved. Then the replicates alone decide.
    """
    exponent = line.exponent
    return exponent is not None and (not exponent.low <= 1 <= exponent.high or len(points) < 6)


def _failed(points: Sequence[CanaryPoint]) -> str:
    """Return a reason if runs failed, or an empty text."""
    failed = [point for point in points if point.failure]
    if not failed:
        return ""
    return f"{len(failed)} of {len(points)} canary runs failed, the first with: {failed[0].failure}"


def _passes(name: str, fractions: Sequence[float], works: Sequence[LoaderWork]) -> str:
    """Return a reason if runs made different numbers of passes over a loader, or an empty text.

    The end of such a script depends on a value that it computes, for example its loss.
    """
    # A fraction for each number of passes. A loader that does not count its passes has 0.
    pairs = zip(fractions, works, strict=True)
    fraction_of = {work.num_passes: fraction for fraction, work in pairs if work.num_passes}
    if len(fraction_of) < 2:
        return ""
    texts = " and ".join(f"{count} at {percent(fraction)}" for count, fraction in sorted(fraction_of.items()))
    return (
        f"the number of passes over loader {name} differs between runs ({texts}), so the script decides by its values "
        "when it ends"
    )


def _fixed_steps(name: str, fractions: Sequence[float], works: Sequence[LoaderWork]) -> str:
    """Return a reason if something other than the data fixes a loader's number of steps, or an empty text."""
    leaves_early = any(work.num_passes > work.num_complete_passes for work in works)
    # A loader that delivers the same samples in complete passes has data that stays whole, such as a validation set.
    if not leaves_early or not is_fixed_loader(works, fractions):
        return ""
    return (
        f"loader {name} delivers {works[0].num_samples:,} samples whatever the amount of data, and the script leaves "
        "its passes early, so something else fixes the number of its steps"
    )


def _short_passes(name: str, fractions: Sequence[float], works: Sequence[LoaderWork]) -> str:
    """Return a reason if a pass has hardly more batches than are fetched at the same time, or an empty text."""
    most_batches = max(work.num_steps / max(1, work.num_passes) for work in works)
    in_flight = max(work.max_in_flight for work in works)
    # A loader with eight processes makes its first eight batches at the same time. A job bound by its loader took
    # 240 s, where 81 s were forecast.
    if in_flight <= 1 or most_batches >= _FLIGHTS * in_flight or is_fixed_loader(works, fractions):
        return ""
    return (
        f"a pass over loader {name} has at most {most_batches:.3g} batches in the canaries, of which the loader "
        f"fetches {in_flight} at the same time, so the canaries do not show how fast batches follow each other"
    )


def _disproportion(name: str, fractions: Sequence[float], works: Sequence[LoaderWork]) -> str:
    """Return a reason if a loader's samples are not in proportion to the data, or an empty text."""
    # Samples of the whole job, extrapolated from each run.
    extrapolated = [work.num_samples / fraction for fraction, work in zip(fractions, works, strict=True)]
    # The samples of up to three batches differ by rounding alone.
    is_rounded = min(work.num_samples / max(1, work.batch_samples) for work in works) <= 3
    if is_rounded or is_fixed_loader(works, fractions) or max(extrapolated) <= 1.3 * min(extrapolated):
        return ""
    return (
        f"the samples of loader {name} are not in proportion to the data: the runs extrapolate to "
        f"{min(extrapolated):,.0f} and to {max(extrapolated):,.0f} samples"
    )


def _works(points: Sequence[CanaryPoint], name: str) -> tuple[list[float], list[LoaderWork]]:
    """Return the fractions of the runs that used a loader, and its work in each."""
    pairs = [(point.fraction, loader) for point in points for loader in point.loaders if loader.name == name]
    return [fraction for fraction, _ in pairs], [work for _, work in pairs]


_LOADER_RULES: tuple[tuple[str, Callable[[str, Sequence[float], Sequence[LoaderWork]], str]], ...] = (
    ("passes", _passes),
    ("fixed-steps", _fixed_steps),
    ("short-passes", _short_passes),
    ("loaders", _disproportion),
)
"""Rules about one loader: its name, the fractions of the runs that used it, and its work in each."""
