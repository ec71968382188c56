"""The hosts of a job as one of them knows the others. Pure."""

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
    """What this host knows of another."""

    member: Member
    status: HostStatus | None = None
    last_heard_s: float = 0.0
    """When it was heard and had moved on: a launcher that answers but is stuck counts as silent."""
    is_stuck: bool = False
    """It answered last without having moved on."""
    has_served: bool = False
    """It has had endpoints once, in this life or an earlier one."""
    objection: str = ""
    """Why nothing that it says in this life counts."""
    complaint: str = ""
    """What was last logged of a host that the job does without."""
    is_silent: bool = False
    """It was last logged as silent for a lease, not as heard again."""
    has_left: bool = False
    """It could not be reached any more after it had said that it ends, or how it ended."""
    last_word: str = "never heard of"
    delivered: HostStatus | None = None
    """Our status as this host has it."""

    @property
    def has_our_final(self) -> bool:
        """Whether it knows how this host ended."""
        return self.delivered is not None and (
            self.delivered.state is HostState.DONE or self.delivered.decided is not None
        )

    def awaits_final_of(self, role: Role) -> bool:
        """Whether it may still be there, and wait to hear how this host ended.

        A host that has ended does not, but for a trainer host that is done: it stays until every one of them is.

        Args:
            role: Of this host.
        """
        if self.has_our_final or self.has_left:
            return False
        state = HostState.INIT if self.status is None else self.status.state
        is_trainers = role is self.member.role is Role.TRAINER
        return state is not HostState.FAILED and (state is not HostState.DONE or is_trainers)


def differences(theirs: HostStatus, ours: HostStatus) -> Iterator[str]:
    """Yield a line for each thing that has to be the same on both hosts and is not."""
    shared = sorted(theirs.options.keys() & ours.options.keys())
    for what, found, expected in (
        ("hetero", theirs.version, ours.version),
        ("a training script with digest", theirs.script_digest, ours.script_digest),
        *((name, theirs.options[name], ours.options[name]) for name in shared),
    ):
        if found != expected:
            yield f"{theirs.host} has {what} {found}, {ours.host} has {expected}: give all groups the same"
