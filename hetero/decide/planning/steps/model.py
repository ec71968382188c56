"""The step time of a job on a cluster, computed from its profile.

The slowest part determines a step. The parts overlap, so the step time is at least the largest of:

- the step time with batches always ready (headspace), which no cluster shortens
- the time that the endpoints of all hosts need to make the batches of one step
- the time that the trainer host's network interface needs to receive them
- the time that the CPUs of the trainer host need to receive them and to run the ranks
- the time that an endpoint needs for a batch, divided by the number of batches that a rank has in flight

`StepModel.expected_s` computes this for thousands of clusters at once. The parts also wait for each other, which makes
steps longer. `StepModel.predict` adds this from the timeline of a cluster (timelines.py).

The figures of a profile are uncertain. `StepModel` therefore computes each step time many times, each time with
other figures that the measurements also allow (uncertain.py). An interval is the range of 90 % of these step times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.endpoints import endpoints_on
from hetero.decide.planning.steps.forms import bytes_per_sample, codec_s
from hetero.decide.planning.steps.timelines import Timelines, window_batches
from hetero.decide.planning.steps.uncertain import Array, UncertainFigures
from hetero.metrics.headspace import number_for_headspace
from hetero.metrics.profile.profile import NEARLY_BUSY, Profile
from hetero.reader.window_size import PREFETCH_FACTOR
from hetero.report.plan import AS_IS, BOTTLENECKS

__all__ = ["INTERVAL", "NUM_DRAWS", "REMOVABLE", "Prediction", "StepModel"]

(
    _ACCELERATOR,
    _PREPROCESSING,
    _TRAINER_NETWORK,
    _DATA_NETWORK,
    _STORAGE,
    _MEMORY,
    _TRAINER_CPU,
    _WINDOW,
    _EPOCH_START,
) = range(len(BOTTLENECKS))
REMOVABLE = ("trainer network", "data network", "memory", "window", "trainer CPU")
"""Limits that a plan names as the reason if data hosts would pay without them."""
NUM_DRAWS = 100
"""Number of times that a plan computes each step time with other figures. The ends of an interval are then the fifth
values from each side. The share of intervals with the truth in bench_planner and bench_plan_runs pays for it."""
INTERVAL = (0.05, 0.95)
"""Quantiles of the draws at the ends of an interval. A plan is uncertain if the chance that it pays is between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The step time of one candidate."""

    step_s: float
    low_s: float
    """End of the 90 % interval."""
    high_s: float
    bottleneck: str
    """One of `BOTTLENECKS`: what limits the step time."""
    draws_s: Array
    """Step times with other figures that the measurements also allow. Equal positions use equal figures."""
    is_measured: bool = False
    """Whether the step time was measured, because the profile is of this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostRate:
    """What one host of a type delivers."""

    samples_per_s: Array
    batch_s: Array
    """Seconds that an endpoint needs for a batch."""
    num_endpoints: int
    limit: int
    """Index of the bottleneck: vCPUs, memory, network or storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Modelled step times. One row per candidate."""

    step_s: Array
    """One column per draw."""
    limits: NDArray[np.int64]
    """Indices of the bottlenecks."""
    cpu_bound_s: Array
    """Seconds that all CPUs of the trainer host need for the ranks and for receiving. Timelines do not bound them."""


