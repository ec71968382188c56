"""The step time of a job on a cluster, computed from its profile.

A step takes as long as its slowest part. The parts overlap, so the step time is the largest of:

- the step time with batches always ready (headspace), which no cluster shortens
- the time that the endpoints of all hosts need to make the batches of one step
- the time that the trainer host's network interface needs to receive them
- the time that the CPUs of the trainer host need to receive them and to run the ranks

Three small losses are added, because a window of batches does not hide everything: the spread of the endpoints' times
if two parts take about equally long, batches that take much longer than the others, and the beginning of an epoch,
when no batch is ready.

The figures of a profile are uncertain. `StepModel` therefore computes each step time many times, each time with
other figures that the measurements also allow (uncertain.py). An interval is the range of 90 % of these step times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero.planning.candidates import AS_IS, UINT8, Candidate
from hetero.planning.headspace import number_for_headspace
from hetero.planning.machines import Machine
from hetero.planning.profile import Profile
from hetero.planning.uncertain import Array, UncertainFigures
from hetero.planning.window_stalls import stall_table

__all__ = ["BOTTLENECKS", "MOST_PROCESSES_PER_CPU", "Prediction", "StepModel"]

MOST_PROCESSES_PER_CPU = 8
"""Largest number of processes per CPU that a plan proposes for data that waits for storage."""

BOTTLENECKS = (
    "accelerator",
    "preprocessing",
    "trainer network",
    "data network",
    "storage",
    "memory",
    "trainer CPU",
    "window",
)
"""What can limit the step time."""
(_ACCELERATOR, _PREPROCESSING, _TRAINER_NETWORK, _DATA_NETWORK, _STORAGE, _MEMORY, _TRAINER_CPU, _WINDOW) = range(8)

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_MEMORY_SHARE = 0.9
"""Share of a host's memory that endpoints may use."""
_CALIBRATION_RANGE = (0.7, 1.4)
"""Range of the measured step time / the modelled one that corrects the costs of samples."""
_LONG_EPOCH = 100
"""Steps of an epoch whose beginning hardly changes the mean step time."""
_OWN_BONUS = 1.1
"""How many times more batches an endpoint makes if its batches need no network, and the network is full."""
_SLOW_SHARE = 0.75
"""Share of its part of the batches that a slow kind of endpoint makes at least."""
_WINDOW_PER_ENDPOINT = 2
_MAX_WINDOW_BYTES = 2.0**30
_MAX_WINDOW_SHARE = 0.25
"""Limits of the reader's window: two batches per endpoint, 1 GiB per rank, and a quarter of the host's memory."""


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
    trainer_network_share: float
    """Bytes that a trainer host receives / bytes that its network interface can receive. 0 if unknown."""
    is_measured: bool = False
    """Whether the step time was measured, because the profile is of this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostRate:
    """What one host of a type delivers."""

    samples_per_s: Array
    """The smaller of the next two."""
    computed_per_s: Array
    """Samples per second that its endpoints make."""
    carried_per_s: Array
    """Samples per second that its network interface sends."""
    batch_s: Array
    """Seconds that an endpoint needs for a batch."""
    num_endpoints: Array
    limit: int
    """Index of the bottleneck: vCPUs, memory, network or storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Modelled step times. One row per candidate."""

    step_s: Array
    """One column per draw."""
    limits: NDArray[np.int64]
    """Indices of the bottlenecks."""
    network_s: Array
    """Seconds per step that the trainer host's network interface is busy. 0 if its bandwidth is unknown."""


