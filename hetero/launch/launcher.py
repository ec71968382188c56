"""The one process on every host: reads the cluster, runs this host's part, ends with the truth.

Life of a host (states: `hetero.control.status.HostState`):

    INIT        control port open, endpoints starting
    WAIT_PEERS  own endpoints ready (if any); a trainer host waits for every other host
    SERVING     data host: endpoints answer until every trainer host is done
    TRAINING    trainer host: ranks run
    DRAINING    data host: nothing new is accepted, what is in work is finished
    DONE        ended well; told to every peer before the process exits
    FAILED      the decided root cause is known; everything of this host is killed

The main thread runs all of it; signal handlers only count. Exit code: 0, that
of the decided root cause, or 128 + 15 after SIGTERM.
"""

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

from hetero import logs
from hetero.cluster import ClusterSpec, Role, resolve_address
from hetero.config import LaunchOptions, Timings
from hetero.control import security
from hetero.control.directory import EndpointRecord
from hetero.control.hub import Hub, RankFacts
from hetero.control.membership import Member, Membership
from hetero.control.session import LAUNCHER_VARIABLE
from hetero.control.status import Cause, HostState, HostStatus
from hetero.dataplane.pool import EndpointPool
from hetero.errors import AuthenticationError, ConfigError, ExitCode, HeteroError
from hetero.launch import placement, progress
from hetero.launch.failure import write_failure
from hetero.launch.ranks import RankProcesses, RanksOptions
from hetero.launch.relay import LineRelay
from hetero.launch.summary import write_report
from hetero.metrics.hosts import HostSampler
from hetero.version import __version__

__all__ = ["WORK_DIR_VARIABLE", "Launcher", "launch"]

logger = logging.getLogger(__name__)

WORK_DIR_VARIABLE = "HETERO_WORK_DIR"
"""Environment: where the launcher makes its private folder; simulation removes it even if the launcher is killed."""

_TICK_S = 0.2
_PROGRESS_S = 10.0
_FAREWELL_S = 5.0
_SPOT_S = 2.0
"""How long a data host that got SIGTERM waits to learn whether the whole job is to stop."""


