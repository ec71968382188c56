"""The driver of a job on Ray: what it does when hosts are lost, signals arrive, or the demand changes."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.cluster import Role
from hetero.config import LaunchOptions
from hetero.errors import CapacityError, ExitCode, HeteroError, PortError
from hetero.ray.connection import connected
from hetero.ray.groups import parse_group
from hetero.ray.job import Job
from tests.support.ray.fake_ray import FakeRay, RayActorError, RayError

TWO_TRAINERS = ("trainer=GPU:1:2", "data=CPU:1:1..4")
STOPPED = 128 + signal.SIGTERM


def follow(ray: FakeRay, scenario: Callable[[], Iterator[None]], *groups: str, **stated: Any) -> int:
    """Run a job to its end, with these options. The scenario goes on whenever the driver waits."""
    ray.scenario = scenario()
    options = LaunchOptions(script="train.py", **{"start_timeout_s": 60.0, **stated})
    parsed = [parse_group(text) for text in groups]
    try:
        with Job(ray, options, parsed, [Role.TRAINER] + [Role.DATA] * (len(groups) - 1)) as job:
            return job.run()
    finally:
        assert ray.freed == ["placement group"]
        assert all(actor.is_killed for actor in ray.actors)


def grown(ray: FakeRay, low: int, high: int, count: int = 1, *, first: int = 1) -> Iterator[None]:
    """Give the driver several estimates, one after the other."""
    for number in range(first, first + count):
        ray.actors[0].estimate(number, low, high)
        yield


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), ExitCode.CLUSTER),  # wrong token too
        (type("AuthenticationError", (RayError,), {})("no authentication token was found"), ExitCode.AUTHENTICATION),
    ],
)
def test_cluster_that_refuses_the_driver_may_demand_a_token(error: Exception, code: ExitCode) -> None:
    def init(**_: object) -> None:
        raise error

    errors = SimpleNamespace(RayError=RayError, RuntimeEnvSetupError=type("RuntimeEnvSetupError", (RayError,), {}))
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=errors)
    with pytest.raises(HeteroError, match="set RAY_AUTH_MODE=token, and put the token into") as caught, connected(ray):
        pass
    assert caught.value.exit_code is code
    assert str(error) in str(caught.value)


def test_other_trainers_end_in_order_after_the_first_was_lost_and_give_the_code() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        first, second, data = ray.actors
        first.lose()
        yield
        assert (second.calls, data.calls) == (
            ["address", "guard", "run"],
            ["address", "guard", "run"],
        )  # neither was asked to end
        second.end.set_result(ExitCode.SCRIPT_FAILED)
        yield

    assert follow(ray, scenario, *TWO_TRAINERS) == ExitCode.SCRIPT_FAILED
    assert all(actor.calls[-1] == "close" for actor in ray.actors[1:])


def test_job_whose_trainers_are_all_lost_is_orphaned() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        for actor in ray.actors[:2]:
            actor.lose()
            yield

    assert follow(ray, scenario, *TWO_TRAINERS) == ExitCode.ORPHANED


def test_failure_of_any_trainer_is_the_code_of_the_job() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        ray.actors[0].end.set_result(0)
        yield
        ray.actors[1].end.set_result(ExitCode.DATA_PLANE_LOST)
        yield

    assert follow(ray, scenario, *TWO_TRAINERS) == ExitCode.DATA_PLANE_LOST


@pytest.mark.parametrize(("other", "code"), [(ExitCode.ORPHANED, ExitCode.ORPHANED), (-9, 137)])
def test_launcher_that_is_killed_gives_the_code_only_if_no_other_reports_one(other: int, code: int) -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        ray.actors[0].end.set_result(-signal.SIGKILL)
        yield
        ray.actors[1].end.set_result(other)
        yield

    assert follow(ray, scenario, *TWO_TRAINERS) == code


class RayTaskError(RayError):
    """The actor's own code has failed."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the actor raised {cause}")
        self.cause = cause


