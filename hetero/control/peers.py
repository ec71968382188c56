"""What one host of a job knows about the other hosts. Pure."""

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
    is_optional: bool = False
    """Whether the job goes on without this data host, even if it has never served."""


@dataclass(slots=True)
class Peer:
    """What this host knows about another host, its peer."""

    member: Member
    status: HostStatus | None = None
    last_heard_s: float = 0.0
    """Time of the last status that showed progress. A launcher that answers but is stuck counts as silent."""
    is_stuck: bool = False
    """Whether the peer's launcher still answers but has shown no progress for some time."""
    has_served: bool = False
    """Whether the peer has ever had endpoints, even if its launcher has restarted since."""
    objection: str = ""
    """Why this host ignores the peer until the peer's launcher restarts. Empty if it does not ignore the peer."""
    complaint: str = ""
    """Last logged reason why the job continues without the peer."""
    is_silent: bool = False
    """Whether the log has reported the peer as silent for a lease, and not yet as heard again."""
    has_left: bool = False
    """Whether the peer became unreachable after it had reported that it was ending or had ended."""
    last_state: str = "sent nothing yet"
    delivered: HostStatus | None = None
    """The last status of this host that the peer has received."""

    @property
    def has_our_final(self) -> bool:
        """Whether the peer knows how this host ended."""
        return self.delivered is not None and (
            self.delivered.state is HostState.DONE or self.delivered.decided is not None
        )

    @property
    def has_our_failure(self) -> bool:
        """Whether the peer knows that this host has failed."""
        return self.delivered is not None and self.delivered.failure is not None

    def awaits_final_of(self, role: Role, *, is_arbiter: bool) -> bool:
        """Return whether the peer may still be waiting to learn how this host ends.

        A failed host does not wait. A data host that is done does not wait either. A trainer host that is done waits
        for the other trainer hosts, because each of them stays until all are done. The arbiter waits for data hosts
        too, because it writes their last figures into the report or the profile.

        Args:
            role: Role of this host.
            is_arbiter: Whether the peer is the job's arbiter.
        """
        if self.has_our_final or self.has_left:
            return False
        state = HostState.INIT if self.status is None else self.status.state
        # Without `is_arbiter`, data hosts left too early, and two of ten busy profile runs lost the samples of one.
        # Without the rule for trainer hosts, one of them left before it had told the other. A job whose trainer hosts
        # ended within 20 ms of each other then failed with HET-32.
        waits_when_done = self.member.role is Role.TRAINER and (role is Role.TRAINER or is_arbiter)
        return waits_when_done if state is HostState.DONE else state is not HostState.FAILED


def differences(theirs: HostStatus, ours: HostStatus) -> Iterator[str]:
    """Yield one line for each thing that must be the same on both hosts and differs."""
    # A host lacks an option that does not apply to it.
    shared = sorted(theirs.options.keys() & ours.options.keys())
    for what, found, expected in (
        ("hetero", theirs.version, ours.version),
        ("a training script with digest", theirs.script_digest, ours.script_digest),
        *((name, theirs.options[name], ours.options[name]) for name in shared),
    ):
        if found != expected:
            yield f"{theirs.host} has {what} {found}, {ours.host} has {expected}; use the same in all groups"
