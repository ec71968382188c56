"""One host of a job as its launcher holds it: control plane, endpoints, output, signals, and its end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hetero import logs
from hetero.cluster import ClusterSpec, Role, resolve_address, slug
from hetero.config import LaunchOptions, Timings
from hetero.control import security
from hetero.control.directory import EndpointRecord
from hetero.control.hub import Hub, RankFacts
from hetero.control.membership import Member, Membership
from hetero.control.status import Cause, HostStatus
from hetero.dataplane.pool import EndpointPool
from hetero.errors import AuthenticationError, ExitCode, HeteroError, first_line
from hetero.launch import placement
from hetero.launch.relay import LineRelay
from hetero.launch.summary import write_report
from hetero.metrics.hosts import HostSampler
from hetero.process import adopt_descendants, end_descendants
from hetero.version import __version__

__all__ = ["WORK_DIR_VARIABLE", "Host", "JobEndsError", "cause_of", "job_id"]

logger = logging.getLogger(__name__)

WORK_DIR_VARIABLE = "HETERO_WORK_DIR"
"""Environment: where the launcher makes its private folder; simulation removes it even if the launcher is killed."""

_TICK_S = 0.2
_PATIENCE_S = 10.0
_FAREWELL_S = 5.0


class JobEndsError(Exception):
    """The job's root cause is decided; unwinds whatever this host was doing."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class Host:
    """What a host of either role has; a context manager that takes all of it down again.

    Use it on the main thread: signals arrive there, and children that are bound
    to their parent's life are bound to the thread that starts them.

    Args:
        options: Resolved options.
        cluster: The cluster, with this host in it.
        base_dir: The platform's tree, ``/opt/ml`` or like it.
        environ: Environment of this process.

    Raises:
        AuthenticationError: If the token cannot be read, or there is none and it is required.
        PortError: If the control port cannot be bound.
    """

    def __init__(
        self, options: LaunchOptions, cluster: ClusterSpec, *, base_dir: Path, environ: Mapping[str, str]
    ) -> None:
        self.options = options
        self.cluster = cluster
        self.timings = Timings.from_options(options, environ)
        self.name = cluster.current_host
        self.trainer_hosts = [host.name for host in cluster.trainer_hosts]
        self.placement = placement.plan(options, cluster)
        self.job_id = job_id(environ, cluster)
        self.child_environment = {"HETERO_JOB_ID": self.job_id, "PYTHONHASHSEED": "0"}
        self.interrupted_s: float | None = None
        """When this host was asked to stop, monotonic seconds; None while it was not."""
        self.endpoints_were_ready = False
        """Whether every endpoint of this host has served at some time."""
        self._base_dir = base_dir
        self._num_signals = 0
        self._started_epoch_s = time.time()
        self._started_s = time.monotonic()
        self._patience_s = self._started_s + _PATIENCE_S
        with contextlib.ExitStack() as stack:
            self._set_up(stack, environ)
            self._stack = stack.pop_all()

    def _set_up(self, stack: contextlib.ExitStack, environ: Mapping[str, str]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
        self.run_dir = Path(tempfile.mkdtemp(prefix="hetero-", dir=environ.get(WORK_DIR_VARIABLE)))
        stack.callback(shutil.rmtree, self.run_dir, ignore_errors=True)
        self.relay = LineRelay(logs.relay_line)
        stack.callback(self.relay.close)
        # Whatever the script has started and left; what this process itself starts is stopped in order before.
        adopt_descendants()
        stack.callback(end_descendants)
        token = _load_token(environ, is_required=self.options.require_token)
        token_path = None
        if token is not None:
            descriptor, token_path = security.token_memfd(token)
            stack.callback(os.close, descriptor)
            self.child_environment[security.TOKEN_FILE_VARIABLE] = token_path
        self.address = resolve_address(self.name)
        self.hub = stack.enter_context(self._make_hub(token))
        self._sampler = stack.enter_context(HostSampler(self.name, scope=self.placement.usage_scope))
        self.pool = self._make_pool(token_path) if self.placement.num_endpoints else None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make_hub(self, token: security.Token | None) -> Hub:
        cluster, options = self.cluster, self.options
        members = [
            *(Member(host=host.name, role=Role.TRAINER) for host in cluster.trainer_hosts),
            *(Member(host=host.name, role=Role.DATA) for host in cluster.data_hosts),
        ]
        own = HostStatus(
            host=self.name,
            incarnation=secrets.token_hex(8),
            version=__version__,
            script_digest=hashlib.sha256(Path(options.script).read_bytes()).hexdigest()[:16],
            rendezvous_port=_free_port(self.address) if self.is_first_trainer else 0,
        )
        facts = RankFacts(
            remote=self.placement.remote,
            data_timeout_s=self.timings.data_timeout_s,
            prepare_timeout_s=self.timings.prepare_timeout_s,
            emulate_step_s=options.emulate_step_s,
            purity_checks=options.purity_checks,
            warmup_steps=options.warmup_steps,
        )
        return Hub(
            Membership(members, own, timings=self.timings, clock=time.monotonic),
            address=self.address,
            port=options.port,
            resolve=lambda host: f"{resolve_address(host)}:{options.port}",
            peers=tuple(member.host for member in members if member.host != self.name),
            token=token,
            job_id=self.job_id,
            facts=facts,
            heartbeat_s=self.timings.heartbeat_s,
        )

    def _make_pool(self, token_path: str | None) -> EndpointPool:
        options = placement.pool_options(
            self.options,
            self.placement,
            host=self.name,
            address=self.address,
            token_path=token_path,
            job_id=self.job_id,
            environment=self.child_environment,
        )
        return EndpointPool(options, on_change=self._on_endpoints, on_line=self.relay.line)

    def _on_endpoints(self, records: tuple[EndpointRecord, ...]) -> None:
        if len(records) == self.placement.num_endpoints:
            self.endpoints_were_ready = True
        self.hub.update(endpoints=records)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    # While the job runs

    @property
    def was_stopped(self) -> bool:
        """Whether this host was asked to stop, or, through another, the whole job."""
        with self.hub.membership() as membership:
            return self.interrupted_s is not None or membership.stop_requested

    @property
    def is_first_trainer(self) -> bool:
        """Whether this is the trainer host that reports for the job."""
        return self.name == self.trainer_hosts[0]

    def tick(self, waiting_for: Callable[[Membership], str] | None = None) -> None:
        """Wait a moment and deal with what came up.

        Args:
            waiting_for: Says whom this host waits for, and why; logged every ten seconds.

        Raises:
            JobEndsError: If the root cause of a failure is decided, here or elsewhere.
        """
        self.hub.wait(_TICK_S)
        self.publish()
        with self.hub.membership() as membership:
            decided = membership.own.decided
            words = waiting_for(membership) if waiting_for is not None else ""
        if decided is not None:
            raise JobEndsError(decided)
        if self._num_signals:
            self._take_signal()
        if self.pool is not None and self.pool.failure is not None and not self.endpoints_were_ready:
            self.fail(cause_of(self.pool.failure, self.name))
        if words and time.monotonic() >= self._patience_s:
            self._patience_s = time.monotonic() + _PATIENCE_S
            logger.info("waiting for %s", words)

    def publish(self, **changes: object) -> None:
        """Bring this host's status up to date, with ``changes`` to it."""
        counters = {"authentication failures": self.hub.auth_failures}
        if self.pool is not None:
            endpoints = self.pool.statistics()
            counters["authentication failures"] += int(endpoints.get("auth_failures", 0))
            counters["endpoint restarts"] = self.pool.num_restarts
            counters["batches computed"] = int(endpoints.get("num_batches", 0))
            counters["emulation overruns"] = int(endpoints.get("num_overruns", 0))
        usage_json = json.dumps(self._sampler.usage().to_json()).encode()
        with self.hub.membership() as membership:
            membership.update(usage_json=usage_json, counters=counters, **changes)

    def fail(self, cause: Cause) -> NoReturn:
        """Report that this host failed, and wait for the arbiter to say what the root cause is.

        Raises:
            JobEndsError: Always.
        """
        self.hub.fail(cause)
        deadline_s = time.monotonic() + self.timings.lease_s + _FAREWELL_S
        while time.monotonic() < deadline_s:
            self.hub.wait(_TICK_S)
            with self.hub.membership() as membership:
                decided = membership.own.decided
            if decided is not None:
                raise JobEndsError(decided)
        raise JobEndsError(cause)

    def _take_signal(self) -> None:
        now_s = time.monotonic()
        if self.interrupted_s is None:
            self.interrupted_s = now_s
            logger.warning("asked to stop: ranks end after the step they are in, then every host stops")
            self.hub.update(stop_requested=True)
        elif self._num_signals > 1:
            summary = "stopped by a second signal"
            raise JobEndsError(Cause(host=self.name, summary=summary, exit_code=ExitCode.SHUTDOWN_OVERRAN))
        elif self.placement.num_ranks and now_s - self.interrupted_s > self.timings.stop_grace_s:
            summary = f"the ranks did not end within {self.timings.stop_grace_s:.0f} s of the request to stop"
            self.fail(Cause(host=self.name, summary=summary, exit_code=ExitCode.SHUTDOWN_OVERRAN))

    # At its end

    def farewell(self) -> None:
        """Stay until every living peer has heard how this host ended, a few seconds at most."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline_s:
            with self.hub.membership() as membership:
                if membership.final_delivered:
                    return
            self.hub.wait(_TICK_S)

    def report(self, cause: Cause | None = None) -> None:
        """Write the job's report if this host is the one to do so."""
        if not self.is_first_trainer:
            return
        with self.hub.membership() as membership:
            statuses = membership.statuses()
        write_report(
            self.options,
            self.cluster,
            self.placement,
            statuses,
            job_id=self.job_id,
            started_epoch_s=self._started_epoch_s,
            wall_s=time.monotonic() - self._started_s,
            cause=cause,
            base_dir=self._base_dir,
        )


def cause_of(error: HeteroError, host: str) -> Cause:
    """Return an error of ``host`` as the cause of the job's end."""
    return Cause(host=host, summary=first_line(error), detail=str(error), exit_code=error.exit_code)


def _load_token(environ: Mapping[str, str], *, is_required: bool) -> security.Token | None:
    token = security.token_from_environment(environ)
    if token is None:
        hint = f"set {security.TOKEN_FILE_VARIABLE} to the path of a file with mode 0600"
        if is_required:
            raise AuthenticationError(f"--require-token is given but the job has no token; {hint}")
        logger.warning("the job has no token: whoever reaches its ports can use them; %s", hint)
    return token


def job_id(environ: Mapping[str, str], cluster: ClusterSpec) -> str:
    """Return the id of the job, the same on all its hosts: one plain word, since it travels in headers.

    Where neither the user nor the platform names the job, it is a digest of the cluster.
    """
    stated = environ.get("HETERO_JOB_ID") or environ.get("TRAINING_JOB_NAME")
    return slug(stated) if stated else _cluster_digest(cluster)


def _cluster_digest(cluster: ClusterSpec) -> str:
    text = json.dumps([[group.name, group.instance_type, *group.hosts] for group in cluster.groups])
    return "cluster-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
