"""Data hosts that join a running job and leave it, as the state machine sees them."""

from __future__ import annotations

import dataclasses

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.joined import MAX_JOINED, JoinedHost
from hetero.control.members.joined_hosts import JoinedHosts, Obstacle
from hetero.control.members.membership import Member, Membership
from hetero.control.status import HostState
from hetero.errors import ExitCode
from tests.support.control.clocks import Clock
from tests.support.control.members import MEMBERS, cause, endpoint, status, view

NEW = JoinedHost(host="new", address="10.0.0.9:17170", group="data", instance_type="ml.c5.xlarge")


def hosts(membership: Membership) -> list[str]:
    return membership.hosts(Role.DATA)


def serving(host: str = "new", **changes: object) -> object:
    return status(host, HostState.SERVING, endpoints=(endpoint(host),), **changes)


def test_joined_host_serves_as_soon_as_it_is_heard(clock: Clock) -> None:
    membership = view("algo-3", clock)
    assert membership.obstacle_to(NEW) is None
    before = membership.news
    membership.admit(NEW)
    assert membership.news != before  # the other hosts learn it at once
    assert hosts(membership) == ["algo-1", "algo-2", "new"]
    membership.observe(serving())  # type: ignore[arg-type]
    assert [record.host for record in membership.endpoints()] == ["new"]


def test_other_trainers_follow_the_list_of_the_first_one(clock: Clock) -> None:
    first, second, data = view("algo-3", clock), view("algo-4", clock), view("algo-1", clock)
    first.admit(NEW)
    for other in (second, data):
        other.observe(dataclasses.replace(first.own, state=HostState.TRAINING))
    assert hosts(second) == ["algo-1", "algo-2", "new"]
    assert hosts(data) == ["algo-1", "algo-2"]  # data hosts need no others
    first.observe(serving())  # type: ignore[arg-type]
    first.observe(status("new", HostState.DONE, revision=2))
    first.tick()
    second.observe(first.own)
    assert hosts(first) == hosts(second) == ["algo-1", "algo-2"]


