"""What one host of a job knows of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero.cluster import Role
from hetero.control.status import HostState, HostStatus

__all__ = ["Member", "Peer", "differences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One host of the job, from the cluster's description."""

    host: str
    role: Role


@dataclass(slots=True)
class Peer:
    """What this host knows of another host."""

    member: Member
    status: HostStatus | None = None
    last_heard_s: float = 0.0
    """Time of the last status that showed progress. A launcher that answers but is stuck counts as silent."""
    is_stuck: bool = False
    """Whether its last answer showed no progress."""
    has_served: bool = False
    """Whether it has ever had endpoints, in this life or an earlier one."""
    objection: str = ""
    """Why this host ignores everything that the peer reports in this life. Empty if it does not ignore the peer."""
    complaint: str = ""
    """Last log message about a host that the job continues without."""
    is_silent: bool = False
    """Whether the last log message reported it as silent for a lease, and not as heard again."""
    has_left: bool = False
    """Whether it became unreachable after it had reported that it ends or has ended."""
    last_word: str = "never heard of"
    delivered: HostStatus | None = None
    """The last status of this host that the peer has received."""

    @property
    def has_our_final(self) -> bool:
        """Whether the peer knows how this host ended."""
        return self.delivered is not None and (
            self.delivered.state is HostState.DONE or self.delivered.decided is not None
        )

    def awaits_final_of(self, role: Role) -> bool:
        """Return whether the peer may still run and wait for the end of this host.

        A host that has ended does not wait. The exception is a trainer host that is done, because it stays until all
        trainer hosts are done.

        Args:
            role: Role of this host.
        """
        if self.has_our_final or self.has_left:
            return False
        state = HostState.INIT if self.status is None else self.status.state
        is_trainers = role is self.member.role is Role.TRAINER
        return state is not HostState.FAILED and (state is not HostState.DONE or is_trainers)


def differences(theirs: HostStatus, ours: HostStatus) -> Iterator[str]:
    """Yield one line for each thing that must be the same on both hosts and differs."""
    shared = sorted(theirs.options.keys() & ours.options.keys())
    for what, found, expected in (
        ("hetero", theirs.version, ours.version),
        ("a training script with digest", theirs.script_digest, ours.script_digest),
        *((name, theirs.options[name], ours.options[name]) for name in shared),
    ):
        if found != expected:
            yield f"{theirs.host} has {what} {found}, {ours.host} has {expected}: give all groups the same"
