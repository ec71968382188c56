"""The control plane of one host: the hosts that it exchanges statuses with, and what all hosts must agree on."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable

from hetero import __version__
from hetero.cluster import Role
from hetero.config import LaunchOptions, Timings, trainer_endpoints_of
from hetero.control import security
from hetero.control.hub import Hub
from hetero.control.members.admission import Admitter
from hetero.control.members.membership import Member, Membership
from hetero.control.status import HostStatus, SessionOptions
from hetero.launch.placement import HostPlan, Placement
from hetero.system.scripts import find_script
from hetero.wire.limits import PROTOCOL
from hetero.wire.tls import Tls

__all__ = ["first_status", "make_hub", "script_digest", "session_options", "shared_options"]


def make_hub(
    plan: HostPlan, *, address: str, resolve: Callable[[str], str], token: security.Token | None, tls: Tls | None
) -> Hub:
    """Return the hub of a host: its connections to other hosts and its ranks. The hub is not started yet.

    Args:
        plan: What is fixed about the host.
        address: Numeric address of the host.
        resolve: See `Hub`.
        token: The job's token.
        tls: TLS settings of this host.
    """
    cluster, options, placement, timings = plan.cluster, plan.options, plan.placement, plan.timings
    members = _members_of(plan)
    read_cluster = functools.partial(plan.platform.read_cluster, host=plan.name, roles=options.roles)
    admitter = Admitter(
        cluster,
        plan.job_id,
        obstacle=_obstacle_to_joining(options, placement),
        # On some platforms, the list of hosts changes while the job runs.
        read_again=read_cluster if plan.platform.may_change else None,
    )
    membership = Membership(
        members,
        first_status(plan.name, options, placement),
        timings=timings,
        clock=time.monotonic,
        max_restarts=options.job_restarts,
        # A job with endpoints on its trainer hosts can go on without data hosts. With ``auto``, there may be 0 of them.
        needs_data_hosts=not trainer_endpoints_of(options, has_data_hosts=bool(cluster.data_hosts)),
    )
    return Hub(
        membership,
        address=address,
        port=options.port,
        resolve=resolve,
        peers=tuple(member.host for member in members if member.host != plan.name),
        token=token,
        job_id=plan.job_id,
        # The hub tells each rank whether its loaders fetch batches from endpoints.
        remote=placement.remote,
        session_options=session_options(
            options,
            timings,
            data_service=placement.data_service,
            # Ranks send the times of single steps four times per second. Only the host that decides about endpoints
            # needs these times.
            wants_step_times=plan.is_first_trainer and placement.servers.may_number_change,
        ),
        heartbeat_s=timings.heartbeat_s,
        num_ranks=placement.num_ranks,
        started_s=plan.started_s,
        tls=tls,
        # Only the first trainer host lets hosts join.
        admitter=admitter if plan.is_first_trainer else None,
    )


def first_status(host: str, options: LaunchOptions, placement: Placement | None) -> HostStatus:
    """Return the status of a host at the start of its launcher.

    Args:
        host: Name of the host.
        options: Options of the host.
        placement: What runs on the host. None for a host without endpoints and ranks.
    """
    return HostStatus(
        host=host,
        incarnation=secrets.token_hex(8),
        version=__version__,
        script_digest=script_digest(options),
        options=shared_options(options, placement),
    )


def session_options(
    options: LaunchOptions, timings: Timings, *, data_service: str, wants_step_times: bool = False
) -> SessionOptions:
    """Return the options that a launcher sends to its ranks. `SessionOptions` says what the last two arguments mean."""
    return SessionOptions(
        data_timeout_s=timings.data_timeout_s,
        prepare_timeout_s=timings.prepare_timeout_s,
        emulate_step_s=options.emulate_step_s,
        purity_checks=options.purity_checks,
        warmup_steps=options.warmup_steps,
        max_batch_bytes=options.max_batch_bytes,
        stop_grace_s=timings.stop_grace_s,
        data_service=data_service,
        wants_step_times=wants_step_times,
        profile=options.profile,
    )


def _members_of(plan: HostPlan) -> list[Member]:
    """Return the hosts that this host exchanges statuses with, and itself.

    Data hosts connect only to trainer hosts. The number of connections then grows with the number of hosts, and not
    with its square. With tf.data.service, data hosts also connect to each other, because the host of the dispatcher
    waits for the workers of the other data hosts before it ends.
    """
    cluster = plan.cluster
    needs_all = cluster.role is Role.TRAINER or plan.placement.servers.dispatcher_host != ""
    data_hosts = [host for host in cluster.data_hosts if needs_all or host.name == plan.name]
    return [
        *(Member(host=host.name, role=Role.TRAINER) for host in cluster.trainer_hosts),
        # The job does not wait for data hosts on spot capacity, which the platform may take back.
        *(
            Member(host=host.name, role=Role.DATA, is_optional=plan.options.spot_usd(host.group) is not None)
            for host in data_hosts
        ),
    ]


def script_digest(options: LaunchOptions) -> str:
    """Return the digest of the training script, which must be the same on all hosts."""
    script = find_script(options.script, is_module=options.module)
    return hashlib.sha256(script.read_bytes()).hexdigest()[:16]


def shared_options(options: LaunchOptions, placement: Placement | None) -> dict[str, str]:
    """Return the options that must be equal on all hosts. A host may lack an option that does not apply to it.

    Args:
        options: The options of this host.
        placement: What runs on this host. None for a data host.
    """
    shared = {**options.shared(), "data plane protocol": str(PROTOCOL)}
    if placement is not None and placement.num_ranks:
        # The ranks of mpirun have their numbers from mpirun, so hosts may have different numbers of ranks.
        shared["ranks per trainer host"] = "set by mpirun" if placement.are_ranks_given else str(placement.num_ranks)
    return shared


def _obstacle_to_joining(options: LaunchOptions, placement: Placement) -> str:
    """Return why no data host can join this job. Empty if data hosts can join."""
    if options.data_service == "tf":
        return "its data hosts run tf.data.service, whose workers cannot be added; give the job more hosts at the start"
    if options.profile:
        return "it is a profile run, which measures the hosts that it began with"
    if not placement.remote:
        return (
            "it has neither data hosts nor endpoints, so its ranks load their own data; start it with a data group, or "
            "with --trainer-endpoints 1"
        )
    return ""
