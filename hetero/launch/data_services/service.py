"""The interface of a data service: what the launcher requests from it, and which facts it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetero.cluster import ClusterSpec
from hetero.config import LaunchOptions, Timings
from hetero.control.members.directory import EndpointRecord
from hetero.control.status import Cause, RankReport
from hetero.pool.pool import EndpointPool

__all__ = ["DataService", "HostFacts", "Servers", "ServiceWatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The server processes of a data service that are planned for one host."""

    number: int
    """Largest number of processes on this host. May be 0."""
    num_at_start: int | None = None
    """Number of processes at first. The number then changes between 0 and ``number``, see
    `hetero.launch.auto_endpoints`. None means that it does not change."""
    num_slots: int = 1
    """Number of batches that each process computes at the same time. It is 1 unless vCPUs are emulated."""
    dispatcher_host: str = ""
    """Host of the dispatcher, a server that the whole job needs. Empty for a service without one. The host ends
    its servers last. The job stops if the host is asked to stop."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Planned number of servers by host, without the dispatcher. Empty for a service without one."""

    @property
    def may_number_change(self) -> bool:
        """Whether the job changes the number of servers on this host while it runs."""
        return self.num_at_start is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about one host of a job, for the servers of this host."""

    options: LaunchOptions
    servers: Servers
    name: str
    """Name of this host."""
    address: str
    """Numeric address of this host."""
    address_of: Callable[[str], str | None]
    """Returns the address of another host, or None if it is not known yet. Called from any thread."""
    is_trainer: bool
    """Whether this host has ranks too."""
    token_path: str | None
    """File with the job's token. None for a job without a token."""
    job_id: str
    environment: Mapping[str, str]
    """Variables to add to the environment of the servers."""
    timings: Timings


class ServiceWatch(Protocol):
    """Checks that a service still serves the ranks of this host. After a restart of the ranks, a new object is used."""

    def check(self, records: Sequence[EndpointRecord], reports: Sequence[RankReport]) -> Cause | None:
        """Return why the job must end, or None. Called several times per second while ranks run.

        Args:
            records: The servers of the job that are running now.
            reports: The latest reports of the ranks of this host.
        """


class DataService(ABC):
    """A service that data hosts run. There is one object per service, without state."""

    computes_batches: bool
    """Whether the service computes batches that the ranks' loaders request by index."""

    @abstractmethod
    def plan(self, options: LaunchOptions, cluster: ClusterSpec) -> Servers:
        """Return which servers run on the current host of a cluster."""

    @abstractmethod
    def make_pool(
        self,
        facts: HostFacts,
        on_change: Callable[[tuple[EndpointRecord, ...]], None],
        on_line: Callable[[str, str], None],
    ) -> EndpointPool:
        """Return the pool that starts and watches a host's servers. At least one is planned. See `EndpointPool`."""

    @abstractmethod
    def report_options(self, options: LaunchOptions, cluster: ClusterSpec) -> dict[str, str]:
        """Return the report's entries on how many servers were planned for each host."""

    def watch(self, host: str, servers: Servers, timings: Timings) -> ServiceWatch | None:
        """Return a watch for the ranks of ``host``, or None if readers notice a lost service by themselves."""
        return None
