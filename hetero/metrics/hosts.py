"""Measures CPU, memory, network and GPU use of a host, in a thread.

A sampler with the scope ``host`` measures the whole machine. With the scope ``tree``, it measures its process and all
descendants of this process. This scope is for simulated hosts, which share a machine: all processes of a simulated host
descend from its launcher, which contains the sampler.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from hetero.documents.records import JsonRecord, limits
from hetero.metrics.reading import MAX_SHARDS
from hetero.metrics.usage_series import Percentiles, SeriesLog, UsagePoint, UsageSeries
from hetero.system.cpu_pressure import CpuReading, TaskWaits, pressure_between, read_cpus, stolen_between

__all__ = ["SCOPES", "GpuReading", "Gpus", "HostReading", "HostSampler", "HostUsage"]

logger = logging.getLogger(__name__)

SCOPES = ("host", "tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage(JsonRecord):
    """Resources that a host used while it was sampled. None replaces values that could not be read."""

    host: str
    """Host name in the cluster, for example ``algo-1``."""
    scope: str = field(metadata=limits(choices=SCOPES))
    """``host`` is the whole machine, ``tree`` is one process and its descendants."""
    duration_s: float
    """Seconds between the first and the last reading."""
    num_readings: int
    """Number of readings, including the first."""
    num_cpus: int = field(metadata=limits(minimum=1, maximum=1e6))
    """Logical CPUs of the machine, not of the instance type that it may emulate."""
    cpu_seconds: float
    """CPU time used."""
    cpu_percent_mean: float | None
    """Mean CPU use in percent of one logical CPU, as in CloudWatch: a fully used host of 8 CPUs shows 800."""
    cpu_percent_peak: float | None
    """Highest CPU use over one interval between readings."""
    memory_basis: str = field(metadata=limits(choices=("used", "rss")))
    """``used`` is total - available. ``rss`` is the sum over processes, which counts shared pages once per process."""
    memory_mean_bytes: float
    memory_peak_bytes: int
    memory_total_bytes: int
    network_sent_bytes: int | None
    """Bytes sent on all interfaces except loopback. None in scope ``tree``: Linux does not count them per process."""
    network_received_bytes: int | None
    num_gpus: int = field(default=0, metadata=limits(maximum=1024))
    """GPUs that NVML shows. 0 also if pynvml is not installed."""
    gpu_name: str | None = None
    gpu_percent_mean: float | None = field(default=None, metadata=limits(maximum=100))
    """NVML's utilisation (time with any kernel running), as the mean over the machine's GPUs and all readings."""
    gpu_percent_peak: float | None = field(default=None, metadata=limits(maximum=100))
    gpu_memory_peak_bytes: int | None = None
    """Highest sum over the GPUs at one reading."""
    memory_p99_bytes: float | None = None
    """Memory that 99 % of the readings do not exceed, within 1 %."""
    endpoints_private_bytes: int | None = None
    """Memory that the endpoints of the host do not share, as a sum over them, at the latest reading."""
    endpoints_shared_bytes: int | None = None
    """Memory that an endpoint shares with other processes, as the maximum over the endpoints: the data set that was
    built before they were forked, the script, and libraries."""
    endpoints_busy_s: float | None = None
    """Seconds that the endpoints of the host spent on batches, over all slots. With emulated vCPUs a slot is one vCPU,
    and the time is emulated. None without endpoints."""
    endpoints_wait_s: float | None = None
    """Seconds of these that the user's code waited, mostly for storage, and not for a CPU."""
    shard_waits_s: dict[str, float] = field(default_factory=dict, metadata=limits(max_items=MAX_SHARDS))
    """Seconds that the endpoints waited for the slowest files of `hetero.shards`, by path or URL."""
    endpoint_slots: int | None = None
    """Batches that the endpoints of the host compute at the same time."""
    batches_computed: int | None = None
    """Batches that the endpoints of the host made."""
    cpu_others: float | None = field(default=None, metadata=limits(maximum=1))
    """Share of the machine's CPU time that processes outside of the launcher's tree used. None if it is not known."""
    cpu_pressure: float | None = field(default=None, metadata=limits(maximum=1))
    """Share of time when a process waited for a CPU, see `hetero.system.cpu_pressure`."""
    cpu_waited: float | None = field(default=None, metadata=limits(maximum=1))
    """Time that threads of the launcher's tree waited for a CPU, as a sum over them, and as a share of `duration_s`."""
    cpu_stolen: float | None = field(default=None, metadata=limits(maximum=1))
    """Share of the wanted CPU time that the hypervisor gave to other machines."""
    began_monotonic_s: float | None = None
    """First reading, in seconds of the host's `time.monotonic`. It relates `series` to other events of this host."""
    series: UsageSeries = field(default_factory=UsageSeries)
    """History of the run in at most 120 intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One reading of the machine's GPUs."""

    name: str
    percents: tuple[float, ...]
    """Utilisation of each GPU in percent, at least one."""
    memory_bytes: int
    """Used memory of all GPUs together."""

    @property
    def mean_percent(self) -> float:
        """Mean utilisation of the GPUs in percent."""
        return sum(self.percents) / len(self.percents)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """One reading of the counters. CPU and network values are totals since a fixed time in the past."""

    cpu_total_s: float
    memory_bytes: int
    network_sent_bytes: int | None = None
    network_received_bytes: int | None = None
    gpus: GpuReading | None = None
    own_cpu_s: float | None = None
    """CPU time of the launcher and its descendants. None if other programs start the job's processes."""
    own_waited_s: float | None = None
    """Time that threads of the launcher and its descendants waited for a CPU. None if the kernel does not count it."""
    cpus: CpuReading | None = None


