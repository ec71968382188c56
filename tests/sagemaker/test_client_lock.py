"""The client that SDK 3 shares in the whole process, while threads record and start jobs. Needs no SDK."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.sagemaker.recording import _Recorded, _train
from hetero.sagemaker.submission.submit import _start

OFFLINE, USERS = "offline client", "client of the user"


class _Singleton(type):
    _instances: dict[type, object] = {}  # noqa: RUF012  as the SDK has it


class SageMakerClient(metaclass=_Singleton):
    """Substitute for the SDK's class."""


class ModelTrainer:
    """A trainer whose calls of ``train`` meet in time, unless a lock separates them."""

    def __init__(self, entered: threading.Event, other: threading.Event, see: Callable[[object], None]) -> None:
        self.sagemaker_session: object = USERS
        self.input_data_config: list[Any] = []
        self._latest_training_job = SimpleNamespace(training_job_name="job")
        self._entered, self._other, self._see = entered, other, see

    def train(self, inputs: object, *, wait: bool, logs: bool) -> None:
        client = _Singleton._instances.setdefault(SageMakerClient, self.sagemaker_session)
        self._entered.set()
        self._see((client, self._other.wait(0.5)))
        if self.sagemaker_session == OFFLINE:
            raise _Recorded


ModelTrainer.__module__ = "sagemaker.train.model_trainer"


@pytest.fixture(autouse=True)
def _user_has_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(utils=SimpleNamespace(SageMakerClient=SageMakerClient))
    monkeypatch.setitem(sys.modules, "sagemaker.core.utils", utils)  # type: ignore[arg-type]
    monkeypatch.setitem(_Singleton._instances, SageMakerClient, USERS)


def _record(trainer: ModelTrainer) -> None:
    _train(trainer, None, OFFLINE, {})


def _submit(trainer: ModelTrainer) -> None:
    _start(trainer, None, None)


@pytest.mark.parametrize(("second", "expected"), [(_submit, USERS), (_record, OFFLINE)])
def test_calls_of_two_threads_do_not_change_each_others_client(
    second: Callable[[ModelTrainer], None], expected: str
) -> None:
    seen: list[object] = []
    entered = threading.Event(), threading.Event()
    one, two = ModelTrainer(*entered, seen.append), ModelTrainer(*reversed(entered), seen.append)
    thread = threading.Thread(target=_record, args=(one,))
    thread.start()
    assert entered[0].wait(300)
    second(two)
    thread.join(100)
    assert seen == [(OFFLINE, False), (expected, True)]  # the second call began after the end of the first one
    assert _Singleton._instances == {SageMakerClient: USERS}
