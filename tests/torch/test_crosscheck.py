from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetero
from hetero.batches.fetch import describe_environment
from hetero.control.rank import session as control
from hetero.errors import DatasetMismatchError, ExitCode
from hetero.loaders import crosscheck, pipeline
from hetero.torch import DataLoader
from tests.support.torch.endpoints import ServedJob, imported_script
from tests.support.waiting import wait_for

SCRIPT = """
    import os, random
    import numpy as np
    import torch
    import hetero

    class Scaled(torch.utils.data.Dataset):
        scale = 1.0
        num_built = 0
        fails = False
        length = 12
        def __len__(self):
            return self.length
        def __getitem__(self, index):
            if self.fails:
                raise FileNotFoundError("no data here")
            noise = torch.rand(2) + np.random.rand() + random.random()
            return {"x": noise * self.scale, "text": ["a", "b"], "pair": (index, 1.5), "counts": {"index": index}}

    def count():
        Scaled.num_built += 1
        return Scaled()

    @hetero.dataset(name="crosscheck_scaled")
    def scaled():
        return count()

    @hetero.dataset(name="crosscheck_missing")
    def missing():
        if os.environ.get("HETERO_CROSSCHECK_RANK"):
            raise FileNotFoundError("no data here")
        return count()

    @hetero.dataset(name="crosscheck_initialised", worker_init_fn=abs)
    def initialised():
        return count()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:

    with imported_script(tmp_path_factory.mktemp("crosscheck"), "crosscheck_test_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def served(script: Any) -> Iterator[ServedJob]:
    threads = threading.active_count()
    path = Path(script.__file__)
    job = ServedJob(path.parent, path, purity_checks=2)
    job.start(1)
    yield job
    job.stop()
    wait_for(lambda: threading.active_count() <= threads)


@pytest.fixture
def job(served: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedJob]:
    monkeypatch.setattr(control, "_session", served)
    monkeypatch.setattr(pipeline, "_num_verified", {})
    monkeypatch.setattr(crosscheck, "_skipped", set())
    # Comparing one batch takes milliseconds, so on a slow machine a later batch would be due within a test.
    monkeypatch.setattr(crosscheck, "LATER_SHARE", 1e-9)
    monkeypatch.setattr(script.Scaled, "num_built", 0)
    monkeypatch.setenv("HETERO_CROSSCHECK_RANK", "1")
    yield served
    ServedJob.disconnect()
    hetero.spec.set_describer(None)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == crosscheck.__name__]


def states() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def test_equal_first_batches_pass_and_leave_the_trainer_alone(
    job: ServedJob, script: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(job.options, "purity_checks", 0)
        assert len(list(DataLoader(script.scaled(), batch_size=4))) == 3
    expected = states()
    torch.set_rng_state(before)
    loader = DataLoader(script.scaled(), batch_size=4)
    with caplog.at_level(logging.INFO):
        assert len(list(loader)) == 3
        assert states() == expected
        assert len(list(loader)) == 3
    assert torch.get_num_threads() == num_threads
    assert torch.utils.data.get_worker_info() is None
    assert messages(caplog) == []
    assert script.Scaled.num_built == 1


def test_first_batches_of_every_loader_are_compared_once(job: ServedJob, script: Any) -> None:
    for _ in range(2):  # made anew, say for every epoch
        for name in ("one", "two"):
            assert len(list(DataLoader(script.scaled(), batch_size=4, name=name))) == 3
    assert script.Scaled.num_built == 2


def test_later_batch_is_compared_after_a_time_that_its_cost_decides(
    job: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(script.scaled(), batch_size=1)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    assert script.Scaled.num_built == 1
    monkeypatch.setattr(script.Scaled, "scale", 0.5)  # for example a file that was replaced on this host
    next(batches)  # too early
    monkeypatch.setattr(crosscheck.time, "monotonic", lambda now=crosscheck.time.monotonic: now() + 1e12)
    with pytest.raises(DatasetMismatchError, match="makes different batches in the rank and on data hosts"):
        next(batches)


def test_other_first_batch_is_an_error_that_says_where(
    job: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.Scaled, "scale", 0.5)
    batches = iter(DataLoader(script.scaled(), batch_size=4))
    with pytest.raises(DatasetMismatchError, match="makes different batches in the rank and on data hosts") as raised:
        next(batches)
    text = str(raised.value)
    assert raised.value.exit_code is ExitCode.DISAGREEMENT
    assert "At epoch 0, position 0: batch['x']: Tensor float32[4, 2], " in text
    assert "a global or class attribute that main() changed" in text
    assert len(text.splitlines()[0]) <= 120
    with pytest.raises(DatasetMismatchError):  # and no other batch
        next(batches)


@pytest.mark.parametrize(
    ("factory", "change", "said"),
    [
        ("missing", {}, "no data here"),
        ("scaled", {"fails": True}, "no data here"),
        ("scaled", {"length": 3}, "it has 3 samples here and 12 there"),
    ],
)
def test_data_set_that_the_rank_does_not_have_is_not_compared_and_said_once(
    factory: str,
    change: dict[str, Any],
    said: str,
    job: ServedJob,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(script.Scaled, name, value)
    with caplog.at_level(logging.INFO):
        for name in ("one", "two"):
            assert len(list(DataLoader(getattr(script, factory)(), batch_size=4, name=name))) == 3
    (message,) = messages(caplog)
    assert "are not compared with ones computed in the rank: " in message
    assert said in message


@pytest.mark.parametrize("max_s", [-1.0, 1e-9], ids=["to build", "to compute"])
def test_slow_data_set_is_not_compared(
    max_s: float, job: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(script.Scaled, "scale", 0.5)
    monkeypatch.setattr(crosscheck, "MAX_COMPARE_S", max_s)
    with caplog.at_level(logging.INFO):
        assert len(list(DataLoader(script.scaled(), batch_size=4))) == 3
    assert len(messages(caplog)) == 1


@pytest.mark.parametrize("doubt", ["environment", "worker_init_fn"])
def test_difference_that_the_host_may_explain_is_a_warning(
    doubt: str, job: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(script.Scaled, "scale", 0.5)
    if doubt == "environment":
        here = {**describe_environment(), "cpu_capability": "ABACUS"}
        monkeypatch.setattr(crosscheck, "describe_environment", lambda: here)
    factory = script.scaled if doubt == "environment" else script.initialised
    with caplog.at_level(logging.INFO):
        assert len(list(DataLoader(factory(), batch_size=4))) == 3
    (message,) = messages(caplog)
    assert "makes different batches in the rank" in message
    assert ("cpu_capability is ABACUS here" if doubt == "environment" else "worker_init_fn is called") in message


def test_no_purity_checks_compare_nothing(job: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.options, "purity_checks", 0)
    monkeypatch.setattr(script.Scaled, "scale", 0.5)
    assert len(list(DataLoader(script.scaled(), batch_size=4))) == 3
    assert script.Scaled.num_built == 0


def test_batches_that_may_skip_samples_are_not_compared(
    job: ServedJob, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.Scaled, "scale", 0.5)
    assert len(list(DataLoader(script.scaled(), batch_size=4, on_sample_error="skip"))) == 3


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (np.float32(1) + np.float32(1e-6), True),
        (np.float32(0.5), False),
        (np.float64(1), False),
    ],
    ids=["rounding", "value", "dtype"],
)
def test_difference_in_the_last_bits_alone_is_rounding(other: Any, expected: bool) -> None:
    batch = {"x": np.ones(3, np.float32), "index": np.arange(3), "name": "a"}
    assert crosscheck._is_rounding(batch, {**batch, "x": np.full(3, other)}) is expected
    assert not crosscheck._is_rounding(batch, {**batch, "index": np.arange(1, 4)})
    assert not crosscheck._is_rounding(batch, {**batch, "name": "b"})
