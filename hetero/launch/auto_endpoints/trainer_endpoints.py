"""Runs the search on the first trainer host, and applies its decisions on every trainer host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from hetero.cluster import Role
from hetero.control.members.directory import BATCHES
from hetero.control.members.membership import Membership
from hetero.control.status import HostStatus, RankReport
from hetero.launch.auto_endpoints.controller import Controller
from hetero.launch.auto_endpoints.decisions import Action, Conditions, Decision
from hetero.launch.auto_endpoints.memory import HostMemory, MemoryLimit
from hetero.launch.auto_endpoints.windows import JoinedSteps
from hetero.report.model import MAX_EVENTS

__all__ = ["ResizablePool", "TrainerEndpoints"]

logger = logging.getLogger(__name__)


class ResizablePool(Protocol):
    """The part of `hetero.pool.pool.EndpointPool` that this module uses."""

    @property
    def num_used(self) -> int:
        """Endpoints that have received a request."""

    @property
    def num_running(self) -> int:
        """Endpoint processes that may compute."""

    @property
    def used_pids(self) -> tuple[int, ...]:
        """Processes of endpoints that have received a request."""

    def resize(self, number: int) -> None:
        """Set the number of endpoints."""


class TrainerEndpoints:
    """The endpoints of a trainer host with ``--trainer-endpoints auto``. For the launcher's main thread.

    The first trainer host decides between two reports of its ranks, and publishes the number in its status. The others
    follow it. All hosts therefore change at about the same step.

    Args:
        pool: The endpoints of this host. It runs none yet.
        host: Name of this host.
        trainer_hosts: All trainer hosts.
        num_ranks: Ranks of each trainer host.
        max_endpoints: Largest number of endpoints of this host.
        slots_per_endpoint: Batches that an endpoint computes at the same time.
        publish: Called with a decided number, to send it to the other hosts.
        memory: The memory of this host.
    """

    def __init__(
        self,
        pool: ResizablePool,
        *,
        host: str,
        trainer_hosts: Sequence[str],
        num_ranks: int,
        max_endpoints: int,
        slots_per_endpoint: int,
        publish: Callable[[int], None],
        memory: HostMemory,
    ) -> None:
        self.decisions: list[str] = []
        """The first decisions, on the first trainer host, for the report. One line each."""
        self._pool = pool
        self._leader = trainer_hosts[0]
        self._is_leader = host == self._leader
        self._max_endpoints = max_endpoints
        self._publish = publish
        self._memory = memory
        self._number = 0
        self._followed = 0  # the number that the first trainer host decided on
        self._generation = 0
        self._steps = JoinedSteps(num_ranks)
        self._loader = ""  # the loader whose steps the controller has observed
        self._controller = Controller(
            max_endpoints=max_endpoints,
            num_hosts=len(trainer_hosts),
            world_size=num_ranks * len(trainer_hosts),
            slots_per_endpoint=slots_per_endpoint,
        )

    def read(self, membership: Membership) -> Callable[[], None]:
        """Read the facts from the membership that a decision depends on. The caller holds the membership's lock.

        Returns:
            A function that decides, or follows the decision of the first trainer host. Call it without the lock.
        """
        own = membership.own
        if membership.stop_requested:
            return lambda: None
        if not self._is_leader:
            leader = next((status for status in membership.statuses() if status.host == self._leader), None)
            number = 0 if leader is None else leader.trainer_endpoints
            data_hosts = membership.statuses(Role.DATA) if number > self._followed else []
            return lambda: self._follow(number, data_hosts)
        slots = sum(record.num_slots for record in membership.endpoints() if record.kind == BATCHES)
        data_hosts = membership.statuses(Role.DATA)
        return lambda: self._lead(own.generation, own.ranks, slots, data_hosts)

    def _follow(self, number: int, data_hosts: Sequence[HostStatus]) -> None:
        """Adopt the number that the first trainer host decided on. Adopt a smaller one if this host lacks memory."""
        if number == self._followed:
            return
        self._followed = number
        number = min(number, self._max_endpoints)
        if number > self._number and number > (limit := self._memory_limit(data_hosts)).endpoints:
            logger.warning("trainer endpoints: %s wants %d, but %s", self._leader, number, limit.reason)
            number = max(self._number, limit.endpoints)
        if number != self._number:
            logger.info("trainer endpoints: from %d to %d, as %s decided", self._number, number, self._leader)
            self._apply(number)

    def _memory_limit(self, data_hosts: Sequence[HostStatus]) -> MemoryLimit:
        return self._memory.limit(self._number, used_pids=self._pool.used_pids, data_hosts=data_hosts)

    def _lead(
        self,
        generation: int,
        reports: Sequence[RankReport],
        num_slots: int,
        data_hosts: Sequence[HostStatus],
    ) -> None:
        """Pass the latest steps to the controller. If the controller decides, log, apply and publish the decision."""
        # The ranks were restarted, so their steps begin anew.
        if generation != self._generation:
            self._generation = generation
            self._steps.restart()
            self._controller.restart_window()
        conditions = Conditions(
            num_used=self._pool.num_used,
            num_running=self._pool.num_running,
            num_slots=max(1, num_slots),
        )
        steps = self._steps.take(reports)
        decision = self._change_loader(self._steps.loader)
        if decision is None:
            decision = self._controller.observe(steps, conditions)
        if decision is None:
            return
        if decision.action is Action.ADD:
            limit = self._memory_limit(data_hosts)
            if decision.endpoints > limit.endpoints:
                decision = self._controller.limit(decision, limit.endpoints, f"No more are added: {limit.reason}")
        # A new search begins after at least 1,000 steps, and decides at most five times.
        if len(self.decisions) < MAX_EVENTS:
            self.decisions.append(decision.text)
        logger.info("trainer endpoints: %s", decision.text)
        if decision.endpoints != self._number:
            self._apply(decision.endpoints)
            self._publish(decision.endpoints)

    def _change_loader(self, loader: str) -> Decision | None:
        """Restart the search if steps of another loader arrive, because earlier steps say nothing about them."""
        before = self._loader
        self._loader = loader or before
        if before in ("", self._loader):
            return None
        return self._controller.restart_search(f"loader {loader} now takes more time than {before}")

    def _apply(self, number: int) -> None:
        self._number = number
        self._pool.resize(number)
