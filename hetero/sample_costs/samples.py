"""Measures samples in this process: CPU and wall time of each sample, and CPU time of collating and encoding."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.batches.indexed import IndexedWork
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest
from hetero.errors import ConfigError, DatasetError
from hetero.metrics.profile.parts import SampledWork
from hetero.metrics.profile.profile import Spread, SupplyProfile
from hetero.metrics.reading import SHARD_WAITS_S, run_delay_s
from hetero.spec import DatasetSpec
from hetero.system.cgroups import usable_cpus
from hetero.wire.framing import EncodedBatch

__all__ = ["CHUNK_S", "SampleTimes", "measure_samples", "requests_of", "split"]

CHUNK_S = 0.25
"""Largest time of one fetch in seconds, unless a single sample takes longer. Longer batches are fetched in parts."""
_MAX_FAILURES = 10
_MAX_SAMPLES = 20_000
_NUM_BATCHES = 4


@dataclass(slots=True, kw_only=True)
class SampleTimes:
    """Measured times. The first sample of a process does not count, because it opens files and fills caches."""

    sample_cpu_s: list[float] = field(default_factory=list)
    sample_wait_s: list[float] = field(default_factory=list)
    """Wall time minus CPU time of each sample. The wait for a CPU does not count."""
    batch_cpu_s: list[float] = field(default_factory=list)
    """CPU time per sample of collating and encoding, one value per batch."""
    read_bytes_per_sample: float | None = None
    """Bytes per sample that this process read from storage. None if the system does not count them."""
    cold_wait_s: float = 0.0
    """The part of each `sample_wait_s` that was measured apart, with shards that were not in memory."""
    batches: list[tuple[Any, int]] = field(default_factory=list)
    """The last batches, each with its number of samples."""

    def supply(self) -> SupplyProfile:
        """Return the figures of one process, for a host of unknown type.

        Raises:
            ConfigError: If nothing was measured.
        """
        return SupplyProfile(
            instance_type="",
            vcpus=usable_cpus(),
            sample_cpu_s=Spread.of(self.sample_cpu_s, "s", "measured"),
            sample_wait_s=Spread.of(self.sample_wait_s, "s", "measured"),
            batch_cpu_s=Spread.of(self.batch_cpu_s or [0.0], "s", "measured"),
        )


def requests_of(work: SampledWork) -> list[BatchRequest]:
    """Return the requests for the samples of a job, in batches of its size."""
    spec = DatasetSpec(work.dataset, work.arguments_json)
    # A request without collation has exactly one sample.
    size = work.batch_samples if work.collate else 1
    return [
        BatchRequest(
            spec=spec,
            work=IndexedWork(np.array(work.indices[begin : begin + size])),
            seed=work.seed,
            epoch=work.epoch,
            position=begin // size,
            collate=work.collate,
        )
        for begin in range(0, len(work.indices), size)
    ]


def split(requests: Sequence[BatchRequest], num_samples: int) -> Iterator[BatchRequest]:
    """Yield the requests in parts of at most ``num_samples`` samples.

    The parts leave out the purity check, because it would compute each sample twice.
    """
    for request in requests:
        total = request.work.num_samples
        # A request without samples stays one request.
        for begin in range(0, max(total, 1), num_samples):
            positions = range(begin, min(begin + num_samples, total))
            yield dataclasses.replace(request, work=request.work.part(positions), verify=False)


def measure_samples(
    built: BuiltDataset,
    requests: Sequence[BatchRequest],
    *,
    seconds: float,
    cpu_clock: Callable[[], float] = time.process_time,
) -> SampleTimes:
    """Fetch samples for some seconds, and return what they cost. Blocks.

    Args:
        built: The data set.
        requests: The samples. If all are fetched before the time is over, they are fetched again from the start.
        seconds: After this time, no other fetch begins.
        cpu_clock: Returns CPU seconds. The default counts all threads of this process.

    Raises:
        DatasetError: If the data set raises in more than `_MAX_FAILURES` fetches.
        ConfigError: If there is nothing to fetch.
    """
    if not requests:
        raise ConfigError("found no samples to measure; expected at least one request")
    # A lane that is begun anew reads all its earlier samples again. A job does this only if a host is lost.
    requests = [
        dataclasses.replace(each, work=each.work.unending()) if isinstance(each.work, LaneWork) else each
        for each in requests
    ]
    begin_s = time.perf_counter()
    times = SampleTimes()
    # `fetch` calls its argument ``cancelled`` before each sample, and ``on_samples`` after the last one. So `mark`
    # records when each sample begins, and `mark_end` when the last one ends. `start` and `stop` enclose each batch.
    watch = _Stopwatch(cpu_clock)
    read_before, num_samples, num_failures = _read_bytes(), 0, 0
    shards_before_s = sum(SHARD_WAITS_S.values())
    # Measure without a cache. A cache does not help in the first epoch of a job. Here it would help, because the same
    # samples are fetched again.
    with built.loading_anew():
        # Fetch one sample whose times do not count, because it opens files and fills caches. The bytes that it reads
        # count, so it counts in ``num_samples``. The time of this attempt gives the first chunk size, even if the
        # sample raises.
        with contextlib.suppress(DatasetError):
            fetch(built, next(split(requests, 1)), cancelled=watch.mark)
            num_samples += 1
        sample_s = time.perf_counter() - begin_s
        # Measure one chunk at a time. The first sample may take longer than the others, so the size is chosen twice.
        parts: Iterator[BatchRequest] = itertools.cycle(split(requests, _samples_per_chunk(sample_s)))
        is_first = True
        while is_first or (time.perf_counter() - begin_s < seconds and len(times.sample_cpu_s) < _MAX_SAMPLES):
            request = next(parts)
            watch.start()
            try:
                batch = fetch(built, request, cancelled=watch.mark, on_samples=watch.mark_end)
            except DatasetError:
                num_failures += 1
                if num_failures > _MAX_FAILURES:
                    raise
                continue
            # Encode the batch, because an endpoint encodes each batch, and this time is a part of what a batch costs.
            EncodedBatch(batch, copy=not built.makes_new_memory(collate=request.collate))
            watch.stop(times, request.work.num_samples)
            num_samples += request.work.num_samples
            # What a lane reports of itself is no sample.
            batch = batch[0] if isinstance(request.work, LaneWork) else batch
            times.batches = [*times.batches, (batch, request.work.num_samples)][-_NUM_BATCHES:]
            if is_first:
                is_first = False
                mean_s = sum(times.sample_cpu_s + times.sample_wait_s) / len(times.sample_cpu_s)
                # Leave out one chunk of the new size, because the first samples have been measured. This is not exact,
                # because the measured chunk may have had another size.
                parts = itertools.islice(itertools.cycle(split(requests, _samples_per_chunk(mean_s))), 1, None)
    if read_before is not None and (read_after := _read_bytes()) is not None:
        times.read_bytes_per_sample = (read_after - read_before) / num_samples
    shards_s = sum(SHARD_WAITS_S.values()) - shards_before_s
    if read_cold := getattr(built.user_dataset, "hetero_read_cold", None):
        # The samples above come from shards that the job has read, and are few. A job reads each shard whole, and once.
        cold_s, times.read_bytes_per_sample = read_cold(seconds)
        times.cold_wait_s = max(0.0, cold_s - shards_s / num_samples)
        times.sample_wait_s = [wait_s + times.cold_wait_s for wait_s in times.sample_wait_s]
    return times


def _samples_per_chunk(sample_s: float) -> int:
    """Return how many samples of ``sample_s`` seconds take `CHUNK_S` seconds, at least 1."""
    return max(1, int(CHUNK_S / max(sample_s, 1e-9)))


class _Stopwatch:
    """Measures one batch after another: the CPU and wall time of each sample, and the CPU time of the rest.

    For each batch call `start`, `mark` before each sample, `mark_end` after the last sample, and `stop`.
    """

    def __init__(self, cpu_clock: Callable[[], float]) -> None:
        self._cpu_clock = cpu_clock
        # Times when the samples of this batch began, and when the last sample ended, by each of the two clocks.
        self._cpu_s: list[float] = []
        self._wall_s: list[float] = []
        self._end_cpu_s = 0.0
        self._end_wall_s = 0.0
        # What `run_delay_s` returned when the batch began.
        self._delay_s = 0.0

    def start(self) -> None:
        """Begin a batch."""
        self._cpu_s.clear()
        self._wall_s.clear()
        self._delay_s = run_delay_s()

    def mark(self) -> bool:
        """Record that a sample begins. `fetch` calls this as its ``cancelled`` before each sample. Return False."""
        self._cpu_s.append(self._cpu_clock())
        self._wall_s.append(time.perf_counter())
        return False

    def mark_end(self) -> None:
        """Record that all samples are computed."""
        self._end_cpu_s, self._end_wall_s = self._cpu_clock(), time.perf_counter()

    def stop(self, times: SampleTimes, num_samples: int) -> None:
        """Record that the batch is encoded, and add its times to ``times``."""
        times.batch_cpu_s.append((self._cpu_clock() - self._end_cpu_s) / num_samples)
        cpu_wait_s = run_delay_s() - self._delay_s
        cpu_marks, wall_marks = [*self._cpu_s, self._end_cpu_s], [*self._wall_s, self._end_wall_s]
        if len(self._cpu_s) == num_samples:
            cpu_s = [end - begin for begin, end in itertools.pairwise(cpu_marks)]
            wall_s = [end - begin for begin, end in itertools.pairwise(wall_marks)]
        else:  # the data set computes all samples at once, so only their mean is known
            cpu_s = [(cpu_marks[-1] - cpu_marks[0]) / num_samples]
            wall_s = [(wall_marks[-1] - wall_marks[0]) / num_samples]
        # A sample waits for storage, or for a CPU that another process uses. Only the wait for storage counts. The wait
        # for a CPU is known only for all samples together, so the waits of all samples are reduced by one factor.
        waits_s = [max(0.0, wall - cpu) for wall, cpu in zip(wall_s, cpu_s, strict=True)]
        total_s = sum(waits_s)
        storage_share = max(0.0, 1.0 - cpu_wait_s / total_s) if total_s > 0 else 0.0
        times.sample_cpu_s += cpu_s
        times.sample_wait_s += [wait_s * storage_share for wait_s in waits_s]


def _read_bytes() -> int | None:
    """Return the bytes that this process has read from storage, or None if the system does not count them."""
    try:
        lines = Path(f"/proc/{os.getpid()}/io").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    except (OSError, ValueError, StopIteration):
        return None
