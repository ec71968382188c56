"""Profiles the loaders of a rank: counts their steps by phase, repeats batches, and reports to the launcher.

`LoaderProfiler` belongs to one loader. `ProfiledBatches` is one pass of this loader. The rank reports only the loader
with the most time, because a script may also have loaders for validation. All loaders go through the same phases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hetero.batches.build import BuiltDataset
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators, single_threaded
from hetero.control.rank.session import RankSession
from hetero.errors import DatasetError
from hetero.loaders.kept_batches import KeptBatches
from hetero.loaders.measuring.phases import Phase, Phases
from hetero.loaders.pipeline import LoaderPipeline
from hetero.loaders.prefetching import Batches, EpochRequests
from hetero.metrics.hosts import Gpus
from hetero.metrics.profile.parts import MAX_ARGUMENTS_CHARS, MAX_INDICES, MIN_STEPS, Contents, RankPart, SampledWork
from hetero.metrics.profile.profile import Spread, SupplyProfile
from hetero.spec import DatasetSpec

__all__ = ["LoaderProfiler", "ProfiledBatches", "measure_here"]

logger = logging.getLogger(__name__)

_MAX_REQUESTS = 256
_MAX_TRAINING_S = 75.0
"""Seconds after the first delivery. From then on, `MIN_STEPS` measured steps are enough, for example if the script is
in a long validation."""
_GPU_INTERVAL_S = 0.5
_MEASURE_S = 4.0
"""Seconds of the measurement of samples in a rank."""

_profilers: dict[tuple[str, str, str], LoaderProfiler] = {}
"""The profilers of this rank, by the kind of their loaders."""
_latest: LoaderProfiler | None = None
"""The profiler of the loader that delivered the last batch."""


Measure = Callable[[list[BatchRequest]], tuple[SupplyProfile, Contents]]
"""Function that fetches batches in this process and returns what they cost."""


class LoaderProfiler:
    """Follows one loader through the phases of a profile run.

    The thread that trains calls the methods, except for `part`. `delivering` and `repeated` may also be called in the
    thread that takes batches for the framework.

    Args:
        pipeline: The loader.
        session: The session of this rank.
        kept: The batches that the loader repeats. Empty at first.
        num_processes: Processes of this rank that fetch the loader's batches.
        measure: Measures the supply in this rank. Called if hosts cannot build the data set.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        pipeline: LoaderPipeline,
        session: RankSession,
        kept: KeptBatches,
        *,
        num_processes: int,
        measure: Measure,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kept = kept
        self.phases = Phases(session.options.warmup_steps)
        self.batches_per_step = 1
        """Batches that a step consumes."""
        self._pipeline = pipeline
        self._rank = session.rank
        self._basis = "measured" if session.options.emulate_step_s is None else "simulated"
        self._num_processes = num_processes
        self._measure = measure
        self._clock = clock
        self._first_s: float | None = None
        self._steps_per_epoch: int | None = None
        self._batch_samples = 0
        self._unfetched: deque[BatchRequest] = deque(maxlen=_MAX_REQUESTS)
        """The first `_MAX_REQUESTS` requests that kept batches have answered. Nothing was fetched for them."""
        self._fetched: deque[BatchRequest] = deque(maxlen=_MAX_REQUESTS)
        """The latest requests whose batches were fetched."""
        self._usage = _Usage(kept)
        self._measured_here: tuple[SupplyProfile, Contents] | None = None
        """Return value of ``measure``. None if this rank has not measured samples."""
        self._note = ""
        """Why this rank measures samples, and whether that failed. Empty if hosts measure them."""
        self._is_measured = False
        """Whether `measure_rest` has run."""
        self._is_typical = True
        """Whether the step that ends now may be measured. `begin_delivery` decides this."""
        self._has_fetched = False
        """Whether the step that ends now contains fetched batches."""
        self._knows_waits = True
        """Whether each measured data wait so far contains the waits for all batches of its step."""

    def shared(self, session: RankSession) -> LoaderProfiler:
        """Return the profiler that all loaders of this kind share, and connect it to the timer of this loader.

        A script may make a new loader of the same kind for every epoch. The profiler of the first one measures all.

        Args:
            session: The session of this rank. From now on, the session reports what the profilers measure.
        """
        profiler = _profilers.setdefault(self._pipeline.kind, self)
        self._pipeline.timer.on_step = profiler._on_step
        session.set_profile(_part)
        return profiler

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first delivery."""
        return 0.0 if self._first_s is None else self._clock() - self._first_s

    @property
    def is_done(self) -> bool:
        """Whether all steps are measured, and on rank 0 also the samples that hosts cannot measure."""
        return self.phases.phase is Phase.DONE and (self._rank != 0 or self._is_measured)

    @property
    def repeats(self) -> bool:
        """Whether the next delivery repeats a batch."""
        return self.phases.repeats and len(self.kept) > 0

    def begin_delivery(self, *, is_first: bool, has_fetched: bool = False, knows_wait: bool = True) -> None:
        """Record whether the steps that end now are typical. Only typical steps are measured.

        A step is not typical in three cases:

        - Another loader has delivered batches in it, because the script then validates within the step. The first step
          of a pass is exempt, because the time between two passes belongs to no step.
        - It is the first step of a pass, and runs without profiling request its batch in the epoch before.
        - It contains fetched batches in the headspace phase. The framework had taken these batches ahead.

        Args:
            is_first: Whether the batch is the first of its pass.
            has_fetched: Whether the steps contain fetched batches. They may, even if the loader repeats batches now.
            knows_wait: Whether the data wait of the steps contains the waits for all their batches.
        """
        global _latest
        # A run without profiling may request the first batch in the epoch before. It hardly waits for this batch.
        is_first_typical = not self._pipeline.may_add_next_epochs
        # ``_latest is self``: no other loader has delivered a batch since this loader's last one.
        self._is_typical = is_first_typical if is_first else _latest is self
        self._has_fetched = has_fetched
        self._knows_waits = self._knows_waits and knows_wait
        _latest = self

    def delivering(self, request: BatchRequest, batch: Any, *, num_prefetched: int) -> None:
        """Record a fetched batch that is about to be delivered, and keep a copy if it is one of the largest so far.

        Args:
            request: The request of the batch.
            batch: The batch.
            num_prefetched: Batches that are being fetched, or that the script has not consumed. This batch counts.
        """
        # Rounded up. The window is a number of steps, because a phase is planned in steps.
        self.phases.window = max(self.phases.window, -(-num_prefetched // self.batches_per_step))
        if self._first_s is None:
            self._first_s = self._clock()
            with contextlib.suppress(Exception):  # the user's __len__, which may be missing or raise anything
                self._steps_per_epoch = self._pipeline.num_batches()
        num_samples = request.work.num_samples
        if num_samples >= self._batch_samples:
            self._batch_samples = num_samples
            # Copy batches only in the warm-up, because later the copy would lengthen a measured step. But if none is
            # kept yet, keep this one, because the headspace phase needs one.
            if self.phases.phase is Phase.WARMUP or not len(self.kept):
                self.kept.keep(batch)
        self._fetched.append(request)

    def repeated(self, request: BatchRequest) -> Any:
        """Return a kept batch in place of the one that was requested."""
        # Keep the first requests, because the job would have fetched these next. See `_work`.
        if len(self._unfetched) < _MAX_REQUESTS:
            self._unfetched.append(request)
        return self.kept.next()

    def measure_if_done(self) -> None:
        """If all steps are measured, measure in this rank what hosts cannot measure. Blocks for seconds, once."""
        if self.phases.phase is Phase.DONE:
            self.measure_rest()

    def measure_rest(self) -> None:
        """Measure the samples in this rank if hosts cannot do so after the training. Only rank 0 does this, once."""
        if self._is_measured or self._rank != 0:
            return
        work = self._work()
        # A text is the reason why no host can fetch the samples.
        if isinstance(work, str):
            self._note = work
            logger.info("measuring samples in this rank, because %s", self._note)
            try:
                self._measured_here = self._measure([*self._unfetched, *self._fetched])
            except Exception as error:
                logger.warning("the samples could not be measured in this rank", exc_info=True)
                self._note += f". Measuring them in the rank failed: {type(error).__name__}: {str(error)[:200]}"
        self._is_measured = True

    def part(self, *, is_last: bool) -> RankPart:
        """Return the measurements. If measuring goes on, return only the progress. Thread-safe.

        Args:
            is_last: Whether the script has ended.
        """
        phases = self.phases
        # All steps are measured, but rank 0 has yet to measure samples. Report HEADSPACE until then, because the
        # launcher ends the run when all ranks report DONE.
        has_rest = phases.phase is Phase.DONE and not self.is_done
        part = RankPart(
            loader=self._pipeline.name,
            phase=Phase.HEADSPACE.value if has_rest else phases.phase.value,
            num_steps=phases.num_steps,
            num_planned=phases.num_planned,
            num_steps_total=phases.num_steps_total,
            batch_samples=self._batch_samples * self.batches_per_step,
            num_loader_processes=self._num_processes,
            steps_per_epoch=(self._steps_per_epoch or 0) // self.batches_per_step or None,  # None if not known
            requests_ahead=self._pipeline.requests_ahead,
        )
        # In a long validation, no more steps are measured. Report what there is, and DONE so that the run ends.
        is_late = self.elapsed_s > _MAX_TRAINING_S and len(phases.step_s) >= MIN_STEPS
        if not (self.is_done or is_last or is_late):
            return part
        if is_last:
            self.measure_rest()
        num_steps = min(len(phases.step_s), len(phases.data_wait_s))  # the script may be about to add a step
        # The launcher uses only the samples of rank 0. A text stands for no samples.
        work = self._work() if self._rank == 0 else ""
        # The costs of samples, if `measure_rest` has measured them in this rank because no host can.
        supply, contents = (None, None) if self._measured_here is None else self._measured_here
        return dataclasses.replace(
            part,
            phase=Phase.DONE.value if is_late else part.phase,
            step_s=_spread(phases.step_s[:num_steps], self._basis),
            data_wait_s=self._data_wait(num_steps),
            headspace_s=_spread(phases.headspace_s[:], self._basis),
            cpu_cores=self._usage.cpu_cores,
            gpu_percent=self._usage.gpu_percent,
            work=None if isinstance(work, str) else work,
            supply=supply,
            contents=contents,
            note=self._note,
            is_registered=isinstance(self._pipeline.subject, DatasetSpec),
        )

    def _on_step(self, compute_s: float, data_wait_s: float) -> None:
        """Record a complete step, and read CPU and GPU use in the headspace phase. The loader's timer calls this."""
        step_s = compute_s + data_wait_s
        # In the phases that repeat batches, a step on fetched batches does not count, because it may have waited.
        is_typical = self._is_typical and not (self.phases.repeats and self._has_fetched)
        self.phases.step(step_s, data_wait_s, elapsed_s=self.elapsed_s, is_typical=is_typical)
        # Measure the use of CPU and GPUs in the same steps as the time of the HEADSPACE phase.
        if self.phases.phase is Phase.HEADSPACE and not self.phases.measures_headspace:
            self._usage.prepare()
        elif self.phases.repeats:
            self._usage.update(is_over=self.phases.phase is Phase.DONE)

    def _data_wait(self, num_steps: int) -> Spread | None:
        """Return the data wait of the first ``num_steps`` measured steps of the RUNNING phase. None if not known.

        If the framework takes several batches at once, only the wait for the first of them is measured. Then the data
        wait is computed from at least `MIN_STEPS` steps of the HEADSPACE phase, which have no waits.
        """
        phases = self.phases
        if self._knows_waits:
            return _spread(phases.data_wait_s[:num_steps], self._basis)
        step_s, headspace_s = phases.step_s[:num_steps], phases.headspace_s[:]
        if not step_s or len(headspace_s) < MIN_STEPS:
            return None
        # A step of the RUNNING phase is longer than one of the HEADSPACE phase only because of its waits.
        share = max(0.0, 1.0 - statistics.fmean(headspace_s) / statistics.fmean(step_s))
        return _spread([share * seconds for seconds in step_s], "modelled")

    def _work(self) -> SampledWork | str:
        """Return samples that a host measures after the training. If no host can fetch them, return the reason.

        Samples that the job would have fetched next come first, because files of fetched samples may still be in the
        memory of a host.
        """
        spec = self._pipeline.subject
        if not isinstance(spec, DatasetSpec):
            return "the data set is an object, which only this process has. Register its factory with @hetero.dataset"
        if len(spec.arguments_json) > MAX_ARGUMENTS_CHARS:
            return f"the data set's arguments have more than {MAX_ARGUMENTS_CHARS} characters"
        has_no_integers = "its samples have no indices, or indices that are not integers"
        requests = [*self._unfetched, *self._fetched]
        indices: list[int] = []
        for request in requests:
            if not isinstance(request.work, IndexedWork) or isinstance(request.work.indices, tuple):
                return str(getattr(request.work, "no_indices", has_no_integers))
            indices += request.work.indices.tolist()
            if len(indices) >= MAX_INDICES:
                break
        if not indices:
            return has_no_integers
        return SampledWork(
            dataset=spec.name,
            arguments_json=spec.arguments_json,
            indices=tuple(indices[:MAX_INDICES]),
            batch_samples=max(1, self._batch_samples),
            seed=requests[0].seed,
            epoch=requests[0].epoch,
            collate=requests[0].collate,
        )


