"""Ray without processes, for tests of the driver. A scenario decides what happens whenever the driver waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hetero.ray.job_host import Demand, Results


class RayError(Exception):
    """The base of Ray's errors."""


class RayActorError(RayError):
    """The actor or its node was lost."""


def _bundle(_placement: object, *, placement_group_bundle_index: int) -> int:
    return placement_group_bundle_index


class FakeActor:
    """An actor of `JobHost`.

    Args:
        is_placed: Whether it answers. Ray has not placed the others yet.
    """

    def __init__(self, *, is_placed: bool = True) -> None:
        self.is_placed = is_placed
        self.is_killed = False
        self.name = ""
        self.bundle: int | None = None
        self.order: dict[str, Any] = {}
        self.calls: list[str] = []
        """Methods that the driver has called, except `demand`."""
        self.grace_s: float | None = None
        self.end: Future[int] = Future()
        """The exit code of the launcher."""
        self._estimate: Future[Demand] = Future()
        self._error: RayError | None = None

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method, *arguments))

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = self.end if method == "run" else Future()
        if method == "demand":
            self._estimate = answer
        else:
            self.calls.append(method)
        if method == "run":
            self.order = arguments[0]
            self.name = self.order["name"]
        if method == "close":
            self.grace_s = arguments[0]
        if self._error is not None:
            answer.set_exception(self._error)
        elif self.is_placed and method not in ("run", "demand"):
            answer.set_result({"address": "10.0.0.1", "results": Results({}, [])}.get(method))
        return answer

    def estimate(self, number: int, low: int, high: int) -> None:
        """Answer the driver that waits for an estimate."""
        self._estimate.set_result(Demand(number, low, high))

    def lose(self, error: RayError | None = None) -> None:
        """Make every open and later call fail."""
        self._error = error or RayActorError("the actor died because its node has died")
        for answer in (self.end, self._estimate):
            if not answer.done():
                answer.set_exception(self._error)


class FakeRay:
    """The module.

    Args:
        num_placed: Actors that Ray places.
    """

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, num_placed: int = 1000) -> None:
        self.actors: list[FakeActor] = []
        self.freed: list[str] = []
        """What the driver has given back."""
        self.scenario: Iterator[None] = iter(())
        self._num_placed = num_placed
        self.util = SimpleNamespace(
            placement_group=lambda *_, **__: SimpleNamespace(wait=lambda _: True),
            remove_placement_group=lambda _: self.freed.append("placement group"),
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=_bundle),
        )

    def remote(self, _kind: type) -> Any:
        """Return a class of actors."""
        return SimpleNamespace(options=lambda **stated: SimpleNamespace(remote=lambda: self._placed(**stated)))

    def _placed(self, *, scheduling_strategy: int | None = None, **_: Any) -> FakeActor:
        actor = self._new()
        actor.bundle = scheduling_strategy
        return actor

    def _new(self) -> FakeActor:
        self.actors.append(FakeActor(is_placed=len(self.actors) < self._num_placed))
        return self.actors[-1]

    def wait(
        self, references: Sequence[Future[Any]], *, num_returns: int = 1, timeout: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        """Return the references that have an answer. If there are too few, the scenario goes on."""
        assert timeout >= 0
        if sum(reference.done() for reference in references) < num_returns:
            next(self.scenario)
        done = [reference for reference in references if reference.done()][:num_returns]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: Future[Any], timeout: float = 0) -> Any:
        """Return an answer, which must be there."""
        return reference.result(timeout)

    def kill(self, actor: FakeActor) -> None:
        """Record that the actor was killed."""
        actor.is_killed = True
