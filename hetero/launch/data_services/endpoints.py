"""grpc: data hosts run the endpoints of hetero's data plane, which compute batches by index."""

from __future__ import annotations

from collections.abc import Callable

from hetero.cluster import ClusterSpec, Role
from hetero.config import LaunchOptions, trainer_endpoints_of
from hetero.config.options import AUTO
from hetero.control.members.directory import EndpointRecord
from hetero.endpoint.options import EndpointOptions
from hetero.launch.data_services.service import DataService, HostFacts, Servers
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.system.cgroups import usable_cpus

__all__ = ["Endpoints", "pool_options"]

_MAX_EMULATED_ENDPOINTS = 8


class Endpoints(DataService):
    """Endpoints on data hosts, and on trainer hosts if ``--trainer-endpoints`` asks for them."""

    computes_batches = True

    def plan(self, options: LaunchOptions, cluster: ClusterSpec) -> Servers:
        """Return which endpoints run on the current host of a cluster.

        With emulated vCPUs, the trainer hosts of a homogeneous job load through endpoints too. Homogeneous and
        heterogeneous jobs are then emulated in the same way and can be compared. All endpoints of an emulated host have
        the same number of slots. Together they have at most one slot per vCPU. If the host has more endpoints than
        vCPUs, each endpoint has one slot.
        """
        is_emulated = options.emulate_sample_s is not None
        num_vcpus = options.emulate_vcpus or usable_cpus()
        trainer_endpoints = trainer_endpoints_of(options, has_data_hosts=bool(cluster.data_hosts))
        if cluster.role is Role.DATA:
            # One emulated endpoint has all vCPUs of its host as slots.
            number = options.endpoints_per_host or (1 if is_emulated else usable_cpus())
        elif trainer_endpoints is None:
            # The job chooses the number of endpoints on trainer hosts while it runs.
            return _changing_number(num_vcpus, is_emulated=is_emulated)
        else:
            # The emulated trainer hosts of a homogeneous job need an endpoint, see above.
            least = 1 if is_emulated and not cluster.data_hosts else 0
            number = max(least, trainer_endpoints)
        # A slot emulates one vCPU. Round down, as a real host with 8 vCPUs and 7 endpoints leaves one vCPU idle too.
        num_slots = max(1, num_vcpus // number) if is_emulated and number else 1
        return Servers(number=number, num_slots=num_slots)

    def make_pool(
        self,
        facts: HostFacts,
        on_change: Callable[[tuple[EndpointRecord, ...]], None],
        on_line: Callable[[str, str], None],
    ) -> EndpointPool:
        """Return the pool of the endpoints of a host."""
        return EndpointPool(pool_options(facts), on_change=on_change, on_line=on_line)

    def report_options(self, options: LaunchOptions, cluster: ClusterSpec) -> dict[str, str]:
        """Return the report's entries on how many endpoints were planned for each host."""
        trainer_endpoints = trainer_endpoints_of(options, has_data_hosts=bool(cluster.data_hosts))
        return {
            "endpoints per data host": str(options.endpoints_per_host or "default"),
            "endpoints per trainer host": AUTO if trainer_endpoints is None else str(trainer_endpoints),
        }


def _changing_number(num_cpus: int, *, is_emulated: bool) -> Servers:
    """Return a number of endpoints that begins with 0 and may grow to one per CPU.

    An emulated host has at most eight endpoints, because many hosts share one machine. Each of its vCPUs is a slot of
    an endpoint.
    """
    number = num_cpus
    if is_emulated:
        # The number must divide the vCPUs, because each vCPU is a slot and all endpoints have the same number of slots.
        number = max(count for count in range(1, _MAX_EMULATED_ENDPOINTS + 1) if num_cpus % count == 0)
    return Servers(number=number, num_at_start=0, num_slots=num_cpus // number)


def pool_options(facts: HostFacts) -> PoolOptions:
    """Return the settings of a host's pool of endpoints."""
    options, servers, timings = facts.options, facts.servers, facts.timings
    # Endpoints that the job adds on trainer hosts must not see the accelerators of the ranks. Otherwise a script that
    # uses an accelerator at its import would take memory from the ranks.
    hidden_gpus = {"CUDA_VISIBLE_DEVICES": "-1"} if servers.may_number_change else {}
    return PoolOptions(
        endpoint=EndpointOptions(
            script=options.script,
            is_module=options.module,
            script_args=tuple(options.script_args),
            host=facts.name,
            address=facts.address,
            num_endpoints=servers.number,
            num_slots=servers.num_slots,
            sample_time_s=options.emulate_sample_s or 0.0,
            tls_dir=None if options.tls_dir is None else str(options.tls_dir.absolute()),
            job_id=facts.job_id,
            max_batch_bytes=options.max_batch_bytes,
            log_level=options.log_level.upper(),
        ),
        token_path=facts.token_path,
        num_at_start=servers.num_at_start,
        endpoint_restarts=options.endpoint_restarts,
        # The pool does not give up, because other endpoints compute the batches. If all endpoints are gone for too
        # long, the ranks fail.
        gives_up=False,
        stuck_s=timings.lease_s,
        prepare_timeout_s=timings.prepare_timeout_s,
        stable_s=timings.stable_s,
        environment={**facts.environment, **hidden_gpus},
    )
