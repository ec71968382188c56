"""What samples cost, and what a batch consists of, measured in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero.batches.build import BuiltDataset
from hetero.batches.collation import collate_arrays
from hetero.batches.lanes.pieces import LanePiece, LaneRules
from hetero.batches.lanes.work import LaneWork
from hetero.documents.records import decode, encode
from hetero.errors import ConfigError, DatasetError
from hetero.metrics.profile.parts import SampledWork
from hetero.metrics.profile.profile import ConcurrencyPoint, Spread, SupplyProfile
from hetero.plans.lanes import LaneLayout, LanePart
from hetero.sample_costs.contents import measure_contents
from hetero.sample_costs.measuring import burst_sizes, emulated_costs, most_processes, with_wait
from hetero.sample_costs.options import CostOptions
from hetero.sample_costs.samples import measure_samples, requests_of, split


class Skewed:
    """Samples. Every fourth takes much more CPU time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        for _ in range(200_000 if index % 4 == 0 else 1_000):
            pass
        return np.full(100, index, np.float32)


def work(**changes: Any) -> SampledWork:
    values: dict[str, Any] = {
        "dataset": "skewed",
        "arguments_json": "{}",
        "indices": tuple(range(64)),
        "batch_samples": 16,
        "seed": 0,
        "epoch": 0,
    }
    return SampledWork(**values | changes)


def built(dataset: Any) -> BuiltDataset:
    return BuiltDataset.from_object(dataset, collate_fn=collate_arrays, seeding="sample")


def test_requests_of_a_job_have_its_batches_in_order() -> None:
    requests = requests_of(work(indices=(9, 8, 7, 6, 5), batch_samples=2))
    assert [list(request.work.labels) for request in requests] == [[9, 8], [7, 6], [5]]
    assert [request.position for request in requests] == [0, 1, 2]


def test_requests_without_collation_have_one_sample_each() -> None:
    requests = requests_of(work(indices=(9, 8), batch_samples=1, collate=False))
    assert [(list(request.work.labels), request.collate) for request in requests] == [([9], False), ([8], False)]


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 5), (2, [2, 1, 2]), (8, [3, 2])])
def test_parts_of_requests_have_the_same_samples(size: int, expected: list[int]) -> None:
    requests = requests_of(work(indices=(1, 2, 3, 4, 5), batch_samples=3))
    parts = list(split(requests, size))
    assert [part.work.num_samples for part in parts] == expected
    assert [label for part in parts for label in part.work.labels] == [1, 2, 3, 4, 5]


def test_measured_samples_tell_dear_from_cheap_ones() -> None:
    times = measure_samples(built(Skewed()), requests_of(work()), seconds=0.2)
    supply = times.supply()
    assert supply.sample_cpu_s.num_measured == len(times.sample_wait_s) >= 16
    assert supply.sample_cpu_s.p95 > 10 * supply.sample_cpu_s.p50
    assert supply.batch_cpu_s.mean < supply.sample_cpu_s.mean
    assert times.batches[-1][0].shape == (times.batches[-1][1], 100)


def test_time_without_the_cpu_is_a_wait() -> None:
    class Slow(Skewed):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.05)  # the wait that is measured
            return np.zeros(4, np.float32)

    supply = measure_samples(built(Slow()), requests_of(work()), seconds=0.5).supply()
    # Most of the 50 ms. On a busy machine, 5 ms of each wait are taken for a wait for a CPU.
    assert supply.sample_wait_s.p50 >= 0.025
    assert supply.sample_cpu_s.p50 < 0.025


def test_wait_of_shards_is_that_of_whole_shards_if_it_is_longer() -> None:
    class Warm(Skewed):
        def hetero_read_cold(self, seconds: float) -> tuple[float, float]:
            return 0.25, 1000.0

    times = measure_samples(built(Warm()), requests_of(work()), seconds=0.1)
    assert times.supply().sample_wait_s.mean == pytest.approx(0.25, abs=0.01)
    assert (times.cold_wait_s, times.read_bytes_per_sample) == (0.25, 1000.0)
    point = ConcurrencyPoint(num_processes=2, samples_per_s=8.0, cpu_s_per_sample=0.2)
    assert with_wait(point, 0.25).samples_per_s == 4.0


