"""Forecasts a whole job from its canary runs. Pure.

Time is a sum of parts, because each part grows differently:

    fixed parts      start-up, imports and end. The forecast is their mean, because they are equal in all runs. If the
                     runs show that they grow, the forecast is a line through the runs
    steps            seconds of the measured steps of each loader. They are in proportion to the number of steps: zero
                     steps take zero seconds. So the forecast has the error of a mean, which is smaller than the error
                     of a line
    the rest         all else in the script: building the data set, warm-up steps, work between epochs. The forecast is
                     a line with a fixed part

The memory peak is a line through the peaks of the runs. Utilisation is the CPU or GPU time of the script's growing part
divided by the seconds of this part, because a short run is mostly start-up and a long run is not.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetero.decide.canary.line import (
    NUM_DRAWS,
    Form,
    Line,
    Noise,
    constant_draws,
    fit_line,
    fit_ratio,
    interval,
    num_distinct,
)
from hetero.decide.canary.model import Candidate, ForecastFigure, Refusal
from hetero.decide.canary.points import MIN_FRACTIONS, MIN_RUNS, CanaryPoint, LoaderWork, mean_excess
from hetero.decide.canary.quadratic import quadratic_bound, quadratic_notes
from hetero.decide.canary.refusals import (
    MIN_GROWTH,
    check_busy,
    check_cache,
    check_cpu_cache,
    check_figure,
    check_line,
    check_script,
    is_fixed_loader,
    ran_out_of_memory,
)
from hetero.decide.canary.suggestions import suggestion
from hetero.errors import ConfigError
from hetero.pricing import cost

__all__ = ["Forecast", "ForecastOptions", "forecast"]

Array = npt.NDArray[np.float64]

_TIME = Noise(relative=0.02, absolute=0.03, degrees=1.0)
_STEPS = Noise(relative=0.02, absolute=0.01)
_MEMORY = Noise(relative=0.002, absolute=1e6, degrees=1.0)
_CPU = Noise(relative=0.02, absolute=0.03)
_LACK = Noise(relative=0.1, absolute=0.05)
_MIN_STEPS = 3
_CPU_DRIFT = 0.05
"""Standard deviation of the use of CPUs between the canaries, which are mostly first steps, and the whole job."""
_MATTERS = 0.05
"""If the time outside of the loaders is a larger share of the growing time than this, it must be on a line."""
_MACHINE_DRIFT = 0.015
"""Standard deviation of a machine's speed between the canaries and the whole job, which no canary can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """Options of a forecast.

    Raises:
        ConfigError: If a rule is accepted that cannot be.
    """

    curvature: float = 0.015
    """Standard deviation of the exponent of growth around 1, before the canaries are seen."""
    step_curvature: float = 0.008
    """Standard deviation of the exponent for the time of steps. It is smaller, because a step takes equally long with
    more data, unless caches matter."""
    accept: tuple[str, ...] = ()
    """Rules that must not refuse."""
    basis: str = "measured"
    """Basis of the canaries' measurements, ``measured`` or ``simulated``."""
    seed: int = 0
    """Seed of the draws. A forecast of the same runs is always the same."""

    def __post_init__(self) -> None:
        if "too-few" in self.accept:
            raise ConfigError("--accept too-few: fewer runs give no forecast that could be accepted; leave it out")


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast with the draws of its cost, which comparisons of candidates need."""

    candidate: Candidate
    """The candidate with its forecast."""
    usd: Array
    """Draws of the cost. Empty without a forecast or a price."""


def forecast(candidate: Candidate, options: ForecastOptions | None = None) -> Forecast:
    """Forecast the whole job on one cluster.

    Args:
        candidate: The cluster and its runs. If it has a forecast already, this is replaced.
        options: Options. None for the defaults.

    Raises:
        ConfigError: If a run has a fraction of 0.
    """
    options = options or ForecastOptions()
    if any(point.fraction <= 0 for point in candidate.points):
        raise ConfigError("a canary run has a fraction of 0; expected more than 0")
    finished = [point for point in candidate.points if not point.failure]
    # Each of these refusals has an empty figure, so it is about all figures.
    refusals = check_script(candidate.points)
    usd = np.empty(0)
    lacked_memory = any(ran_out_of_memory(point, candidate.memory_limit_bytes) for point in candidate.points)
    num_fractions = num_distinct([point.fraction for point in finished])
    if len(finished) < MIN_RUNS or num_fractions < MIN_FRACTIONS:
        reason = (
            f"{len(finished)} canary runs finished, with {num_fractions} different amounts of data; a forecast needs "
            f"at least {MIN_RUNS}, with {MIN_FRACTIONS}, because two points are always on a line"
        )
        other_refusals = [refusal for refusal in refusals if refusal.rule not in options.accept]
        all_refusals = (*other_refusals, Refusal(rule="too-few", figure="", reason=reason))
        refused = replace(candidate, figures=(), refusals=all_refusals, out_of_memory=1.0 if lacked_memory else None)
        return Forecast(refused, usd)
    model = _Model(candidate, finished, options)
    time_s = model.time()
    figures = [model.figure("time", "s", time_s, fixed=model.fixed_s, points=[point.wall_s for point in finished])]
    if candidate.hourly_usd is not None:
        # The price of one second times the draws of the time.
        usd = np.asarray(cost.job_cost_usd(candidate.hourly_usd, wall_s=1.0) * time_s)
        figures.append(model.figure("cost", "USD", usd))
    figures += model.utilisation("CPU", "cpu_percent_mean", "cpu_percents")
    figures += model.utilisation("GPU", "gpu_percent_mean", "gpu_percents")
    figures += model.memory()
    # Refuse figures. If the machine was busy, other reasons against the time would be about the machine and not about
    # the job.
    busy = check_busy(finished)
    refusals += [*busy, *(refusal for refusal in model.refusals if not busy or refusal.figure != "time")]
    # The whole job may be slower per byte if it holds more data in memory than the CPUs' caches. A step works on one
    # batch, which is as large in the canaries as in the whole. So skip this rule if steps were measured.
    if not model.has_steps:
        refusals += check_cpu_cache(
            finished,
            held_bytes=model.held_bytes,
            least_held_bytes=model.least_held_bytes,
            cache_bytes=candidate.cache_bytes,
        )
    refusals += check_cache(finished, data_bytes=candidate.data_bytes, memory_bytes=candidate.memory_limit_bytes)
    refusals = [refusal for refusal in refusals if refusal.rule not in options.accept]
    if "noise" not in options.accept:
        # Skip figures that have a refusal. If a line does not hold, the width of its interval says nothing. Skip the
        # cost too, because its interval is as wide as the interval of the time, which is checked.
        skipped = {"cost", *(refusal.figure for refusal in refusals)}
        refusals += [refusal for figure in figures if figure.name not in skipped for refusal in check_figure(figure)]
    out_of_memory = 1.0 if lacked_memory else model.out_of_memory(candidate.memory_limit_bytes)
    # If the memory was refused, state the probability of a lack of memory only above one half. `decide` then leaves
    # the candidate out, whatever the exact probability is.
    if any(refusal.figure in ("", "memory peak") for refusal in refusals):
        out_of_memory = out_of_memory if (out_of_memory or 0.0) > 0.5 else None

    time_refusals = [refusal for refusal in refusals if refusal.figure in ("", "time")]
    notes = [] if time_refusals else quadratic_notes(model.longest_s(), figures[0].high)
    forecast_candidate = replace(
        candidate,
        figures=tuple(figures),
        refusals=tuple(dict.fromkeys(refusals)),
        notes=(*candidate.notes, *notes),
        out_of_memory=out_of_memory,
        canary_share=None if time_refusals else candidate.canary_s / figures[0].value,
        more_canaries=suggestion(finished, time_refusals),
    )
    return Forecast(forecast_candidate, usd)


class _Model:
    """The fitted parts of one candidate."""

    def __init__(self, candidate: Candidate, points: Sequence[CanaryPoint], options: ForecastOptions) -> None:
        self._points = points
        self._options = options
        self.fractions = [point.fraction for point in points]
        # Candidates are compared draw by draw, so each needs other draws, also if the runs are equal. Take crc32,
        # because the function hash gives another number for a text in each process.
        own_seed = zlib.crc32("\n".join((candidate.name, *candidate.groups)).encode())
        self._random = np.random.default_rng((options.seed, len(points), own_seed))
        self.refusals: list[Refusal] = []
        # The method `time` sets the figures of the time, and the method `memory` sets those of the memory.
        self.fixed_s = 0.0
        """Part of the time of the whole that does not grow with the data: the median of its draws."""
        self._rest_s: list[float] = []
        """Time of the script in each run, without the steps of its loaders."""
        self._growing_s = np.zeros(0)
        """Draws of the time of the script in the whole. It may grow with the data."""
        self._memory_peak = np.zeros(0)
        """Draws of the memory peak. Empty if a run lacks its memory."""
        self.time_s = np.zeros(0)
        """Draws of the time of the whole."""
        self.has_steps = False
        """Whether steps of hetero's loaders were measured."""
        self.held_bytes = 0.0
        """Growth of the memory from no data to the whole."""
        self.least_held_bytes = 0.0
        """Bytes that this growth exceeds with a probability of 90 %."""

    def figure(
        self, name: str, unit: str, draws: Array, *, fixed: float | None = None, points: Sequence[float] = ()
    ) -> ForecastFigure:
        """Return a figure with the 90 % interval of its draws.

        Args:
            name: Its name.
            unit: Its unit.
            draws: Draws of the figure for the whole.
            fixed: Part of it that does not grow with the data. None if it is not known.
            points: The figure in each run, for a plot. Empty for a figure without a line.
        """
        middle, low, high = interval(draws)
        return ForecastFigure(
            name=name,
            unit=unit,
            basis=self._options.basis,
            value=middle,
            low=low,
            high=high,
            fixed=fixed,
            points=tuple(points),
        )

    # Time

    def time(self) -> Array:
        """Return draws of the time of the whole.

        It is the sum of three parts: the time outside of the script, the steps of the script's loaders, and the rest of
        the script. Without measured steps, the whole script is the rest. A line has draws of one run of the whole with
        its noise (`run_draws`), of the mean of such runs (`mean_draws`), and of its fixed part (`fixed_draws`).
        """
        script_s = [point.growing_s for point in self._points]
        script_line = self._line(script_s, _TIME, self._options.curvature)
        works = {
            name: [next(loader for loader in point.loaders if loader.name == name) for point in self._points]
            for name in self._step_loaders()
        }
        self.has_steps = bool(works)
        # If the samples of a loader grow, the time of its steps grows too, even if the noise hides this.
        has_growing_loader = any(not is_fixed_loader(each, self.fractions) for each in works.values())
        self.refusals += check_line("time", script_line, self._points, must_grow=not has_growing_loader)
        outside = self._outside()
        self._growing_s, fixed_s = script_line.run_draws, script_line.fixed_draws
        self._rest_s = script_s
        # With measured steps, replace the line of the whole script by the steps of each loader and a line of the rest.
        if works:
            unmeasured_s = list(script_s)
            steps_s, fixed_s = np.zeros(NUM_DRAWS), np.zeros(NUM_DRAWS)
            for name, own in works.items():
                unmeasured_s = [left_s - work.measured_s for left_s, work in zip(unmeasured_s, own, strict=True)]
                own_steps_s = self._steps(name, own)
                steps_s = steps_s + own_steps_s
                if is_fixed_loader(own, self.fractions):
                    fixed_s = fixed_s + own_steps_s
            self._rest_s = [max(0.0, value) for value in unmeasured_s]
            rest_line = self._line(self._rest_s, _TIME, self._options.curvature)
            self._growing_s, fixed_s = steps_s + rest_line.run_draws, fixed_s + rest_line.fixed_draws
            # If the rest grows little, do not check that it is on a line, because it changes the forecast little.
            if np.median(rest_line.mean_draws - rest_line.fixed_draws) > _MATTERS * np.median(self._growing_s):
                what = "time of the script outside of its loaders"
                self.refusals += check_line("time", rest_line, self._points, must_grow=False, what=what)
        # The machine may be faster or slower during the whole job than during the canaries.
        drift = np.exp(_MACHINE_DRIFT * self._random.standard_normal(NUM_DRAWS))
        self._growing_s = self._growing_s * drift
        time_s = outside.run_draws + self._growing_s
        # Other work of the machine took at most this share of the time. Each share up to it is equally likely.
        if excess := mean_excess(self._points):
            time_s = time_s * (1 - excess * self._random.random(NUM_DRAWS))
        # The fixed part is at most the whole time, also if the median of its draws is longer.
        self.fixed_s = min(float(np.median(outside.fixed_draws + fixed_s)), float(np.median(time_s)))
        self.time_s = np.asarray(time_s)
        return self.time_s

    def longest_s(self) -> float | None:
        """Return the longest time that the runs do not exclude, or None if no parabola fits. Call `time` before.

        A step works on one batch, so only the rest of the script may grow with the square of the data. If a parabola
        through the rest gives more time than a straight line, the difference is added to the forecast.
        """
        longest_rest_s = quadratic_bound(self.fractions, self._rest_s, self._random, noise=_TIME)
        if longest_rest_s is None:
            return None
        straight_rest_s = float(np.median(self._line(self._rest_s, _TIME, curvature=0.0).mean_draws))
        return max(0.0, longest_rest_s - straight_rest_s) + float(np.median(self.time_s))

    def _outside(self) -> Line:
        """Return the line of start-up, imports and end. It does not grow, unless the runs show that it does.

        It grows for example if a module reads the data when it is imported.
        """
        values = [point.fixed_s for point in self._points]
        # `MOSTLY_CONSTANT` gives a line only if the evidence for growth is clear. When a line and a constant had even
        # odds, a forecast of bench_canary, whose start-up does not grow, had an error of 31 %.
        line = self._line(values, _TIME, self._options.curvature, Form.MOSTLY_CONSTANT)
        # Refuse a curved growth only if the figure grows measurably, because the forecast is otherwise a constant.
        if line.growth >= MIN_GROWTH:
            what = "time of start-up, imports and end"
            self.refusals += check_line("time", line, self._points, must_grow=False, what=what)
        return line

    def _line(self, values: Sequence[float], noise: Noise, curvature: float, form: Form = Form.BOTH) -> Line:
        """Return a line through a value of each run against the fraction of the data."""
        return fit_line(self.fractions, values, self._random, noise=noise, curvature=curvature, form=form)

    def _step_loaders(self) -> list[str]:
        """Return the names of the loaders whose steps were measured in every run.

        The time of all other loaders belongs to the rest of the script. Among them are loaders whose passes have fewer
        than three batches, because hardly any of these batches is full.
        """
        measured = [{loader.name for loader in point.loaders if _is_measured(loader)} for point in self._points]
        # In the order of the first run, because the order decides which draws a loader gets.
        return [loader.name for loader in self._points[0].loaders if all(loader.name in names for names in measured)]

    def _steps(self, name: str, works: Sequence[LoaderWork]) -> Array:
        """Return draws of the time of a loader's measured steps in the whole."""
        # A loader whose data stays whole takes the same time in the whole job.
        if is_fixed_loader(works, self.fractions):
            return constant_draws([work.measured_s for work in works], self._random, noise=_STEPS)
        # The last batch of a pass may be small. If its step takes as long as other steps, the whole time is in
        # proportion to the steps. If its step is shorter, the whole time is in proportion to the samples. Nobody knows
        # which is true, so use the geometric mean of both shares. The logarithm of this mean is wrong by at most half
        # the difference of the shares' logarithms.
        shares_of_steps, shares_of_samples = self._shares(works)
        pairs = list(zip(shares_of_steps, shares_of_samples, strict=True))
        shares = [math.sqrt(of_steps * of_samples) for of_steps, of_samples in pairs]
        error_of_log = max(abs(math.log(of_steps / of_samples)) for of_steps, of_samples in pairs) / 2
        # A wider prior of the exponent p allows for this error. A time in proportion to x^p grows by the factor
        # (1 / x)^p from the share x to the whole. The logarithm of this factor is p log(1 / x). So an error of p by
        # `error_of_log` / log(1 / x) has the same effect. If the runs are nearly the whole, log(1 / x) is near 0. Then
        # do not divide by it.
        log_growth = math.log(1 / statistics.fmean(shares)) if max(shares) < 0.9 else 1.0
        passes = max(work.num_passes for work in works)
        line = fit_line(
            shares,
            [work.measured_s for work in works],
            self._random,
            noise=_STEPS,
            curvature=math.hypot(self._options.step_curvature, error_of_log / log_growth),
            # Each pass begins with a wait, which does not grow with the data. In a single pass, no measured step waits.
            form=Form.THROUGH_ORIGIN if passes == 1 else Form.MAYBE_ORIGIN,
        )
        what = f"time of the steps of loader {name}"
        self.refusals += check_line("time", line, self._points, must_grow=False, what=what)
        return line.run_draws

    def _shares(self, works: Sequence[LoaderWork]) -> tuple[list[float], list[float]]:
        """Return each run's share of the measured steps of the whole job, and its share of the samples in these steps.

        Measured steps are all but the warm-up, which has as many steps in the whole job as in a canary run.
        """
        batch_samples = max(work.batch_samples for work in works)
        num_warmup = statistics.median(work.num_steps - work.num_steps_measured for work in works)
        # Estimate the samples of the whole job, its measured steps, and the samples in these steps.
        whole_samples = statistics.fmean(
            work.num_samples / fraction for work, fraction in zip(works, self.fractions, strict=True)
        )
        measured_steps = max(1.0, whole_samples / max(1, batch_samples) - num_warmup)
        measured_samples = max(1.0, whole_samples - num_warmup * batch_samples)
        return (
            # Rounding may give a run more steps than the estimate of the whole has.
            [min(1.0, work.num_steps_measured / measured_steps) for work in works],
            [min(1.0, max(1, work.num_samples_measured) / measured_samples) for work in works],
        )

    # Resources

    def utilisation(self, what: str, mean_name: str, values_name: str) -> list[ForecastFigure]:
        """Return mean and 99th percentile (p99) of the use of CPUs or GPUs. Empty if a run lacks the mean.

        Args:
            what: ``CPU`` or ``GPU``.
            mean_name: Field of `Resources` with the mean of a run.
            values_name: Field of `Resources` with the values of a run's seconds.
        """
        means = [getattr(point.resources, mean_name) for point in self._points]
        if any(mean is None for mean in means):
            return []
        growing_s = [max(1e-3, point.growing_s) for point in self._points]
        # A mean use is CPU seconds / seconds. Forecast the CPU seconds, which grow with the seconds.
        used_s = [mean / 100 * seconds for mean, seconds in zip(means, growing_s, strict=True)]
        whole_s = np.maximum(self._growing_s, 1e-3)
        whole_used_s = fit_ratio(growing_s, used_s, whole_s, self._random, noise=_CPU)
        # A canary shows mostly the first steps of the job. Later steps may use the CPUs a little more or less.
        whole_used_s = whole_used_s * np.exp(_CPU_DRIFT * self._random.standard_normal(len(whole_used_s)))
        figures = [self.figure(f"{what} mean", "%", 100 * whole_used_s / whole_s, points=means)]
        values = [getattr(point.resources, values_name) for point in self._points]
        # Fewer than 20 values do not show a 99th percentile.
        if all(values) and sum(len(each) for each in values) >= 20:
            figures.append(self.figure(f"{what} p99", "%", self._percentile(values)))
        return figures

    def _percentile(self, values: Sequence[Sequence[float]]) -> Array:
        """Return draws of the 99th percentile of the values of all runs. Runs are drawn with replacement."""
        arrays = [np.asarray(each) for each in values]
        # A percentile takes long to compute, so compute 400 and choose the draws from them.
        percentiles = [
            np.quantile(np.concatenate([arrays[i] for i in self._random.integers(len(arrays), size=len(arrays))]), 0.99)
            for _ in range(400)
        ]
        # Assume noise of 2 % as for the mean, because runs that agree by chance would give an interval of zero.
        noise = np.exp(_CPU.relative * self._random.standard_normal(len(self._growing_s)))
        return np.asarray(self._random.choice(np.asarray(percentiles), len(self._growing_s)) * noise)

    def memory(self) -> list[ForecastFigure]:
        """Return mean, p99 and peak of the memory of a host, and of its GPUs."""
        figures = []
        for what, prefix, base_name in (("memory", "memory", "memory_base_bytes"), ("GPU memory", "gpu_memory", "")):
            mean, p99, peak = (_known(self._points, f"{prefix}_{name}_bytes") for name in ("mean", "p99", "peak"))
            # The memory of a GPU before the part that grows is not measured, so it counts as 0.
            bases = _known(self._points, base_name) if base_name else [0.0] * len(self._points)
            if mean is None or p99 is None or peak is None or bases is None:
                continue
            line = self._peak(f"{what} peak", peak)
            draws, fixed = line.run_draws, float(np.median(line.fixed_draws))
            if what == "memory":
                self._memory_peak, self.held_bytes = draws, float(np.median(draws)) - fixed
                self.least_held_bytes = float(np.quantile(line.mean_draws - line.fixed_draws, 0.1))
            base = statistics.fmean(bases)
            figures += [
                self.figure(f"{what} {name}", "bytes", self._filled(draws, base, part, peak, bases), points=part)
                for name, part in (("mean", mean), ("p99", p99))
            ]
            figures.append(self.figure(f"{what} peak", "bytes", draws, fixed=fixed, points=peak))
        return figures

    def _filled(
        self, peak_draws: Array, base: float, values: Sequence[float], peaks: Sequence[float], bases: Sequence[float]
    ) -> Array:
        """Return draws of the mean or the 99th percentile of the memory in the whole.

        Such a value is between the base (the memory before the part that grows) and the peak. Its share of this range
        is 0 at the base and 1 at the peak. A short run grows most of the time, and a long run is at its peak most of
        the time. So the share is larger in a long run. The lack of a run is (1 - share) times its time. The lack grows
        less than the time. A line with a fixed part forecasts the lack, and the share of the whole follows.

        Args:
            peak_draws: Draws of the peak in the whole.
            base: Base of the whole.
            values: The mean or percentile in each run.
            peaks: Peak of each run.
            bases: Base of each run.
        """
        shares = [
            (value - low) / (high - low) if high > low else 1.0
            for value, high, low in zip(values, peaks, bases, strict=True)
        ]
        growing_s = [max(1e-3, point.growing_s) for point in self._points]
        lacking_s = [(1 - min(1.0, share)) * seconds for share, seconds in zip(shares, growing_s, strict=True)]
        whole_s = np.maximum(self._growing_s, 1e-3)
        whole_lacking_s = fit_ratio(growing_s, lacking_s, whole_s, self._random, noise=_LACK)
        whole_share = 1 - np.clip(whole_lacking_s / whole_s, 0.0, 1.0)
        return np.asarray(base + (peak_draws - base) * whole_share)

    def _peak(self, figure: str, values: Sequence[float]) -> Line:
        """Return the line through the peaks of a figure, and refuse the figure if they are on no line."""
        # Allow a constant instead of a line. Without it, 6 % of the jobs with constant memory were refused.
        line = self._line(values, _MEMORY, self._options.curvature, Form.MAYBE_CONSTANT)
        self.refusals += check_line(figure, line, self._points, must_grow=False)
        return line

    def out_of_memory(self, limit_bytes: float | None) -> float | None:
        """Return the probability that the peak exceeds a limit, or None if either is unknown."""
        if limit_bytes is None or not len(self._memory_peak):
            return None
        return float(np.mean(self._memory_peak > limit_bytes))


def _is_measured(work: LoaderWork) -> bool:
    """Return whether a loader has enough steps in each pass, and after the warm-up, for a separate part of the time."""
    has_long_passes = work.num_steps >= _MIN_STEPS * max(1, work.num_passes)
    return has_long_passes and work.num_steps_measured >= _MIN_STEPS


def _known(points: Sequence[CanaryPoint], name: str) -> list[float] | None:
    """Return a figure of all runs, or None if a run lacks it."""
    found = [getattr(point.resources, name) for point in points]
    return None if any(value is None or not math.isfinite(value) for value in found) else found