def test_list_of_another_trainer_is_not_followed(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", joined=(NEW,)))
    assert hosts(membership) == ["algo-1", "algo-2"]


def test_reply_waits_until_every_living_trainer_knows_the_joined_host(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4"))
    membership.admit(NEW)
    assert not membership.knows_joined(NEW)
    membership.delivered("algo-4", membership.own)
    assert membership.knows_joined(NEW)


@pytest.mark.parametrize(
    ("host", "address", "obstacle"),
    [
        ("algo-1", "10.0.0.9:1", "already has a host 'algo-1'"),
        ("algo-3", "10.0.0.9:1", "already has a host 'algo-3'"),
        ("new", NEW.address, ""),  # a restarted launcher
        ("other", "10.0.0.8:1", ""),
    ],
)
def test_name_belongs_to_one_host(clock: Clock, host: str, address: str, obstacle: str) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    membership.observe(serving())  # type: ignore[arg-type]
    found = membership.obstacle_to(dataclasses.replace(NEW, host=host, address=address))
    assert obstacle in ("" if found is None else found.text)
    assert (found is not None) is bool(obstacle)


@pytest.mark.fault("F40")
@pytest.mark.parametrize("state", [HostState.SERVING, HostState.DRAINING])
def test_host_that_replaces_another_one_asks_until_that_one_was_silent_for_a_lease(
    clock: Clock, state: HostState
) -> None:
    timings = Timings()
    membership = view("algo-3", clock)
    membership.admit(NEW)
    other = dataclasses.replace(NEW, address="10.0.0.8:17170")
    for revision in range(10):
        membership.observe(status("new", state, revision=revision, ticks=revision + 1))
        found = membership.obstacle_to(other)
        assert found is not None
        assert found.may_pass
        assert found.text.startswith("'new' has joined from 10.0.0.9:17170; give this host another name with --host")
        clock.now_s += timings.lease_s / 3
    clock.now_s += timings.lease_s
    assert membership.obstacle_to(other) is None


@pytest.mark.fault("F40")
def test_host_that_joins_again_is_new(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    membership.observe(serving())  # type: ignore[arg-type]
    clock.now_s += 2 * Timings().orphan_s - 0.5
    membership.admit(NEW)
    assert membership.endpoints() == ()  # those of the launcher before
    clock.now_s += 60.0
    membership.tick()
    assert "new" in hosts(membership)
    membership.observe(dataclasses.replace(serving(), incarnation="second"))  # type: ignore[type-var]
    assert [record.host for record in membership.endpoints()] == ["new"]


@pytest.mark.fault("F40")
def test_lost_host_may_come_back_from_another_address(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    membership.observe(serving())  # type: ignore[arg-type]
    clock.now_s += Timings().lease_s + 1
    again = dataclasses.replace(NEW, address="10.0.0.8:17170")
    assert membership.obstacle_to(again) is None
    membership.admit(again)
    assert membership.joined_hosts.present["new"] == again
    assert membership.own.joined == (again,)


@pytest.mark.parametrize("why", ["decided", "stop", "done"])
def test_job_that_is_about_to_end_admits_nobody(clock: Clock, why: str) -> None:
    membership = view("algo-3", clock)
    if why == "decided":
        membership.update(decided=cause("algo-3"))
    elif why == "stop":
        membership.observe(status("algo-4", stop_requested=True))
    else:
        membership.update(state=HostState.DONE)
        membership.observe(status("algo-4", HostState.DONE))
    assert membership.obstacle_to(NEW) == Obstacle(text="the job is about to end", exit_code=ExitCode.OK)
    assert membership.is_ending


def test_number_of_joined_hosts_is_limited(clock: Clock) -> None:
    membership = view("algo-3", clock)
    for number in range(MAX_JOINED):
        membership.admit(dataclasses.replace(NEW, host=f"new-{number}"))
    obstacle = membership.obstacle_to(NEW)
    assert obstacle is not None
    assert "which is the limit" in obstacle.text
    assert membership.obstacle_to(dataclasses.replace(NEW, host="new-3")) is None  # it has its place


@pytest.mark.parametrize("state", [HostState.DONE, HostState.FAILED])
def test_joined_host_that_ends_leaves_the_job_and_stays_in_its_report(clock: Clock, state: HostState) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    clock.now_s += 10
    last = status("new", state, counters={"batches computed": 7})
    membership.observe(last)
    membership.tick()
    assert hosts(membership) == ["algo-1", "algo-2"]
    (gone,) = membership.joined_hosts.left
    assert (gone.joined, gone.status, gone.present_s) == (NEW, last, 10.0)
    assert membership.own.failure is None


@pytest.mark.fault("F40")
def test_joined_host_that_is_lost_leaves_long_after_its_lease(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    membership.observe(serving())  # type: ignore[arg-type]
    clock.now_s += 2 * Timings().orphan_s - 1
    membership.tick()
    assert "new" in hosts(membership)  # it may only be cut off
    assert membership.endpoints() == ()
    clock.now_s += 2
    membership.tick()
    assert "new" not in hosts(membership)


def test_joined_host_that_never_comes_is_forgotten(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    clock.now_s += Timings().start_timeout_s + 1
    membership.tick()
    assert "new" not in hosts(membership)
    assert membership.joined_hosts.left[0].status is None


@pytest.mark.parametrize("changes", [{"script_digest": "other"}, {"failure": cause("new")}])
def test_unusable_joined_host_does_not_fail_the_job(clock: Clock, changes: dict[str, object]) -> None:
    membership = view("algo-3", clock)
    membership.admit(NEW)
    membership.observe(status("new", **changes))
    clock.now_s += Membership.SETTLE_S + 1
    membership.tick()
    assert (membership.own.failure, membership.own.decided) == (None, None)


def test_start_waits_for_no_joined_host(clock: Clock) -> None:
    membership = view("algo-3", clock)
    for host in ("algo-1", "algo-2"):
        membership.observe(status(host, HostState.SERVING))
    membership.admit(NEW)
    assert membership.missing(Role.DATA, at_least=HostState.SERVING) == []


@pytest.mark.fault("F41")
def test_start_waits_for_one_of_the_hosts_that_may_be_taken_away(clock: Clock) -> None:
    members = [dataclasses.replace(member, is_optional=member.role is Role.DATA) for member in MEMBERS]
    membership = Membership(members, status("algo-3"), timings=Timings(), clock=clock)
    missing = membership.missing(Role.DATA, at_least=HostState.SERVING)
    assert [host for host, _ in missing] == ["algo-1", "algo-2"]
    membership.observe(status("algo-2", HostState.SERVING))
    assert membership.missing(Role.DATA, at_least=HostState.SERVING) == []


def test_host_of_the_description_is_never_removed(clock: Clock) -> None:
    membership = view("algo-4", clock)
    listed = JoinedHost(host="algo-1", address="10.0.0.9:1", group="data", instance_type="")
    membership.observe(status("algo-3", joined=(listed,)))
    membership.observe(status("algo-3", joined=(), revision=1))
    assert hosts(membership) == ["algo-1", "algo-2"]


def test_number_of_departed_hosts_in_the_report_is_limited() -> None:
    joined_hosts = JoinedHosts()
    for number in range(MAX_JOINED + 5):
        joined = dataclasses.replace(NEW, host=f"new-{number}")
        joined_hosts.add(joined, 1.0)
        joined_hosts.remove(joined.host, None, 3.0)
    assert len(joined_hosts.left) == MAX_JOINED
    assert joined_hosts.left[0].present_s == 2.0


def test_member_is_needed_unless_it_says_otherwise() -> None:
    assert not Member(host="a", role=Role.DATA).is_optional


def spot_view(clock: Clock, *, needs_data_hosts: bool = True) -> Membership:
    members = [dataclasses.replace(member, is_optional=member.role is Role.DATA) for member in MEMBERS]
    return Membership(members, status("algo-3"), timings=Timings(), clock=clock, needs_data_hosts=needs_data_hosts)


def test_dead_joined_host_holds_up_no_job_without_data_hosts(clock: Clock) -> None:
    trainers = [member for member in MEMBERS if member.role is Role.TRAINER]
    membership = Membership(trainers, status("algo-3"), timings=Timings(), clock=clock)
    membership.admit(NEW)
    assert membership.missing(Role.DATA, at_least=HostState.SERVING) == []


def test_spot_host_that_has_failed_or_fallen_silent_does_not_serve(clock: Clock) -> None:
    membership = spot_view(clock)
    membership.observe(status("algo-1", HostState.FAILED))
    assert [host for host, _ in membership.missing(Role.DATA, at_least=HostState.SERVING)] == ["algo-1", "algo-2"]
    membership.observe(serving("algo-2"))  # type: ignore[arg-type]
    assert membership.missing(Role.DATA, at_least=HostState.SERVING) == []
    clock.now_s += Timings().lease_s + 1
    assert [host for host, _ in membership.missing(Role.DATA, at_least=HostState.SERVING)] == ["algo-1", "algo-2"]


@pytest.mark.fault("F41")
def test_job_whose_spot_hosts_all_fail_at_the_start_has_their_cause(clock: Clock) -> None:
    membership = spot_view(clock)
    first = cause("algo-1", "the script cannot be imported")
    membership.observe(status("algo-1", HostState.FAILED, failure=first))
    assert membership.own.failure is None  # the other one may serve
    membership.observe(status("algo-2", HostState.FAILED, failure=cause("algo-2", "the script cannot be imported")))
    clock.now_s += Membership.SETTLE_S
    membership.tick()
    assert membership.own.decided is not None
    assert membership.own.decided.host == "algo-2"


@pytest.mark.fault("F41")
def test_loss_of_the_last_spot_host_that_served_is_no_failure(clock: Clock) -> None:
    membership = spot_view(clock)
    membership.observe(serving("algo-1"))  # type: ignore[arg-type]
    for revision, host in enumerate(("algo-1", "algo-2"), 1):
        membership.observe(status(host, HostState.FAILED, failure=cause(host), revision=revision))
    clock.now_s += Membership.SETTLE_S
    membership.tick()
    assert membership.own.decided is None


@pytest.mark.fault("F41")
def test_joined_host_that_serves_is_enough_for_a_spot_job(clock: Clock) -> None:
    membership = spot_view(clock)
    membership.admit(NEW)
    assert membership.missing(Role.DATA, at_least=HostState.SERVING)
    membership.observe(serving())  # type: ignore[arg-type]
    assert membership.missing(Role.DATA, at_least=HostState.SERVING) == []
    for host in ("algo-1", "algo-2"):
        membership.observe(status(host, HostState.FAILED, failure=cause(host)))
    clock.now_s += Membership.SETTLE_S
    membership.tick()
    assert membership.own.decided is None


@pytest.mark.fault("F41")
def test_spot_hosts_may_all_fail_while_endpoints_of_trainers_start(clock: Clock) -> None:
    membership = spot_view(clock, needs_data_hosts=False)
    for host in ("algo-1", "algo-2"):
        membership.observe(status(host, HostState.FAILED, failure=cause(host)))
    clock.now_s += Membership.SETTLE_S
    membership.tick()
    assert membership.own.decided is None


def test_spot_hosts_that_are_done_are_not_missing(clock: Clock) -> None:
    membership = spot_view(clock)
    for host in ("algo-1", "algo-2"):
        membership.observe(status(host, HostState.DONE))
    assert membership.missing(Role.DATA, at_least=HostState.DONE) == []
