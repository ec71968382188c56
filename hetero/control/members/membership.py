"""The state machine of a job's hosts: which hosts are present, which are done, and why the job ends.

Pure: it uses neither threads nor I/O, and the clock is passed in. `hetero.control.hub` puts a lock, the heartbeats and
the RPCs around it.

Every host holds one `Membership` and feeds it with the messages that arrive. One host decides everything that must be
the same everywhere (the root cause, the step where ranks stop). This host is the *arbiter*, the lowest-ranked living
trainer host. The others adopt its decision from its heartbeats. Therefore a lost message only delays the decision by a
heartbeat interval. Failures are ordered by arrival, because clocks of different hosts are never compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.causes import is_restartable, root_of
from hetero.control.members.host_table import ENDED, LEAVING, HostTable
from hetero.control.members.joined import JoinedHost
from hetero.control.members.past_ranks import PastRanks
from hetero.control.peers import Member, Peer, differences
from hetero.control.status import Cause, HostState, HostStatus, RankReport
from hetero.control.stop_points import stop_point
from hetero.errors import ExitCode

__all__ = ["Member", "Membership"]

logger = logging.getLogger(__name__)


class Membership(HostTable):
    """What one host knows about every host of its job.

    Args:
        members: Every host, trainer hosts in rank order.
        own: Status of this host at the start.
        timings: Leases and intervals, seconds.
        clock: Monotonic seconds.
        max_restarts: Maximum number of restarts of the trainer group after failures of its ranks.
        needs_data_hosts: Whether the batches need data hosts, because trainer hosts compute none.
    """

    CHECK_S = 0.1
    """Least time between two checks of the leases."""
    SETTLE_S = 1.0
    """Seconds that the arbiter collects failures before it decides. The report of a killed rank arrives a moment after
    the exceptions that its death raises in other ranks."""
    CONSEQUENCE_SETTLE_S = 4.0
    """Seconds that the arbiter collects failures if all are consequences (`Cause.is_consequence`). The failure that
    caused them may come later from another host (tests/control/test_causes.py). If a trainer host is silent by
    then, the arbiter waits longer, until that host is heard again or its lease ends."""

    def __init__(
        self,
        members: Sequence[Member],
        own: HostStatus,
        *,
        timings: Timings,
        clock: Callable[[], float],
        max_restarts: int = 0,
        needs_data_hosts: bool = True,
    ) -> None:
        super().__init__(members, own, timings=timings, clock=clock)
        self._started_s = clock()
        self._check_s = self._started_s
        """Time of the next check of the leases."""
        self._max_restarts = max_restarts
        self._needs_data_hosts = needs_data_hosts
        self._failures: list[tuple[float, Cause]] = []
        """Each failure with the time of its arrival, the first one first."""
        self.past_ranks = PastRanks()

    # Inputs

    def fail(self, cause: Cause, *, generation: int | None = None) -> None:
        """Record a failure of this host, or one that another host reported. Ignore repeats.

        Args:
            cause: The failure.
            generation: Generation of the rank that failed. The failure is ignored if another generation runs now.
        """
        if generation is not None and generation != self.own.generation:
            return
        # A host repeats its failure in each heartbeat.
        if any(known.first_line == cause.first_line for _, known in self._failures):
            return
        self._failures.append((self._clock(), cause))
        if cause.host == self.own.host and self.own.failure is None:
            self.update(failure=cause)

    @property
    def has_failure(self) -> bool:
        """Whether this host knows of a failure. The arbiter's decision about it follows."""
        return bool(self._failures)

    def observe(self, status: HostStatus) -> None:
        """Process a heartbeat that was received, or the answer to one that was sent."""
        peer = self._peers.get(status.host)
        if peer is None:
            logger.debug("ignored a heartbeat from %r, which is not a host of this job", status.host)
            return
        before = peer.status
        had_served = peer.has_served
        is_same = before is not None and before.incarnation == status.incarnation
        if is_same and before is not None and status.revision < before.revision:
            # A newer status has arrived before this status, because heartbeats and answers travel separately.
            return
        now_s = self._clock()
        # Compute `local_news` again if the peer was silent or had left, or if the status changes a part of it.
        is_alive = before is not None and now_s - peer.last_heard_s <= self._timings.lease_s
        if not is_alive or peer.has_left or before is None or _visible(status) != _visible(before):
            self._local_news = None
        # The main loop of a launcher counts ticks. If they have not changed, the peer counts as silent, because another
        # thread still sends heartbeats when the main loop is stuck. 0 ticks disable this check.
        has_ticked = before is None or status.ticks == 0 or status.ticks != before.ticks
        if has_ticked or not is_same:
            peer.last_heard_s = now_s
        peer.is_stuck = now_s - peer.last_heard_s > self._timings.suspect_s
        state = status.state.name.lower()
        peer.last_state = f"heard, {state}, but its main loop is stuck" if peer.is_stuck else f"heard, {state}"
        peer.status, peer.has_left = status, False
        peer.has_served |= bool(status.endpoints)
        # If the peer's launcher is new, compare its settings. A restart on a trainer host counts as a failure.
        if not is_same:
            self._compare(peer, status, had_served=had_served)
            if before is not None:
                self._restarted(peer, before)
        # Do not follow a peer whose settings differ.
        if peer.objection:
            peer.last_state = peer.objection
            return
        # Adopt what the peer has decided or found out. A new generation comes before a failure, because a failure of a
        # rank counts only in its own generation.
        self._follow_list(status)
        if status.generation > self.own.generation and self.own.decided is None:
            self._begin_generation(status.generation, status.restarted_for)
        if status.failure is not None and self._is_fatal(peer):
            self.fail(status.failure, generation=status.generation if status.failure.of_rank else None)
        if self.own.decided is None and status.decided is not None and self._may_decide(peer.member, status.decided):
            self.update(decided=status.decided)
        if self.own.stop_at is None and status.stop_at is not None:
            self.update(stop_at=status.stop_at)

    def store(self, report: RankReport) -> None:
        """Store the latest report of one of this host's ranks. Ignore a rank of an earlier generation."""
        if report.generation != self.own.generation:
            return
        known = next((known for known in self.own.ranks if known.rank == report.rank), None)
        report = self.past_ranks.merged(report, known)
        others = [other for other in self.own.ranks if other is not known]
        ranks = tuple(sorted([*others, report], key=lambda each: each.rank))
        self.update(ranks=ranks)

    def admit(self, joined: JoinedHost) -> None:
        """Add a data host to the running job. The other trainer hosts add it when they read this host's status."""
        self._add(joined)
        # A host that joins again replaces its record.
        others = (known for known in self.own.joined if known.host != joined.host)
        self.update(joined=(*others, joined))

    def unreachable(self, host: str, why: str) -> None:
        """Record that ``host`` could not be reached, and why."""
        if (peer := self._peers.get(host)) is None:
            # The host has left the job meanwhile.
            return
        peer.last_state = why
        # A peer that was ending and no longer answers has left, so this host must not wait for its answer. When two
        # data hosts ended together, one waited for the other. One of four such jobs ended 5 s late. `local_news`
        # contains ``has_left``.
        has_left = peer.status is not None and peer.status.state in LEAVING
        if has_left != peer.has_left:
            peer.has_left, self._local_news = has_left, None

    def do_without(self, host: str, why: str) -> bool:
        """If the job can continue without ``host``, record and log once why ``host`` cannot be used.

        Returns:
            Whether the job continues. If False, the job needs the host, and the caller must fail the job.
        """
        # The host has left the job.
        if (peer := self._peers.get(host)) is None:
            return True
        if not self._may_do_without(peer, has_served=peer.has_served):
            return False
        peer.last_state = why
        if peer.complaint != why:
            peer.complaint = why
            logger.warning("the job continues without data host %s: %s", host, why)
        return True

    def delivered(self, host: str, status: HostStatus) -> None:
        """Record that ``host`` has received this host's ``status``."""
        if (peer := self._peers.get(host)) is None:
            return
        # `local_news` contains both facts. A fact may become False again. If a new generation begins after this host
        # was done, the peer no longer has this host's final status.
        before = peer.has_our_final, peer.has_our_failure
        peer.delivered = status
        if (peer.has_our_final, peer.has_our_failure) != before:
            self._local_news = None

    def tick(self) -> None:
        """Check leases. Decide the root cause and where ranks stop, if the messages so far suffice."""
        now = self._clock()
        # The hub ticks after each message of each host. While a decision about failures is pending, each tick checks
        # the leases, because a lease that has just ended may be their cause.
        if now >= self._check_s or (self._failures and self.own.decided is None):
            self._check_s = now + self.CHECK_S
            self._check_leases(now)
        self._remove_left(now)
        if self.own.decided is None:
            self._decide_cause(now)
        if self.own.stop_at is None:
            self._decide_stop()

    # Rules

    def _remove_left(self, now: float) -> None:
        """Remove joined hosts that this host has admitted and that have ended or are lost."""
        for joined in self.own.joined:
            # A host that was never heard has the time that hosts have to start. A host that was heard ends itself after
            # ``orphan_s`` without a trainer host. After twice this time of silence it is certainly gone.
            peer = self._peers[joined.host]
            limit_s = self._timings.start_timeout_s if peer.status is None else 2 * self._timings.orphan_s
            if self._state(joined.host) in ENDED or now - peer.last_heard_s > limit_s:
                self._remove(joined.host)
                self.update(joined=tuple(known for known in self.own.joined if known is not joined))

    def _may_do_without(self, peer: Peer, *, has_served: bool) -> bool:
        """Return whether the job can continue without a peer."""
        # The job can continue without a data host that has served, for example if its replacement is unusable. If a
        # data host never served, trainer hosts fail the job. Data hosts do not, because the fault may be their own.
        is_spare = has_served or peer.member.is_optional or self._members[self.own.host].role is Role.DATA
        return peer.member.role is Role.DATA and is_spare

    def _is_fatal(self, peer: Peer) -> bool:
        """Return whether a failure of a peer ends the job."""
        # The job can lose a data host that has served, because other data hosts compute its batches. `has_served`
        # remembers this, because a host that fails loses its endpoints. If a host never served, its failure ends the
        # job.
        if peer.member.role is Role.TRAINER or not (peer.has_served or peer.member.is_optional):
            return True
        # The job goes on if trainer hosts compute batches, if the peer has joined later, or if other endpoints serve.
        if not self._needs_data_hosts or peer.member.host in self.joined_hosts.present or self.endpoints():
            return False
        # The failure ends the job if all planned data hosts are optional, and all have failed before one has served.
        # Then no host is left to compute batches. If this host itself is a data host, it is left, because it has not
        # failed. It is not in `_peers`.
        spare = [host for host in self.hosts(Role.DATA) if host not in self.joined_hosts.present]
        return all(
            host in self._peers
            and self._members[host].is_optional
            and self._state(host) is HostState.FAILED
            and not self._peers[host].has_served
            for host in spare
        )

    def _may_decide(self, member: Member, decided: Cause) -> bool:
        """Return whether to adopt a decision that a member has sent."""
        # A data host may pass on decisions of other hosts. If a data host has decided alone, a partition has cut it
        # off, and only that host ends.
        return member.role is Role.TRAINER or decided.host != member.host

    def _compare(self, peer: Peer, status: HostStatus, *, had_served: bool) -> None:
        """Compare the settings of a peer's new launcher with those of this host.

        If they differ and the job can continue without the peer, this host ignores the peer. If they differ and the job
        needs the peer, the job fails.

        Args:
            peer: The peer.
            status: First status of the new launcher.
            had_served: Whether the peer had endpoints before this status. ``peer.has_served`` counts this status too.
        """
        found = list(differences(status, self.own))
        peer.objection = ""
        if not found:
            peer.complaint = ""
        elif self._may_do_without(peer, has_served=had_served):
            peer.objection = "; ".join(found)
            self.do_without(status.host, peer.objection)
        else:
            for summary in found:
                self.fail(Cause(host=self.own.host, summary=summary, exit_code=ExitCode.DISAGREEMENT))

    def _restarted(self, peer: Peer, before: HostStatus) -> None:
        """Fail the job if the launcher of a trainer host was restarted before that host had ended."""
        if peer.member.role is Role.TRAINER and before.state not in ENDED:
            summary = f"the launcher of trainer host {peer.member.host} was restarted while the job ran"
            self.fail(Cause(host=self.own.host, summary=summary, exit_code=ExitCode.ORPHANED))

    def _check_leases(self, now: float) -> None:
        """Fail the job if a trainer host is silent for a lease. On a data host, end if all trainer hosts are silent."""
        heard = [self._peers[host].last_heard_s for host in self.hosts(Role.TRAINER) if host != self.own.host]
        if self._members[self.own.host].role is Role.DATA:
            silent_s = now - max([self._started_s, *heard])
            # Before any trainer host was heard, the limit for the start of a job applies, which the launcher checks.
            was_any_heard = any(self._peers[host].status is not None for host in self.hosts(Role.TRAINER))
            if was_any_heard and silent_s > self._timings.orphan_s and not self.trainers_done:
                summary = f"no trainer host was heard for {silent_s:.0f} s; this host ends, to cause no more cost"
                cause = Cause(host=self.own.host, summary=summary, exit_code=ExitCode.ORPHANED)
                self.fail(cause)
                # Decide alone, because no arbiter can be heard.
                if self.own.decided is None:
                    self.update(decided=cause)
            self._log_silence(Role.TRAINER, now)
            return
        self._log_silence(Role.DATA, now)
        for host in self.hosts(Role.TRAINER):
            peer = self._peers.get(host)
            # This host itself is no peer. A host that was never heard is still starting.
            if peer is None or peer.status is None or self._state(host) in ENDED or self._lives(host):
                continue
            what = "stood still" if peer.is_stuck else "fell silent"
            summary = (
                f"trainer host {host} {what} for {now - peer.last_heard_s:.0f} s "
                f"(lease {self._timings.lease_s:.0f} s; last state: {peer.last_state})"
            )
            # Report each loss once. The summary contains the seconds of silence, so `fail` would not find it to be a
            # repeat. A failure that only mentions a lost host must not hide the loss, so consequences do not count.
            words = f"trainer host {host} "
            if not any(words in known.summary and not known.is_consequence for _, known in self._failures):
                self.fail(Cause(host=self.own.host, summary=summary, exit_code=ExitCode.ORPHANED))

    def _log_silence(self, role: Role, now: float) -> None:
        """Log once if a host of ``role`` has been silent for a lease, and once if it is heard again."""
        for host in self.hosts(role):
            peer = self._peers[host]
            is_silent = peer.status is not None and self._state(host) not in ENDED and not self._lives(host)
            if is_silent == peer.is_silent:
                continue
            peer.is_silent = is_silent
            if is_silent:
                what, silent_s = "stood still" if peer.is_stuck else "fell silent", now - peer.last_heard_s
                logger.warning("%s host %s %s for %.0f s (%s)", role.value, host, what, silent_s, peer.last_state)
            else:
                logger.info("%s host %s is heard again", role.value, host)

    def _decide_cause(self, now: float) -> None:
        """Decide the root cause or a restart, if there are failures and this host may decide now.

        The arbiter decides for all hosts, after it has collected failures for a moment. Any other host waits for this
        decision. If the decision does not come, a host that has failed ends because of its own failure.
        """
        if not self._failures:
            return
        since_first_s = now - self._failures[0][0]
        if self.arbiter == self.own.host:
            self._decide_for_all(now, since_first_s)
        elif self.own.failure is not None:
            # An arbiter decides after one lease at the latest. If its decision has not arrived by then, do not wait any
            # longer, because the arbiter rejects this host. Without a living trainer host, there is no arbiter whose
            # decision could arrive.
            has_arbiter = self.arbiter is not None
            patience_s = self._timings.lease_s + self.SETTLE_S if has_arbiter else self._timings.heartbeat_s
            if since_first_s > patience_s:
                self.update(decided=self.own.failure)

    def _decide_for_all(self, now: float, since_first_s: float) -> None:
        """On the arbiter, decide the root cause or begin a restart. Wait if another failure may still arrive.

        Args:
            now: The clock's time.
            since_first_s: Seconds since the first failure arrived.
        """
        causes = [cause for _, cause in self._failures]
        are_consequences = all(cause.is_consequence for cause in causes)
        # A lost host breaks connections at once, and its lease ends after 15 s. Without this wait, jobs ended after 4 s
        # and named the connection.
        if are_consequences and self._awaits_host(now):
            return
        if since_first_s < (self.CONSEQUENCE_SETTLE_S if are_consequences else self.SETTLE_S):
            return
        # A failure that no restart can repair ends the job, whatever else failed.
        final = [cause for cause in causes if not self._may_restart(cause)]
        if final:
            self.update(decided=root_of(final))
        else:
            self._begin_generation(self.own.generation + 1, root_of(causes))

    def _awaits_host(self, now: float) -> bool:
        """Return whether a trainer host has missed heartbeats. It may be lost although its lease has not ended yet."""
        missed_s = max(self.SETTLE_S, 1.5 * self._timings.heartbeat_s)
        return any(
            self._lives(host) and self._state(host) not in ENDED and now - self._peers[host].last_heard_s > missed_s
            for host in self.hosts(Role.TRAINER)
            if host != self.own.host
        )

    def _may_restart(self, cause: Cause) -> bool:
        """Return whether the trainer group may restart after a failure. All trainer hosts must live."""
        return (
            is_restartable(cause)
            and self.own.generation < self._max_restarts
            and not self.stop_requested
            and all(host == self.own.host or self._lives(host) for host in self.hosts(Role.TRAINER))
        )

    def _begin_generation(self, generation: int, cause: Cause | None) -> None:
        """Begin a generation and forget failures of ranks. On a trainer host, also reset the state of the old ranks."""
        changes: dict[str, object] = {"generation": generation, "restarted_for": cause}
        # A failure of a launcher or an endpoint still has to be decided.
        self._failures = [(at_s, known) for at_s, known in self._failures if not known.of_rank]
        if self.own.failure is not None and self.own.failure.of_rank:
            changes["failure"] = None
        if self._members[self.own.host].role is Role.TRAINER:
            self.past_ranks.take(self.own.ranks)
            changes |= {"state": HostState.INIT, "ranks": (), "rendezvous_port": 0}
        self.update(**changes)

    def _decide_stop(self) -> None:
        """On the arbiter, decide where all ranks end, when each rank that still runs has paused."""
        if not self.stop_requested or self.arbiter != self.own.host:
            return
        reports = [report for status in self.statuses(Role.TRAINER) for report in status.ranks]
        # A rank that has finished begins no further step, so it need not pause.
        running = [report for report in reports if not report.finished]
        if all(report.stop_vote for report in running):
            self.update(stop_at=stop_point(running))


def _visible(status: HostStatus) -> tuple[object, ...]:
    """Return the part of another host's status that changes `HostTable.local_news`."""
    return status.state, status.endpoints, status.generation, status.stop_requested, status.incarnation