def _named(name: str) -> RayError:
    error: RayError = type(name, (RayError,), {})(f"{name} happened")
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RayActorError("lost"), ExitCode.ORPHANED),
        (_named("ActorUnavailableError"), ExitCode.ORPHANED),
        (_named("OutOfMemoryError"), ExitCode.RESOURCES),
        (_named("RuntimeEnvSetupError"), ExitCode.USAGE),
        (_named("ActorUnschedulableError"), ExitCode.CAPACITY),
        (RayTaskError(ValueError("unexpected")), ExitCode.INTERNAL),
        (RayTaskError(PortError("no free port")), ExitCode.PORT),
    ],
)
@pytest.mark.parametrize("when", ["starting", "running"])
def test_error_of_ray_becomes_an_exit_code(
    error: RayError, code: ExitCode, when: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = FakeRay()
    if when == "starting":
        new = ray._new

        def lost() -> object:
            actor = new()
            actor.lose(error)
            return actor

        ray._new = lost  # type: ignore[assignment,method-assign]

    def scenario() -> Iterator[None]:
        ray.actors[0].lose(error)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1") == code
    assert f"host trainer-0 was lost: {error}" in capfd.readouterr().err


def test_job_that_is_interrupted_while_actors_start_ends() -> None:
    ray = FakeRay(num_placed=1)

    def scenario() -> Iterator[None]:
        yield  # the first answer of the actor that is missing
        os.kill(os.getpid(), signal.SIGINT)
        yield

    assert follow(ray, scenario, *TWO_TRAINERS) == STOPPED
    assert all(actor.calls == ["address"] for actor in ray.actors)


def test_actor_that_does_not_start_in_time_is_named() -> None:
    ray = FakeRay(num_placed=2)
    with pytest.raises(CapacityError, match="no answer from data-0"):
        follow(ray, lambda: itertools.repeat(None), *TWO_TRAINERS, start_timeout_s=0.01)


def test_request_to_stop_reaches_each_launcher_once() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield
        yield
        for actor in ray.actors:
            assert actor.calls == ["address", "guard", "run", "stop"]
            actor.end.set_result(STOPPED)
        yield

    assert follow(ray, scenario, *TWO_TRAINERS) == STOPPED
    assert [actor.grace_s for actor in ray.actors] == [10.0] * 3


def test_job_that_was_asked_to_stop_has_succeeded_if_the_option_says_so() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        yield from grown(ray, 2, 2)
        ray.actors[-1].end.set_result(STOPPED)  # a data host that got a notice, long before
        yield
        yield from grown(ray, 2, 2, first=2)
        assert len(ray.actors) == 4  # it was replaced
        os.kill(os.getpid(), signal.SIGTERM)
        yield
        for actor in ray.actors:
            assert "--no-sigterm-ok" in actor.order["arguments"]
            if not actor.end.done():
                actor.end.set_result(STOPPED)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1..4", sigterm_ok=True) == 0


def test_flags_of_the_driver_go_to_every_host_as_flags() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        yield from grown(ray, 2, 2)
        orders = [actor.order["arguments"] for actor in ray.actors]
        assert all("--endpoints-per-host=4" in words and "--hedging" not in words for words in orders)
        assert ["--nproc-per-node=8" in words for words in orders] == [True, False, False]
        ports = {word for words in orders for word in words if word.startswith("--port=")}
        assert len(ports - {"--port={port}"}) == 1  # one for the hosts of the start, and one for the other
        assert "--port=17170" not in ports
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:8:1", "data=CPU:1:1..4", endpoints_per_host=4) == 0


def test_second_signal_ends_the_launchers_at_once() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            yield

    assert follow(ray, scenario, *TWO_TRAINERS) == ExitCode.SHUTDOWN_OVERRAN
    assert [actor.grace_s for actor in ray.actors] == [0.0] * 3


def test_estimate_adds_the_hosts_that_it_wants_and_six_remove_one() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        yield from grown(ray, 9, 9)
        assert [actor.name for actor in ray.actors] == ["trainer-0", "data-0", "data-1", "data-2", "data-3"]
        yield from [None] * 40  # the driver sees no estimate twice
        yield from grown(ray, 0, 1, 5, first=2)
        assert not any("stop" in actor.calls for actor in ray.actors)
        yield from grown(ray, 0, 1, 1, first=7)
        assert ray.actors[4].calls == ["address", "guard", "run", "stop"]
        yield from grown(ray, 0, 1, 5, first=8)  # data-3 drains, and is not counted
        yield from grown(ray, 0, 1, 1, first=13)
        assert [actor.calls.count("stop") for actor in ray.actors] == [0, 0, 0, 1, 1]
        ray.actors[4].end.set_result(-signal.SIGTERM)
        yield
        yield from grown(ray, 0, 1, 12, first=14)
        assert [actor.calls.count("stop") for actor in ray.actors] == [0, 0, 1, 1, 1]  # one is the least
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1..4") == 0


def test_host_that_ray_has_not_placed_need_not_leave_in_order() -> None:
    ray = FakeRay(num_placed=2)

    def scenario() -> Iterator[None]:
        yield from grown(ray, 2, 2)
        yield from grown(ray, 0, 1, 6, first=2)
        yield
        assert ray.actors[2].is_killed
        ray.actors[2].lose()
        yield
        yield from grown(ray, 2, 2, first=8)
        assert [actor.name for actor in ray.actors] == ["trainer-0", "data-0", "data-1", "data-2"]
        ray.actors[0].end.set_result(0)
        yield
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1..4") == 0


def test_no_more_hosts_are_added_after_three_have_failed(capfd: pytest.CaptureFixture[str]) -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        for number in range(1, 6):
            yield from grown(ray, 2, 2, first=number)
            if not ray.actors[-1].end.done():
                ray.actors[-1].end.set_result(ExitCode.PORT)
                yield
        assert [actor.name for actor in ray.actors[2:]] == ["data-1", "data-2", "data-3"]
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1..4") == 0
    assert capfd.readouterr().err.count("3 data hosts in a row have ended shortly after their start") == 1


def test_hosts_that_ended_early_are_replaced_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.ray.job._PAUSE_S", 0.05)
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        for count in (2, 3, 4):
            assert len(ray.actors) == count
            ray.actors[-1].lose()
            yield
            yield
        assert len(ray.actors) == 4
        time.sleep(0.1)  # the pause
        yield
        yield
        assert [actor.name for actor in ray.actors[1:]] == ["data-0", "data-1", "data-2", "data-3"]
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1") == 0


def test_bundle_that_a_lost_host_has_left_is_used_by_the_next_host() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        yield from grown(ray, 2, 2)
        ray.actors[1].lose()
        yield
        yield
        assert len(ray.actors) == 3  # the lower bound is one
        yield from grown(ray, 2, 2, first=2)
        assert [actor.bundle for actor in ray.actors] == [0, 1, None, 1]
        yield from grown(ray, 0, 1, 6, first=3)
        assert [actor.calls.count("stop") for actor in ray.actors] == [0, 0, 1, 0]  # Ray would keep the bundle's CPUs
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1..2") == 0


def test_estimate_is_for_the_data_hosts_of_all_groups() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        yield from grown(ray, 5, 5)
        assert [actor.name for actor in ray.actors[4:]] == ["data-1", "data-2"]
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "other=CPU:1:2", "data=CPU:1:1..4") == 0


