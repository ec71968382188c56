"""Step time and data wait, measured by the loader itself.

A *step* is the time from the delivery of one batch to the delivery of the next batch. It consists of the compute on the
first batch and the data wait for the second one. Between two passes over a loader, the script may validate the model or
save a checkpoint. This time belongs to no step: the clock stops from `StepTimer.pause` to the next
`StepTimer.begin_wait`.

The wait for the first batch of a pass is the data wait of the step that began with the last batch of the pass before.
If this wait were left out, short epochs would look too good. At the beginning of a pass, parallel processes make the
first batches at the same time. The script waits for the first of these batches, and then gets the others without a
wait.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetero.batches.skips import MAX_LISTED
from hetero.config.options import DEFAULT_WARMUP_STEPS
from hetero.documents.records import JsonRecord, limits
from hetero.documents.text import MAX_NAME_CHARS
from hetero.errors import ConfigError
from hetero.metrics.reading import MAX_SHARDS, slowest_shards
from hetero.metrics.skips import SkipLog, SkippedSample
from hetero.metrics.step_series import StepLog, StepSeries
from hetero.metrics.usage_series import Percentiles

__all__ = ["Extent", "RecentSteps", "StepSummary", "StepTimer", "Traffic", "check_name", "encode_summaries"]

MAX_STEP_WAIT_S = 3600.0
_NUM_RECENT = 256


def check_name(name: object) -> None:
    """Reject a loader's name that is too long, or has characters that cannot be printed.

    A rank could not send such a name to its launcher, so the report of the rank would be lost.

    Raises:
        ConfigError: If the name is rejected.
    """
    if not isinstance(name, str) or not name.isprintable():
        # Do not show the name as it is, because it may have characters that cannot be printed.
        found = ascii(name)[:60]
    elif len(name) > MAX_NAME_CHARS:
        found = f"{name[:20]!r}... of {len(name)} characters"
    else:
        return
    raise ConfigError(
        f"name is {found}, expected at most {MAX_NAME_CHARS} printable characters\n"
        "  The default is the data set's name. Pass another one to the loader, for example name='train'."
    )


@dataclass(slots=True)
class Traffic:
    """Bytes of the batches that one loader received on one rank. One thread calls `add`, any may read. Picklable."""

    compression: str | None
    """Compression that the loader requests, or None."""
    batch_bytes: int = 0
    """Bytes before compression, with headers."""
    saved_bytes: int = 0
    """How many of `batch_bytes` were not sent, because of compression."""

    def add(self, batch_bytes: int, saved_bytes: int) -> None:
        """Count a batch that is about to be delivered."""
        self.batch_bytes += batch_bytes
        self.saved_bytes += saved_bytes


@dataclass(slots=True)
class Extent:
    """How much of its data set one loader has delivered. One thread changes it, any may read. Picklable."""

    dataset_samples: int | None = None
    """Length of the data set, None until the first pass."""
    pass_samples: int | None = None
    """Samples of a pass over all ranks. It is less than the data set if a canary run uses a part of it."""
    num_passes: int = 0
    """Passes that began."""
    num_complete_passes: int = 0
    """Passes that delivered all of their batches."""
    num_requested: int = 0
    """Batches requested. 0 if the loader does not count them."""
    num_passed: int = 0
    """How many of the requested batches were delivered or have raised. The others are in flight, or were discarded."""
    max_in_flight: int = 0
    """Most batches that were requested and not yet delivered."""
    pass_steps: int | None = None
    """Steps of the latest pass, from its epoch's first batch to its last. None if the loader does not know it."""
    pass_end: int = 0
    """Value of `num_passed` at the end of the latest pass."""
    by_source: Counter[str] = field(default_factory=Counter)
    """Delivered samples of each source of a `hetero.Mixture`."""
    num_lanes_begun: int = 0
    """How often an iterator was begun within a lane (`hetero.loaders.lanes`)."""
    shard_waits_s: defaultdict[str, float] = field(default_factory=functools.partial(defaultdict, float))
    """Seconds that torch's workers, or this process, have waited for each shard, by path or URL."""

    def add_shard_waits(self, waits_s: Mapping[str, float]) -> None:
        """Add seconds of waiting to those of each shard."""
        for name, wait_s in waits_s.items():
            self.shard_waits_s[name] += wait_s

    def begin_pass(self, *, steps: int | None, num_done: int) -> None:
        """Count a pass that begins.

        Args:
            steps: Steps of the pass, None if the loader does not know it.
            num_done: Steps of the pass that were done before, because it resumes a loaded state.
        """
        self.num_passes += 1
        self.pass_steps = steps
        # `num_passed` counts batches, and each of the remaining steps takes one batch. If the number of steps is
        # unknown, count no remaining steps, because `StepSummary.pass_steps_left` must be a number.
        num_left = 0 if steps is None else steps - num_done
        self.pass_end = self.num_passed + num_left


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentSteps:
    """The latest complete steps of one `StepTimer`, at most 256."""

    first: int
    """Number of steps before these, including the warm-up."""
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    """Data wait of each step."""
    total_s: float
    """Time of all complete steps so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSamples:
    """Samples of one source of a `hetero.Mixture`."""

    name: str
    num_samples: int = field(metadata=limits(maximum=2**53))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary(JsonRecord):
    """Figures of one `StepTimer`. None replaces a figure whose definition does not apply."""

    name: str
    """Name of the loader, for example ``photos/train``."""
    num_steps: int = field(metadata=limits(maximum=2**53))
    """Batches delivered, including the warm-up."""
    num_samples: int = field(metadata=limits(maximum=2**53))
    """Samples delivered, including the warm-up."""
    batch_samples: int = field(metadata=limits(maximum=2**53))
    """Samples in the largest batch, which is the batch size of this rank."""
    warmup_steps: int = field(metadata=limits(maximum=2**53))
    """Steps at the start that the times and rates below leave out."""
    num_steps_measured: int = field(metadata=limits(maximum=2**53))
    """Complete steps after the warm-up. All times and rates below come from these steps."""
    num_samples_measured: int = field(metadata=limits(maximum=2**53))
    """Samples that the measured steps computed on."""
    compute_total_s: float
    """Time from each delivery to the next request, summed over the measured steps."""
    data_wait_total_s: float
    """Time blocked in ``next()``, summed over the measured steps."""
    step_time_mean_s: float | None
    step_time_p50_s: float | None
    """Percentiles are over all measured steps, within 1 %."""
    step_time_p95_s: float | None
    data_wait_mean_s: float | None
    data_wait_p50_s: float | None
    data_wait_p95_s: float | None
    utilisation: float | None = field(metadata=limits(maximum=1.0))
    """Compute / (compute + data wait), in [0, 1]."""
    samples_per_s: float | None
    """Samples per second of this rank over the measured steps."""
    step_wait_s: float | None = field(default=None, metadata=limits(maximum=MAX_STEP_WAIT_S))
    """Emulated accelerator time per step. None means real compute."""
    num_emulation_overruns: int = field(default=0, metadata=limits(maximum=2**53))
    """Steps whose real compute took longer than `step_wait_s`. The emulation cannot shorten them."""
    num_skips: int = field(default=0, metadata=limits(maximum=2**53))
    """Samples that raised and were replaced by other samples of their batches."""
    skips: tuple[SkippedSample, ...] = field(default=(), metadata=limits(max_items=MAX_LISTED))
    """The first 32 skipped samples."""
    by_source: tuple[SourceSamples, ...] = ()
    """Delivered samples of each source of a `hetero.Mixture`. Empty without one."""
    num_lanes_begun: int = field(default=0, metadata=limits(maximum=2**53))
    """How often an iterator was begun within a lane of an iterable, because the lane moved or the job was resumed."""
    shard_waits_s: dict[str, float] = field(default_factory=dict, metadata=limits(max_items=MAX_SHARDS))
    """Seconds that torch's workers, or the rank itself, have waited for the slowest files of `hetero.shards`, by path
    or URL. Empty if endpoints make the batches."""
    compression: str | None = None
    """Compression that was requested for batches from endpoints, or None."""
    batch_bytes: int = field(default=0, metadata=limits(maximum=2**53))
    """Bytes of the batches from endpoints, before compression, with headers."""
    saved_bytes: int = field(default=0, metadata=limits(maximum=2**53))
    """How many of `batch_bytes` were not sent, because of compression."""
    dataset_samples: int | None = field(default=None, metadata=limits(maximum=2**53))
    """Length of the data set, if the loader knows it."""
    pass_samples: int | None = field(default=None, metadata=limits(maximum=2**53))
    """Samples of a pass over all ranks, if the loader knows it. Less than `dataset_samples` in a canary run."""
    num_passes: int = field(default=0, metadata=limits(maximum=2**53))
    """Passes that began. 0 if the loader does not count them."""
    num_complete_passes: int = field(default=0, metadata=limits(maximum=2**53))
    """Passes that delivered all of their batches."""
    pass_steps: int | None = field(default=None, metadata=limits(maximum=2**53))
    """Steps of the latest pass, if the loader knows them. If the pass resumes a loaded state, the steps before the
    state count too."""
    pass_steps_left: int = field(default=0, metadata=limits(maximum=2**53))
    """How many of `pass_steps` have not been done yet."""
    max_in_flight: int = field(default=0, metadata=limits(maximum=2**53))
    """Most batches that were requested and not yet delivered. 0 if the loader does not count them."""
    num_not_delivered: int = field(default=0, metadata=limits(maximum=2**53))
    """Batches that were requested and are in flight, or were discarded."""
    first_batch_at_s: float | None = None
    """Seconds from the start of the run to the first delivery. None without one, or if the start is not known."""
    history: StepSeries = field(default_factory=StepSeries)
    """All complete steps, with the warm-up, in at most 120 intervals. Empty for all loaders of a rank except the
    one that took the most time."""

    @property
    def total_s(self) -> float:
        """Measured time in seconds, compute plus data wait."""
        return self.compute_total_s + self.data_wait_total_s


def encode_summaries(summaries: Sequence[StepSummary]) -> tuple[bytes, ...]:
    """Return the summaries of a rank as JSON.

    Only the loader that took the most time keeps its history. Histories are the largest part of a summary, and the
    reports of all ranks of a host have to fit into one message.
    """
    longest = max(summaries, key=lambda summary: (summary.total_s, summary.num_steps), default=None)
    kept = (each if each is longest else replace(each, history=StepSeries()) for each in summaries)
    return tuple(each.to_json() for each in kept)


class StepTimer:
    """Measures the steps of one loader on one rank.

    One thread calls `begin_wait`, `end_wait` and `pause`. Any thread may call `summary`. The memory does not grow with
    the number of steps. The sums are exact, and the percentiles are exact within 1 %.

    Args:
        name: Name of the loader, for reports.
        warmup_steps: Steps at the start that times and rates leave out, >= 0.
        step_wait_s: Seconds that every step's compute lasts on the emulated accelerator, in (0, 3600]. None: no
            emulation.
        run_clock: Returns the seconds since the start of the run. None if its start is not known.
        clock: Monotonic clock in seconds.
        sleep: Waits the given number of seconds, and may return early.

    Raises:
        ConfigError: If ``warmup_steps`` or ``step_wait_s`` is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        step_wait_s: float | None = None,
        run_clock: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {warmup_steps}; it must be at least 0")
        if step_wait_s is not None and not 0 < step_wait_s <= MAX_STEP_WAIT_S:
            raise ConfigError(f"step_wait_s is {step_wait_s}; it must be in (0, {MAX_STEP_WAIT_S:g}] seconds")
        self.name = name
        self.warmup_steps = warmup_steps
        self.step_wait_s = step_wait_s
        """Seconds that each step's compute lasts on the emulated accelerator. None without emulation."""
        self.skips: SkipLog | None = None
        """Skipped samples of the loader, for the summary."""
        self.traffic = Traffic(compression=None)
        """Network traffic of the loader's batches, for the summary."""
        self.extent = Extent()
        """Passes of the loader, for the summary."""
        self.on_step: Callable[[float, float], object] | None = None
        """Called with the compute and the data wait of each complete step, in seconds, also in the warm-up."""
        self._run_clock = run_clock
        """Returns the seconds since the start of the run. None if the start is not known."""
        self._first_batch_at_s: float | None = None
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._delivered_at: float | None = None
        """Time of the last delivery. None during a data wait, and after a pause."""
        self._begun_at: float | None = None
        """Time when ``next()`` was entered. None unless a data wait goes on."""
        self._compute_s: float | None = None
        """Compute on the last batch, kept until the data wait after it ends. None if its end is not known."""
        self._current_samples = 0
        """Number of samples of the last delivery."""
        self._current_steps = 1
        """Number of steps of the last delivery."""
        self._num_steps = 0
        self._num_samples = 0
        self._batch_samples = 0
        self._num_complete = 0
        self._num_samples_measured = 0
        self._compute_total_s = 0.0
        self._data_wait_total_s = 0.0
        self._num_overruns = 0
        """Steps whose real compute took longer than `step_wait_s`."""
        self._step_percentiles = Percentiles()
        self._wait_percentiles = Percentiles()
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)
        """Compute and data wait of each of the latest steps."""
        self._all_steps_s = 0.0
        """Compute and data wait of all complete steps together, also in the warm-up."""
        self._log = StepLog()
        self._run_began_s = 0.0
        """Start of the run by this timer's clock. It is set at the first delivery."""

    def begin_wait(self) -> None:
        """Record that ``next()`` was entered. With an emulated accelerator, first wait for the end of the step."""
        # If the previous wait failed, `end_wait` was not called, and the step of that wait is dropped.
        if self._begun_at is not None:
            self._compute_s = None
        now = self._clock()
        # The compute on the last batch ends here. After a pause, its end is not known.
        if self._delivered_at is not None:
            if self.step_wait_s is not None:
                now = self._wait_out_step(self._delivered_at, self.step_wait_s * self._current_steps, now)
            self._compute_s = now - self._delivered_at
            self._delivered_at = None
        self._begun_at = now

    def end_wait(self, num_samples: int, *, waited_s: float | None = None, num_steps: int = 1) -> None:
        """Record that a batch of ``num_samples`` samples is being delivered, or was delivered.

        Args:
            num_samples: Samples of all batches that are delivered.
            waited_s: Duration of the wait, if the wait ended before this call, as in TensorFlow, which reports batches
                late. The compute then began at the end of the wait. None means that the wait ends now.
            num_steps: Number of batches that are delivered together, one for each of the next steps, at least 1. Only
                the wait for the first batch is known. The wait and the compute are divided evenly among the steps.
        """
        assert self._begun_at is not None, "end_wait without begin_wait"
        now = self._clock()
        # The caller may measure `waited_s` by the wall clock. The system may set this clock during the wait, so limit
        # `waited_s` to the time since `begin_wait`.
        delivered_at = now if waited_s is None else min(now, self._begun_at + max(0.0, waited_s))
        # At the first delivery, compute when the run began, in the time of this timer's clock. `_run_clock` returns the
        # seconds since the start of the run. Without a known start, the run begins with this delivery.
        if self._num_steps == 0:
            self._run_began_s = delivered_at if self._run_clock is None else now - self._run_clock()
            if self._run_clock is not None:
                self._first_batch_at_s = max(0.0, delivered_at - self._run_began_s)
        with self._lock:
            if self._compute_s is not None:
                self._record(self._compute_s, delivered_at - self._begun_at, delivered_at - self._run_began_s)
            self._num_steps += num_steps
            self._num_samples += num_samples
            # If batches that are delivered together differ in size, count the largest: round the mean up.
            self._batch_samples = max(self._batch_samples, math.ceil(num_samples / num_steps))
        self._current_samples = num_samples
        self._current_steps = num_steps
        self._begun_at = self._compute_s = None
        self._delivered_at = delivered_at

    def pause(self) -> None:
        """Stop the clock at the end of a pass, until the next `begin_wait`. Idempotent.

        The last step of the pass depends on where the pass ends:

        - The loader is exhausted. Then ``next()`` calls this after `begin_wait`, which has set ``_compute_s`` to the
          compute on the last batch. The step ends with the first data wait of the next pass.
        - The script left the loop. Then `begin_wait` was not called. ``_compute_s`` is None, and the step is dropped.
        """
        self._begun_at = None
        self._delivered_at = None

    @property
    def is_waiting(self) -> bool:
        """Whether a ``next()`` is in progress, between `begin_wait` and `end_wait`. Thread-safe."""
        return self._begun_at is not None

    def recent(self) -> RecentSteps:
        """Return the latest complete steps, including steps of the warm-up. Thread-safe."""
        with self._lock:
            steps, num_complete, total_s = tuple(self._recent), self._num_complete, self._all_steps_s
        return RecentSteps(
            first=num_complete - len(steps),
            compute_s=tuple(compute_s for compute_s, _ in steps),
            wait_s=tuple(wait_s for _, wait_s in steps),
            total_s=total_s,
        )

    def summary(self) -> StepSummary:
        """Return the figures so far. Thread-safe."""
        num_skips, skips = (0, ()) if self.skips is None else self.skips.summary()
        with self._lock:
            num_measured = max(0, self._num_complete - self.warmup_steps)
            compute_s, wait_s = self._compute_total_s, self._data_wait_total_s
            total_s = compute_s + wait_s
            return StepSummary(
                name=self.name,
                num_steps=self._num_steps,
                num_samples=self._num_samples,
                batch_samples=self._batch_samples,
                warmup_steps=self.warmup_steps,
                num_steps_measured=num_measured,
                num_samples_measured=self._num_samples_measured,
                compute_total_s=compute_s,
                data_wait_total_s=wait_s,
                step_time_mean_s=total_s / num_measured if num_measured else None,
                step_time_p50_s=self._step_percentiles.get(0.5),
                step_time_p95_s=self._step_percentiles.get(0.95),
                data_wait_mean_s=wait_s / num_measured if num_measured else None,
                data_wait_p50_s=self._wait_percentiles.get(0.5),
                data_wait_p95_s=self._wait_percentiles.get(0.95),
                utilisation=compute_s / total_s if total_s > 0 else None,
                samples_per_s=self._num_samples_measured / total_s if total_s > 0 else None,
                step_wait_s=self.step_wait_s,
                num_emulation_overruns=self._num_overruns,
                num_skips=num_skips,
                skips=skips,
                by_source=tuple(
                    SourceSamples(name=name, num_samples=count) for name, count in self.extent.by_source.items()
                ),
                num_lanes_begun=self.extent.num_lanes_begun,
                shard_waits_s=slowest_shards(self.extent.shard_waits_s.copy()),
                compression=self.traffic.compression,
                batch_bytes=self.traffic.batch_bytes,
                saved_bytes=self.traffic.saved_bytes,
                dataset_samples=self.extent.dataset_samples,
                pass_samples=self.extent.pass_samples,
                num_passes=self.extent.num_passes,
                num_complete_passes=self.extent.num_complete_passes,
                pass_steps=self.extent.pass_steps,
                pass_steps_left=max(0, self.extent.pass_end - self.extent.num_passed),
                max_in_flight=self.extent.max_in_flight,
                num_not_delivered=max(0, self.extent.num_requested - self.extent.num_passed),
                first_batch_at_s=self._first_batch_at_s,
                history=self._log.series(),
            )

    def _wait_out_step(self, delivered_at: float, wait_s: float, now: float) -> float:
        """Wait until ``wait_s`` seconds have passed since the last delivery. Return the time when the wait ends.

        If more time has passed already, the real compute took longer than the emulated one, so count the steps as
        overruns.
        """
        if now - delivered_at > wait_s:
            with self._lock:
                self._num_overruns += self._current_steps
            return now
        # Sleep in a loop, because a sleep may end early.
        while (remaining_s := delivered_at + wait_s - now) > 0:
            self._sleep(remaining_s)
            now = self._clock()
        return now

    def _record(self, compute_s: float, wait_s: float, ended_s: float) -> None:
        """Record the steps of the last delivery.

        Args:
            compute_s: Seconds of compute on all batches of the delivery.
            wait_s: Seconds of the data wait that followed the compute and has just ended.
            ended_s: End of that wait, in seconds since the start of the run.
        """
        num_steps, samples = self._current_steps, self._current_samples
        for index in range(num_steps):
            # Divide the samples so evenly that the steps together have all of them.
            num_samples = samples * (index + 1) // num_steps - samples * index // num_steps
            self._record_step(compute_s / num_steps, wait_s / num_steps, num_samples)
            # Only the end of the delivery's last step is known. The earlier steps are assumed to end earlier by equal
            # shares of the time.
            left_s = (num_steps - 1 - index) / num_steps * (compute_s + wait_s)
            self._log.add_step(ended_s - left_s, compute_s / num_steps, wait_s / num_steps)

    def _record_step(self, compute_s: float, wait_s: float, num_samples: int) -> None:
        """Add a step to the sums. A step of the warm-up is left out of most sums."""
        self._num_complete += 1
        self._recent.append((compute_s, wait_s))
        self._all_steps_s += compute_s + wait_s
        if self.on_step is not None:
            self.on_step(compute_s, wait_s)
        if self._num_complete <= self.warmup_steps:
            return
        self._compute_total_s += compute_s
        self._data_wait_total_s += wait_s
        self._num_samples_measured += num_samples
        self._step_percentiles.add(compute_s + wait_s)
        self._wait_percentiles.add(wait_s)