class ProfiledBatches(Iterator[Any]):
    """The batches of one pass of a profiled loader: first fetched batches, then kept batches.

    The pass has as many batches as without profiling, because schedulers of scripts count steps. Once the profiler
    repeats batches, each remaining request gets a kept batch, and nothing more is fetched.

    Args:
        profiler: The loader's profiler.
        requests: The batches of the pass. The caller reports each delivered batch to this object before the next one.
        open_source: Starts to fetch batches.
        num_unconsumed: Returns how many batches the framework has taken from this iterator and not yet given to the
            script. The caller then reports to the profiler when the script gets them. None if the script gets each
            batch at once.
    """

    may_be_kept = False
    """Whether this object may stay open between two passes. Never, because a profile run measures each pass."""

    def __init__(
        self,
        profiler: LoaderProfiler,
        requests: EpochRequests,
        open_source: Callable[[EpochRequests], Batches],
        num_unconsumed: Callable[[], int] | None = None,
    ) -> None:
        self._profiler = profiler
        self._requests = requests
        self._source: Batches | None = None if profiler.repeats else open_source(requests)
        self._num_unconsumed = num_unconsumed
        """If not None, the framework takes batches ahead, and the caller itself reports when the script gets one."""
        self._is_closed = False
        self._is_first = True
        """Whether the next batch is the first one of the pass."""
        self.request: BatchRequest | None = None
        """Request of the batch that `next` returned or raised an exception for."""
        self.is_repeated = False
        """Whether the batch that `next` returned is a kept one."""

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return not self._is_closed and (self._source is None or self._source.is_open)

    def __next__(self) -> Any:
        """Return the next batch: a fetched one, or a kept one if the profiler repeats batches. Blocks.

        Report the batch to the profiler, and set `request` and `is_repeated`.
        """
        if self._is_closed:
            raise StopIteration
        # In the HEADSPACE phase every batch is a kept one, because the script must never wait for data.
        if self._profiler.repeats:
            # Close the source, which would otherwise go on fetching ahead.
            if self._source is not None:
                self._source.close()
                self._source = None
            # The batches that the source had requested come next in the pass, so replace these first. The caller
            # removes each from ``in_flight`` when it reports its delivery.
            in_flight = self._requests.in_flight
            self.request = in_flight[0] if in_flight else next(self._requests)
            self.is_repeated = True
            self._begin_delivery()
            return self._profiler.repeated(self.request)
        assert self._source is not None
        try:
            batch = next(self._source)
        except DatasetError:
            self.request = self._source.request
            raise
        self.request = self._source.request
        assert self.request is not None
        self._begin_delivery()
        # Batches that are fetched ahead are in flight, or in a buffer of the framework.
        num_prefetched = len(self._requests.in_flight)
        if self._num_unconsumed is not None:
            num_prefetched += self._num_unconsumed()
        self._profiler.delivering(self.request, batch, num_prefetched=num_prefetched)
        return batch

    def _begin_delivery(self) -> None:
        """Report to the profiler that the script gets a batch, unless the caller reports this itself."""
        # If the framework takes batches ahead of the script, only the caller knows when the script gets one.
        if self._num_unconsumed is not None:
            return
        self._profiler.measure_if_done()
        self._profiler.begin_delivery(is_first=self._is_first)
        self._is_first = False

    def close(self) -> None:
        """Discard the batches in flight. Idempotent."""
        self._is_closed = True
        if self._source is not None:
            self._source.close()


