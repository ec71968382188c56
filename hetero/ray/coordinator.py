"""The process that runs the hub of a data service.

::

    python -m hetero.ray.coordinator ADDRESS JOB FLAGS SCRIPT -- ARGUMENTS

This process is the only trainer host of its job, and starts no ranks. The workers of Ray Train register with it as its
ranks, and data hosts join through it. After SIGTERM, the process tells the data hosts that the job is done. When the
data hosts have ended, the actor sends SIGINT, and the process ends. It does not end when a worker fails, because Ray
restarts workers.

The process writes one JSON object per line to standard output, for the actor that started it::

    {"port": 40123, "rank_port": 40124}         the hub listens, for launchers and for ranks
    {"hosts": ["data-0", "data-1"]}             the data hosts that serve now, after each change
    {"wanted": {"hosts": 3, "low": 2, "high": 4}}   the number of data hosts that the job could use
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from hetero import config
from hetero.cluster import ClusterSpec, Role
from hetero.cluster.spec import InstanceGroup
from hetero.config import LaunchOptions, Timings
from hetero.control.hub import Hub
from hetero.control.members.admission import Admitter
from hetero.control.members.membership import Member, Membership
from hetero.control.security import token_from_environment
from hetero.control.status import HostState, RankReport
from hetero.errors import ClusterError, HeteroError
from hetero.launch.control_plane import first_status, session_options
from hetero.launch.reporting.metric_lines import log_metrics, progress_metrics
from hetero.launch.reporting.progress import interval_s
from hetero.launch.wanted_hosts import WantedHosts, totals_of
from hetero.system import logs
from hetero.system.process import SignalWaiter, allow_descriptors, bind_to_parent

__all__ = ["MAX_RANKS", "LivingRanks", "main"]

# Use a fixed name, because `__name__` is "__main__" here.
logger = logging.getLogger("hetero.ray.coordinator")

MAX_RANKS = 1000
"""Maximum number of workers of a training run."""
_GROUP = "ray-train"
_FAREWELL_S = 30.0
"""Longest time from SIGTERM to the end if no other signal follows."""


class LivingRanks:
    """Drops the reports of ranks that have ended, for example after Ray has restarted them with fewer workers. Pure.

    Args:
        patience_s: A rank that has not reported for this time has ended.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[int, tuple[RankReport, float]] = {}
        """The last report of each rank, and when it arrived, in monotonic seconds."""

    def of(self, reports: Sequence[RankReport], now_s: float) -> tuple[RankReport, ...]:
        """Return the reports of ranks that still report.

        Args:
            reports: The last report of each rank.
            now_s: Monotonic seconds.
        """
        for report in reports:
            last_seen = self._seen.get(report.rank)
            # Each report that arrives is a new object. If the object is the same, the rank has not reported again.
            if last_seen is None or last_seen[0] is not report:
                self._seen[report.rank] = report, now_s
        return tuple(report for report in reports if now_s - self._seen[report.rank][1] <= self._patience_s)


