"""Decides what runs on this host: the number of endpoints and ranks, and what is emulated."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from hetero.cluster import ClusterSpec, Platform, Role
from hetero.config import LaunchOptions, Timings, framework_of, trainer_endpoints_of
from hetero.launch.data_services import Servers, find_service
from hetero.launch.ranks.frameworks import RANK_FRAMEWORKS

__all__ = ["HostPlan", "Placement", "count_gpus", "needed_descriptors", "plan"]

_DESCRIPTORS_PER_PEER = 4
_OTHER_DESCRIPTORS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """This host's share of the work."""

    servers: Servers
    """Endpoints of this host, or servers of another data service."""
    num_ranks: int
    """Number of ranks on this host. It is 0 on data hosts."""
    num_gpus: int
    """Number of accelerators of this host."""
    framework: str
    """Training framework of the ranks, ``torch`` or ``tensorflow``."""
    remote: bool
    """Whether loaders fetch batches from endpoints, because at least one host of the job has endpoints."""
    usage_scope: str
    """What the host's resource use covers: ``host``, or ``tree`` (this process tree) if hosts share a machine."""
    data_service: str
    """Service that data hosts run, ``grpc`` or ``tf``. Empty in a job without data hosts."""
    are_ranks_given: bool
    """Whether mpirun has made the processes of the ranks of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What is fixed about one host of a job before its launcher begins to work."""

    options: LaunchOptions
    """Resolved options."""
    cluster: ClusterSpec
    """The hosts of the job at its start. This host is the current one."""
    platform: Platform
    """The platform that runs the job."""
    placement: Placement
    timings: Timings
    job_id: str
    started_s: float = field(default_factory=time.monotonic)
    """Start of this launcher, in monotonic seconds."""
    started_epoch_s: float = field(default_factory=time.time)
    """Wall-clock time of the start of this launcher. Durations are never computed from it."""

    @property
    def name(self) -> str:
        """Name of this host."""
        return self.cluster.current_host

    @property
    def trainer_hosts(self) -> list[str]:
        """Names of all trainer hosts in rank order."""
        return [host.name for host in self.cluster.trainer_hosts]

    @property
    def is_first_trainer(self) -> bool:
        """Whether this is the trainer host that writes the job's report and logs its metrics."""
        return self.name == self.trainer_hosts[0]


def plan(options: LaunchOptions, cluster: ClusterSpec, *, num_gpus: int, num_given: int = 0) -> Placement:
    """Return what runs on the current host.

    Args:
        options: Resolved options.
        cluster: The cluster.
        num_gpus: Number of accelerators of this host, see `count_gpus`.
        num_given: Number of ranks of this host that mpirun has made. If 0, the options give the number of ranks.
    """
    service = find_service(options.data_service)
    has_data_hosts = bool(cluster.data_hosts)
    # Loaders fetch their batches from endpoints if any host of the job has endpoints. Trainer hosts have endpoints if
    # the option asks for them, or if vCPUs are emulated. Data hosts have endpoints, unless they run another data
    # service, such as tf.data.service.
    trainer_endpoints = trainer_endpoints_of(options, has_data_hosts=has_data_hosts)
    loads_from_endpoints = bool(trainer_endpoints) or options.emulate_sample_s is not None
    loads_from_endpoints |= has_data_hosts and service.computes_batches
    framework = framework_of(options)
    num_by_default = num_gpus if RANK_FRAMEWORKS[framework].has_rank_per_gpu else 1
    # Take the number of ranks that mpirun made, else the number of the option, else the framework's default. On a host
    # without GPUs that default may be 0, and there is one rank.
    num_ranks = num_given or options.nproc_per_node or num_by_default or 1
    return Placement(
        servers=service.plan(options, cluster),
        num_ranks=num_ranks if cluster.role is Role.TRAINER else 0,
        num_gpus=num_gpus,
        framework=framework,
        remote=loads_from_endpoints,
        data_service=options.data_service if has_data_hosts else "",
        are_ranks_given=bool(num_given),
        # Simulated hosts share a machine, so each one measures the resource use of its own process tree.
        usage_scope="tree" if "HETERO_SIMULATED" in os.environ else "host",
    )


def needed_descriptors(num_hosts: int) -> int:
    """Return the minimum number of open files that a launcher needs in a job with this number of hosts."""
    return _OTHER_DESCRIPTORS + _DESCRIPTORS_PER_PEER * num_hosts


def count_gpus(platform: Platform) -> int:
    """Return the number of accelerators of this host without importing a framework."""
    stated = platform.num_gpus()
    if stated is not None:
        return stated
    # An import of torch for this would take 1.5 s of CPU time on a quick machine and 3 s on a slow one. Files such as
    # nvidiactl are not accelerators.
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit())