class StepModel:
    """Predicts step times. Deterministic: equal arguments give equal predictions.

    Column 0 of every array has the mean figures, and the other columns have figures that the measurements also allow.

    Args:
        profile: The figures of the job.
        vcpu_speeds: Relative speed of a vCPU by instance type, compared with the profile's first supply. It replaces
            the assumption about a type that was not measured.
        endpoints_per_host: Endpoints per data host. None means one per vCPU, or more if they wait for storage.
        has_removable_limits: Whether the `REMOVABLE` bottlenecks limit steps. Without them, a plan finds out whether
            data hosts would pay if one of these limits were lifted.
        num_draws: Number of times that each step time is computed for its interval. 0 gives no intervals.
        timelines: The timelines of another model with the same arguments, which saves time. None makes new ones.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        vcpu_speeds: Mapping[str, float] | None = None,
        endpoints_per_host: int | None = None,
        has_removable_limits: bool = True,
        num_draws: int = NUM_DRAWS,
        timelines: Timelines | None = None,
    ) -> None:
        vcpu_speeds = vcpu_speeds or {}
        self.timelines = timelines or Timelines(profile, vcpu_speeds=vcpu_speeds, endpoints_per_host=endpoints_per_host)
        """The timelines of the clusters that were predicted."""
        self._figures = UncertainFigures(profile, vcpu_speeds=vcpu_speeds, num_draws=num_draws)
        # Use the factor with which the timeline of the profiled cluster has the measured step time.
        self._figures.correction = self.timelines.correction
        self._num_draws = num_draws
        self._endpoints_per_host = endpoints_per_host
        self._has_removable_limits = has_removable_limits
        self._profile = profile
        self._training = profile.training
        self.headspace_s = self._figures.headspace_s
        receive, cores = self._training.receive_cpu_s_per_gb, self._training.rank_cpu_cores
        self._receive_s_per_byte = receive.value / 1e9 if receive else 0.0
        self._rank_cores = cores.value if cores else 0.0
        self._samples_per_host = self._training.ranks_per_host * self._training.batch_samples

    # Hosts

    def endpoints_on(self, machine: Machine, wanted: int | None) -> tuple[int, bool]:
        """Return the number of endpoints of a data host, and whether its memory limits this number.

        Args:
            machine: The host's type.
            wanted: The candidate's number. The number that the user wants, if any, replaces it.
        """
        return endpoints_on(
            machine,
            self._figures,
            self._profile,
            wanted=self._endpoints_per_host or wanted,
            # The memory is one of `REMOVABLE`.
            has_enough_memory=not self._has_removable_limits,
        )

    def with_common_endpoints(self, candidate: Candidate) -> Candidate:
        """Return the candidate with one number of endpoints for all its data hosts, where a job needs that.

        A job states one number of endpoints for all data hosts. Types get different numbers only with the launcher's
        default of one endpoint per vCPU.
        """
        if len(candidate.data) < 2 or candidate.endpoints_per_host is not None:
            return candidate
        machines = [group.machine for group in candidate.data]
        numbers = [self.endpoints_on(machine, wanted=None)[0] for machine in machines]
        if numbers == [machine.vcpus for machine in machines]:
            return candidate
        # This model once used a number for each type, but the plan stated the smaller one for all. A step of one random
        # job then took 89 % longer than planned. The smaller number fits into the memory of both types. If it is 0,
        # because no endpoint fits into one of them, state no number.
        return replace(candidate, endpoints_per_host=min(numbers) or None)

    def variable_endpoints_on(self, candidate: Candidate) -> int | None:
        """Return the smallest number of endpoints of a data host, or None if no other number may be better.

        Another number may be better if endpoints wait for storage, because a host then has more than one per vCPU. The
        number that the user wants is never varied.
        """
        machines = [group.machine for group in candidate.data]
        if self._endpoints_per_host or all(self.endpoints_on(each, wanted=None)[0] <= each.vcpus for each in machines):
            return None
        return min(self.endpoints_on(machine, candidate.endpoints_per_host)[0] for machine in machines)

    def _rate_of(self, machine: Machine, form: str, wanted: int | None = None) -> _HostRate:
        """Return what a data host of this type delivers with the wanted number of endpoints.

        Position 0 of each array has the mean figures, which decide what limits the host.
        """
        num_endpoints, is_short_of_memory = self.endpoints_on(machine, wanted)
        cpu_s, wait_s = self._figures.costs_on(machine, num_endpoints)
        encode_s, _ = codec_s(self._profile, form)
        # Samples that cost nothing must not divide by zero.
        cpu_s = np.maximum(cpu_s + encode_s, 1e-12)
        seconds = cpu_s + wait_s
        # The rate has two bounds. At the first, no endpoint waits for a CPU. At the second, the CPUs are always busy.
        # In parts of bench_planner, a queueing model of the cases between these two chose no better clusters.
        rate = np.minimum(num_endpoints / seconds, machine.vcpus / cpu_s)
        # What limits this rate: the memory, which allows fewer endpoints, else the storage, else the vCPUs.
        limit = _PREPROCESSING
        if is_short_of_memory:
            limit = _MEMORY
        elif wait_s[0] > cpu_s[0]:
            limit = _STORAGE
        # A network that is slower than the endpoints limits the host instead.
        nbytes = bytes_per_sample(self._profile, form)
        if nbytes > 0 and self._has_removable_limits:
            network_rate = self._figures.network_of(machine) / nbytes
            if network_rate[0] < rate[0]:
                limit = _DATA_NETWORK
            rate = np.minimum(rate, network_rate)
        return _HostRate(
            samples_per_s=rate,
            batch_s=(seconds + nbytes / self._figures.network_of(machine)) * self._training.batch_samples,
            num_endpoints=num_endpoints,
            limit=limit,
        )

    def hosts_for_headspace(self, machine: Machine, form: str) -> int:
        """Return the number of data hosts of a type that make batches as fast as the accelerators use them.

        It is 0 if no endpoint fits into the memory of such a host. Position 0 of an array has the mean figures.
        """
        needed_rate = self._samples_per_host * self._training.num_hosts / max(float(self.headspace_s[0]), 1e-9)
        rate = float(self._rate_of(machine, form).samples_per_s[0])
        return number_for_headspace(needed_rate, rate) if rate > 0 else 0

    def has_bytes_limit(self, trainer: Machine, machine: Machine) -> bool:
        """Return whether batches of fewer bytes could shorten the steps with data hosts of a type.

        True if one of these conditions holds:

        - Batches need more than half of the network of one of the two hosts.
        - Receiving batches needs more than a quarter of the CPUs that the ranks leave free. Local processes may need
          these CPUs too.
        - The windows hold fewer than two batches per endpoint.

        These bounds are low on purpose. One candidate too many costs little time, but the plan is wrong if the best
        candidate is missing. Position 0 of an array has the mean figures.

        Args:
            trainer: Type of the trainer host.
            machine: Type of the data hosts.
        """
        nbytes = bytes_per_sample(self._profile, AS_IS)
        if nbytes <= 0:
            return False
        ranks = self._training.ranks_per_host
        needed_bytes_per_s = nbytes * self._samples_per_host / max(float(self.headspace_s[0]), 1e-9)
        sent_bytes_per_s = nbytes * float(self._rate_of(machine, AS_IS).samples_per_s[0])
        # The ranks may keep all CPUs busy. If no CPU counted as free, batches of any size would need too much.
        free_cpus = max(0.5, trainer.vcpus - ranks * self._rank_cores)
        # The window of a rank if one data host with an endpoint on each vCPU serves one trainer host.
        batch_bytes = nbytes * self._training.batch_samples
        batches = window_batches(trainer, machine.vcpus, batch_bytes, num_ranks=ranks, ranks_per_host=ranks)
        return (
            needed_bytes_per_s > 0.5 * self._figures.network_of(trainer)[0]
            or sent_bytes_per_s > 0.5 * self._figures.network_of(machine)[0]
            or needed_bytes_per_s * self._receive_s_per_byte > 0.25 * free_cpus
            or batches * ranks < PREFETCH_FACTOR * machine.vcpus
        )

    # Step times

    def expected_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the step times of candidates with the mean figures, in seconds, without intervals and timelines."""
        found = [0.0] * len(candidates)
        for indices, parts in self._grouped(candidates):
            for row, index in enumerate(indices):
                # Value 0 has the mean figures.
                found[index] = float(self._draws_of(candidates[index], parts.step_s[row])[0])
        return found

    def predict(self, candidates: Sequence[Candidate], *, is_simulated: bool = True) -> list[Prediction]:
        """Return the predictions of candidates, in their order.

        Args:
            candidates: The clusters.
            is_simulated: Whether to make their timelines. Modelled step times are then multiplied by the ratio of the
                timeline's step time to the modelled one.
        """
        found: dict[int, Prediction] = {}
        for indices, parts in self._grouped(candidates):
            for row, index in enumerate(indices):
                candidate = candidates[index]
                timeline_ratio = self._timeline_ratio(candidate, parts, row) if is_simulated else 1.0
                draws = self._draws_of(candidate, parts.step_s[row] * timeline_ratio)
                # Value 0 has the mean figures, the others are draws. Without draws, value 0 is the whole interval.
                low, high = np.quantile(draws[1:] if self._num_draws else draws, INTERVAL)
                found[index] = Prediction(
                    step_s=float(draws[0]),
                    # The interval contains the step time with the mean figures, also if all draws are on one side.
                    low_s=float(min(low, draws[0])),
                    high_s=float(max(high, draws[0])),
                    bottleneck=BOTTLENECKS[int(parts.limits[row])],
                    draws_s=draws[1:],
                    is_measured=self.timelines.is_measured(candidate),
                )
        return [found[index] for index in range(len(candidates))]

    def limit_of(self, candidate: Candidate) -> str:
        """Return what limits a cluster with data hosts, one of `REMOVABLE`, or an empty text if none of them does."""
        wanted = candidate.endpoints_per_host
        # If few endpoints fit, the trainer hosts make most of the batches, and the bottleneck does not show the memory.
        if any(self.endpoints_on(group.machine, wanted)[1] for group in candidate.data):
            return "memory"
        (found,) = self.predict([candidate], is_simulated=False)
        return found.bottleneck if found.bottleneck in REMOVABLE else ""

    def _timeline_ratio(self, candidate: Candidate, parts: _Parts, row: int) -> float:
        """Return the step time of the timeline / the modelled step time. 1 for a cluster without a timeline."""
        # A measured step time needs no timeline.
        if self.timelines.is_measured(candidate):
            return 1.0
        simulated_s = self.timelines.step_s(candidate)
        if simulated_s is None:
            return 1.0
        # A timeline does not bound how many batches the CPUs receive at the same time. So a step takes at least the
        # time that the CPUs need to receive its batches and to run the ranks.
        return max(simulated_s, float(parts.cpu_bound_s[row])) / float(parts.step_s[row, 0])

    def _grouped(self, candidates: Sequence[Candidate]) -> Iterator[tuple[list[int], _Parts]]:
        """Yield groups of candidates: the indices of each group, and its modelled step times.

        The candidates of a group differ only in data hosts and local endpoints, so one array has all their step times.
        """
        groups: dict[tuple[int, int, int | None, str], list[int]] = defaultdict(list)
        for index, candidate in enumerate(candidates):
            # Use the identity of the machine, because its hash takes longer.
            key = id(candidate.trainer), candidate.num_trainer_hosts, candidate.endpoints_per_host, candidate.form
            groups[key].append(index)
        for indices in groups.values():
            yield indices, self._parts([candidates[index] for index in indices])

    def _draws_of(self, candidate: Candidate, modelled_s: Array) -> Array:
        """Return the step times of a candidate: measured if the profile is of this cluster, else modelled."""
        if self.timelines.is_measured(candidate):
            return self._figures.measured_step_s
        # In a job without data hosts, loader processes copy batches to the ranks. No figure of a profile measures this.
        # So add `residual_s`: how much longer the measured steps were than those of the profiled cluster's timeline.
        draws = modelled_s * self._figures.model_error
        return draws if candidate.data else draws + self.timelines.residual_s

    def _parts(self, candidates: Sequence[Candidate]) -> _Parts:
        """Return the modelled step times of candidates that differ only in data hosts and local endpoints.

        All figures are of one trainer host. Arrays have one row per candidate and one column per draw. Column 0 has the
        mean figures.
        """
        training, first = self._training, candidates[0]
        trainer, num_hosts, form = first.trainer, first.num_trainer_hosts, first.form
        ranks, samples = training.ranks_per_host, float(self._samples_per_host)
        nbytes = bytes_per_sample(self._profile, form)
        encode_s, decode_s = codec_s(self._profile, form)
        # Step time with batches always ready.
        accelerator_s = self.headspace_s
        # Whether loader processes of the ranks make the batches of a candidate, as in the profile.
        as_profiled = np.array(
            [not each.data and each.local_endpoints == training.num_local_processes for each in candidates]
        )

        # What the data hosts deliver: samples per second, the slowest batch, and the limit of the type that makes most.
        machines = {id(group.machine): group.machine for candidate in candidates for group in candidate.data}
        columns = {machine: column for column, machine in enumerate(machines)}
        rates = [self._rate_of(machine, form, wanted=first.endpoints_per_host) for machine in machines.values()]
        counts = np.zeros((len(candidates), len(machines)))
        for row, candidate in enumerate(candidates):
            for group in candidate.data:
                counts[row, columns[id(group.machine)]] += group.count
        shape = (len(candidates), self._num_draws + 1)
        if rates:
            remote_rate = counts @ np.stack([rate.samples_per_s for rate in rates]) / num_hosts
            remote_endpoints = counts @ np.array([float(rate.num_endpoints) for rate in rates])
            remote_batch_s = np.max(np.where(counts > 0, [rate.batch_s[0] for rate in rates], 0.0), axis=1)
            dominant = np.argmax(counts * [rate.samples_per_s[0] for rate in rates], axis=1)
            remote_limit = np.array([rates[index].limit for index in dominant])
        else:
            remote_rate, remote_endpoints = np.zeros(shape), np.zeros(len(candidates))
            remote_batch_s, remote_limit = np.zeros(len(candidates)), np.full(len(candidates), _PREPROCESSING)

        # What the trainer host makes itself. Its batches are compressed too if there are data hosts.
        local = np.array([[candidate.local_endpoints] for candidate in candidates], dtype=np.float64)
        cpu_s, wait_s = self._figures.costs_on(trainer, local, busy_cpus=ranks * self._rank_cores)
        local_cpu_s = cpu_s + np.where(remote_rate[:, :1] > 0, encode_s, 0.0)
        local_batch_s = (local_cpu_s + wait_s) * training.batch_samples
        local_rate = local / np.maximum(local_cpu_s + wait_s, 1e-12)

        # Time to make the samples of a step, if all endpoints are always busy, and if the trainer host's CPUs are.
        rank_cpu_s = ranks * self._rank_cores * accelerator_s
        receive_cpu_s = self._receive_s_per_byte * nbytes + decode_s if self._has_removable_limits else 0.0
        total_rate = np.maximum(remote_rate + local_rate, 1e-12)
        busy_endpoints_s = samples / total_rate
        # In a step of T seconds, the data hosts make remote_rate x T samples. The CPUs run the ranks, receive these
        # samples, and make the others:
        #     vcpus x T = rank_cpu_s + receive_cpu_s x remote_rate x T + local_cpu_s x (samples - remote_rate x T)
        # Solved for T:
        coefficient_of_t = trainer.vcpus + remote_rate * (local_cpu_s - receive_cpu_s)
        busy_cpus_s = (samples * local_cpu_s + rank_cpu_s) / np.maximum(coefficient_of_t, 1e-9)
        # If local endpoints would make a step longer, the data hosts make all samples.
        remote_only_s = samples / np.maximum(remote_rate, 1e-12)
        with_local_s = np.minimum(remote_only_s, np.maximum(busy_endpoints_s, busy_cpus_s))
        supply_s = np.where(local > 0, with_local_s, remote_only_s)
        # Every endpoint has about equally many requests. So the share of the batches that come over the network is
        # about the share of the endpoints on other hosts, which include the other trainer hosts. In a job of one
        # host, no batch comes over the network.
        num_endpoints = remote_endpoints + local[:, 0] * num_hosts
        network_share = 1 - local[:, 0] / np.maximum(num_endpoints, 1e-12)
        network_share = np.where(counts.sum(axis=1) + num_hosts > 1, network_share, 0.0)[:, None]
        has_limit = nbytes > 0 and self._has_removable_limits
        network_rate = self._figures.network_of(trainer) / nbytes if has_limit else np.full(shape[1], np.inf)
        # Batches of loader processes stay on their host.
        network_s = np.where(as_profiled[:, None], 0.0, network_share * samples / network_rate)
        # The CPUs receive the share that comes over the network, or the share that the data hosts can make during a
        # step, if it is larger.
        remote_share = np.minimum(1.0, remote_rate * np.maximum(supply_s, accelerator_s) / samples)
        received_share = np.maximum(remote_share, network_share)
        cpu_bound_s = (rank_cpu_s + receive_cpu_s * samples * received_share) / trainer.vcpus
        # Without data hosts and local processes, each rank makes its own batch between two steps, so nothing overlaps.
        is_serial = (local[:, 0] == 0) & (counts.sum(axis=1) == 0)
        serial_s = accelerator_s + training.batch_samples * (cpu_s + wait_s)

        # The window of a rank bounds the batches that are made at the same time.
        batch_s = np.maximum(remote_batch_s[:, None], np.where(local > 0, local_batch_s, 0.0))
        num_ranks = ranks * num_hosts
        in_flight = self._window(trainer, num_endpoints, nbytes, num_ranks)
        # torch's own loader limits the number of batches in flight, and not their bytes.
        in_flight = np.where(as_profiled, np.maximum(1.0, PREFETCH_FACTOR * num_endpoints / num_ranks), in_flight)
        window_s = batch_s / in_flight[:, None]
        # The slowest part determines the step. Each epoch begins with a wait for a batch, unless the loader asks ahead.
        # Divide this wait among the steps of the epoch.
        step_s = np.maximum.reduce([np.broadcast_to(accelerator_s, shape), supply_s, cpu_bound_s, network_s, window_s])
        waits = training.steps_per_epoch is not None and not training.requests_ahead
        start_s = batch_s / training.steps_per_epoch if waits else np.zeros_like(batch_s)
        step_s = np.where(is_serial[:, None], serial_s, step_s + start_s)
        # The bottlenecks. If data hosts make most of the samples, what limits the data hosts limits the supply.
        limits = _limits(
            times=(accelerator_s[0], supply_s[:, 0], cpu_bound_s[:, 0], window_s[:, 0], network_s[:, 0]),
            supply_limit=np.where(remote_rate[:, 0] * 2 > total_rate[:, 0], remote_limit, _PREPROCESSING),
        )
        # If the waits at the starts of epochs take a large share of a step, they limit the step instead of the
        # accelerators.
        is_late = (limits == _ACCELERATOR) & (start_s[:, 0] > NEARLY_BUSY * step_s[:, 0]) & ~is_serial
        limits = np.where(is_late, _EPOCH_START, limits)
        # A rank that makes its own batches waits for them. From a share of `NEARLY_BUSY` on, this wait limits a step.
        is_waiting = (1 - NEARLY_BUSY) * serial_s[:, 0] > accelerator_s[0]
        limits = np.where(is_serial & is_waiting, _PREPROCESSING, limits)
        # If samples wait longer than they compute, storage limits the clusters without data hosts, and not the vCPUs.
        if wait_s[0] > cpu_s[:, 0].max():
            limits = np.where((limits == _PREPROCESSING) & (counts.sum(axis=1) == 0), _STORAGE, limits)
        return _Parts(step_s=step_s, limits=limits, cpu_bound_s=cpu_bound_s[:, 0])

    def _window(self, trainer: Machine, num_endpoints: NDArray[Any], nbytes: float, num_ranks: int) -> Array:
        """Return how many batches a rank has in flight. Its plan and the bytes of its window limit them.

        Args:
            trainer: Type of the trainer hosts.
            num_endpoints: Endpoints of all hosts, one number per candidate. The result has the same form.
            nbytes: Bytes of a sample.
            num_ranks: Ranks of the job.
        """
        by_count: Array = np.maximum(1.0, PREFETCH_FACTOR * num_endpoints / num_ranks)
        # The bytes limit nothing if they are unknown, or if the model leaves out the limits in `REMOVABLE`.
        if nbytes <= 0 or not self._has_removable_limits:
            return by_count
        training = self._training
        by_bytes = [
            window_batches(trainer, int(number), nbytes * training.batch_samples, num_ranks, training.ranks_per_host)
            for number in num_endpoints
        ]
        return np.minimum(by_count, np.array(by_bytes, dtype=np.float64))


def _limits(times: tuple[Any, ...], supply_limit: Any) -> NDArray[np.int64]:
    """Return the index of the bottleneck of every candidate, which is the largest of its times.

    Args:
        times: Seconds of a step by accelerator (one number), supply, CPUs, window and network (one for each candidate).
        supply_limit: Index of the bottleneck of each candidate if its supply is the largest.
    """
    accelerator_s, *others = times
    largest = np.argmax(np.stack([np.broadcast_to(accelerator_s, others[0].shape), *others]), axis=0)
    # Bottlenecks in the order of `times`. Position 1, the supply, is replaced below.
    bottlenecks = np.array([_ACCELERATOR, 0, _TRAINER_CPU, _WINDOW, _TRAINER_NETWORK])
    return np.asarray(np.where(largest == 1, supply_limit, bottlenecks[largest]))