class _JobEndsError(Exception):
    """Unwinds the main loop with the decided root cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class Launcher:
    """This host's part of a job.

    Args:
        options: Resolved options.
        cluster: The cluster, with this host in it.
        base_dir: The platform's tree, ``/opt/ml`` or like it.
        environ: Environment of this process.
    """

    def __init__(
        self, options: LaunchOptions, cluster: ClusterSpec, *, base_dir: Path, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._base_dir = base_dir
        self._timings = Timings.from_options(options, environ)
        self._environ = environ
        self._host = cluster.current_host
        self._role = cluster.role
        self._trainer_hosts = [host.name for host in cluster.trainer_hosts]
        self._placement = placement.plan(options, cluster)
        self._job_id = environ.get("HETERO_JOB_ID") or environ.get("TRAINING_JOB_NAME") or _cluster_digest(cluster)
        self._signals = 0
        self._interrupted_s: float | None = None
        self._started = time.time()
        self._started_s = time.monotonic()
        self._patience_s = time.monotonic() + _PROGRESS_S
        self._progress_interval_s = progress.interval_s(environ)
        self._progress_s = time.monotonic() + self._progress_interval_s
        self._ranks: RankProcesses | None = None
        self._pool: EndpointPool | None = None
        self._pool_was_ready = False

    def run(self) -> int:
        """Run to the end; return the exit code. Call it on the main thread."""
        with contextlib.ExitStack() as stack:
            try:
                self._set_up(stack)
                self._start()
                self._wait_ready()
                code = self._train() if self._role is Role.TRAINER else self._serve()
            except _JobEndsError as end:
                code = self._abort(end.cause)
            except HeteroError as error:
                logger.error("HET-%02d %s", error.exit_code, error)
                code = self._give_up(error)
        return code

    # Set up

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
        self._run_dir = Path(tempfile.mkdtemp(prefix="hetero-", dir=self._environ.get(WORK_DIR_VARIABLE)))
        stack.callback(shutil.rmtree, self._run_dir, ignore_errors=True)
        self._relay = LineRelay(logs.relay_line)
        stack.callback(self._relay.close)
        token = self._load_token()
        self._child_environment = {"HETERO_JOB_ID": self._job_id, "PYTHONHASHSEED": "0"}
        self._token_path: str | None = None
        if token is not None:
            descriptor, self._token_path = security.token_memfd(token)
            stack.callback(os.close, descriptor)
            self._child_environment[security.TOKEN_FILE_VARIABLE] = self._token_path
        self._address = resolve_address(self._host)
        self._hub = stack.enter_context(self._make_hub(token))
        self._sampler = stack.enter_context(HostSampler(self._host, scope=self._placement.usage_scope))

    def _load_token(self) -> security.Token | None:
        token = security.token_from_environment(self._environ)
        if token is None:
            hint = f"set {security.TOKEN_FILE_VARIABLE} to the path of a file with mode 0600"
            if self._options.require_token:
                raise AuthenticationError(f"--require-token is given but the job has no token; {hint}")
            logger.warning("the job has no token: whoever reaches its ports can use them; %s", hint)
        return token

    def _make_hub(self, token: security.Token | None) -> Hub:
        cluster, options = self._cluster, self._options
        members = [
            *(Member(host=host.name, role=Role.TRAINER) for host in cluster.trainer_hosts),
            *(Member(host=host.name, role=Role.DATA) for host in cluster.data_hosts),
        ]
        own = HostStatus(
            host=self._host,
            incarnation=secrets.token_hex(8),
            version=__version__,
            script_digest=_digest(Path(options.script)),
            rendezvous_port=_free_port(self._address) if self._host == self._trainer_hosts[0] else 0,
        )
        facts = RankFacts(
            remote=self._placement.remote,
            data_timeout_s=self._timings.data_timeout_s,
            prepare_timeout_s=self._timings.prepare_timeout_s,
            emulate_step_s=options.emulate_step_s,
            purity_checks=options.purity_checks,
            warmup_steps=options.warmup_steps,
        )
        return Hub(
            Membership(members, own, timings=self._timings, clock=time.monotonic),
            address=self._address,
            port=options.port,
            resolve=lambda host: f"{resolve_address(host)}:{options.port}",
            peers=tuple(member.host for member in members if member.host != self._host),
            token=token,
            job_id=self._job_id,
            facts=facts,
            heartbeat_s=self._timings.heartbeat_s,
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    # The common loop

    def _start(self) -> None:
        groups = ", ".join(
            f"{group.name}={group.instance_type}:{len(group.hosts)} ({group.role.value})"
            for group in self._cluster.groups
        )
        logger.info("hetero %s, job %s: %s", __version__, self._job_id, groups)
        if self._placement.num_endpoints:
            self._pool = EndpointPool(
                placement.pool_options(
                    self._options,
                    self._placement,
                    host=self._host,
                    address=self._address,
                    token_path=self._token_path,
                    job_id=self._job_id,
                    environment=self._child_environment,
                ),
                on_change=self._on_endpoints,
                on_line=self._relay.line,
            )
            self._pool.start()

    def _on_endpoints(self, records: tuple[EndpointRecord, ...]) -> None:
        if len(records) == self._placement.num_endpoints:
            self._pool_was_ready = True
        self._hub.update(endpoints=records)

    def _tick(self, waiting_for: Callable[[Membership], str] | None = None) -> None:
        """Wait a moment; raise if the job has ended; say now and then whom this host waits for."""
        self._hub.wait(_TICK_S)
        with self._hub.membership() as membership:
            membership.update(
                usage_json=self._usage_json(), counters=self._counters(), progress=membership.own.progress + 1
            )
            decided = membership.own.decided
            patience = waiting_for(membership) if waiting_for is not None else ""
        if decided is not None:
            raise _JobEndsError(decided)
        if self._signals:
            self._take_signal()
        if self._pool is not None and self._pool.failure is not None and not self._pool_was_ready:
            self._hub.fail(_cause_of(self._pool.failure, self._host))
            self._await_decision()
        if patience and time.monotonic() >= self._patience_s:
            self._patience_s = time.monotonic() + _PROGRESS_S
            logger.info("waiting for %s", patience)

    def _usage_json(self) -> bytes:
        return json.dumps(self._sampler.usage().to_json()).encode()

    def _counters(self) -> dict[str, int]:
        found = {"authentication failures": self._hub.auth_failures}
        if self._pool is not None:
            endpoints = self._pool.statistics()
            found["authentication failures"] += int(endpoints.get("auth_failures", 0))
            found["endpoint restarts"] = self._pool.num_restarts
            found["batches computed"] = int(endpoints.get("num_batches", 0))
            found["emulation overruns"] = int(endpoints.get("num_overruns", 0))
        return found

    def _take_signal(self) -> None:
        now = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now
            logger.warning("asked to stop: ranks end after the step they are in, then every host stops")
            self._hub.update(stop_requested=True)
        elif self._signals > 1:
            cause = Cause(host=self._host, summary="stopped by a second signal", exit_code=ExitCode.SHUTDOWN_OVERRAN)
            raise _JobEndsError(cause)
        elif now - self._interrupted_s > self._timings.stop_grace_s:
            cause = Cause(
                host=self._host,
                summary=f"the ranks did not end within {self._timings.stop_grace_s:.0f} s of the request to stop",
                exit_code=ExitCode.SHUTDOWN_OVERRAN,
            )
            self._hub.fail(cause)
            self._await_decision()

    def _await_decision(self) -> None:
        """Wait for the arbiter's word on what this host reported; always raises."""
        deadline_s = time.monotonic() + self._timings.lease_s + _FAREWELL_S
        while time.monotonic() < deadline_s:
            self._hub.wait(_TICK_S)
            with self._hub.membership() as membership:
                decided, own = membership.own.decided, membership.own.failure
            if decided is not None:
                raise _JobEndsError(decided)
        raise _JobEndsError(own or Cause(host=self._host, summary="no root cause was decided"))

    # Start barrier

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + self._timings.start_timeout_s
        while self._pool is not None and not self._pool_was_ready:
            self._tick(lambda _: f"{self._placement.num_endpoints} endpoints of this host")
            if time.monotonic() > deadline_s:
                summary = f"endpoints were not ready within {self._timings.start_timeout_s:.0f} s"
                self._hub.fail(Cause(host=self._host, summary=summary, exit_code=ExitCode.DATA_HOSTS_MISSING))
                self._await_decision()
        if self._role is Role.DATA:
            self._hub.update(state=HostState.SERVING)
            logger.info("serving with %d endpoints", self._placement.num_endpoints)
            return
        self._hub.update(state=HostState.WAIT_PEERS)
        while True:
            with self._hub.membership() as membership:
                data = membership.missing(Role.DATA, at_least=HostState.SERVING)
                trainers = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
            if not data and not trainers:
                return
            if time.monotonic() > deadline_s:
                code = ExitCode.DATA_HOSTS_MISSING if data else ExitCode.TRAINER_HOSTS_MISSING
                summary = f"not there after {self._timings.start_timeout_s:.0f} s: {_words(data + trainers)}"
                self._hub.fail(Cause(host=self._host, summary=summary, exit_code=code))
                self._await_decision()
            self._tick(lambda _: _words(data + trainers))  # noqa: B023

    # Data hosts

    def _serve(self) -> int:
        deadline_s = time.monotonic() + self._timings.start_timeout_s
        while True:
            self._tick()
            with self._hub.membership() as membership:
                done = membership.trainers_done
                job_stops = membership.stop_requested
                trainers = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
            if done:
                logger.info("every trainer host is done")
                break
            if trainers and time.monotonic() > deadline_s:
                summary = f"trainer hosts never came within {self._timings.start_timeout_s:.0f} s: {_words(trainers)}"
                raise _JobEndsError(Cause(host=self._host, summary=summary, exit_code=ExitCode.TRAINER_HOSTS_MISSING))
            leaving = self._interrupted_s is not None and time.monotonic() - self._interrupted_s > _SPOT_S
            if leaving and not job_stops:
                logger.warning("this host alone was asked to stop: leaving; the others compute its batches")
                break
        self._hub.update(state=HostState.DRAINING)
        if self._pool is not None:
            self._pool.stop(self._timings.abort_grace_s)
        self._hub.update(state=HostState.DONE, endpoints=())
        self._farewell()
        return self._ended_well()

    # Trainer hosts

    def _train(self) -> int:
        self._hub.update(state=HostState.TRAINING)
        first = self._trainer_hosts[0]
        with self._hub.membership() as membership:
            ports = {status.host: status.rendezvous_port for status in membership.statuses(Role.TRAINER)}
        options = RanksOptions(
            script=self._options.script,
            script_args=self._options.script_args,
            num_hosts=len(self._trainer_hosts),
            host_index=self._trainer_hosts.index(self._host),
            rendezvous_address=resolve_address(first),
            rendezvous_port=ports[first],
            own_address=self._address,
            num_ranks=self._placement.num_ranks,
            environment={**self._child_environment, LAUNCHER_VARIABLE: f"{self._address}:{self._hub.port}"},
        )
        logger.info("starting %d of %d ranks", options.num_ranks, options.num_ranks * options.num_hosts)
        self._ranks = RankProcesses(options, host=self._host, relay=self._relay, run_dir=self._run_dir)
        while (status := self._ranks.poll()) is None:
            self._tick()
            self._show_progress()
        if status != 0:
            self._hub.fail(self._ranks.cause())
            self._await_decision()
        logger.info("ranks are done")
        self._hub.update(state=HostState.DONE, usage_json=self._usage_json(), counters=self._counters())
        while True:
            with self._hub.membership() as membership:
                if membership.trainers_done:
                    break
            self._tick(lambda membership: _words(membership.missing(Role.TRAINER, at_least=HostState.DONE)))
        self._farewell()
        if self._pool is not None:
            self._pool.stop(self._timings.abort_grace_s)
        self._report(ExitCode.OK, None)
        return self._ended_well()

    def _show_progress(self) -> None:
        if self._host != self._trainer_hosts[0] or time.monotonic() < self._progress_s:
            return
        self._progress_s = time.monotonic() + self._progress_interval_s
        with self._hub.membership() as membership:
            reports = membership.own.ranks
        text = progress.describe(reports)
        if text:
            logger.info("progress: %s", text)

    # Ends

    def _farewell(self) -> None:
        """Stay until every living peer has heard how this host ended."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline_s:
            with self._hub.membership() as membership:
                if membership.final_delivered:
                    return
            self._hub.wait(_TICK_S)

    def _ended_well(self) -> int:
        if self._interrupted_s is not None and not self._options.sigterm_ok:
            return 128 + signal.SIGTERM
        return int(ExitCode.OK)

    def _abort(self, cause: Cause) -> int:
        logger.error("%s", cause.first_line)
        for line in cause.detail.splitlines()[-40:]:
            logger.error("    %s", line)
        if self._ranks is not None:
            self._ranks.kill(list(self._hub.rank_pids.values()))
        self._hub.update(state=HostState.FAILED, decided=cause, endpoints=())
        write_failure(self._base_dir / "output" / "failure", cause)
        if self._pool is not None:
            self._pool.stop(0.5)
        self._farewell()
        self._report(cause.exit_code, cause)
        return int(cause.exit_code)

    def _give_up(self, error: HeteroError) -> int:
        """End after an error of this host itself, as far as it got."""
        cause = _cause_of(error, self._host)
        if hasattr(self, "_hub"):
            return self._abort(cause)
        write_failure(self._base_dir / "output" / "failure", cause)
        return int(cause.exit_code)

    def _report(self, exit_code: ExitCode, cause: Cause | None) -> None:
        if self._host != self._trainer_hosts[0]:
            return
        with self._hub.membership() as membership:
            statuses = membership.statuses()
        write_report(
            self._options,
            self._cluster,
            self._placement,
            statuses,
            job_id=self._job_id,
            started=self._started,
            wall_s=time.monotonic() - self._started_s,
            exit_code=exit_code,
            cause=cause,
            base_dir=self._base_dir,
        )


def launch(options: LaunchOptions, cluster: ClusterSpec, *, base_dir: Path) -> int:
    """Run this host's part of the job and return its exit code.

    Raises:
        ConfigError: If the script does not exist.
    """
    if not Path(options.script).is_file():
        raise ConfigError(f"the training script {options.script!r} does not exist in {Path.cwd()}; give its path")
    logs.setup_logging(
        group=cluster.current_group.name, host=cluster.current_host, role=cluster.role.value, level=options.log_level
    )
    return Launcher(options, cluster, base_dir=base_dir).run()


def _cause_of(error: HeteroError, host: str) -> Cause:
    text = str(error)
    return Cause(host=host, summary=text.splitlines()[0], detail=text, exit_code=error.exit_code)


def _words(missing: list[tuple[str, str]]) -> str:
    return "; ".join(f"{host} ({word})" for host, word in missing)


def _digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()[:16]


def _cluster_digest(cluster: ClusterSpec) -> str:
    """Return an id that the hosts of one cluster share where the platform names no job."""
    text = json.dumps([[group.name, group.instance_type, *group.hosts] for group in cluster.groups])
    return "cluster-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
