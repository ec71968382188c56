"""Decides what runs on this host: the number of endpoints and ranks, and what is emulated."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.cluster import ClusterSpec, Role
from hetero.config import LaunchOptions, Timings, framework_of
from hetero.dataplane.pool.pool import PoolOptions
from hetero.launch.addresses import Addresses
from hetero.system.cgroups import cpu_quota

if TYPE_CHECKING:
    from hetero.dataplane.pool.tf_pool import ServiceOptions

__all__ = ["Placement", "needed_descriptors", "num_gpus", "plan", "pool_options", "service_options", "usable_cpus"]

_EMULATED_ENDPOINTS = 1
_DESCRIPTORS_PER_PEER = 4
_OTHER_DESCRIPTORS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """This host's share of the work."""

    num_endpoints: int
    """Number of endpoints on this host, or of servers of tf.data.service. May be 0."""
    num_slots: int
    """Number of batches that each endpoint computes at the same time. It is 1 unless vCPUs are emulated."""
    num_ranks: int
    """Number of ranks on this host. It is 0 on data hosts."""
    framework: str
    """Training framework of the ranks, ``torch`` or ``tensorflow``."""
    remote: bool
    """Whether loaders fetch batches from endpoints, because any host of the job has some."""
    usage_scope: str
    """Scope of the host's resource use: ``host``, or ``tree`` (this process tree) if hosts share a machine."""
    data_service: str = ""
    """Service that data hosts run, ``grpc`` or ``tf``. Empty in a job without data hosts."""
    has_tf_dispatcher: bool = False
    """Whether one of the servers is the dispatcher of tf.data.service, which runs on the first data host."""
    tf_workers: Mapping[str, int] = field(default_factory=dict)
    """Planned number of workers of tf.data.service on each host of the job that has any."""


def plan(options: LaunchOptions, cluster: ClusterSpec, *, num_given: int = 0) -> Placement:
    """Return what runs on the current host.

    With emulated vCPUs, the trainer hosts of a homogeneous job load through endpoints too. Both kinds of job are then
    emulated in the same way and can be compared.

    Args:
        options: Resolved options.
        cluster: The cluster.
        num_given: Number of ranks of this host that another launcher has made. With 0, the options give the number.
    """
    emulated = options.emulate_sample_s is not None
    is_trainer = cluster.role is Role.TRAINER
    data_service = options.data_service if cluster.data_hosts else ""
    has_tf_dispatcher = data_service == "tf" and cluster.current_host == cluster.data_hosts[0].name
    tf_workers = _tf_workers(options, cluster) if data_service == "tf" else {}
    if options.data_service == "tf":
        num_endpoints = tf_workers.get(cluster.current_host, 0) + has_tf_dispatcher
    elif not is_trainer:
        num_endpoints = options.endpoints_per_host or (_EMULATED_ENDPOINTS if emulated else usable_cpus())
    elif emulated and not cluster.data_hosts:
        num_endpoints = options.trainer_endpoints or _EMULATED_ENDPOINTS
    else:
        num_endpoints = options.trainer_endpoints
    framework = framework_of(options)
    num_ranks = num_given or options.nproc_per_node or (num_gpus() if framework == "torch" else 1) or 1
    num_slots = 1
    if emulated and num_endpoints:
        num_slots = math.ceil((options.emulate_vcpus or usable_cpus()) / num_endpoints)
    return Placement(
        num_endpoints=num_endpoints,
        num_slots=num_slots,
        num_ranks=num_ranks if is_trainer else 0,
        framework=framework,
        remote=data_service == "grpc" or options.trainer_endpoints > 0 or emulated,
        data_service=data_service,
        has_tf_dispatcher=has_tf_dispatcher,
        tf_workers=tf_workers,
        usage_scope="tree" if "HETERO_SIMULATED" in os.environ else "host",
    )


def _tf_workers(options: LaunchOptions, cluster: ClusterSpec) -> dict[str, int]:
    workers = {host.name: options.tf_workers_per_host for host in cluster.data_hosts}
    if options.trainer_tf_workers:
        workers.update((host.name, options.trainer_tf_workers) for host in cluster.trainer_hosts)
    return workers


def service_options(
    options: LaunchOptions,
    placement: Placement,
    *,
    host: str,
    address: str,
    addresses: Addresses,
    job_id: str,
    environment: Mapping[str, str],
    timings: Timings,
) -> ServiceOptions:
    """Return the options of this host's servers of tf.data.service."""
    from hetero.dataplane.pool.tf_pool import ServiceOptions  # see `hetero.launch.host`

    return ServiceOptions(
        host=host,
        address=address,
        num_endpoints=placement.num_endpoints,
        has_dispatcher=placement.has_tf_dispatcher,
        is_trainer=placement.num_ranks > 0,
        workers=placement.tf_workers if placement.has_tf_dispatcher else {},
        address_of=addresses.known,
        work_dir=None if options.tf_work_dir is None else str(options.tf_work_dir.absolute()),
        job_id=job_id,
        endpoint_restarts=options.endpoint_restarts,
        gives_up=False,  # as in `pool_options`
        stuck_s=timings.lease_s,
        stable_s=timings.stable_s,
        log_level=options.log_level.upper(),
        environment=environment,
    )


def pool_options(
    options: LaunchOptions,
    placement: Placement,
    *,
    host: str,
    address: str,
    token_path: str | None,
    job_id: str,
    environment: Mapping[str, str],
    timings: Timings,
) -> PoolOptions:
    """Return the options of this host's endpoint pool."""
    return PoolOptions(
        script=options.script,
        is_module=options.module,
        script_args=tuple(options.script_args),
        host=host,
        address=address,
        num_endpoints=placement.num_endpoints,
        num_slots=placement.num_slots,
        sample_time_s=options.emulate_sample_s or 0.0,
        token_path=token_path,
        tls_dir=None if options.tls_dir is None else str(options.tls_dir.absolute()),
        job_id=job_id,
        max_batch_bytes=options.max_batch_bytes,
        endpoint_restarts=options.endpoint_restarts,
        gives_up=False,  # other endpoints compute the batches meanwhile, and ranks fail if all are gone for too long
        stuck_s=timings.lease_s,
        prepare_timeout_s=timings.prepare_timeout_s,
        stable_s=timings.stable_s,
        log_level=options.log_level.upper(),
        environment=environment,
    )


def needed_descriptors(num_hosts: int) -> int:
    """Return how many open files a launcher needs at least in a job with this number of hosts."""
    return _OTHER_DESCRIPTORS + _DESCRIPTORS_PER_PEER * num_hosts


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, from its affinity and the quotas of its control groups."""
    count = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return count if quota is None else min(count, max(1, int(quota)))


def num_gpus() -> int:
    """Return the number of accelerators of this host without importing a framework."""
    declared = os.environ.get("SM_NUM_GPUS", "")
    if declared.isdigit():
        return int(declared)
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit())
