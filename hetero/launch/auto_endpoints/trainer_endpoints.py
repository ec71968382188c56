"""Runs the search on the first trainer host, and applies its decisions on every trainer host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hetero.cluster import Role
from hetero.control.members.directory import BATCHES
from hetero.control.members.membership import Membership
from hetero.control.status import HostStatus, RankReport
from hetero.launch.auto_endpoints.controller import Controller
from hetero.launch.auto_endpoints.decisions import Action, Conditions, Decision
from hetero.launch.auto_endpoints.memory import MemoryLimit, limit_of_this_host
from hetero.launch.auto_endpoints.windows import JoinedSteps
from hetero.pool.pool import EndpointPool
from hetero.report.model import MAX_EVENTS

__all__ = ["TrainerEndpoints"]

logger = logging.getLogger(__name__)


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
        memory_limit: Returns how many endpoints this host can run.
    """

    def __init__(
        self,
        pool: EndpointPool,
        *,
        host: str,
        trainer_hosts: Sequence[str],
        num_ranks: int,
        max_endpoints: int,
        slots_per_endpoint: int,
        publish: Callable[[int], None],
        memory_limit: Callable[..., MemoryLimit] = limit_of_this_host,
    ) -> None:
        self.decisions: list[str] = []
        """The first decisions, for the report. One line each. Empty on all trainer hosts except the first one."""
        self._pool = pool
        self._leader = trainer_hosts[0]
        """The trainer host that decides for all trainer hosts."""
        self._is_leader = host == self._leader
        self._max_endpoints = max_endpoints
        self._publish = publish
        self._limit_of_this_host = memory_limit
        self._number = 0
        """Endpoints that this host should run now."""
        self._followed = 0
        """The latest decision of the first trainer host that this host has followed. Not used on the first one."""
        self._generation = 0
        """Generation of the ranks whose steps are counted now. Each restart of the trainer group begins a new one."""
        self._steps = JoinedSteps(num_ranks)
        self._loader = ""
        """The loader whose steps the controller has observed. Empty before the first step."""
        self._controller = Controller(
            max_endpoints=max_endpoints,
            num_hosts=len(trainer_hosts),
            world_size=num_ranks * len(trainer_hosts),
            slots_per_endpoint=slots_per_endpoint,
        )

    def read(self, membership: Membership) -> Callable[[], None]:
        """Read from the membership what a decision depends on. The caller holds the membership's lock.

        Returns:
            A function that decides, or follows the decision of the first trainer host. Call it without the lock.
        """
        own = membership.own
        # A job that stops must not start endpoints, so there is nothing to decide.
        if membership.stop_requested:
            return lambda: None
        data_hosts = membership.statuses(Role.DATA)
        if not self._is_leader:
            leader = next((status for status in membership.statuses() if status.host == self._leader), None)
            number = 0 if leader is None else leader.trainer_endpoints
            return lambda: self._follow(number, data_hosts)
        num_slots = sum(record.num_slots for record in membership.endpoints() if record.kind == BATCHES)
        return lambda: self._lead(own.generation, own.ranks, num_slots, data_hosts)

    def _follow(self, number: int, data_hosts: Sequence[HostStatus]) -> None:
        """Adopt the number that the first trainer host decided on. Adopt a smaller one if this host lacks memory."""
        if number == self._followed:
            return
        self._followed = number
        # This host may have fewer CPUs than the first trainer host.
        number = min(number, self._max_endpoints)
        # The memory is only measured if endpoints are added, because this takes time.
        if number > self._number:
            limit = self._memory_limit(data_hosts)
            if number > limit.endpoints:
                logger.warning("trainer endpoints: %s wants %d, but %s", self._leader, number, limit.reason)
                number = limit.endpoints
        if number != self._number:
            logger.info("trainer endpoints: from %d to %d, as %s decided", self._number, number, self._leader)
            self._apply(number)

    def _memory_limit(self, data_hosts: Sequence[HostStatus]) -> MemoryLimit:
        return self._limit_of_this_host(self._number, used_pids=self._pool.used_pids, data_hosts=data_hosts)

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
            # While no endpoint serves, assume one slot. With 0 slots, the controller would never add an endpoint.
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
        # The report has room for this number. More decisions are rare, because a new search begins after at least 1,000
        # steps, and decides at most five times.
        if len(self.decisions) < MAX_EVENTS:
            self.decisions.append(decision.text)
        logger.info("trainer endpoints: %s", decision.text)
        if decision.endpoints != self._number:
            self._apply(decision.endpoints)
            self._publish(decision.endpoints)

    def _change_loader(self, loader: str) -> Decision | None:
        """Restart the search if steps of another loader arrive, because earlier steps say nothing about them."""
        loader_before = self._loader
        # The loader is not known for a moment after the ranks were restarted.
        self._loader = loader or loader_before
        is_first = loader_before == ""
        if is_first or self._loader == loader_before:
            return None
        return self._controller.restart_search(f"loader {loader} now takes more time than {loader_before}")

    def _apply(self, number: int) -> None:
        self._number = number
        self._pool.resize(number)