class StepModel:
    """Predicts step times. Deterministic: equal arguments give equal predictions.

    Column 0 of every array has the mean figures, and the other columns have figures that the measurements also allow.

    Args:
        profile: The figures of the job.
        vcpu_speeds: Relative speed of a vCPU by instance type, compared with the profile's first supply. It replaces
            the assumption about a type that was not measured.
        endpoints_per_host: Endpoints per data host. None means one per vCPU, or more if they wait for storage.
        ignored: Some of `BOTTLENECKS` that the model leaves out, to find out what would happen without them.
        num_draws: Number of times that each step time is computed for its interval. 0 gives no intervals.
        seed: Seed of the draws.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        vcpu_speeds: Mapping[str, float] | None = None,
        endpoints_per_host: int | None = None,
        ignored: Collection[str] = (),
        num_draws: int = 200,
        seed: int = 0,
    ) -> None:
        self._figures = UncertainFigures(profile, vcpu_speeds=vcpu_speeds or {}, num_draws=num_draws, seed=seed)
        self._num_draws = num_draws
        self._endpoints_per_host = endpoints_per_host
        self._ignored = ignored
        self._profile = profile
        self._training = profile.training
        self._reference = profile.supply[0]
        self.headspace_s = self._figures.headspace_s
        self._bytes_per_sample = profile.wire_bytes_per_sample.value if profile.wire_bytes_per_sample else 0.0
        self._receive_s_per_byte = _value(self._training.receive_cpu_s_per_gb) / 1e9
        self._rank_cores = _value(self._training.rank_cpu_cores)
        self._num_ranks = self._training.ranks_per_host * self._training.num_hosts
        self._samples_per_host = self._training.ranks_per_host * self._training.batch_samples
        self._residual_s = 0.0
        self._calibrate()

    # Bytes

    def bytes_per_sample(self, form: str) -> float:
        """Return the bytes of one sample on the network in a form of `FORMS`. 0 if not measured."""
        if form == UINT8:
            wide = sum(leaf.bytes_per_sample for leaf in self._profile.leaves if leaf.fits_uint8)
            narrow = sum(
                leaf.bytes_per_sample / _ITEM_BYTES.get(leaf.dtype, 1)
                for leaf in self._profile.leaves
                if leaf.fits_uint8
            )
            return self._bytes_per_sample - wide + narrow
        return self._bytes_per_sample * next((c.ratio for c in self._profile.codecs if c.name == form), 1.0)

    def _codec_s(self, form: str) -> tuple[float, float]:
        """Return the CPU seconds per sample of an endpoint and of a rank for a compression."""
        for codec in self._profile.codecs:
            if codec.name == form:
                return codec.encode_cpu_s_per_sample, codec.decode_cpu_s_per_sample
        return 0.0, 0.0

    # Hosts

    def endpoints_on(self, machine: Machine) -> tuple[int, bool]:
        """Return the number of endpoints of a data host, and whether its memory limits it.

        Endpoints that wait for storage leave their CPU to others, so there are more of them than CPUs.
        """
        cpu_s, wait_s = self._figures.costs_on(machine, machine.vcpus)
        per_cpu = min(MOST_PROCESSES_PER_CPU, 1 + wait_s[0] / cpu_s[0]) if cpu_s[0] > 0 else 1.0
        wanted = self._endpoints_per_host or math.floor(machine.vcpus * per_cpu)
        private = _value(self._reference.endpoint_private_bytes)
        shared = _value(self._reference.endpoint_shared_bytes)
        if machine.memory_bytes is None or private <= 0 or "memory" in self._ignored:
            return wanted, False
        fitting = int((machine.memory_bytes * _MEMORY_SHARE - shared) // private)
        return max(0, min(wanted, fitting)), fitting < wanted

    def _rate_of(self, machine: Machine, form: str) -> _HostRate:
        """Return what a data host of this type delivers."""
        num_endpoints, is_short_of_memory = self.endpoints_on(machine)
        cpu_s, wait_s = self._figures.costs_on(machine, num_endpoints)
        cpu_s = np.maximum(cpu_s + self._codec_s(form)[0], 1e-12)
        seconds = cpu_s + wait_s
        rate = np.minimum(num_endpoints / seconds, machine.vcpus / cpu_s)
        limit = _PREPROCESSING
        if is_short_of_memory:
            limit = _MEMORY
        elif wait_s[0] > cpu_s[0]:
            limit = _STORAGE
        nbytes = self.bytes_per_sample(form)
        computed, carried = rate, np.full_like(rate, np.inf)
        if nbytes > 0 and "data network" not in self._ignored:
            carried = self._figures.network_of(machine) / nbytes
            if carried[0] < rate[0]:
                limit = _DATA_NETWORK
            rate = np.minimum(rate, carried)
        return _HostRate(
            samples_per_s=rate,
            computed_per_s=computed,
            carried_per_s=carried,
            batch_s=(seconds + nbytes / self._figures.network_of(machine)) * self._training.batch_samples,
            num_endpoints=np.full_like(rate, num_endpoints),
            limit=limit,
        )

    def hosts_for_headspace(self, machine: Machine, form: str) -> int:
        """Return the number of data hosts of a type that make batches as fast as the accelerators use them."""
        wanted = self._samples_per_host * self._training.num_hosts / max(float(self.headspace_s[0]), 1e-9)
        rate = float(self._rate_of(machine, form).samples_per_s[0])
        return number_for_headspace(wanted, rate) if rate > 0 else 0

    def has_bytes_limit(self, trainer: Machine, machine: Machine) -> bool:
        """Return whether fewer bytes could shorten steps: a network, the receiving CPUs or the window is half used."""
        nbytes = self.bytes_per_sample(AS_IS)
        if nbytes <= 0:
            return False
        wanted = self._samples_per_host / max(float(self.headspace_s[0]), 1e-9)
        free_cpus = max(0.5, trainer.vcpus - self._training.ranks_per_host * self._rank_cores)
        rate = self._rate_of(machine, AS_IS)
        batches = self._window(trainer, np.array([float(machine.vcpus)]), nbytes)[0]
        return (
            wanted * nbytes > 0.5 * self._figures.network_of(trainer)[0]
            or float(rate.samples_per_s[0]) * nbytes > 0.5 * self._figures.network_of(machine)[0]
            or wanted * nbytes * self._receive_s_per_byte > 0.25 * free_cpus
            or batches < _WINDOW_PER_ENDPOINT * machine.vcpus
        )

    # Step times

    def expected_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the step times of candidates, without intervals."""
        found = [0.0] * len(candidates)
        for indices, parts in self._grouped(candidates):
            for row, index in enumerate(indices):
                found[index] = float(self._draws_of(candidates[index], parts.step_s[row])[0])
        return found

    def predict(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        """Return the predictions of candidates, in their order."""
        found: dict[int, Prediction] = {}
        for indices, parts in self._grouped(candidates):
            for row, index in enumerate(indices):
                draws = self._draws_of(candidates[index], parts.step_s[row])
                low, high = np.quantile(draws[1:] if self._num_draws else draws, (0.05, 0.95))
                found[index] = Prediction(
                    step_s=float(draws[0]),
                    low_s=float(min(low, draws[0])),
                    high_s=float(max(high, draws[0])),
                    bottleneck=BOTTLENECKS[int(parts.limits[row])],
                    draws_s=draws[1:],
                    trainer_network_share=float(parts.network_s[row] / draws[0]),
                    is_measured=self._is_profiled(candidates[index]),
                )
        return [found[index] for index in range(len(candidates))]

    def _grouped(self, candidates: Sequence[Candidate]) -> Iterator[tuple[list[int], _Parts]]:
        """Yield the candidates with the same trainer hosts and form, as indices, with their step times."""
        groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for index, candidate in enumerate(candidates):
            groups[id(candidate.trainer), candidate.num_trainer_hosts, candidate.form].append(index)
        for indices in groups.values():
            chosen = [candidates[index] for index in indices]
            first = chosen[0]
            yield indices, self._parts(first.trainer, first.num_trainer_hosts, first.form, chosen)

    def _draws_of(self, candidate: Candidate, modelled_s: Array) -> Array:
        """Return the step times of a candidate: measured if the profile is of this cluster, else modelled."""
        if self._is_profiled(candidate):
            return self._figures.measured_step_s
        draws = modelled_s * self._figures.model_error
        return draws if candidate.data else draws + self._residual_s

    def _calibrate(self) -> None:
        """Make the model give the measured step time for the profiled cluster.

        If the accelerator limits the modelled step, local loading costs what the model does not know, such as the
        copies between processes. More processes do not save it. Otherwise the measured samples were cheaper or more
        expensive than the others. In short epochs neither is known, because their beginnings cost about as much.
        """
        training = self._training
        own = Machine(instance_type=training.instance_type, vcpus=training.vcpus)
        candidate = Candidate(
            trainer=own, num_trainer_hosts=training.num_hosts, local_endpoints=training.num_local_processes
        )
        modelled_s = float(self._parts(own, training.num_hosts, AS_IS, [candidate]).step_s[0, 0])
        unexplained_s = training.step_s.mean - modelled_s
        if modelled_s < 1.1 * float(self.headspace_s[0]):
            self._residual_s = min(max(0.0, unexplained_s), training.data_wait_s.mean)
        elif training.num_local_processes and (training.steps_per_epoch or _LONG_EPOCH) >= _LONG_EPOCH:
            low, high = _CALIBRATION_RANGE
            self._figures.correct(min(high, max(low, training.step_s.mean / modelled_s)))

    def _uneven_s(
        self, counts: Array, rates: Sequence[_HostRate], local: Array, local_rate: Array, samples: float
    ) -> Array:
        """Return the least step time of endpoints of several kinds if one kind is slow.

        Every endpoint has about equally many requests, and batches arrive in order. So a kind makes nearly its share of
        the batches, even if it takes longer for them than the others.

        Args:
            counts: Data hosts of each type per trainer host. One row per candidate.
            rates: What one host of each type delivers.
            local: Endpoints of a trainer host, as a column.
            local_rate: Samples per second of these endpoints.
            samples: Samples per step of one trainer host.
        """
        numbers = [counts[:, [column]] * rate.num_endpoints[0] for column, rate in enumerate(rates)]
        total = np.maximum(sum(numbers, local), 1e-12)
        least_s = _SLOW_SHARE * local / total * samples / np.maximum(local_rate, 1e-12)
        for column, (number, rate) in enumerate(zip(numbers, rates, strict=True)):
            own = np.maximum(counts[:, [column]], 1e-12)
            wanted = number / total * samples / own
            least_s = np.maximum(least_s, _SLOW_SHARE * wanted / np.maximum(rate.computed_per_s, 1e-12))
            least_s = np.maximum(least_s, _SLOW_SHARE * wanted / rate.carried_per_s)
        return np.asarray(least_s)

    def _is_as_profiled(self, candidates: Sequence[Candidate]) -> NDArray[np.bool_]:
        """Return for each candidate whether loader processes of the ranks make its batches, as in the profile."""
        own = self._training.num_local_processes
        return np.array([not candidate.data and candidate.local_endpoints == own for candidate in candidates])

    def _is_profiled(self, candidate: Candidate) -> bool:
        """Return whether the profile measured this cluster."""
        training = self._training
        return (
            not candidate.data
            and candidate.form == AS_IS
            and candidate.trainer.instance_type == training.instance_type
            and candidate.num_trainer_hosts == training.num_hosts
            and candidate.local_endpoints == training.num_local_processes
        )

    def _parts(self, trainer: Machine, num_hosts: int, form: str, candidates: Sequence[Candidate]) -> _Parts:
        """Return the modelled step times of candidates with the same trainer hosts and form."""
        training = self._training
        ranks, samples = training.ranks_per_host, float(self._samples_per_host)
        nbytes = self.bytes_per_sample(form)
        encode_s, decode_s = self._codec_s(form)
        accelerator_s = self.headspace_s

        # What the data hosts deliver, per trainer host. One row per candidate, one column per draw.
        machines = {id(group.machine): group.machine for candidate in candidates for group in candidate.data}
        columns = {machine: column for column, machine in enumerate(machines)}
        rates = [self._rate_of(machine, form) for machine in machines.values()]
        counts = np.zeros((len(candidates), len(machines)))
        for row, candidate in enumerate(candidates):
            for group in candidate.data:
                counts[row, columns[id(group.machine)]] += group.count
        shape = (len(candidates), self._num_draws + 1)
        if rates:
            remote = counts @ np.stack([rate.samples_per_s for rate in rates]) / num_hosts
            endpoints = counts @ np.array([rate.num_endpoints[0] for rate in rates])
            slowest = np.max(np.where(counts > 0, [rate.batch_s[0] for rate in rates], 0.0), axis=1)
            dominant = np.argmax(counts * [rate.samples_per_s[0] for rate in rates], axis=1)
            remote_limit = np.array([rates[index].limit for index in dominant])
        else:
            remote, endpoints, slowest = np.zeros(shape), np.zeros(len(candidates)), np.zeros(len(candidates))
            remote_limit = np.full(len(candidates), _PREPROCESSING)

        # What the trainer host makes itself.
        local = np.array([[candidate.local_endpoints] for candidate in candidates], dtype=np.float64)
        cpu_s, wait_s = self._figures.costs_on(trainer, local, busy_cpus=ranks * self._rank_cores)
        local_cpu_s = cpu_s + np.where(remote[:, :1] > 0, encode_s, 0.0)
        local_batch_s = (local_cpu_s + wait_s) * training.batch_samples
        local_rate = local / np.maximum(local_cpu_s + wait_s, 1e-12)

        # Step times: supply, and the CPUs of the trainer host.
        rank_cpu_s = ranks * self._rank_cores * accelerator_s
        receive_cpu_s = 0.0 if "trainer CPU" in self._ignored else self._receive_s_per_byte * nbytes + decode_s
        total_rate = np.maximum(remote + local_rate, 1e-12)
        supply_s = samples / total_rate
        spare = trainer.vcpus + remote * (local_cpu_s - receive_cpu_s)
        shared_s = (samples * local_cpu_s + rank_cpu_s) / np.maximum(spare, 1e-9)
        alone_s = samples / np.maximum(remote, 1e-12)
        data_s = np.where(local > 0, np.minimum(alone_s, np.maximum(supply_s, shared_s)), alone_s)
        # Every endpoint has about equally many requests. So the share of the batches that come over the network is
        # about the share of the endpoints on other hosts, which include the other trainer hosts.
        num_endpoints = endpoints + local[:, 0] * num_hosts
        own_share = local[:, 0] / np.maximum(num_endpoints, 1e-12)
        foreign_share = 1 - np.minimum(1.0, _OWN_BONUS * own_share)
        foreign_share = np.where(counts.sum(axis=1) + num_hosts > 1, foreign_share, 0.0)[:, None]
        has_limit = nbytes > 0 and "trainer network" not in self._ignored
        carried = self._figures.network_of(trainer) / nbytes if has_limit else np.full(shape[1], np.inf)
        data_s = np.maximum(data_s, self._uneven_s(counts / num_hosts, rates, local, local_rate, samples))
        network_s = np.where(self._is_as_profiled(candidates)[:, None], 0.0, foreign_share * samples / carried)
        received = np.maximum(np.minimum(1.0, remote * np.maximum(data_s, accelerator_s) / samples), foreign_share)
        cpu_bound_s = (rank_cpu_s + receive_cpu_s * samples * received) / trainer.vcpus
        # Without data hosts and local processes, a rank fetches between two steps: nothing overlaps.
        is_serial = (local[:, 0] == 0) & (counts.sum(axis=1) == 0)
        serial_s = accelerator_s + training.batch_samples * (cpu_s + wait_s)

        # The window of a rank bounds the batches that are made at the same time.
        batch_s = np.maximum(slowest[:, None], np.where(local > 0, local_batch_s, 0.0))
        in_flight = self._window(trainer, num_endpoints, nbytes)
        if (as_profiled := self._is_as_profiled(candidates)).any():  # torch's own loader has no limit in bytes
            in_flight = np.where(as_profiled, np.maximum(1.0, _WINDOW_PER_ENDPOINT * num_endpoints), in_flight)
        active = np.minimum(1.0, in_flight * self._num_ranks / np.maximum(num_endpoints, 1.0))
        batch_s = batch_s * self._figures.relief(active[:, None])
        window_s = batch_s / in_flight[:, None]
        base = np.maximum.reduce([np.broadcast_to(accelerator_s, shape), data_s, cpu_bound_s, network_s])
        step_s = base + self._losses(base, data_s, batch_s, in_flight)
        step_s = np.where(is_serial[:, None], serial_s, step_s)
        limits = _limits(
            (accelerator_s[0], data_s[:, 0], cpu_bound_s[:, 0], window_s[:, 0], network_s[:, 0]),
            np.where(remote[:, 0] * 2 > total_rate[:, 0], remote_limit, _PREPROCESSING),
        )
        limits = np.where(is_serial & (serial_s[:, 0] > 1.02 * accelerator_s[0]), _PREPROCESSING, limits)
        if wait_s[0] > cpu_s[:, 0].max():
            limits = np.where((limits == _PREPROCESSING) & (counts.sum(axis=1) == 0), _STORAGE, limits)
        if trainer.network_bytes_per_s is None:
            network_s = np.zeros(shape)
        return _Parts(step_s=step_s, limits=limits, network_s=network_s[:, 0])

    def _window(self, trainer: Machine, num_endpoints: NDArray[Any], nbytes: float) -> Array:
        """Return the batches that a rank asks for at the same time."""
        training = self._training
        by_count: Array = np.maximum(1.0, _WINDOW_PER_ENDPOINT * num_endpoints)
        if nbytes <= 0 or "window" in self._ignored:
            return by_count
        limit = _MAX_WINDOW_BYTES
        if trainer.memory_bytes is not None:
            limit = min(limit, trainer.memory_bytes * _MAX_WINDOW_SHARE / training.ranks_per_host)
        return np.asarray(np.maximum(1.0, np.minimum(by_count, limit // (nbytes * training.batch_samples))))

    def _losses(self, base: Array, data_s: Array, batch_s: Array, in_flight: Array) -> Array:
        """Return the seconds of a step that the window does not hide."""
        training = self._training
        accelerator_s = self.headspace_s
        # Two parts that take about equally long: the mean of the larger one exceeds both means.
        deviation = float(np.std(self._figures.batch_shape))
        spread = data_s * deviation / np.sqrt(np.maximum(in_flight[:, None], 1.0)) + 1e-15
        distance = (accelerator_s - data_s) / spread
        density = np.exp(-0.5 * np.minimum(distance**2, 1400.0)) / math.sqrt(2 * math.pi)
        below = 0.5 * (1.0 + _erf(distance / math.sqrt(2)))
        larger = data_s + (accelerator_s - data_s) * below + spread * density
        coupling = np.maximum(0.0, larger - np.maximum(accelerator_s, data_s))
        # Batches that take longer than the window lasts.
        table = stall_table(tuple(self._figures.batch_shape.tolist()), self._num_ranks)
        flights = np.broadcast_to(in_flight[:, None], base.shape)
        slack = base * flights / np.maximum(batch_s, 1e-12)
        stalls = base * (table.ratio(slack, flights) - 1)
        # The beginning of an epoch, when no batch is ready.
        begin = np.zeros(1)
        if training.steps_per_epoch:
            half = batch_s / 2
            begin = half + np.where(data_s > accelerator_s, np.minimum(accelerator_s, half), half)
            begin = begin / training.steps_per_epoch
        return np.asarray(coupling + stalls + begin)


def _limits(times: tuple[Any, ...], supply_limit: Any) -> NDArray[np.int64]:
    """Return the index of the bottleneck of every candidate."""
    accelerator_s, *others = times
    largest = np.argmax(np.stack([np.broadcast_to(accelerator_s, others[0].shape), *others]), axis=0)
    fixed = np.array([_ACCELERATOR, 0, _TRAINER_CPU, _WINDOW, _TRAINER_NETWORK])
    return np.asarray(np.where(largest == 1, supply_limit, fixed[largest]))


def _value(figure: Any) -> float:
    return 0.0 if figure is None else float(figure.value)


def _erf(x: Array) -> Array:
    """Return the error function, with an absolute error below 2e-7 (Abramowitz and Stegun 7.1.26)."""
    sign, x = np.sign(x), np.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * x)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(sign * (1.0 - polynomial * np.exp(-np.minimum(x**2, 700.0))))
