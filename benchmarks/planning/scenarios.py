"""The configurations of the planner's benchmark. All are made from seeds, without a look at any planner.

`random_scenarios` mixes pipelines, trainer machines, menus, NICs and stragglers. `constructed_scenarios` has cases with
a known right answer and the word for its reason.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace

import numpy as np

from planning.choices import Choice
from planning.machines import DATA_TYPES, TRAINERS, MachineType, made_up
from planning.workload import LINEAR, Cluster, Curve, Host, Workload

__all__ = ["NUM_RANDOM", "Reason", "Scenario", "all_scenarios", "constructed_scenarios", "random_scenarios"]

NUM_RANDOM = 200
HYPER_THREADS: Curve = ((0.0, 1.0), (0.5, 0.97), (1.0, 0.72))
MEMORY_BANDWIDTH: Curve = ((0.0, 1.0), (0.25, 0.93), (0.5, 0.78), (1.0, 0.52))
_GIB = 2.0**30
LEAST_STEP_S = 0.005
"""Shorter steps are rare, and depend on costs of a request that are not simulated."""


class Reason(enum.Enum):
    """Why the right answer of a constructed case is right."""

    ACCELERATOR = "accelerator"
    """The accelerator is busy already. Add nothing."""
    NETWORK = "network"
    """The trainer hosts' NICs carry too few batches of data hosts. Add no data hosts."""
    STORAGE = "storage"
    """The processes wait for storage. More processes on the trainer host help, data hosts cost more."""
    MEMORY = "memory"
    """Too few endpoints fit into the memory of a data host. Add no data hosts."""
    BREAK_EVEN = "break-even"
    """Data hosts make steps shorter, and cost more than that saves. Add no data hosts."""
    UINT8 = "uint8"
    """The NICs are full of float32 values that fit into uint8. Send uint8 first."""
    FREE_CPUS = "free-cpus"
    """The trainer host has enough free CPUs. Use them, and add no data hosts."""
    DATA_HOSTS = "data-hosts"
    """Data hosts pay."""

    def agrees(self, choice: Choice) -> bool:
        """Return whether a choice is of the right kind. Only the reason itself can be wrong for `UINT8`."""
        if self is Reason.UINT8:
            return True
        if self is Reason.DATA_HOSTS:
            return choice.num_data_hosts > 0
        needs_endpoints = self in (Reason.STORAGE, Reason.FREE_CPUS)
        return choice.num_data_hosts == 0 and (choice.trainer_endpoints > 0 or not needs_endpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One configuration. The planner sees its machines, its prices and a profile, but not the workload."""

    name: str
    seed: int
    pipeline: str
    workload: Workload
    trainer: MachineType
    num_trainers: int
    menu: tuple[MachineType, ...]
    """With the speeds that their vCPUs have for this workload. The planner must not see these speeds."""
    curve: Curve = LINEAR
    slow_host_share: float = 0.0
    slow_host_factor: float = 1.0
    slow_batch_share: float = 0.0
    slow_batch_factor: float = 1.0
    profiled_types: tuple[str, ...] = ()
    """Types of the menu whose supply was measured. The trainer's type always is."""
    is_float: bool = False
    """Whether the batches are float32 values that fit into uint8."""
    reason: Reason | None = None
    """The reason of the right answer, None if it was not constructed."""

    @property
    def has_stragglers(self) -> bool:
        """Whether hosts or batches are slow at times."""
        return self.slow_batch_share > 0 or self.slow_host_share > 0

    @property
    def slow_episode_s(self) -> float:
        """How long a host stays slow: longer than its endpoints need for the batches in their queues."""
        workload = self.workload
        return max(15.0 * workload.step_s, 5.0 * (workload.batch_cpu_total_s + workload.batch_wait_total_s))

    @property
    def most_trainer_endpoints(self) -> int:
        """Largest number of endpoints per trainer host in the search, more than one per vCPU if they wait."""
        return min(self.trainer.vcpus * (4 if self.waits else 1), self.fitting_endpoints(self.trainer))

    @property
    def waits(self) -> bool:
        """Whether processes wait for storage much of their time."""
        return self.workload.batch_wait_total_s > 0.3 * self.workload.batch_cpu_total_s / self.trainer.speed

    def fitting_endpoints(self, machine: MachineType) -> int:
        """Return how many endpoints fit into the memory of a machine."""
        workload = self.workload
        if not workload.endpoint_private_bytes:
            return 4096
        return max(0, int((machine.memory_bytes - workload.endpoint_shared_bytes) / workload.endpoint_private_bytes))

    def data_endpoints(self, machine: MachineType) -> int:
        """Return the endpoints of a data host: one per vCPU, or fewer if its memory is small."""
        return min(machine.vcpus, self.fitting_endpoints(machine))

    def hourly_usd(self, choice: Choice) -> float:
        """Return the price of all hosts of a choice."""
        prices = {machine.name: machine.hourly_usd for machine in self.menu}
        return self.trainer.hourly_usd * self.num_trainers + sum(prices[name] * count for name, count in choice.data)

    def cluster(self, choice: Choice) -> Cluster:
        """Return the hosts of a choice."""
        machines = {machine.name: machine for machine in self.menu}
        data = tuple(
            self._host(machines[name], choice.endpoints_per_host or self.data_endpoints(machines[name]))
            for name, count in choice.data
            for _ in range(count)
        )
        return Cluster(
            trainers=(self._host(self.trainer, choice.trainer_endpoints),) * self.num_trainers,
            data=data,
            slow_host_share=self.slow_host_share,
            slow_host_factor=self.slow_host_factor,
            slow_batch_share=self.slow_batch_share,
            slow_batch_factor=self.slow_batch_factor,
            slow_episode_s=self.slow_episode_s,
        )

    def with_uint8(self) -> Scenario:
        """Return the same job with batches of uint8, which are converted on the accelerator."""
        return replace(
            self, workload=replace(self.workload, bytes_per_sample=self.workload.bytes_per_sample / 4), is_float=False
        )

    def _host(self, machine: MachineType, endpoints: int) -> Host:
        return Host(
            name=machine.name,
            vcpus=machine.vcpus,
            speed=machine.speed,
            nic_bytes_per_s=machine.nic_bytes_per_s,
            memory_bytes=machine.memory_bytes,
            endpoints=endpoints,
            curve=self.curve,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Ranges of a pipeline's numbers."""

    cpu_s: tuple[float, float]
    """CPU seconds of a sample."""
    variation: tuple[float, float]
    kilobytes: tuple[float, float]
    batches: tuple[int, ...]
    """Samples per batch."""
    wait_s: tuple[float, float] = (0.0, 0.0)
    tail: tuple[float, float] = (0.0, 1.0)
    """Share of slow samples, and how many times more they cost."""
    memory_gib: tuple[float, float] = (0.15, 0.6)


PIPELINES = {
    "tabular": Pipeline(cpu_s=(1e-4, 5e-4), variation=(0.05, 0.2), kilobytes=(0.1, 2), batches=(512, 1024, 2048)),
    "text": Pipeline(cpu_s=(1e-3, 6e-3), variation=(0.3, 0.9), kilobytes=(2, 16), batches=(32, 64, 128)),
    "photos": Pipeline(cpu_s=(4e-3, 1.5e-2), variation=(0.2, 0.5), kilobytes=(100, 160), batches=(32, 64, 128, 256)),
    "photos-float": Pipeline(cpu_s=(4e-3, 1.5e-2), variation=(0.2, 0.5), kilobytes=(400, 640), batches=(32, 64, 128)),
    "augmented": Pipeline(cpu_s=(2e-2, 8e-2), variation=(0.2, 0.6), kilobytes=(150, 700), batches=(32, 64, 128)),
    "audio": Pipeline(cpu_s=(1e-2, 4e-2), variation=(0.4, 0.8), kilobytes=(60, 600), batches=(16, 32, 64)),
    "skewed": Pipeline(
        cpu_s=(1e-2, 5e-2), variation=(0.8, 1.5), kilobytes=(300, 3000), batches=(8, 16, 32), tail=(0.02, 10.0)
    ),
    "video": Pipeline(
        cpu_s=(0.2, 1.2), variation=(0.3, 0.8), kilobytes=(1500, 12000), batches=(4, 8, 16), memory_gib=(0.5, 2.0)
    ),
    "storage": Pipeline(
        cpu_s=(1e-3, 5e-3), variation=(0.2, 0.5), kilobytes=(100, 600), batches=(32, 64, 128), wait_s=(0.005, 0.06)
    ),
}


class _Dice:
    """Seeded draws."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def between(self, bounds: tuple[float, float]) -> float:
        """Return a number whose logarithm is uniform."""
        low, high = bounds
        return float(low * (high / low) ** self._generator.random()) if low > 0 else 0.0

    def pick(self, *values: float | str) -> float | str:
        return values[int(self._generator.integers(len(values)))]

    def choose(self, names: list[str], count: int) -> list[str]:
        return [str(name) for name in self._generator.choice(names, count, replace=False)]

    def happens(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)

    def around(self, value: float, variation: float) -> float:
        return float(value * np.exp(self._generator.normal(0.0, variation)))


def make_workload(dice: _Dice, pipeline: Pipeline, trainer: MachineType, num_trainers: int, ratio: float) -> Workload:
    """Return a job whose local loaders would need ``ratio`` times the accelerator's step time for a step."""
    batch = int(dice.pick(*pipeline.batches))
    cpu_s, wait_s = dice.between(pipeline.cpu_s), dice.between(pipeline.wait_s)
    tail_share, tail_factor = pipeline.tail
    batch_cpu_s = cpu_s * dice.between((0.01, 0.15))
    sample_s = (cpu_s * (1 + tail_share * (tail_factor - 1)) + batch_cpu_s) / trainer.speed + wait_s
    processes = max(1, trainer.vcpus // trainer.num_accelerators)
    variation = dice.between(pipeline.variation)
    while batch * sample_s / processes / ratio < LEAST_STEP_S:
        batch *= 2
    step_s = batch * sample_s / processes / ratio
    return Workload(
        num_ranks=trainer.num_accelerators * num_trainers,
        batch_samples=batch,
        steps_per_epoch=max(20, round(dice.between((20.0, 3600.0)) / step_s)),
        step_s=step_s,
        step_variation=dice.between((0.003, 0.05)),
        sample_cpu_s=cpu_s,
        sample_variation=variation,
        tail_share=tail_share,
        tail_factor=tail_factor,
        sample_wait_s=wait_s,
        batch_cpu_s=batch_cpu_s,
        bytes_per_sample=dice.between(pipeline.kilobytes) * 1e3,
        receive_cpu_s_per_gb=dice.between((0.3, 0.5)),
        rank_cpu_cores=dice.between((0.3, 1.0)),
        endpoint_private_bytes=dice.between(pipeline.memory_gib) * _GIB,
        endpoint_shared_bytes=dice.between((0.1, 2.0)) * _GIB,
        local_processes=processes,
    )


def make_menu(dice: _Dice, names: list[str], *, is_stated: bool) -> tuple[MachineType, ...]:
    """Return machines with the speeds that a workload finds on them, and prices of some region.

    Args:
        dice: Random numbers.
        names: Types.
        is_stated: Whether prices are those of `planning.machines`. Otherwise they differ by some percent.
    """
    speeds = {name.rpartition(".")[0]: dice.around(1.0, 0.08) for name in names}
    return tuple(
        replace(
            machine,
            speed=machine.speed * speeds[machine.family],
            hourly_usd=machine.hourly_usd if is_stated else round(dice.around(machine.hourly_usd, 0.15), 4),
        )
        for machine in (DATA_TYPES[name] for name in sorted(names))
    )


@functools.cache
def random_scenarios() -> tuple[Scenario, ...]:
    """Return `NUM_RANDOM` configurations."""
    return tuple(_random_scenario(number) for number in range(NUM_RANDOM))


def _random_scenario(number: int) -> Scenario:
    dice = _Dice(1000 + number)
    pipeline = list(PIPELINES)[number % len(PIPELINES)]
    num_trainers = 2 if dice.happens(0.25) else 1
    trainer = TRAINERS[str(dice.pick(*TRAINERS))]
    if dice.happens(0.5):
        trainer = made_up(trainer, nic_gbit=float(dice.pick(1.25, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)))
    workload = make_workload(dice, PIPELINES[pipeline], trainer, num_trainers, ratio=dice.between((0.5, 8.0)))
    menu = make_menu(dice, dice.choose(list(DATA_TYPES), int(dice.pick(4, 5, 6, 7, 8))), is_stated=dice.happens(0.5))
    families = list({machine.family: machine.name for machine in menu}.values())
    profiled = families if dice.happens(0.6) else families[:1] if dice.happens(0.75) else []
    stragglers = {}
    if dice.happens(0.15):
        stragglers = {"slow_batch_share": dice.between((0.005, 0.03)), "slow_batch_factor": dice.between((2.0, 6.0))}
    elif dice.happens(0.15):
        stragglers = {"slow_host_share": dice.between((0.05, 0.15)), "slow_host_factor": dice.between((1.2, 2.0))}
    return Scenario(
        name=f"{number:03d}-{pipeline}",
        seed=number,
        pipeline=pipeline,
        workload=workload,
        trainer=trainer,
        num_trainers=num_trainers,
        menu=menu,
        curve=(LINEAR, HYPER_THREADS, MEMORY_BANDWIDTH)[number % 3 if dice.happens(0.8) else 0],
        profiled_types=tuple(profiled),
        **stragglers,
    )


# Constructed cases


@functools.cache
def constructed_scenarios() -> tuple[Scenario, ...]:
    """Return the cases whose right answer is known."""
    makers = {
        Reason.ACCELERATOR: (_accelerator, 8),
        Reason.NETWORK: (_network, 6),
        Reason.STORAGE: (_storage, 6),
        Reason.MEMORY: (_memory, 6),
        Reason.BREAK_EVEN: (_break_even, 8),
        Reason.UINT8: (_uint8, 6),
        Reason.FREE_CPUS: (_free_cpus, 8),
        Reason.DATA_HOSTS: (_data_hosts, 24),
    }
    return tuple(
        replace(make(_Dice(5000 + 100 * group + number), number), name=f"{reason.value}-{number}", reason=reason)
        for group, (reason, (make, count)) in enumerate(makers.items())
        for number in range(count)
    )


def all_scenarios() -> tuple[Scenario, ...]:
    """Return the random and the constructed configurations."""
    return (*random_scenarios(), *constructed_scenarios())


_MENU = ["ml.c5.2xlarge", "ml.c5.4xlarge", "ml.c5.9xlarge", "ml.c5.18xlarge", "ml.m5.4xlarge", "ml.c6i.8xlarge"]


def _case(
    dice: _Dice, number: int, pipeline: str, trainer: str, ratio: float, *, menu: list[str] | None = None
) -> Scenario:
    machine = TRAINERS[trainer]
    names = _MENU if menu is None else menu
    families = {name.rpartition(".")[0]: name for name in names}
    workload = make_workload(dice, PIPELINES[pipeline], machine, 1, ratio)
    return Scenario(
        name="",
        seed=number,
        pipeline=pipeline,
        workload=replace(workload, steps_per_epoch=5000, rank_cpu_cores=min(0.6, workload.rank_cpu_cores)),
        trainer=machine,
        num_trainers=1,
        menu=make_menu(dice, names, is_stated=True),
        profiled_types=tuple(families.values()),
    )


def _local_samples_per_s(case: Scenario) -> float:
    """Return how many samples per second the loader processes of all ranks make."""
    workload = case.workload
    sample_s = workload.batch_cpu_total_s / workload.batch_samples / case.trainer.speed
    return workload.num_ranks * workload.local_processes / sample_s


def _accelerator(dice: _Dice, number: int) -> Scenario:
    pipelines = ("tabular", "text", "photos", "augmented", "audio", "video", "photos", "text")
    trainers = ("ml.p3.2xlarge", "ml.p3.8xlarge", "ml.p4d.24xlarge", "ml.g5.12xlarge")
    return _case(dice, number, pipelines[number], trainers[number % 4], dice.between((0.2, 0.5)))


def _network(dice: _Dice, number: int) -> Scenario:
    # A NIC that carries 3 % of the local loaders' batches cannot pay for a data host of 5 % of the price or more.
    # Batches are small enough for the windows.
    trainers = ("ml.p3.2xlarge", "ml.g5.2xlarge", "ml.p3.8xlarge")
    case = _case(dice, number, "photos-float", trainers[number % 3], dice.between((2.0, 4.0)), menu=_MENU[1:])
    trainer = made_up(case.trainer, nic_gbit=1.25)
    shrink = 16 / case.workload.batch_samples
    workload = replace(case.workload, batch_samples=16, step_s=case.workload.step_s * shrink)
    bytes_per_sample = trainer.nic_bytes_per_s / (0.03 * _local_samples_per_s(case))
    return replace(case, trainer=trainer, workload=replace(workload, bytes_per_sample=bytes_per_sample))


def _storage(dice: _Dice, number: int) -> Scenario:
    # A sample waits 20 times longer than it computes, and the loader has one process per vCPU.
    case = _case(dice, number, "storage", ("ml.p3.2xlarge", "ml.p3.8xlarge", "ml.g5.12xlarge")[number % 3], 1.0)
    workload = case.workload
    sample_cpu_s = (workload.sample_cpu_s + workload.batch_cpu_s) / case.trainer.speed
    sample_s = 21 * sample_cpu_s
    step_s = workload.batch_samples * sample_s / workload.local_processes / dice.between((2.0, 3.0))
    return replace(case, workload=replace(workload, sample_wait_s=20 * sample_cpu_s, step_s=step_s))


def _memory(dice: _Dice, number: int) -> Scenario:
    if number % 2:
        # Two batches fit into a rank's window, and so two endpoints work for it. Its loader has 12 processes.
        case = _case(dice, number, "video", "ml.p4d.24xlarge", dice.between((1.5, 3.0)))
        return replace(case, workload=replace(case.workload, bytes_per_sample=450e6 / case.workload.batch_samples))
    # The trainer host has 12 GiB per vCPU. Two endpoints fit into an ml.c5.9xlarge, and one into an ml.m5.4xlarge.
    menu = ["ml.c5.2xlarge", "ml.c5.4xlarge", "ml.c5.9xlarge", "ml.m5.4xlarge"]
    case = _case(dice, number, "augmented", "ml.p4d.24xlarge", dice.between((1.5, 3.0)), menu=menu)
    private, shared = dice.between((10.0, 11.0)), dice.between((45.0, 50.0))
    workload = replace(case.workload, endpoint_private_bytes=private * _GIB, endpoint_shared_bytes=shared * _GIB)
    return replace(case, workload=workload)


def _break_even(dice: _Dice, number: int) -> Scenario:
    # The accelerator machine is so cheap that a data host costs more than the time it saves.
    trainers = ("ml.g4dn.xlarge", "ml.g4dn.2xlarge", "ml.g5.xlarge", "ml.g5.2xlarge")
    pipelines = ("photos", "augmented", "audio", "text")
    menu = ["ml.c5.9xlarge", "ml.c5.18xlarge", "ml.m5.12xlarge", "ml.m5.24xlarge"]
    case = _case(dice, number, pipelines[number % 4], trainers[number // 2], dice.between((1.15, 1.45)), menu=menu)
    return replace(case, workload=replace(case.workload, rank_cpu_cores=0.1))


def _uint8(dice: _Dice, number: int) -> Scenario:
    # The trainer's NIC carries 1.1 times what the local loaders make. The accelerator takes 4 times as much.
    trainers = ("ml.p3.2xlarge", "ml.p3.8xlarge", "ml.p3.16xlarge")
    case = _case(dice, number, "photos-float", trainers[number % 3], dice.between((4.0, 5.0)))
    bytes_per_sample = case.trainer.nic_bytes_per_s / (1.1 * _local_samples_per_s(case))
    return replace(case, workload=replace(case.workload, bytes_per_sample=bytes_per_sample), is_float=True)


def _free_cpus(dice: _Dice, number: int) -> Scenario:
    # The loader has a few processes, and the host has many vCPUs.
    trainers = ("ml.p4d.24xlarge", "ml.g5.48xlarge", "ml.g5.8xlarge", "ml.p3.16xlarge")
    pipelines = ("photos", "text", "audio", "augmented")
    case = _case(dice, number, pipelines[number // 2], trainers[number % 4], dice.between((0.4, 0.6)))
    processes = max(1, case.workload.local_processes // 5)
    return replace(case, workload=replace(case.workload, local_processes=processes))


def _data_hosts(dice: _Dice, number: int) -> Scenario:
    trainers = ("ml.p3.2xlarge", "ml.p3.8xlarge", "ml.p4d.24xlarge", "ml.p3.16xlarge", "ml.p3dn.24xlarge")
    pipelines = ("augmented", "audio", "video", "photos", "skewed", "text")
    case = _case(dice, number, pipelines[number % 6], trainers[number % 5], dice.between((2.5, 6.0)))
    # Batches are small enough for the windows.
    bytes_per_sample = min(case.workload.bytes_per_sample, 15e6 / case.workload.batch_samples)
    return replace(case, workload=replace(case.workload, bytes_per_sample=bytes_per_sample))
