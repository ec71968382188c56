"""A profile run in the launcher: follows the phases of the ranks, stops them, measures the supply, writes the profile.

While the ranks train, they report their progress, and in the end what they have measured. The first trainer host then
requests a stop, as SIGTERM does. After the training, this host and the first data host of each other instance type
measure what a sample costs there. The first trainer host waits for the others and writes ``profile.json`` and
``profile.md``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import logging
import os
import platform
import select
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero import __version__
from hetero.cluster import Role
from hetero.control.status import HostStatus, RankReport
from hetero.documents.files import write_text
from hetero.documents.records import encode
from hetero.endpoint.options import EndpointOptions
from hetero.errors import ConfigError, ExitCode, HeteroError, first_line
from hetero.launch.reporting.summary import JobHistory, run_facts, simulated_parts
from hetero.metrics.profile.assembly import JobFacts, assemble_profile, check_ranks
from hetero.metrics.profile.parts import PHASES, HostPart, RankPart
from hetero.metrics.profile.profile import PROFILE_FILE_NAME, write_profile
from hetero.metrics.profile.text import first_sentence, render_profile
from hetero.pool.spawn import PoolOptions, child_environment
from hetero.pricing import Catalogue
from hetero.report.build import build_report
from hetero.report.model import Report
from hetero.report.overruns import excess_share, upper_bounds_note
from hetero.sample_costs.options import Channel, CostOptions
from hetero.system.cgroups import usable_cpus
from hetero.system.waits import LOG_INTERVAL_S

if TYPE_CHECKING:
    from hetero.launch.host import LaunchedHost

__all__ = ["TEXT_FILE_NAME", "JobProfile", "ProgressLines", "progress_text"]

TEXT_FILE_NAME = "profile.md"
_WAITING = "profiling: waiting for the first batch"
_SUPPLY_S = 240.0
"""Time limit of the measurement of the supply, for example if the data set takes long to build. The first trainer host
waits as long for the measurements of data hosts."""

logger = logging.getLogger(__name__)


class JobProfile:
    """The profile of a job, as one host sees it.

    Args:
        host: This host.
    """

    def __init__(self, host: LaunchedHost) -> None:
        self._host = host
        self._lines = ProgressLines()
        self._stop_s: float | None = None

    # While the ranks train

    def follow(self) -> bool:
        """Log the progress, and stop the job when all ranks have measured everything.

        Returns:
            Whether the ranks should have ended by now. The caller then kills them.
        """
        host = self._host
        with host.hub.membership() as membership:
            is_stopping = membership.stop_requested
            reports = [report for status in membership.statuses(Role.TRAINER) for report in status.ranks]
        now_s = time.monotonic()
        if is_stopping:
            # The time of the first call after the request.
            self._stop_s = self._stop_s or now_s
            # Ranks that still run shortly before the stop grace ends are killed, because the job would fail otherwise.
            return now_s - self._stop_s > host.plan.timings.early_grace_s
        if not host.plan.is_first_trainer:
            return False
        line = self._lines.due(progress_text(reports), now_s)
        if line:
            logger.info("progress: %s", line)
        parts = _parts(reports)
        if parts and all(part.phase == PHASES[-1] for part in parts.values()):
            logger.info("all steps are measured: the training ends now, and writes no checkpoint")
            host.hub.update(stop_requested=True)
        return False

    # After the training

    def finish(self) -> None:
        """On the first trainer host, measure what samples cost, wait for the data hosts, and write the profile.

        Other trainer hosts have nothing to do, because a profile states what samples cost on one type of trainer host.

        Raises:
            ConfigError: If too little was measured.
            JobEndsError: If the job fails meanwhile.
        """
        host = self._host
        if not host.plan.is_first_trainer:
            return
        if host.interrupted_s is not None:
            logger.warning("asked to stop: no profile is written")
            return
        facts, ranks = self._facts(), self._ranks()
        # Check this before the samples are measured. That measurement takes about 12 s on two CPUs, and a run with too
        # few steps has no profile.
        check_ranks(ranks, facts)
        parts = [self._measure(ranks)]
        # Data hosts send their measurements with their last statuses, so wait until they have ended.
        deadline_s = time.monotonic() + _SUPPLY_S
        while self._data_hosts_at_work() and time.monotonic() < deadline_s and host.interrupted_s is None:
            host.tick(lambda _: f"the measurements of {', '.join(self._data_hosts_at_work())}")
        with host.hub.membership() as membership:
            parts += [found for status in membership.statuses(Role.DATA) if (found := _host_part(status)) is not None]
        self._write(ranks, [part for part in parts if part is not None], facts)

    def serve(self) -> None:
        """Measure what samples cost on this data host, and send the result to the first trainer host.

        Only the first host of each instance type does this, because samples cost the same on all hosts of a type. If a
        trainer host has the same type, no data host does it, because the first trainer host measures its own type.
        """
        host = self._host
        groups = host.plan.cluster.groups
        own_type = host.plan.cluster.current_group.instance_type
        trainer_types = {group.instance_type for group in groups if group.role is Role.TRAINER}
        first_of_type = next(group.hosts[0] for group in groups if group.instance_type == own_type)
        if own_type in trainer_types or host.plan.name != first_of_type:
            return
        part = self._measure(self._ranks())
        if part is not None:
            host.publish(profile_json=part.to_json())

    def _data_hosts_at_work(self) -> list[str]:
        """Return the data hosts that have not ended. The first trainer host waits for their measurements."""
        with self._host.hub.membership() as membership:
            return membership.at_work(Role.DATA)

    def _ranks(self) -> dict[int, RankPart]:
        with self._host.hub.membership() as membership:
            return _parts([report for status in membership.statuses(Role.TRAINER) for report in status.ranks])

    def _facts(self) -> JobFacts:
        """Return the facts about this job that its profile states."""
        host, options = self._host, self._host.plan.options
        trainers = [group for group in host.plan.cluster.groups if group.role is Role.TRAINER]
        is_emulated = options.emulate_sample_s is not None
        servers = host.plan.placement.servers
        return JobFacts(
            command=shlex.join(options.command),
            measured_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            instance_type=trainers[0].instance_type,
            vcpus=self._vcpus(),
            num_hosts=len(host.plan.trainer_hosts),
            ranks_per_host=host.plan.placement.num_ranks,
            # Each slot of an emulated endpoint emulates one vCPU. A real host runs one endpoint per vCPU.
            num_endpoints=servers.number * servers.num_slots,
            has_data_hosts=any(group.role is Role.DATA for group in host.plan.cluster.groups),
            warmup_steps=options.warmup_steps,
            is_sample_emulated=is_emulated,
            is_step_emulated=options.emulate_step_s is not None,
            simulated=tuple(simulated_parts(options, host.plan.cluster, host.plan.placement)),
            versions={"hetero": __version__, "python": platform.python_version()},
        )

    def _vcpus(self) -> int:
        options = self._host.plan.options
        is_emulated = options.emulate_sample_s is not None
        return (options.emulate_vcpus if is_emulated else None) or usable_cpus()

    def _measure(self, ranks: dict[int, RankPart]) -> HostPart | None:
        """Run the process that measures what samples and batches cost. Return the costs on this host.

        Return None if there is nothing to measure.

        Args:
            ranks: What each rank has reported. The lowest rank describes the samples and batches.
        """
        host, options = self._host, self._host.plan.options
        lowest_rank = ranks.get(min(ranks, default=0))
        if lowest_rank is None:
            return None
        is_emulated = options.emulate_sample_s is not None
        is_trainer = host.plan.placement.num_ranks > 0
        # Simulated hosts share a machine, so the trainer host measures its samples for all of them. Each host measures
        # emulated samples, because their cost is stated for each host.
        are_hosts_simulated = host.plan.placement.usage_scope == "tree"
        if are_hosts_simulated and not is_emulated and not is_trainer:
            return HostPart(
                notes=(f"Samples were not measured on {host.plan.name}, because simulated hosts share a machine.",)
            )
        # The leaves are the tensors of a batch.
        leaves = () if lowest_rank.contents is None else lowest_rank.contents.leaves
        request = CostOptions(
            host=host.plan.name,
            instance_type=host.plan.cluster.current_group.instance_type,
            script=options.script,
            is_module=options.module,
            script_args=options.script_args,
            # The samples that the measuring process fetches.
            work=lowest_rank.work,
            batch_bytes=tuple(round(leaf.bytes_per_sample * lowest_rank.batch_samples) for leaf in leaves),
            num_processes=usable_cpus(),
            vcpus=self._vcpus(),
            emulated_sample_s=options.emulate_sample_s,
            parent_pid=os.getpid(),
            # Only ranks receive batches, so only a trainer host measures what this costs.
            receives=is_trainer,
        )
        logger.info("progress: profiling: the samples, on %s", host.plan.name)
        # Give the process the environment of an endpoint, because samples must cost the same as in an endpoint.
        endpoint = EndpointOptions(host=host.plan.name, address=host.address, num_endpoints=1, job_id=host.plan.job_id)
        environment = child_environment(PoolOptions(endpoint=endpoint, environment=host.child_environment))
        channel, other_end = Channel.pair("the process that measures samples")
        with other_end:
            command = [sys.executable, "-m", "hetero.sample_costs.measuring", str(other_end.fileno())]
            process = host.relay.start("profile", command, pass_fds=(other_end.fileno(),), env=environment)
        try:
            channel.send(encode(request))
            return self._wait_for(channel)
        except HeteroError as error:
            logger.warning("the samples were not measured on %s: %s", host.plan.name, error)
            return HostPart(notes=(f"Samples were not measured on {host.plan.name}: {first_line(error)}",))
        finally:
            channel.close()
            process.kill()
            process.wait()

    def _wait_for(self, channel: Channel) -> HostPart | None:
        """Log the progress of the process that measures, and return its result. None if this host is asked to stop."""
        host = self._host
        deadline_s = time.monotonic() + _SUPPLY_S
        while True:
            while select.select([channel], [], [], 0)[0]:
                # A message has begun to arrive, so its rest follows within a second.
                message = channel.receive(1.0)
                if "part" in message:
                    return HostPart.from_json(message["part"].encode())
                logger.info("progress: profiling: %s", message["progress"])
            if host.interrupted_s is not None:
                return None
            if time.monotonic() > deadline_s:
                raise ConfigError(f"the measurement of the samples took longer than {_SUPPLY_S:.0f} s")
            host.tick()

    def _write(self, ranks: dict[int, RankPart], hosts: Sequence[HostPart], facts: JobFacts) -> None:
        """Write the profile as JSON and as text, unless this host was asked to stop."""
        if self._host.interrupted_s is not None:
            logger.warning("asked to stop: no profile is written")
            return
        report = self._report()
        # If other programs used the CPUs, or real work took longer than the emulated time, the measured times are too
        # long. The profile then has a note that its times are upper bounds, and the share of the times that may be in
        # excess.
        note = upper_bounds_note({"the profile run": report})
        facts = dataclasses.replace(facts, excess_share=excess_share(report), excess_notes=(note,) if note else ())
        profile = assemble_profile(ranks, hosts, facts)
        folder = self._host.output_folder
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(profile, folder / PROFILE_FILE_NAME)
        write_text(folder / TEXT_FILE_NAME, render_profile(profile))
        logger.info("%s", first_sentence(profile))
        logger.info("profile: %s", folder / PROFILE_FILE_NAME)

    def _report(self) -> Report:
        """Return the report of this run. It states the share of its times that other work may have caused."""
        host = self._host
        with host.hub.membership() as membership:
            statuses = membership.statuses()
        facts = run_facts(host.plan, statuses, JobHistory(), exit_code=ExitCode.OK)
        # Only the times of this report are used, so the prices of its catalogue do not matter.
        return build_report(facts, Catalogue.load())


class ProgressLines:
    """Decides when a progress line is due: at once for a new phase, after a while for the same one."""

    def __init__(self) -> None:
        self._phase = _WAITING
        self._began_s: float | None = None
        self._shown_s = 0.0

    def due(self, text: str, now_s: float) -> str:
        """Return the line to log now, or an empty text.

        Args:
            text: The text of `progress_text`. While it is empty, lines say how long the ranks have had no batch.
            now_s: Monotonic seconds. The wait begins with the first call.
        """
        # A line is due when the phase changes, or `LOG_INTERVAL_S` after the last line. `_phase` begins as `_WAITING`,
        # so the first calls without a batch change no phase.
        if self._began_s is None:
            self._began_s = self._shown_s = now_s
        text = text or f"{_WAITING}, {now_s - self._began_s:.0f} s"
        phase = text.partition(",")[0]
        if phase == self._phase and now_s - self._shown_s < LOG_INTERVAL_S:
            return ""
        self._phase, self._shown_s = phase, now_s
        return text


def progress_text(reports: Sequence[RankReport]) -> str:
    """Return the progress of the slowest rank, for example ``profiling: headspace, 31 of 50 steps``.

    Empty before the script has made a loader.
    """
    parts = _parts(reports)
    if not parts:
        return ""
    slowest = min(parts.values(), key=lambda part: (PHASES.index(part.phase), part.num_steps))
    # The last phase is "done". It consists of no steps.
    if slowest.phase == PHASES[-1]:
        return f"profiling: {slowest.phase}"
    # A phase with short steps takes more steps than planned. Log no planned number then. Before, "228 of 55 steps" was
    # logged.
    is_longer = slowest.num_steps > slowest.num_planned
    count = str(slowest.num_steps) if is_longer else f"{slowest.num_steps} of {slowest.num_planned}"
    return f"profiling: {slowest.phase}, {count} steps"


def _parts(reports: Sequence[RankReport]) -> dict[int, RankPart]:
    """Return what each rank has measured so far, by rank. Log a warning for a malformed part."""
    found = {}
    for report in reports:
        if report.profile_json:
            try:
                found[report.rank] = _read(report.profile_json)
            except ConfigError as error:
                logger.warning("rank %d: %s", report.rank, error)
    return found


# `follow` reads the parts of all ranks in each turn of the main loop, five times per second. Ranks send new parts about
# once per second.
@functools.lru_cache(maxsize=256)
def _read(content: bytes) -> RankPart:
    return RankPart.from_json(content)


def _host_part(status: HostStatus) -> HostPart | None:
    """Return what a host has measured. None if it has sent nothing, or a malformed part, which is logged."""
    try:
        return HostPart.from_json(status.profile_json) if status.profile_json else None
    except ConfigError as error:
        logger.warning("host %s: %s", status.host, error)
        return None
