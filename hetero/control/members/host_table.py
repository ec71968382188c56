"""The hosts of a job, and what each has reported, as one host knows them. Pure.

`hetero.control.members.membership` feeds it with messages and decides.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.joined import MAX_JOINED, JoinedHost
from hetero.control.members.joined_hosts import JoinedHosts, Obstacle
from hetero.control.peers import Member, Peer
from hetero.control.status import HostState, HostStatus
from hetero.errors import ExitCode

__all__ = ["ENDED", "LEAVING", "HostTable"]

logger = logging.getLogger(__name__)

ENDED = (HostState.DONE, HostState.FAILED)
LEAVING = (HostState.DRAINING, *ENDED)
_QUIET = frozenset(("ranks", "usage_json", "counters", "ticks", "profile_json"))
"""Fields of the own status whose changes wake no thread of this host."""


class HostTable:
    """What one host knows about every host of its job.

    Args:
        members: Every host, trainer hosts in rank order.
        own: Status of this host at the start.
        timings: Leases and intervals, seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self, members: Sequence[Member], own: HostStatus, *, timings: Timings, clock: Callable[[], float]
    ) -> None:
        self.own = own
        self._members = {member.host: member for member in members}
        self._peers = {host: Peer(member) for host, member in self._members.items() if host != own.host}
        self._timings = timings
        self._clock = clock
        self.joined_hosts = JoinedHosts()
        self._hosts_of: dict[Role, list[str]] = {role: [] for role in Role}
        for member in members:
            self._hosts_of[member.role].append(member.host)
        self._local_news: tuple[object, ...] | None = None
        """The last `local_news`. None if something has changed since."""
        self._news_valid_until_s = math.inf
        """Time when the first lease may end. Then `local_news` may change."""

    def update(self, **changes: object) -> None:
        """Replace fields of this host's own status."""
        self.own = dataclasses.replace(self.own, revision=self.own.revision + 1, **changes)  # type: ignore[arg-type]
        # `local_news` contains none of the quiet fields, so it is computed again only if another field changes.
        if not changes.keys() <= _QUIET:
            self._local_news = None

    @property
    def news(self) -> tuple[object, ...]:
        """Values whose changes the hub sends to other hosts at once, not only with the next heartbeat."""
        own = self.own
        votes = tuple((report.rank, report.stop_vote, report.finished) for report in own.ranks)
        decisions = own.failure, own.decided, own.stop_requested, own.stop_at, own.generation
        return own.state, own.endpoints, own.rendezvous_port, own.trainer_endpoints, own.joined, decisions, votes

    @property
    def local_news(self) -> tuple[object, ...]:
        """Values whose changes wake the waiting threads of this host.

        The values are computed again only after a change, or when a lease may have ended. Otherwise a host would go
        through the statuses of all hosts after each message, and its CPU time would grow with the square of the number
        of hosts.
        """
        now_s = self._clock()
        # With 256 data hosts, computing this for each message took 63 % of a core. Now it takes 5 %.
        if self._local_news is not None and now_s <= self._news_valid_until_s:
            return self._local_news
        # Without a further message, the values change when the next lease ends. Leases in the past have ended already.
        # A host that was never heard has no lease.
        ends_s = (peer.last_heard_s + self._timings.lease_s for peer in self._peers.values() if peer.status is not None)
        self._news_valid_until_s = min((end_s for end_s in ends_s if end_s >= now_s), default=math.inf)
        finals = tuple((peer.has_our_final, peer.has_left) for peer in self._peers.values())
        states = tuple(self._state(host) for host in self._members)
        directory = self.endpoints(), self.hosts_in_service()
        common = self.stop_requested, self.own.generation
        self._local_news = self.failure_delivered, finals, states, common, directory
        return self._local_news

    @property
    def arbiter(self) -> str | None:
        """The lowest-ranked living trainer host, or None if no trainer host is known to live."""
        trainers = self._hosts_of[Role.TRAINER]
        return next((host for host in trainers if host == self.own.host or self._lives(host)), None)

    @property
    def trainers_done(self) -> bool:
        """Whether every trainer host has reported that it is done."""
        return all(self._state(host) is HostState.DONE for host in self._hosts_of[Role.TRAINER])

    @property
    def final_delivered(self) -> bool:
        """Whether every living peer that waits for this host's final status has received it."""
        role, arbiter = self._members[self.own.host].role, self.arbiter
        return not any(
            self._lives(host) and peer.awaits_final_of(role, is_arbiter=host == arbiter)
            for host, peer in self._peers.items()
        )

    @property
    def failure_delivered(self) -> bool:
        """Whether the arbiter has received this host's failure.

        True also if nothing has to be sent: without a failure, with a decided cause, or if no other host is arbiter.
        """
        # None if no arbiter lives. None also if this host itself is the arbiter, because it is no peer of itself.
        arbiter = self._peers.get(self.arbiter or "")
        if self.own.failure is None or self.own.decided is not None or arbiter is None:
            return True
        return arbiter.has_our_failure

    @property
    def stop_requested(self) -> bool:
        """Whether any trainer host was asked to stop."""
        return any(status.stop_requested for status in self.statuses(Role.TRAINER))

    @property
    def is_ending(self) -> bool:
        """Whether the job has ended or is about to."""
        return self.own.decided is not None or self.stop_requested or self.trainers_done

    @property
    def reporter(self) -> str:
        """The first trainer host, which writes the job's report and admits hosts that join."""
        return next(iter(self._hosts_of[Role.TRAINER]), "")

    def was_asked_to_stop(self, host: str) -> bool:
        """Return whether a host has reported that it was asked to stop."""
        return any(status.host == host and status.stop_requested for status in self.statuses())

    def hosts(self, role: Role) -> list[str]:
        """Return the hosts of ``role``, in rank order."""
        return list(self._hosts_of[role])

    def statuses(self, role: Role | None = None) -> list[HostStatus]:
        """Return the last status of each host that was heard, including this host."""
        hosts = self._members if role is None else self._hosts_of[role]
        found = (self.own if host == self.own.host else self._peers[host].status for host in hosts)
        return [status for status in found if status is not None]

    def missing(self, role: Role, *, at_least: HostState) -> list[tuple[str, str]]:
        """Return (host, last news about it) for each other host of ``role`` that has not reached ``at_least``.

        Hosts that have joined are never missing. If only some hosts are optional, these are not missing. If all hosts
        are optional, the job needs only one of them to serve. All are missing until one serves, and then none is. At
        the end of such a job, when ``at_least`` is DRAINING or later, each host is missing by its own state.
        """
        others = [host for host in self.hosts(role) if host != self.own.host and host not in self.joined_hosts.present]
        missing = [host for host in others if self._state(host).value < at_least.value]
        are_all_optional = all(self._members[host].is_optional for host in others)
        if not are_all_optional:
            missing = [host for host in missing if not self._members[host].is_optional]
        elif at_least < HostState.DRAINING:
            missing = [] if self._has_host(role, at_least) else others
        return [(host, self._peers[host].last_state) for host in missing]

    def endpoints(self) -> tuple[EndpointRecord, ...]:
        """Return the endpoints of all hosts that live and serve."""
        return tuple(record for status in self._in_service() for record in status.endpoints)

    def hosts_in_service(self) -> tuple[str, ...]:
        """Return the hosts that live and have begun their work."""
        # A host may be in service without endpoints, for example while its only one is started again. A host in INIT
        # without endpoints is not, because a launcher that was restarted has lost the endpoints of the earlier one.
        return tuple(
            status.host for status in self._in_service() if status.endpoints or status.state is not HostState.INIT
        )

    def at_work(self, role: Role) -> list[str]:
        """Return the other hosts of ``role`` that have begun their work, have not ended it, and were heard just now."""
        in_service = self.hosts_in_service()
        # The first trainer host waits for the last figures of these hosts. It must stop waiting soon for a host that is
        # lost while it drains. So a host counts only if it was heard within ``suspect_s``, less than a lease.
        heard_since_s = self._clock() - self._timings.suspect_s
        others = (host for host in self.hosts(role) if host != self.own.host)
        return [
            host
            for host in others
            if (host in in_service or self._state(host) is HostState.DRAINING)
            and self._peers[host].last_heard_s >= heard_since_s
        ]

    def has(self, host: str) -> bool:
        """Return whether a host belongs to the job."""
        return host in self._members

    def obstacle_to(self, joined: JoinedHost) -> Obstacle | None:
        """Return why a host cannot join now. None if it can."""
        if self.is_ending:
            return Obstacle(text="the job is about to end", exit_code=ExitCode.OK)
        known = self.joined_hosts.present.get(joined.host)
        if known is None:
            if self.has(joined.host):
                text = f"the job already has a host {joined.host!r}; give this host another name with --host"
                return Obstacle(text=text)
            is_full = self.joined_hosts.is_full
            return Obstacle(text=f"{MAX_JOINED} hosts have joined, which is the limit") if is_full else None
        # A host that asks again from the same address has lost the answer, or was restarted. A host that comes back may
        # have another address. It gets its place back when the host at the old address has been silent for a lease
        # (failure F40 in docs/reliability.md).
        if known.address == joined.address or not self._lives(joined.host):
            return None
        # The new host may ask again, because the host that has joined may have been lost or may be leaving.
        text = f"{joined.host!r} has joined from {known.address}"
        return Obstacle(text=f"{text}; give this host another name with --host if that one lives", may_pass=True)

    def knows_joined(self, joined: JoinedHost) -> bool:
        """Return whether every living trainer host has received a status of this host that lists a joined host."""
        return all(
            peer.delivered is not None and joined in peer.delivered.joined
            for host, peer in self._peers.items()
            if peer.member.role is Role.TRAINER and self._lives(host)
        )

    # Rules

    def _has_host(self, role: Role, at_least: HostState) -> bool:
        """Return whether another host of ``role`` lives, is in a state from ``at_least`` on, and does not leave."""
        others = (host for host in self.hosts(role) if host != self.own.host)
        return any(self._lives(host) and at_least <= self._state(host) < HostState.DRAINING for host in others)

    def _add(self, joined: JoinedHost) -> None:
        """Add a host that has joined, or replace its record if it joins again."""
        # The description of the cluster has this host, so it need not join.
        if joined.host in self._members and joined.host not in self.joined_hosts.present:
            return
        now_s = self._clock()
        self.joined_hosts.add(joined, now_s)
        is_new = joined.host not in self._members
        member = Member(host=joined.host, role=Role.DATA, is_optional=True)
        self._members[joined.host] = member
        # Begin with an empty record, because a launcher that joins again has lost what it had reported before.
        self._peers[joined.host] = Peer(member, last_heard_s=now_s)
        # `local_news` contains the state of every host.
        self._local_news = None
        if is_new:
            self._hosts_of[Role.DATA].append(joined.host)
            logger.info("data host %s has joined the job, in group %s", joined.host, joined.group)

    def _follow_list(self, status: HostStatus) -> None:
        """On a trainer host, adopt the joined hosts that the first trainer host lists in its status."""
        if status.host == self.reporter and self._members[self.own.host].role is Role.TRAINER:
            new, gone = self.joined_hosts.changes(status.joined)
            for joined in new:
                self._add(joined)
            for host in gone:
                self._remove(host)

    def _remove(self, host: str) -> None:
        """Remove a host that had joined. Keep its last status for the report."""
        peer, _ = self._peers.pop(host), self._members.pop(host)
        self._hosts_of[Role.DATA].remove(host)
        # `local_news` contains the state of every host.
        self._local_news = None
        self.joined_hosts.remove(host, peer.status, peer.last_heard_s)
        logger.info("data host %s has left the job (%s)", host, peer.last_state)

    def _state(self, host: str) -> HostState:
        """Return the last known state of a host. INIT if it was not heard, or if it has not begun this generation."""
        if host == self.own.host:
            return self.own.state
        status = self._peers[host].status
        if status is None:
            return HostState.INIT
        # Only trainer hosts begin again with each generation. Data hosts go on.
        is_behind = self._members[host].role is Role.TRAINER and status.generation < self.own.generation
        return HostState.INIT if is_behind else status.state

    def _in_service(self) -> Iterator[HostStatus]:
        """Yield the statuses of hosts that live, whose settings are accepted, and that are not leaving."""
        for status in self.statuses():
            is_of_use = status.host == self.own.host or (
                self._lives(status.host) and not self._peers[status.host].objection
            )
            if is_of_use and status.state not in LEAVING:
                yield status

    def _lives(self, host: str) -> bool:
        """Return whether another host was heard within the last lease."""
        peer = self._peers[host]
        return peer.status is not None and self._clock() - peer.last_heard_s <= self._timings.lease_s
