"""What a planner, a rule or the search may choose for a job."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOTHING", "Choice"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Choice:
    """Endpoints and data hosts that are added to the trainer hosts of a job."""

    trainer_endpoints: int = 0
    """Endpoints per trainer host. Without them and without data hosts, the ranks load their batches as before."""
    data: tuple[tuple[str, int], ...] = ()
    """Pairs of instance type and count, sorted by type."""
    endpoints_per_host: int = 0
    """Endpoints per data host. 0 means one per vCPU, or fewer if the memory is small."""

    @property
    def num_data_hosts(self) -> int:
        """Data hosts of all types."""
        return sum(count for _, count in self.data)

    def __str__(self) -> str:
        parts = [f"{self.trainer_endpoints} trainer endpoints"] if self.trainer_endpoints else []
        parts += [f"{count} x {name}" for name, count in self.data]
        return " + ".join(parts) or "nothing"


NOTHING = Choice()
"""The job as it is."""