def test_hosts_that_served_for_long_and_were_lost_are_replaced_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.ray.job._SHORT_LIFE_S", 0.0)
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        for number in range(6):
            ray.actors[-1].lose()
            yield
            assert ray.actors[-1].name == f"data-{number + 2}"
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:2") == 0
    assert len(ray.actors) == 3 + 6


@pytest.mark.parametrize(
    ("code", "is_replaced"), [(-9, True), (STOPPED, True), (ExitCode.ORPHANED, True), (ExitCode.PORT, False)]
)
def test_data_host_that_was_taken_is_replaced_and_one_that_failed_is_not(code: int, is_replaced: bool) -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        data = ray.actors[1]
        data.end.set_result(code)
        yield
        yield
        assert data.is_killed  # its CPUs are free
        assert data.calls == ["address", "guard", "run", "close"]
        assert [actor.name for actor in ray.actors[2:]] == (["data-1"] if is_replaced else [])
        assert (ray.actors[-1].bundle == data.bundle) is is_replaced or not is_replaced
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:1") == 0


def test_lower_bound_holds_after_a_failure() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        ray.actors[1].end.set_result(ExitCode.PORT)
        yield
        yield from grown(ray, 0, 1)
        assert [actor.name for actor in ray.actors] == ["trainer-0", "data-0", "data-1", "data-2"]
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:2..4") == 0


def test_host_that_ends_with_the_job_is_not_replaced() -> None:
    ray = FakeRay()

    def scenario() -> Iterator[None]:
        ray.actors[1].end.set_result(0)
        yield
        ray.actors[2].lose()
        yield
        ray.actors[0].end.set_result(0)
        yield

    assert follow(ray, scenario, "trainer=GPU:1:1", "data=CPU:1:2") == 0
    assert len(ray.actors) == 3
