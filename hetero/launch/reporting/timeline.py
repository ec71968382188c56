"""When hosts came and went and processes restarted, as the first trainer host hears of it."""

from __future__ import annotations

from hetero.control.members.membership import Membership
from hetero.control.status import HostStatus
from hetero.report.model import MAX_EVENTS, TimedEvent

__all__ = ["Timeline"]

_COUNTED = {
    "endpoint restarts": "an endpoint restarted",
    "job restarts": "the trainer group restarted",
    "stuck endpoints": "a stuck endpoint was killed",
    "tf.data dispatcher restarts": "the tf.data dispatcher restarted",
    "tf.data worker restarts": "a tf.data worker restarted",
}
"""Counters of hosts whose growth is an event, with the event in words."""


class Timeline:
    """Collects events while the job runs.

    An event has the time when this host learns of it, because clocks of different hosts are never compared.
    """

    def __init__(self) -> None:
        self.events: list[TimedEvent] = []
        self._serving: set[str] = set()
        self._counts: dict[tuple[str, str], int] = {}

    def follow(self, membership: Membership, at_s: float) -> None:
        """Record what is new since the last call.

        Args:
            membership: What this host knows of all hosts.
            at_s: Seconds since the start of the run.
        """
        # At the end of a job every data host leaves, so a leaving host is no event then.
        if membership.is_ending:
            return
        serving = {record.host for record in membership.endpoints()}
        for host in sorted(serving - self._serving):
            self._add(at_s, host, "endpoints begin to serve")
        for host in sorted(self._serving - serving):
            self._add(at_s, host, "endpoints no longer serve")
        self._serving = serving
        for status in membership.statuses():
            self._follow_counters(status, at_s)

    def _follow_counters(self, status: HostStatus, at_s: float) -> None:
        """Record an event for each counter of a host that has grown since the last call."""
        for name, words in _COUNTED.items():
            count = status.counters.get(name, 0)
            if count > self._counts.get((status.host, name), 0):
                self._add(at_s, status.host, words)
            self._counts[status.host, name] = count

    def _add(self, at_s: float, host: str, what: str) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(TimedEvent(at_s=round(at_s, 3), host=host, what=what))