def measure_here(make: Callable[[], BuiltDataset], requests: list[BatchRequest]) -> tuple[SupplyProfile, Contents]:
    """Fetch some of the requests in this process for a profile, and return what they cost. Blocks for seconds.

    Args:
        make: Returns the data set.
        requests: The batches of the job.

    Raises:
        DatasetError: If the user's code raises.
    """
    from hetero.sample_costs.contents import measure_contents  # imports the wire format, which loaders do not need
    from hetero.sample_costs.samples import measure_samples

    # Leave the script's random numbers as they are, and compute with one thread, as endpoints do.
    with preserved_generators(), single_threaded():
        # Other threads of this process may work at the same time, so only this thread's CPU time counts.
        times = measure_samples(make(), requests, seconds=_MEASURE_S, cpu_clock=time.thread_time)
        contents = measure_contents(times.batches, batch_samples=max(each.work.num_samples for each in requests))
    return times.supply(), contents


class _Usage:
    """CPU and GPU use of this process during the headspace phase."""

    def __init__(self, kept: KeptBatches) -> None:
        self._kept = kept
        self._first: tuple[float, float] | None = None
        """First reading: time and CPU time of this process, in seconds."""
        self._last: tuple[float, float] | None = None
        """Latest such reading."""
        self._gpus: Gpus | None = None
        self._gpu_percents: list[float] = []
        self._next_gpu_s = 0.0

    def prepare(self) -> None:
        """Open NVML before the first reading, because opening takes longer than a reading."""
        if self._gpus is None:
            self._gpus = Gpus()

    def update(self, *, is_over: bool) -> None:
        """Read the counters after a step.

        Args:
            is_over: Whether the phase has ended. Later steps do not count.
        """
        if self._gpus is None:  # the phase has already ended
            return
        now_s = time.perf_counter()
        reading = now_s, time.process_time() - self._kept.cpu_s  # copies of kept batches are no training
        self._first = self._first or reading
        self._last = reading
        if now_s >= self._next_gpu_s:
            self._next_gpu_s = now_s + _GPU_INTERVAL_S
            found = self._gpus.read()
            if found is not None and found.percents:
                self._gpu_percents.append(sum(found.percents) / len(found.percents))
        if is_over:
            self._gpus.close()
            self._gpus = None

    @property
    def cpu_cores(self) -> float | None:
        """CPUs that this process kept busy. Copies of kept batches do not count. None if not measured."""
        if self._first is None or self._last is None:
            return None
        (first_s, first_cpu_s), (last_s, last_cpu_s) = self._first, self._last
        # Not negative: the thread that copies batches may have used more CPU time since its time was read.
        return max(0.0, (last_cpu_s - first_cpu_s) / (last_s - first_s)) if last_s > first_s else None

    @property
    def gpu_percent(self) -> float | None:
        """Mean utilisation of the machine's GPUs. None without NVML."""
        return sum(self._gpu_percents) / len(self._gpu_percents) if self._gpu_percents else None


def _spread(values: list[float], basis: str) -> Spread | None:
    """Return the spread of measured seconds. None without values."""
    return Spread.of(values, "s", basis) if values else None


def _part(is_last: bool) -> bytes:
    """Return what the loader with the most time has measured, as JSON."""
    busiest = max(_profilers.values(), key=lambda profiler: profiler.phases.total_s)
    return busiest.part(is_last=is_last).to_json()
