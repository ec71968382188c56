"""A cluster that a plan considers (`Candidate`)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.decide.planning.machines import Machine
from hetero.report.plan import AS_IS

__all__ = ["Candidate", "DataGroup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroup:
    """Data hosts of one type."""

    machine: Machine
    count: int
    """Number of hosts, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cluster and how the job uses it."""

    trainer: Machine
    num_trainer_hosts: int
    local_endpoints: int
    """Processes per trainer host that preprocess: endpoints, or loader workers in a job without data hosts."""
    data: tuple[DataGroup, ...] = ()
    endpoints_per_host: int | None = None
    """Endpoints per data host. None means one per vCPU, or more if they wait for storage."""
    form: str = AS_IS
    """One of `hetero.report.plan.FORMS`. In a job without data hosts batches do not travel."""

    @property
    def num_data_hosts(self) -> int:
        """Number of data hosts of all types."""
        return sum(group.count for group in self.data)

    @property
    def hourly_usd(self) -> float | None:
        """Price of all hosts in USD per hour. None if a price is unknown."""
        prices = [(self.trainer, self.num_trainer_hosts), *((group.machine, group.count) for group in self.data)]
        total = 0.0
        for machine, count in prices:
            if machine.hourly_usd is None:
                return None
            total += machine.hourly_usd * count
        return total

    @property
    def has_spot(self) -> bool:
        """Whether a data host is a spot instance."""
        return any(group.machine.is_spot for group in self.data)
