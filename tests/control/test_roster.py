"""What wakes the threads of a host is computed only after a change, and is then as if it were always computed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hetero.config import Timings
from hetero.control.members.joined import JoinedHost
from hetero.control.members.membership import Membership
from hetero.control.status import HostState, RankReport
from tests.support.control.clocks import Clock
from tests.support.control.members import cause, endpoint, status, view

HOSTS = ("algo-1", "algo-2", "algo-3", "algo-4", "new")


def fresh(membership: Membership) -> tuple[object, ...]:
    """Return the news without what is kept of the last ones."""
    kept = membership._local_news, membership._news_valid_until_s
    membership._local_news = None
    found = membership.local_news
    membership._local_news, membership._news_valid_until_s = kept
    return found


class Events:
    """Changes at random."""

    def __init__(self, rng: random.Random, membership: Membership, clock: Clock) -> None:
        self._rng = rng
        self._membership = membership
        self._clock = clock
        self._revision = 0

    def happen(self) -> None:
        """Change one thing."""
        events: list[Callable[[], object]] = [self.heard, self.heard, self.waited, self.updated, self.unreachable]
        events += [self.delivered, self.reported, self.admitted, self._membership.tick]
        self._rng.choice(events)()

    def heard(self) -> None:
        host = self._rng.choice([host for host in HOSTS if host != self._membership.own.host])
        if not self._membership.has(host):
            return
        self._revision += 1
        self._membership.observe(
            status(
                host,
                self._rng.choice(list(HostState)[1:]),
                revision=self._revision,
                incarnation=f"{host}-{self._rng.choice((1, 1, 1, 2))}",
                endpoints=(endpoint(host),) if self._rng.random() < 0.5 else (),
                stop_requested=self._rng.random() < 0.1,
                script_digest=self._rng.choice(("d", "d", "d", "other")),
            )
        )

    def waited(self) -> None:
        self._clock.now_s += self._rng.choice((0.01, 0.5, 3.0, Timings().lease_s + 1))

    def updated(self) -> None:
        change: dict[str, object] = self._rng.choice(
            [
                {"counters": {"a": 1}},
                {"state": HostState.TRAINING},
                {"state": HostState.DONE},
                {"endpoints": (endpoint(self._membership.own.host),)},
                {"stop_requested": True},
                {"failure": cause(self._membership.own.host)},
            ]
        )
        self._membership.update(**change)

    def unreachable(self) -> None:
        self._membership.unreachable(self._rng.choice(HOSTS), "refused")

    def delivered(self) -> None:
        self._membership.delivered(self._rng.choice(HOSTS), self._membership.own)

    def reported(self) -> None:
        self._membership.store(RankReport(rank=self._rng.randrange(2), finished=self._rng.random() < 0.2))

    def admitted(self) -> None:
        joined = JoinedHost(host="new", address=f"10.0.0.{self._rng.randrange(3)}:1", group="data", instance_type="")
        is_first = self._membership.own.host == self._membership.reporter  # the others do not admit hosts
        if is_first and self._membership.obstacle_to(joined) is None:
            self._membership.admit(joined)


@pytest.mark.parametrize("num_seeds", [20, pytest.param(1_000, marks=pytest.mark.long)])
def test_kept_news_are_those_of_the_moment(num_seeds: int) -> None:
    for seed in range(num_seeds):
        rng, clock = random.Random(seed), Clock()
        membership = view(rng.choice(("algo-3", "algo-4", "algo-1")), clock)
        events = Events(rng, membership, clock)
        for _ in range(150):
            events.happen()
            assert membership.local_news == fresh(membership), f"seed {seed}"


def test_delivery_of_a_status_that_is_not_final_after_one_that_was_is_news(clock: Clock) -> None:
    membership = view("algo-3", clock)
    for state in (HostState.DONE, HostState.TRAINING):
        membership.update(state=state)
        assert membership.local_news == fresh(membership)
        membership.delivered("algo-1", membership.own)
        assert membership.local_news == fresh(membership)


def test_heartbeat_without_news_computes_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    membership = view("algo-3", clock)
    serving = (endpoint("algo-1"),)
    membership.observe(status("algo-1", HostState.SERVING, endpoints=serving))
    before = membership.local_news
    monkeypatch.setattr(membership, "endpoints", lambda: pytest.fail("computed"))
    for revision in range(1, 5):
        clock.now_s += 1.0
        membership.observe(status("algo-1", HostState.SERVING, endpoints=serving, revision=revision))
        membership.update(counters={"batches computed": revision})
        assert membership.local_news is before