def test_lanes_go_on_and_are_not_begun_anew_for_each_measurement() -> None:
    class Numbers:
        num_read = 0

        def __iter__(self) -> Iterator[int]:
            for number in range(10_000):
                Numbers.num_read += 1
                yield number

    lanes = LaneLayout(num_lanes=2, chunk_samples=4)
    rules = LaneRules(layout=lanes, guarantee="replay", end="stop")
    parts = [LanePart(lane=number % 2, place=8000 + number // 2 * 4, num_samples=4) for number in range(8)]
    works = [LaneWork(pieces=(LanePiece(part=part),), rules=rules) for part in parts]
    requests = [dataclasses.replace(requests_of(work())[0], work=each) for each in works]
    times = measure_samples(built(Numbers()), requests, seconds=0.2)
    assert Numbers.num_read < 2 * len(times.sample_cpu_s) + 100


def test_samples_that_raise_are_left_out() -> None:
    class Broken(Skewed):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise ValueError("a broken file")
            return super().__getitem__(index)

    times = measure_samples(built(Broken()), requests_of(work(batch_samples=2)), seconds=0.1)
    assert times.sample_cpu_s


def test_data_set_that_always_raises_fails_with_its_error() -> None:
    class Broken(Skewed):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("a broken file")

    with pytest.raises(DatasetError, match="a broken file"):
        measure_samples(built(Broken()), requests_of(work()), seconds=0.1)


def test_no_samples_are_rejected() -> None:
    with pytest.raises(ConfigError, match="found no samples to measure"):
        measure_samples(built(Skewed()), [], seconds=0.1)


@pytest.mark.parametrize(
    ("array", "fits"),
    [
        (np.arange(256, dtype=np.float32), True),
        (np.arange(256, dtype=np.float32) / 255, True),
        (np.arange(256, dtype=np.int64), True),
        (np.arange(257, dtype=np.float32), False),
        (np.arange(256, dtype=np.float32) / 256, False),
        (np.arange(-1, 5, dtype=np.float32), False),
        (np.array([np.nan, 1.0]), False),
        (np.arange(256, dtype=np.uint8), False),
        (np.array([], np.float32), False),
    ],
)
def test_leaf_says_whether_uint8_could_carry_it(array: Any, fits: bool) -> None:
    (leaf,) = measure_contents([({"x": array}, 2)], batch_samples=2).leaves
    assert (leaf.path, leaf.dtype, leaf.bytes_per_sample) == ("['x']", str(array.dtype), array.nbytes / 2)
    assert leaf.fits_uint8 is fits


def test_bytes_on_the_network_have_the_header_of_a_whole_batch() -> None:
    part = [np.zeros((4, 1000), np.uint8)]
    small = measure_contents([(part, 4)], batch_samples=4).wire_bytes_per_sample
    large = measure_contents([(part, 4)], batch_samples=400).wire_bytes_per_sample
    assert small is not None
    assert large is not None
    assert 1000 < large.value < 1005 < small.value < 1100


def test_batch_that_cannot_be_sent_has_only_leaves() -> None:
    found = measure_contents([([np.zeros(4), object()], 2)], batch_samples=2)
    assert len(found.leaves) == 1
    assert (found.wire_bytes_per_sample, found.codecs) == (None, ())


def test_codecs_shrink_zeros_and_not_noise() -> None:
    pytest.importorskip("lz4")
    pytest.importorskip("zstandard")
    noise = np.random.default_rng(0).integers(0, 256, 2**18, np.uint8)
    of_zeros = measure_contents([([np.zeros(2**18, np.uint8)], 2)], batch_samples=2).codecs
    of_noise = measure_contents([([noise], 2)], batch_samples=2).codecs
    assert [codec.name for codec in of_zeros] == ["lz4", "zstd"]
    assert all(codec.ratio < 0.1 and codec.decode_cpu_s_per_sample > 0 for codec in of_zeros)
    assert all(codec.ratio == 1.0 and codec.decode_cpu_s_per_sample == 0 for codec in of_noise)


@pytest.mark.parametrize(
    ("num_processes", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (72, [1, 2, 4, 8, 16, 32, 64, 72])],
)
def test_bursts_double_up_to_all_cpus(num_processes: int, sizes: list[int]) -> None:
    assert burst_sizes(num_processes) == sizes


@pytest.mark.parametrize(
    ("wait_s", "num_processes"),
    [(0.0, 8), (0.002, 9), (0.01, 16), (0.025, 28), (1.0, 32)],
)
def test_bursts_have_more_processes_than_cpus_if_they_wait_for_storage(wait_s: float, num_processes: int) -> None:
    measured = SupplyProfile(
        instance_type="ml.c5.2xlarge",
        vcpus=8,
        sample_cpu_s=Spread.of([0.008], "s", "measured"),
        sample_wait_s=Spread.of([wait_s], "s", "measured"),
        batch_cpu_s=Spread.of([0.002], "s", "measured"),
    )
    assert most_processes(8, measured) == num_processes
    assert most_processes(96, measured) <= 128


def test_emulated_costs_is_what_the_emulation_states() -> None:
    options = CostOptions(
        host="algo-1",
        instance_type="ml.c5.xlarge",
        script="train.py",
        is_module=False,
        script_args=(),
        work=None,
        num_processes=2,
        vcpus=4,
        emulated_sample_s=0.02,
        parent_pid=1,
    )
    supply = emulated_costs(options)
    assert (supply.instance_type, supply.vcpus) == ("ml.c5.xlarge", 4)
    assert (supply.sample_cpu_s.mean, supply.sample_cpu_s.basis) == (0.02, "simulated")
    assert [(point.num_processes, point.samples_per_s) for point in supply.concurrency] == [(1, 50), (2, 100), (4, 200)]
    assert decode(CostOptions, encode(options)) == options
