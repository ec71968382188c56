"""Host sampler: sums and peaks from fake readings, and one look at the real machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from hetero.documents.records import decode
from hetero.errors import ConfigError
from hetero.metrics.hosts import GpuReading, HostReading, HostSampler, HostUsage
from hetero.system.cpu_pressure import CpuReading


def make_sampler(readings: list[HostReading], times: list[float], **options: object) -> HostSampler:
    source, clock = iter(readings), iter(times)
    return HostSampler("algo-1", read=lambda: next(source), clock=lambda: next(clock), **options)


def test_usage_over_readings_gives_means_and_peaks() -> None:
    gpu = [GpuReading(name="H", percents=(p, p), memory_bytes=m) for p, m in ((50, 5), (100, 7), (0, 6))]
    sampler = make_sampler(
        [
            HostReading(
                cpu_total_s=10.0, memory_bytes=100, network_sent_bytes=1000, network_received_bytes=50, gpus=gpu[0]
            ),
            HostReading(
                cpu_total_s=12.0, memory_bytes=300, network_sent_bytes=1500, network_received_bytes=60, gpus=gpu[1]
            ),
            HostReading(
                cpu_total_s=13.0, memory_bytes=200, network_sent_bytes=1600, network_received_bytes=70, gpus=gpu[2]
            ),
        ],
        [0.0, 1.0, 3.0],
    )
    for _ in range(3):
        sampler.sample()
    usage = sampler.usage()
    assert (usage.duration_s, usage.num_readings, usage.cpu_seconds) == (3.0, 3, 3.0)
    assert usage.cpu_percent_mean == pytest.approx(100.0)
    assert usage.cpu_percent_peak == pytest.approx(200.0)
    assert (usage.memory_mean_bytes, usage.memory_peak_bytes) == (200.0, 300)
    assert (usage.network_sent_bytes, usage.network_received_bytes) == (600, 20)
    assert (usage.num_gpus, usage.gpu_percent_mean, usage.gpu_percent_peak) == (2, 50.0, 100.0)
    assert usage.gpu_memory_peak_bytes == 7


def test_usage_tells_the_time_of_others_from_that_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    cpus = [
        CpuReading(at_s=0.0, busy=1000, idle=500, stolen=7, waited_s=3.0),
        CpuReading(at_s=10.0, busy=2600, idle=900, stolen=407, waited_s=8.0),
    ]
    readings = [
        HostReading(cpu_total_s=0.0, memory_bytes=1, own_cpu_s=own_s, own_waited_s=own_s - 4, cpus=each)
        for own_s, each in zip((5.0, 9.0), cpus, strict=True)
    ]
    sampler = make_sampler(readings, [0.0, 10.0])
    sampler.sample()
    assert sampler.usage().cpu_others is None
    sampler.sample()
    usage = sampler.usage()
    assert usage.cpu_others == pytest.approx((16.0 - 4.0) / 20)
    assert (usage.cpu_pressure, usage.cpu_stolen) == (pytest.approx(0.5), pytest.approx(0.2))
    assert usage.cpu_waited == pytest.approx(0.4)


def test_usage_when_a_process_vanishes_keeps_what_was_counted() -> None:
    totals = [10.0, 14.0, 2.0, 3.0]
    sampler = make_sampler([HostReading(cpu_total_s=t, memory_bytes=1) for t in totals], [0.0, 1.0, 2.0, 3.0])
    for _ in totals:
        sampler.sample()
    assert sampler.usage().cpu_seconds == pytest.approx(5.0)


def test_usage_over_a_very_short_interval_is_no_peak() -> None:
    sampler = make_sampler(
        [HostReading(cpu_total_s=t, memory_bytes=1) for t in (0.0, 1.0, 1.5)], [0.0, 1.0, 1.001], interval_s=1.0
    )
    for _ in range(3):
        sampler.sample()
    assert sampler.usage().cpu_percent_peak == pytest.approx(100.0)


def test_usage_without_readings_refuses_rates() -> None:
    sampler = make_sampler([], [])
    usage = sampler.usage()
    assert usage.cpu_percent_mean is usage.network_sent_bytes is usage.gpu_percent_mean is None
    assert HostUsage.from_json(usage.to_json()) == usage


def test_sampler_when_the_tree_is_gone_skips_the_reading() -> None:
    def read() -> HostReading:
        raise psutil.NoSuchProcess(1)

    with HostSampler("algo-1", read=read) as sampler:
        pass
    assert sampler.stop().num_readings == 0


def test_sampler_as_context_manager_ends_its_thread_and_stop_is_idempotent() -> None:
    with HostSampler("algo-1", scope="host", interval_s=0.05) as sampler:
        thread = sampler._thread
        assert thread is not None
        assert thread.is_alive()
    assert not thread.is_alive()
    first = sampler.stop()
    assert sampler.stop() == first
    assert first.num_readings >= 2
    assert first.memory_basis == "used"
    assert first.network_sent_bytes is not None
    assert HostUsage.from_json(first.to_json()) == first


@pytest.fixture
def busy_child() -> Iterator[Callable[[], None]]:
    """A tree of two: its grandchild uses CPU, ends and is reaped when asked."""
    script = (
        "import subprocess, sys\n"
        "sys.stdin.readline()\n"
        "subprocess.run([sys.executable, '-S', '-c', 'sum(i * i for i in range(2_000_000))'], check=True)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    command = [sys.executable, "-S", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def work() -> None:
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"

        yield work
        child.stdin.close()


def test_sampler_of_a_tree_counts_descendants_that_ended(busy_child: Callable[[], None]) -> None:
    sampler = HostSampler("algo-2", scope="tree")
    sampler.sample()
    busy_child()
    sampler.sample()
    usage = sampler.stop()
    assert usage.cpu_seconds > 0.02
    assert usage.memory_basis == "rss"
    assert usage.memory_peak_bytes > 0
    assert usage.network_sent_bytes is None


class FakeNvml:
    """The few calls of pynvml that the sampler makes, for two GPUs."""

    def __init__(self, *, has_utilisation: bool = True) -> None:
        self.has_utilisation = has_utilisation
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"Fake GPU"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if not self.has_utilisation:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=40 + 20 * handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=10**9)


@pytest.mark.parametrize("has_utilisation", [True, False])
def test_sampler_with_nvml_reads_gpus_or_does_without(monkeypatch: pytest.MonkeyPatch, has_utilisation: bool) -> None:
    nvml = FakeNvml(has_utilisation=has_utilisation)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with HostSampler("algo-1") as sampler:
        pass
    usage = sampler.stop()
    assert nvml.num_open == 0
    if has_utilisation:
        assert (usage.num_gpus, usage.gpu_name, usage.gpu_percent_mean) == (2, "Fake GPU", 50.0)
        assert usage.gpu_memory_peak_bytes == 2 * 10**9
    else:
        assert (usage.num_gpus, usage.gpu_percent_mean) == (0, None)


@pytest.mark.parametrize(
    "change", [{"scope": "elsewhere"}, {"num_cpus": 0}, {"memory_peak_bytes": -1}, {"gpu_percent_mean": 101}]
)
def test_usage_from_bad_json_names_the_key(change: dict[str, object]) -> None:
    value = json.loads(make_sampler([], []).usage().to_json()) | change
    with pytest.raises(ConfigError, match=f"hosts.0.{next(iter(change))}: found"):
        decode(HostUsage, value, path="hosts.0")
