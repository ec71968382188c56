"""What the planner may see of a scenario: a profile, as one minute of measurement would give it.

Each figure is drawn anew: a realistic number of noisy measurements of the scenario's workload. The measured spreads
have the errors of small samples, and each run of a measurement has another error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hetero.metrics.figures import Figure
from hetero.metrics.profile.profile import (
    SCHEMA_VERSION,
    ConcurrencyPoint,
    LeafProfile,
    Profile,
    Spread,
    SupplyProfile,
    TrainingProfile,
)
from planning.choices import NOTHING
from planning.draws import lognormal
from planning.machines import MachineType
from planning.processors import progress
from planning.scenarios import Scenario
from planning.simulation import step_times

__all__ = ["profile_of"]

BASIS = "simulated"
_TRAINING_S = 25.0
"""Training as the job runs, of the 60 s."""
_MAX_STEPS = 3000
_MIN_STEPS = 12
_HEADSPACE_STEPS = 40
_SAMPLES_S = 10.0
"""Time for single samples in one process."""
_NUM_SAMPLES = (32, 4096)
_BURST_S = 2.0
"""Time for each number of processes."""
_NUM_BATCHES = 24
_RUN_ERROR = 0.01
"""Error that all values of one measurement share, as a share of the value: clock speed, cache, neighbours."""
_BURST_ERROR = 0.02
_FIGURE_ERROR = 0.03


def profile_of(scenario: Scenario, seed: int) -> Profile:
    """Return what `hetero profile` could measure of the job as it is.

    Args:
        scenario: The truth.
        seed: Of the measurements' errors. It has nothing to do with the scenario's own seed.
    """
    measure = _Measure(np.random.default_rng((seed, scenario.seed, 77)))
    machines = [scenario.trainer, *(each for each in scenario.menu if each.name in scenario.profiled_types)]
    leaf = LeafProfile(
        path="[0]",
        dtype="float32" if scenario.is_float or "float" in scenario.pipeline else "uint8",
        bytes_per_sample=scenario.workload.bytes_per_sample,
        fits_uint8=scenario.is_float,
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        command=f"train.py ({scenario.name})",
        measured_at="2026-01-01T00:00:00+00:00",
        origin="profile",
        training=_training(scenario, measure, seed),
        supply=tuple(_supply(scenario, machine, measure) for machine in machines),
        leaves=(leaf,),
        wire_bytes_per_sample=Figure(value=scenario.workload.bytes_per_sample, unit="B", basis=BASIS),
        simulated=("All figures are drawn from a simulated job.",),
    )


class _Measure:
    """Draws measurements with their errors."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def spread(self, values: Iterable[float], unit: str = "s") -> Spread:
        """Return measured values that share the error of their run."""
        error = 1.0 + _RUN_ERROR * self.generator.standard_normal()
        return Spread.of((max(0.0, float(value) * error) for value in values), unit, BASIS)

    def figure(self, value: float, unit: str) -> Figure:
        """Return one figure with an error of some percent."""
        return Figure(value=max(0.0, self.around(value, _FIGURE_ERROR)), unit=unit, basis=BASIS)

    def around(self, value: float, error: float) -> float:
        """Return a value with a relative error."""
        return float(value * (1.0 + error * self.generator.standard_normal()))