class HostSampler:
    """Samples the resources of a host until stopped. A context manager.

    Args:
        host: Host name in the cluster.
        scope: ``host`` samples the whole machine. ``tree`` samples this process and its descendants.
        starts_all: Whether this process has started all processes of the job on this host, directly or indirectly. If
            not, for example because mpirun starts the ranks, the CPU time of the job on this host is not known.
        interval_s: Seconds between readings.
        read: Takes a reading. The default reads this machine with psutil and, if `pynvml` is installed, NVML.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        host: str,
        *,
        scope: str = "host",
        starts_all: bool = True,
        interval_s: float = 1.0,
        read: Callable[[], HostReading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.scope = scope
        self._interval_s = interval_s
        self._clock = clock
        self._gpus = Gpus()
        self._read = read or _reader(scope, self._gpus, starts_all=starts_all)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._totals = _Totals()
        self._began_s: float | None = None

    def start(self) -> HostSampler:
        """Take the first reading and begin sampling. Return self."""
        assert self._thread is None, "a HostSampler starts once"
        self.sample()
        self._thread = threading.Thread(target=self._run, name=f"hetero-usage-{self.host}", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 5.0) -> HostUsage:
        """Take a last reading and end the thread, within ``timeout_s`` seconds. Idempotent."""
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is not None:
                # End the thread first, because the reading below must be the last one.
                self._thread.join(timeout_s)
            self.sample()
            self._gpus.close()
        return self.usage()

    def sample(self) -> None:
        """Take one reading now. If that fails, skip it. Thread-safe."""
        with self._lock:
            try:
                reading = self._read()
            except (psutil.Error, OSError) as error:
                logger.debug("no reading of %s: %s", self.host, error)
                return
            now_s = self._clock()
            if self._began_s is None:
                self._began_s = now_s
            # `stop` takes the last reading, which may follow at once on the one before it. `_Totals.add` leaves the CPU
            # use of such a short interval out of the peak. Regular intervals are longer than this quarter.
            self._totals.add(reading, now_s, min_interval_s=self._interval_s / 4)

    def usage(self) -> HostUsage:
        """Return the use so far. Thread-safe."""
        with self._lock:
            return self._totals.usage(self.host, self.scope, self._began_s)

    def __enter__(self) -> HostSampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._wake.wait(self._interval_s):
            self.sample()


class _Totals:
    """Sums and peaks over readings. It uses neither a clock nor I/O."""

    def __init__(self) -> None:
        self._first: HostReading | None = None
        self._last: HostReading | None = None
        self._first_at = self._last_at = 0.0
        self._num_readings = 0
        self._cpu_s = 0.0
        self._own_cpu_s = 0.0
        """CPU time that the launcher and its descendants used since the first reading, without other programs."""
        self._cpu = Percentiles()
        self._memory = Percentiles()
        self._gpu = Percentiles()
        self._gpu_memory = Percentiles()
        self._series = SeriesLog()

    def add(self, reading: HostReading, now: float, *, min_interval_s: float) -> None:
        """Add a reading to the sums, the peaks and the series.

        Args:
            reading: The reading.
            now: Time of the reading in monotonic seconds.
            min_interval_s: Shortest interval between two readings whose CPU use counts for the peak.
        """
        if self._last is None:
            self._first, self._first_at = reading, now
        else:
            # In scope ``tree``, the total falls if a process ends and its parent does not reap it. The time that the
            # process used since the last reading is lost. Time that was counted before stays counted.
            used_s = max(0.0, reading.cpu_total_s - self._last.cpu_total_s)
            self._cpu_s += used_s
            self._own_cpu_s += max(0.0, (reading.own_cpu_s or 0.0) - (self._last.own_cpu_s or 0.0))
            interval_s = now - self._last_at
            # Skip a very short last interval, because CPU counters tick every 10 ms, so the quotient means nothing. The
            # `> 0` avoids a division by 0.
            if interval_s >= min_interval_s > 0:
                self._cpu.add(100 * used_s / interval_s)
            if interval_s > 0:
                self._series.add(self._point(reading, used_s, now - interval_s, now))
        self._last, self._last_at = reading, now
        self._num_readings += 1
        self._memory.add(reading.memory_bytes)
        if reading.gpus is not None:
            self._gpu.add(reading.gpus.mean_percent)
            self._gpu_memory.add(reading.gpus.memory_bytes)

    def _point(self, reading: HostReading, used_s: float, begin: float, end: float) -> UsagePoint:
        """Return the point of the series for the interval between two readings."""
        gpus = reading.gpus
        return UsagePoint(
            begin_s=begin - self._first_at,
            end_s=end - self._first_at,
            cpu_percent=100 * used_s / (end - begin),
            memory_mean_bytes=reading.memory_bytes,
            memory_peak_bytes=reading.memory_bytes,
            gpu_percent=None if gpus is None else gpus.mean_percent,
            gpu_memory_bytes=None if gpus is None else gpus.memory_bytes,
        )

    def usage(self, host: str, scope: str, began_monotonic_s: float | None) -> HostUsage:
        """Return the sums, peaks and percentiles of all readings so far. Without readings, most are 0 or None."""
        first, last = self._first, self._last
        duration_s = self._last_at - self._first_at
        gpus = last.gpus if last is not None else None
        return HostUsage(
            host=host,
            scope=scope,
            duration_s=duration_s,
            num_readings=self._num_readings,
            num_cpus=psutil.cpu_count() or 1,
            cpu_seconds=self._cpu_s,
            cpu_percent_mean=100 * self._cpu_s / duration_s if duration_s > 0 else None,
            cpu_percent_peak=self._cpu.largest,
            memory_basis="used" if scope == "host" else "rss",
            memory_mean_bytes=self._memory.mean or 0.0,
            memory_peak_bytes=int(self._memory.largest or 0),
            memory_total_bytes=psutil.virtual_memory().total,
            network_sent_bytes=_growth(first, last, "network_sent_bytes"),
            network_received_bytes=_growth(first, last, "network_received_bytes"),
            num_gpus=len(gpus.percents) if gpus is not None else 0,
            gpu_name=gpus.name if gpus is not None else None,
            gpu_percent_mean=self._gpu.mean,
            gpu_percent_peak=self._gpu.largest,
            gpu_memory_peak_bytes=None if self._gpu_memory.largest is None else int(self._gpu_memory.largest),
            memory_p99_bytes=self._memory.get(0.99),
            **self._cpu_shares(),
            began_monotonic_s=began_monotonic_s,
            series=self._series.series(),
        )

    def _cpu_shares(self) -> dict[str, Any]:
        """Return the fields of `HostUsage` that show other work on the CPUs. Empty if the counters are not known."""
        first, last = self._first, self._last
        if first is None or last is None or first is last:
            return {}
        # Without the CPU time of the job's own processes, the CPU time of all other processes is not known.
        if first.cpus is None or last.cpus is None or last.own_cpu_s is None:
            return {}
        # The 1e-9 avoids a division by 0.
        duration_s = max(self._last_at - self._first_at, 1e-9)
        all_cpus_s = duration_s * (psutil.cpu_count() or 1)
        # The kernel counts busy time in ticks.
        busy_s = (last.cpus.busy - first.cpus.busy) / os.sysconf("SC_CLK_TCK")
        # `_own_cpu_s` is what the launcher and its descendants used between the first and the last reading.
        others = (busy_s - self._own_cpu_s) / all_cpus_s
        # The sum of the waits is None until a thread has waited.
        waited = None if last.own_waited_s is None else (last.own_waited_s - (first.own_waited_s or 0.0)) / duration_s
        return {
            "cpu_others": min(1.0, max(0.0, others)),
            "cpu_pressure": pressure_between(first.cpus, last.cpus),
            "cpu_waited": None if waited is None else min(1.0, max(0.0, waited)),
            "cpu_stolen": stolen_between(first.cpus, last.cpus),
        }


def _growth(first: HostReading | None, last: HostReading | None, name: str) -> int | None:
    """Return by how much a counter grew between two readings, or None if one of them lacks the counter."""
    before, after = getattr(first, name, None), getattr(last, name, None)
    return None if before is None or after is None else max(0, after - before)


def _reader(scope: str, gpus: Gpus, *, starts_all: bool) -> Callable[[], HostReading]:
    """Return a function that reads the counters of the whole host, or of this process and its descendants.

    Args:
        scope: See `HostSampler`.
        gpus: The GPUs of the machine.
        starts_all: Whether all processes of the job on this host are descendants of this process, see `HostSampler`.
    """
    root, waits = psutil.Process(), TaskWaits()

    def read() -> HostReading:
        # Scope ``host`` needs the descendants too, because the CPU time of other programs is the time of the host minus
        # the time of the job. If this process did not start all processes of the job (`starts_all`), the time of its
        # descendants is not the time of the job.
        descendants = _read_tree(root, waits) if starts_all or scope == "tree" else None
        # The second condition is for the type checker. In scope ``tree`` the descendants have been read.
        reading = _read_host() if scope == "host" or descendants is None else descendants
        own_cpu_s = None if descendants is None else descendants.cpu_total_s
        return replace(reading, gpus=gpus.read(), own_cpu_s=own_cpu_s, own_waited_s=waits.total_s, cpus=read_cpus())

    return read


def _read_host() -> HostReading:
    """Return the present counters of the whole host."""
    cpu = psutil.cpu_times()
    # User time already contains guest time. steal and iowait are not time that this host used.
    busy_s = cpu.user + cpu.nice + cpu.system + getattr(cpu, "irq", 0.0) + getattr(cpu, "softirq", 0.0)
    memory = psutil.virtual_memory()
    interfaces = psutil.net_io_counters(pernic=True)
    counters = [counter for name, counter in interfaces.items() if name != "lo"]
    return HostReading(
        cpu_total_s=busy_s,
        memory_bytes=memory.total - memory.available,
        network_sent_bytes=sum(counter.bytes_sent for counter in counters),
        network_received_bytes=sum(counter.bytes_recv for counter in counters),
    )


def _read_tree(root: psutil.Process, waits: TaskWaits) -> HostReading:
    """Return the present counters of a process and all its descendants. Add the waits of their threads to ``waits``."""
    cpu_s, memory_bytes = 0.0, 0
    for process in [root, *root.children(recursive=True)]:
        try:
            with process.oneshot():
                cpu = process.cpu_times()
                memory_bytes += process.memory_info().rss
        except psutil.Error:
            # The process ended between listing and reading.
            continue
        # Each reading can afford this call. It takes 0.04 ms for a process of a few threads.
        waits.add(process.pid)
        # children_* is the time of descendants that were reaped. Living descendants are in the list themselves.
        cpu_s += cpu.user + cpu.system + cpu.children_user + cpu.children_system
    return HostReading(cpu_total_s=cpu_s, memory_bytes=memory_bytes)


class Gpus:
    """The machine's GPUs, read with `pynvml`. Without it or a driver, as on most data hosts, `read` returns None."""

    def __init__(self) -> None:
        # If a call fails, the host counts as a host without GPUs. `close` ends NVML only if it was initialised.
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            # Older versions of pynvml return bytes.
            name = nvml.nvmlDeviceGetName(self._handles[0]) if self._handles else ""
            self._name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        except Exception as error:  # noqa: BLE001 - pynvml has its own exceptions, which differ between versions
            logger.debug("no GPU figures: %s", error)
            self._handles = []

    def read(self) -> GpuReading | None:
        """Return a reading, or None without GPUs. Once a GPU cannot be read, return None from then on."""
        if not self._handles:
            return None
        try:
            percents = tuple(float(self._nvml.nvmlDeviceGetUtilizationRates(h).gpu) for h in self._handles)
            memory_bytes = sum(int(self._nvml.nvmlDeviceGetMemoryInfo(h).used) for h in self._handles)
        except Exception as error:  # noqa: BLE001 - as in `__init__`, and MIG slices have no utilisation
            logger.debug("no GPU figures: %s", error)
            self._handles = []
            return None
        return GpuReading(name=self._name, percents=percents, memory_bytes=memory_bytes)

    def close(self) -> None:
        """Release NVML. Idempotent."""
        if self._nvml is not None:
            # pynvml has its own exceptions, which differ between versions.
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml, self._handles = None, []
