"""The figures of a profile with their uncertainty.

Column 0 of every array has the mean figures. Every other column is a draw: figures that the measurements also allow.
For a draw of a measured figure, values are drawn from the measured ones with replacement. The draw is the mean of these
values, minus a random part of the time that other work of the machine may have taken. Figures that were not measured
are drawn from an assumed range: the relative speed of another type's vCPUs, an unknown network bandwidth, and the error
of the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.decide.planning.machines import Machine, family_of
from hetero.metrics.profile.profile import Profile, Spread, SupplyProfile

__all__ = ["RUN_SPREAD", "SPEED_SPREAD", "Array", "UncertainFigures", "error_of_mean"]

Array = NDArray[np.float64]

_OTHER_FAMILY_SPREAD = 0.25
"""Standard deviation of the logarithm of a vCPU's relative speed if its type was not measured. In the published PyTorch
example a vCPU of ml.c5 did about 1.6 times the work of one of ml.p3."""
SPEED_SPREAD = 0.04
"""Standard deviation of the same logarithm if another type of the family was measured. It also stands for two errors:
of the model about the speed of endpoints, and of the measured samples about all samples. With it, most intervals of
bench_plan_runs contain the real step times."""
_UNKNOWN_NETWORK_BYTES_PER_S_PER_VCPU = (2.0e7, 1.6e8)
"""Range for types whose bandwidth is not known: the catalogue's other types have 0.16 to 1.3 Gbit/s per vCPU."""
_MODEL_SPREAD = 0.02
"""Standard deviation of the logarithm of a step time that comes from the model instead of the figures. With less, fewer
intervals of bench_planner contain the truth."""
RUN_SPREAD = 0.015
"""Relative error that all values of one run share, for example from the clock speed or from neighbours on the machine.
With it, most intervals of bench_plan_runs contain the real step times."""
_BURST_S = 1.5
"""Seconds of one measurement with several processes. Without the weights that follow from it, at least 3 of 200 jobs of
bench_planner have a worse plan."""
_NUM_BATCHES = 4096
"""Number of random batches that describe how long batches take. With 1,024 of them, at least 5 of 200 jobs of
bench_planner have a worse plan, because few batches are slow."""
_NUM_PARTS = 8
"""Parts of the measured steps whose means show how well the mean of all is known."""


@dataclass(frozen=True, slots=True)
class _Costs:
    """Costs of a sample on one measured type."""

    shares: Array
    """Shares of busy CPUs, in ascending order. A process that waits for storage keeps no CPU busy."""
    mean_cpu_s: Array
    """CPU seconds per sample at each share."""
    errors: Array
    """Relative errors, one for each draw."""
    wait_s: Array

    def cpu_s(self, share: Array) -> Array:
        return _extrapolated(share, self.shares, self.mean_cpu_s) * self.errors