def _training(scenario: Scenario, measure: _Measure, seed: int) -> TrainingProfile:
    workload, trainer = scenario.workload, scenario.trainer
    ranks_per_host = workload.num_ranks // scenario.num_trainers
    num_steps = int(min(_MAX_STEPS, max(_MIN_STEPS, _TRAINING_S / workload.step_s)))
    steps_s, waits_s = step_times(workload, scenario.cluster(NOTHING), num_steps=2 * num_steps, seed=9000 + seed)
    # The first steps are the start. Steps come in bursts, so the measured part begins anywhere.
    begin = int(measure.generator.integers(_MIN_STEPS // 2, num_steps))
    ends_s = np.cumsum(steps_s[begin:])
    measured = slice(begin, begin + max(_MIN_STEPS, int(np.searchsorted(ends_s, _TRAINING_S))))
    headspace_s = lognormal(
        measure.generator, workload.step_s, workload.step_variation, _HEADSPACE_STEPS * workload.num_ranks
    )
    slowest_s = headspace_s.reshape(_HEADSPACE_STEPS, -1).max(axis=1)
    steps = measure.spread(steps_s[measured])
    return TrainingProfile(
        instance_type=trainer.name,
        vcpus=trainer.vcpus,
        num_hosts=scenario.num_trainers,
        ranks_per_host=ranks_per_host,
        batch_samples=workload.batch_samples,
        num_local_processes=workload.local_processes * ranks_per_host,
        headspace_s=measure.spread(slowest_s),
        step_s=steps,
        data_wait_s=measure.spread(waits_s[measured]),
        rank_cpu_cores=measure.figure(workload.rank_cpu_cores, "CPU"),
        receive_cpu_s_per_gb=measure.figure(workload.receive_cpu_s_per_gb, "s/GB"),
        steps_per_epoch=workload.steps_per_epoch,
        gpu_percent=Figure(value=97.0, unit="%", basis=BASIS),
    )


def _supply(scenario: Scenario, machine: MachineType, measure: _Measure) -> SupplyProfile:
    workload = scenario.workload
    cpu_s = _samples_s(scenario, measure) / machine.speed
    generator = measure.generator
    wait_s = generator.exponential(workload.sample_wait_s, len(cpu_s)) if workload.sample_wait_s else [0.0]
    batch_cpu_s = lognormal(generator, workload.batch_cpu_s / machine.speed, 0.05, _NUM_BATCHES)
    return SupplyProfile(
        instance_type=machine.name,
        vcpus=machine.vcpus,
        sample_cpu_s=measure.spread(cpu_s),
        sample_wait_s=measure.spread(wait_s),
        batch_cpu_s=measure.spread(batch_cpu_s),
        concurrency=tuple(_concurrency(scenario, machine, measure)),
        endpoint_private_bytes=measure.figure(workload.endpoint_private_bytes, "B"),
        endpoint_shared_bytes=measure.figure(workload.endpoint_shared_bytes, "B"),
        build_s=measure.figure(5.0, "s"),
    )


def _samples_s(scenario: Scenario, measure: _Measure) -> npt.NDArray[np.float64]:
    """Return the CPU seconds of some samples on a vCPU of speed 1."""
    workload = scenario.workload
    least, most = _NUM_SAMPLES
    count = int(min(most, max(least, _SAMPLES_S / (workload.sample_cpu_s + workload.sample_wait_s))))
    samples_s = lognormal(measure.generator, workload.sample_cpu_s, workload.sample_variation, count)
    is_slow = measure.generator.random(count) < workload.tail_share
    return np.where(is_slow, samples_s * workload.tail_factor, samples_s)


def _concurrency(scenario: Scenario, machine: MachineType, measure: _Measure) -> Iterable[ConcurrencyPoint]:
    """Yield the throughput of 1, 2, 4, ... processes, and of one per vCPU."""
    workload = scenario.workload
    cpu_s = workload.batch_cpu_total_s / workload.batch_samples / machine.speed
    alone_s = cpu_s + workload.sample_wait_s
    # One process per vCPU, or more if they wait for storage.
    per_cpu = 1.0 if workload.sample_wait_s < 0.3 * cpu_s else min(4.0, 1.0 + workload.sample_wait_s / cpu_s)
    most = max(machine.vcpus, min(128, int(machine.vcpus * per_cpu)))
    counts = {most, *(2**power for power in range(16) if 2**power < most)}
    for count in sorted(counts & set(range(1, scenario.fitting_endpoints(machine) + 1))):
        rate, _ = progress(machine.vcpus, scenario.curve, cpu_s / alone_s, count, 0, 0.0, 0.0)
        # Their CPU time follows from their throughput, because the wait does not grow.
        used_s = max(cpu_s, min(alone_s / rate - workload.sample_wait_s, cpu_s * 3.0))
        num_samples = max(2.0 * count, _BURST_S * count * rate / alone_s)
        error = math.hypot(_BURST_ERROR, _sample_variation(scenario) / math.sqrt(num_samples))
        burst = max(0.5, 1.0 + error * measure.generator.standard_normal())
        yield ConcurrencyPoint(
            num_processes=count, samples_per_s=count * rate / alone_s / burst, cpu_s_per_sample=used_s * burst
        )


def _sample_variation(scenario: Scenario) -> float:
    """Return the coefficient of variation of a sample's cost, with the slow samples."""
    workload = scenario.workload
    share, factor = workload.tail_share, workload.tail_factor
    square = (1.0 + workload.sample_variation**2) * (1.0 + share * (factor**2 - 1.0))
    return math.sqrt(square / (1.0 + share * (factor - 1.0)) ** 2 - 1.0)