class _Coordinator:
    """The hub of a data service, and the loop that tells the actor what the hub knows."""

    def __init__(self, options: LaunchOptions, *, address: str, job_id: str) -> None:
        self._timings = timings = Timings.from_options(options, os.environ)
        self._address = address
        self._wanted = WantedHosts()
        self._estimate_interval_s = interval_s(os.environ)
        self._next_estimate_s = time.monotonic() + self._estimate_interval_s
        self._living = LivingRanks(timings.lease_s)
        self._hosts: list[str] = []
        """The data hosts that served at the last call of `_follow`."""
        # This process need not start ranks, so it is in the state TRAINING from the start.
        own_status = dataclasses.replace(first_status(address, options, placement=None), state=HostState.TRAINING)
        group = InstanceGroup(name=_GROUP, instance_type="", hosts=(address,), role=Role.TRAINER)
        # For the data hosts, this process is the only trainer host. The workers of Ray Train are its ranks.
        self.hub = Hub(
            Membership([Member(host=address, role=Role.TRAINER)], own_status, timings=timings, clock=time.monotonic),
            address=address,
            # Take a free port. `run` tells the actor which one.
            port=0,
            # Other hosts join later, and state their addresses then. So none is known here, and no name is looked up.
            resolve=_no_address,
            peers=(),
            token=token_from_environment(os.environ),
            job_id=job_id,
            # The workers get all their batches from endpoints.
            remote=True,
            session_options=session_options(options, timings, data_service=options.data_service),
            heartbeat_s=timings.heartbeat_s,
            # Ray Train chooses the number of workers, and may change it with a restart. So accept any rank.
            num_ranks=MAX_RANKS,
            admitter=Admitter(ClusterSpec(current_host=address, groups=(group,), source="Ray"), job_id),
        )

    def run(self) -> None:
        """Serve until SIGTERM. Then tell the data hosts to end, and wait for the next signal, SIGINT."""
        with self.hub, SignalWaiter((signal.SIGTERM, signal.SIGINT)) as waiter:
            _tell({"port": self.hub.port, "rank_port": self.hub.rank_port})
            ticks = 0
            # Wake at least twice per heartbeat. Then each heartbeat has a new number of ticks. Wake at least twice a
            # second, because the actor waits for what `_follow` tells it.
            while not (signals := waiter.wait(min(0.5, self._timings.heartbeat_s / 2))):
                ticks += 1
                # Change the ticks, because data hosts consider a launcher stuck if its ticks stay the same.
                self.hub.update(ticks=ticks)
                # Tell the actor what has changed in the job.
                self._follow()
            # The actor sends SIGINT when its data hosts have ended. Then no data host is left to tell.
            if signal.SIGINT not in signals:
                logger.info("the data service ends, so its data hosts end")
                self.hub.update(state=HostState.DONE)
                waiter.wait(_FAREWELL_S)

    def _follow(self) -> None:
        """Tell the actor which data hosts serve, and at intervals log metrics and tell how many the job could use.

        First remove the reports of ranks that have ended, because a report that no longer changes would prevent every
        estimate.
        """
        now_s = time.monotonic()
        with self.hub.membership() as membership:
            ranks = self._living.of(membership.own.ranks, now_s)
            if len(ranks) < len(membership.own.ranks):
                membership.update(ranks=ranks)
            own_status, endpoints = membership.own, membership.endpoints()
            data_hosts = membership.statuses(Role.DATA)
            # The totals of the job include batches of data hosts that have left.
            data_hosts += [gone.status for gone in membership.joined_hosts.left if gone.status is not None]
        serving = sorted({record.host for record in endpoints})
        if serving != self._hosts:
            self._hosts = serving
            _tell({"hosts": serving})
        # Without ranks, there is nothing to estimate the demand from.
        if now_s < self._next_estimate_s or not own_status.ranks:
            return
        self._next_estimate_s = now_s + self._estimate_interval_s
        estimate = self._wanted.observe(totals_of([own_status], data_hosts, endpoints))
        log_metrics(progress_metrics([own_status], num_endpoints=len(endpoints), wanted=estimate))
        if estimate is not None:
            _tell({"wanted": {"hosts": estimate.hosts, "low": estimate.low, "high": estimate.high}})


def main(arguments: Sequence[str]) -> int:
    """Run the coordinator and return its exit code.

    Args:
        arguments: Address to bind, id of the job, flags of `hetero launch`, the script, ``--`` and its arguments.
    """
    bind_to_parent()
    # Unblock SIGINT. Ray blocks SIGINT in its processes, and children inherit the block. A shutdown then took 20 s
    # instead of half a second.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    address, job_id, *words = arguments
    end = words.index("--")
    parser = argparse.ArgumentParser(prog="hetero.ray.coordinator", allow_abbrev=False)
    config.add_launch_arguments(parser)
    try:
        namespace = config.parse(parser, words[:end])
        namespace.script_args = words[end + 1 :]
        options = config.resolve_options(namespace, os.environ, parameters=None)
        logs.setup_logging(group=_GROUP, host=address, role="coordinator", level=options.log_level)
        # Raise the limit of open files, because the hub has connections to all workers and data hosts.
        allow_descriptors()
        _Coordinator(options, address=address, job_id=job_id).run()
    except HeteroError as error:
        logs.write_line(f"hetero: error HET-{int(error.exit_code):02d}: {error}")
        return int(error.exit_code)
    return 0


def _tell(fact: object) -> None:
    """Write one fact for the actor that started this process, as a line of JSON."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def _no_address(host: str) -> NoReturn:
    raise ClusterError(f"host {host!r} did not state its address when it joined")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