class UncertainFigures:
    """Draws of the figures that a step time depends on. Equal arguments give equal draws.

    Args:
        profile: The measured figures.
        vcpu_speeds: Relative speed of a vCPU by instance type, compared with the profile's first supply.
        num_draws: Number of draws.
    """

    def __init__(self, profile: Profile, *, vcpu_speeds: Mapping[str, float], num_draws: int) -> None:
        self._training = profile.training
        self._given_speeds = dict(vcpu_speeds)
        self._num_draws = num_draws
        # Only this constructor draws from this generator, always in the same order. Draws of later calls have separate
        # generators, so they do not depend on earlier calls.
        self._random = np.random.default_rng(0)
        # Share of the measured time that the job itself took. Other work of the machine may have taken the rest. The
        # draws of this share have a separate generator, so they change no other draws.
        own_share = 1 - profile.training.excess_share * np.random.default_rng((0, 2)).random(num_draws + 1)
        # Column 0 has the figures as measured.
        own_share[0] = 1.0
        self.headspace_s = self._means(profile.training.headspace_s) * own_share
        """Step time in seconds with batches always ready."""
        self.measured_step_s = self._measured_step_s(profile.training.step_s) * own_share
        """Step time in seconds as the job ran."""
        self.model_error = self._lognormal(_MODEL_SPREAD)
        """Real step time / modelled step time."""
        self.correction = 1.0
        """Factor of the costs of samples on the first type, and of all costs that are derived from them."""
        self._speed_error = self._lognormal(SPEED_SPREAD)
        """Real speed of endpoints / modelled speed, the same for all types."""
        self._reference = profile.supply[0]
        self._reference_name = self._reference.instance_type
        self._costs = {supply.instance_type: self._costs_of(supply) for supply in profile.supply}
        self._relative_costs: dict[str, Array] = {}
        self.batch_shape = self._batch_times()
        """Times of random batches, relative to the mean, in ascending order."""

    def _means(self, spread: Spread) -> Array:
        """Return the mean of a measured figure, and its draws: means of values that are drawn with replacement."""
        values = np.asarray(spread.values)
        chosen = self._random.integers(len(values), size=(self._num_draws, len(values)))
        deviations = values[chosen].mean(axis=1) - values.mean()
        # If the profile has only some of the measured values, the mean of all values has a smaller error than the mean
        # of these values.
        shrink = math.sqrt(len(values) / max(len(values), spread.num_measured))
        return np.concatenate([[spread.mean], np.maximum(spread.mean + deviations * shrink, 0.0)])

    def _measured_step_s(self, steps: Spread) -> Array:
        """Return the mean of the measured steps, and its draws."""
        # The steps are not resampled one by one, because they come in bursts. When they were, the mean step time of 488
        # ms in a report got an interval of 45 to 930 ms.
        error = math.hypot(error_of_mean(steps), RUN_SPREAD)
        # A large error must not give steps of no time.
        factors = np.maximum(1 + error * self._random.standard_normal(self._num_draws), 0.1)
        return np.concatenate([[steps.mean], steps.mean * factors])

    def _lognormal(self, spread: float) -> Array:
        return np.concatenate([[1.0], np.exp(self._random.normal(0.0, spread, self._num_draws))])

    def _costs_of(self, supply: SupplyProfile) -> _Costs:
        """Return the costs of a sample on a measured type, by the share of busy CPUs.

        The cost in a single process is the mean of single samples. The costs with more processes were measured in short
        runs of many processes, which have many more samples. If a cost is lower with more processes, this is noise, and
        both costs are replaced by their mean.
        """
        samples, wait_s = supply.sample_cpu_s, supply.sample_wait_s.mean
        # Points: share of busy CPUs, CPU seconds per sample, and the number of samples.
        points = [(0.0, samples.mean + supply.batch_cpu_s.mean, float(samples.num_measured))]
        for point in supply.concurrency:
            # Processes that wait for storage leave their CPU to others, so only the computing ones contend.
            computing_share = point.cpu_s_per_sample / max(point.cpu_s_per_sample + wait_s, 1e-12)
            busy_share = point.num_processes * computing_share / supply.vcpus
            # The profile does not state how many samples this run had, so compute them from its usual duration.
            num_samples = max(1.0, _BURST_S * point.samples_per_s)
            points.append((busy_share, point.cpu_s_per_sample, num_samples))
        shares, costs, nums_samples = (np.array(column) for column in zip(*points, strict=True))
        # All costs share one error, because they describe the same samples. The point with the most samples decides how
        # large it is.
        error = math.hypot(samples.variation / math.sqrt(float(nums_samples.max())), RUN_SPREAD)
        # Position 0 has the mean costs, so its factor is 1. A large error must not give samples that cost nothing.
        errors = np.concatenate([[1.0], np.maximum(1 + error * self._random.standard_normal(self._num_draws), 0.1)])
        errors = errors * self._speed_error
        return _Costs(shares, _rising(costs, nums_samples), errors, self._means(supply.sample_wait_s))

    def costs_on(
        self, machine: Machine, num_processes: Array | float = 0.0, *, busy_cpus: float = 0.0
    ) -> tuple[Array, Array]:
        """Return CPU seconds and waiting seconds per sample of any type.

        Args:
            machine: The type.
            num_processes: Processes that preprocess at the same time on a host of this type: a number, or a column with
                the numbers of several hosts. While they wait for storage they use no CPU.
            busy_cpus: CPUs that others keep busy.

        Returns:
            Two arrays with a value for each draw. With a column of processes, the CPU seconds have a row for each host.
        """
        reference = self._costs[self._reference_name]
        # Share of its time that a process computes. In the rest it waits for storage. Assume the share of the first
        # type for all types, because it only decides how many CPUs are busy. Position 0 of `mean_cpu_s` is the cost in
        # a process that is alone. Position 0 of `wait_s` is the mean wait.
        computing_share = reference.mean_cpu_s[0] / max(reference.mean_cpu_s[0] + float(reference.wait_s[0]), 1e-12)
        all_busy_cpus = np.asarray(num_processes, dtype=np.float64) * computing_share + busy_cpus
        costs, cpu_factor, wait_factor = self._source_of(machine)
        return costs.cpu_s(np.minimum(all_busy_cpus / machine.vcpus, 1.0)) * cpu_factor, costs.wait_s * wait_factor

    def curve_of(self, machine: Machine) -> list[tuple[float, float]]:
        """Return the mean CPU seconds of a sample by the share of busy CPUs of a host, in ascending order."""
        costs, factor, _ = self._source_of(machine)
        # The factor is a number, or an array of draws with the mean at position 0.
        mean_factor = float(np.asarray(factor).flat[0])
        return [
            (float(share), float(cpu_s) * mean_factor)
            for share, cpu_s in zip(costs.shares, costs.mean_cpu_s, strict=True)
        ]

    def _source_of(self, machine: Machine) -> tuple[_Costs, Array | float, float]:
        """Return the measured costs that a type is compared with, and the factors of their CPU seconds and waits.

        The costs of the type are these costs times the factors.
        """
        name = machine.instance_type
        reference, correction = self._costs[self._reference_name], self.correction
        # The measured step time corrects the costs on the first type, and on types that are compared with it.
        if name == self._reference_name:
            return reference, correction, correction
        if name in self._given_speeds:
            return reference, correction / self._given_speeds[name], correction
        if name in self._costs:
            return self._costs[name], 1.0, 1.0
        # Another type of a measured family, or a family about which nothing is known.
        for measured, costs in self._costs.items():
            if measured and family_of(measured) == machine.family:
                return costs, self._relative_cost(name, SPEED_SPREAD), 1.0
        return reference, self._relative_cost(machine.family, _OTHER_FAMILY_SPREAD) * correction, correction

    def _relative_cost(self, name: str, spread: float) -> Array:
        """Return draws of the relative cost of a vCPU. Equal names have equal draws, whatever was drawn before."""
        if name not in self._relative_costs:
            random = np.random.default_rng((0, _seed_of(name)))
            self._relative_costs[name] = np.concatenate([[1.0], np.exp(random.normal(0.0, spread, self._num_draws))])
        return self._relative_costs[name]

    def _batch_times(self) -> Array:
        """Return the times of random batches, relative to the mean, in ascending order."""
        supply, batch_samples = self._reference, self._training.batch_samples
        sample_s = np.asarray(supply.sample_cpu_s.values) + supply.batch_cpu_s.mean
        waits_s = np.asarray(supply.sample_wait_s.values)
        # If each sample has its own wait, keep both together, because samples with much data take long in both.
        sample_s = sample_s + (waits_s if len(waits_s) == len(sample_s) else supply.sample_wait_s.mean)
        # Draw at most 256 samples for each batch, which bounds the memory of the draws.
        num_drawn = min(batch_samples, 256)
        # A new generator, because the times must not depend on the number of draws.
        random = np.random.default_rng(0)
        batch_s = sample_s[random.integers(len(sample_s), size=(_NUM_BATCHES, num_drawn))].mean(axis=1)
        mean_s = float(batch_s.mean())
        if mean_s <= 0:
            return np.ones(_NUM_BATCHES)
        # The mean of all samples of a batch varies less than the mean of those that were drawn.
        relative = 1.0 + (batch_s / mean_s - 1.0) * math.sqrt(num_drawn / batch_samples)
        return np.sort(relative)

    def network_of(self, machine: Machine) -> Array:
        """Return draws of the bandwidth of a machine in bytes per second, from a range if the bandwidth is unknown."""
        if machine.network_bytes_per_s is not None:
            return np.full(self._num_draws + 1, machine.network_bytes_per_s)
        low, high = (math.log(per_vcpu * machine.vcpus) for per_vcpu in _UNKNOWN_NETWORK_BYTES_PER_S_PER_VCPU)
        random = np.random.default_rng((0, 1, _seed_of(machine.instance_type)))
        return np.asarray(np.exp(np.concatenate([[(low + high) / 2], random.uniform(low, high, self._num_draws)])))


