"""The data hosts that have joined a running job, as one host knows them. Pure.

The first trainer host admits hosts and lists them in its status. The other trainer hosts adopt that list. Only the
first trainer host decides that a joined host has left. The others follow when the host is no longer in the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero.control.members.joined import MAX_JOINED, JoinedHost
from hetero.control.status import HostStatus
from hetero.errors import ExitCode

__all__ = ["JoinedHosts", "LeftHost", "Obstacle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftHost:
    """A joined host that has left the job, or was lost."""

    joined: JoinedHost
    status: HostStatus | None
    """Last status of the host. None if the host was never heard."""
    present_s: float
    """Seconds from the admission of the host until it was last heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why a host cannot join now."""

    text: str
    exit_code: ExitCode = ExitCode.USAGE
    """Code with which the host ends. OK: the job is about to end."""
    may_pass: bool = False
    """Whether the same request may succeed later. The host then asks again."""


class JoinedHosts:
    """The hosts that have joined, and the hosts that have left again."""

    def __init__(self) -> None:
        self.present: dict[str, JoinedHost] = {}
        """The hosts that have joined and not left, by name."""
        self.left: list[LeftHost] = []
        """Hosts that have left, up to a limit, for the report of the job."""
        self._admitted_s: dict[str, float] = {}

    def add(self, joined: JoinedHost, now_s: float) -> None:
        """Record that a host has joined. A host that has joined before keeps its time."""
        self.present[joined.host] = joined
        self._admitted_s.setdefault(joined.host, now_s)

    def remove(self, host: str, status: HostStatus | None, last_heard_s: float) -> None:
        """Record that a host has left."""
        joined = self.present.pop(host)
        admitted_s = self._admitted_s.pop(host)
        # The list has a limit, because hosts may join and leave any number of times.
        if len(self.left) < MAX_JOINED:
            present_s = max(0.0, last_heard_s - admitted_s)
            self.left.append(LeftHost(joined=joined, status=status, present_s=present_s))

    def present_s(self, host: str, now_s: float) -> float:
        """Return the seconds since a host has joined."""
        return now_s - self._admitted_s[host]

    @property
    def is_full(self) -> bool:
        """Whether no more hosts can join now."""
        return len(self.present) >= MAX_JOINED

    def changes(self, listed: Iterable[JoinedHost]) -> tuple[list[JoinedHost], list[str]]:
        """Return the hosts to add and the names to remove because of the list of the first trainer host."""
        named = {joined.host: joined for joined in listed}
        new = [joined for host, joined in named.items() if self.present.get(host) != joined]
        return new, [host for host in self.present if host not in named]
