"""What is simulated, and what comes out: a workload, the hosts of a cluster, and a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LINEAR", "Cluster", "Curve", "Host", "Result", "Workload"]

Curve = tuple[tuple[float, float], ...]
"""Points (share of the vCPUs that are busy, speed of each busy process). Between the points it is linear."""
LINEAR: Curve = ((0.0, 1.0), (1.0, 1.0))
"""As many times faster as there are processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training job, without its cluster. CPU seconds are those of one vCPU of speed 1.

    Raises:
        ValueError: If a number is out of its bounds.
    """

    num_ranks: int
    batch_samples: int
    """Samples per step of one rank."""
    steps_per_epoch: int
    step_s: float
    """Mean step time of one rank whose batches are always ready."""
    step_variation: float = 0.0
    """Coefficient of variation of the step time of one rank."""
    sample_cpu_s: float
    """Mean CPU seconds of a sample, lognormal."""
    sample_variation: float = 0.0
    """Coefficient of variation of the CPU seconds of a sample."""
    tail_share: float = 0.0
    """Share of samples that cost ``tail_factor`` times more CPU seconds."""
    tail_factor: float = 1.0
    sample_wait_s: float = 0.0
    """Mean wait for storage per sample, exponential. It uses no CPU."""
    batch_cpu_s: float = 0.0
    """CPU seconds per sample of collating and encoding a batch."""
    bytes_per_sample: float
    """Bytes on the network."""
    receive_cpu_s_per_gb: float = 0.35
    """CPU seconds of a rank for 10^9 bytes from an endpoint."""
    rank_cpu_cores: float = 1.0
    """CPUs that a rank keeps busy during a step."""
    endpoint_private_bytes: float = 0.5e9
    endpoint_shared_bytes: float = 0.0
    """Memory that the endpoints of one host share."""
    local_processes: int = 1
    """Loader processes of each rank in a job without endpoints."""

    def __post_init__(self) -> None:
        positive = ("num_ranks", "batch_samples", "steps_per_epoch", "step_s", "local_processes", "tail_factor")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                raise ValueError(
                    f"{name} is {value}, expected a finite number {'over 0' if name in positive else '>= 0'}"
                )

    @property
    def batch_bytes(self) -> float:
        """Bytes of one batch."""
        return self.batch_samples * self.bytes_per_sample

    @property
    def batch_cpu_total_s(self) -> float:
        """Mean CPU seconds of one batch, with its slow samples."""
        fetch_s = self.sample_cpu_s * (1.0 + self.tail_share * (self.tail_factor - 1.0))
        return self.batch_samples * (fetch_s + self.batch_cpu_s)

    @property
    def batch_wait_total_s(self) -> float:
        """Mean wait of one batch for storage."""
        return self.batch_samples * self.sample_wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine."""

    name: str
    """Instance type."""
    vcpus: int
    speed: float = 1.0
    """CPU seconds of a workload per second of one vCPU of this host."""
    nic_bytes_per_s: float
    """In each direction."""
    memory_bytes: float
    endpoints: int
    """Processes that compute batches, one at a time each."""
    curve: Curve = LINEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The hosts of a job. The ranks are spread evenly over the trainer hosts."""

    trainers: tuple[Host, ...]
    data: tuple[Host, ...] = ()
    slow_host_share: float = 0.0
    """Share of its time that each data host is slow."""
    slow_host_factor: float = 1.0
    """How many times longer batches take that begin on a slow host."""
    slow_episode_s: float = 10.0
    """How long a host stays slow, or not slow."""
    slow_batch_share: float = 0.0
    """Share of computations that take ``slow_batch_factor`` times longer. A second computation may be fast."""
    slow_batch_factor: float = 1.0
    latency_s: float = 0.0005
    """From the end of a computation to the arrival of an empty batch, and the way of the request."""

    @property
    def num_endpoints(self) -> int:
        """Endpoints on all hosts. 0 means that the ranks' own loader processes compute the batches."""
        return sum(host.endpoints for host in (*self.trainers, *self.data))

    def lacks_memory(self, workload: Workload) -> bool:
        """Return whether the endpoints of a host need more memory than it has."""
        return any(
            host.endpoints * workload.endpoint_private_bytes + workload.endpoint_shared_bytes > host.memory_bytes
            for host in (*self.trainers, *self.data)
            if host.endpoints
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one simulated run shows. Shares are of the simulated time."""

    step_s: float
    """Mean time of a global step over whole epochs. Infinite if a host lacks the memory."""
    headspace_s: float
    """Mean time of a global step whose batches are always ready."""
    data_wait_s: float
    """Mean time from the end of a step until the last rank has its batch."""
    trainer_nic_share: float
    """How busy the incoming direction of the busiest trainer host's NIC was."""
    data_nic_share: float
    """How busy the outgoing direction of the busiest data host's NIC was."""
    trainer_cpu_share: float
    """Share of the trainer hosts' vCPUs that loaders, endpoints, ranks and receiving kept busy, on average."""
    data_cpu_share: float
    """Share of the data hosts' endpoints that were busy, on average."""
    num_hedges: int
    num_steps: int
    """Simulated global steps."""

    @property
    def utilisation(self) -> float:
        """Share of a step that the accelerators compute."""
        return self.headspace_s / self.step_s