def _seed_of(name: str) -> int:
    """Return a seed for a name. The bytes of a text are the same in all processes, but its hash is not."""
    return int.from_bytes(name.encode()[:16].ljust(16, b"\0"), "big")


def error_of_mean(steps: Spread) -> float:
    """Return the relative standard error of a mean step time.

    Steps come in bursts: a long one waits for the batches of all processes, and the next ones find them ready. So the
    means of successive parts differ less than single steps suggest.
    """
    # Few steps cannot be divided into parts, so take the error of independent steps.
    if len(steps.values) < 4 * _NUM_PARTS:
        return steps.variation / math.sqrt(steps.num_measured)
    values = np.array(steps.values[: len(steps.values) // _NUM_PARTS * _NUM_PARTS])
    means = values.reshape(_NUM_PARTS, -1).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(_NUM_PARTS) / max(means.mean(), 1e-12))


def _extrapolated(share: Array, shares: Array, costs: Array) -> Array:
    """Return the costs at any share, on straight lines between measured shares. Beyond them, the last line goes on."""
    found = np.interp(share, shares, costs)
    if len(shares) < 2:
        return found
    slope = (costs[-1] - costs[-2]) / max(shares[-1] - shares[-2], 1e-12)
    return np.asarray(found + np.maximum(0.0, share - shares[-1]) * slope)


def _rising(values: Array, weights: Array) -> Array:
    """Return the rising sequence with the least weighted squared distance to the values (pool adjacent violators).

    Neighbours that fall are merged into a block with their weighted mean, until the means of all blocks rise.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, own_weight in zip(values, weights, strict=True):
        mean, weight, number = float(value), float(own_weight), 1
        while blocks and blocks[-1][0] > mean:
            before, weight_before, num_before = blocks.pop()
            total = weight_before + weight
            mean, weight, number = (before * weight_before + mean * weight) / total, total, num_before + number
        blocks.append((mean, weight, number))
    return np.repeat([mean for mean, _, _ in blocks], [number for _, _, number in blocks])
