"""TensorFlow in a simulated job: our guarantees do not depend on who trains."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.batches.fetch import fetch
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators
from hetero.datasets import build
from hetero.loaders.sampling import BuiltInOrder, Shard
from tests.support.integration.harness import DNN, MARKER, StartJob, data, sweep

SCRIPT = Path(__file__).parent / "scripts" / "tf_chain.py"
WORKERS = SCRIPT.with_name("tf_workers.py")
NUM_SAMPLES = 800
TWO_TRAINERS = "dnn_group=ml.p3.2xlarge:2"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
)


@pytest.fixture
def script() -> Iterator[Any]:
    """The job's script: its data set, in this process too."""
    spec = importlib.util.spec_from_file_location("tf_chain_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def wanted(script: Any, num_samples: int) -> dict[str, Any]:
    """Return what two epochs must consist of: indices and digests of their batches."""
    spec = script.tf_augmented(num_samples)
    built = build(spec)
    found: dict[str, Any] = {"indices": [], "digests": []}
    order = BuiltInOrder(num_samples=num_samples, batch_size=8, seed=17, shuffle=True)
    for epoch in range(2):
        for planned in order.batches(epoch, Shard()):
            request = BatchRequest(spec=spec, work=planned.work, seed=17, epoch=epoch, position=planned.position)
            with preserved_generators():
                batch = fetch(built, request)
            found["indices"].append(batch["index"].tolist())
            found["digests"].append(script.digest(batch))
    return found


def test_endpoint_killed_under_tensorflow_loses_and_repeats_nothing(
    start_job: StartJob, script: Any, tmp_path: Path
) -> None:
    args = ["--output", str(tmp_path), "--num-samples", str(NUM_SAMPLES), "--sleep-s", "0.005"]
    job = start_job([data(1), DNN], "--endpoints-per-host", "2", script=SCRIPT, args=args)
    job.wait_line("step 20")
    fork_server = job.find("hetero.pool.fork_server", host="algo-1")[0]
    fork_server.children()[0].send_signal(signal.SIGKILL)
    assert not any("step 100" in line for line in job.lines), "the machine is too slow: the kill came late"
    assert job.wait() == 0, job.output
    result = json.loads((tmp_path / "rank-0.json").read_text())
    expected = wanted(script, NUM_SAMPLES)
    assert result["indices"] == expected["indices"]  # each once, in this order: none lost, none repeated
    assert result["digests"] == expected["digests"]
    assert [(state["epoch"], state["batches"]) for state in result["states"]] == [(0, 100), (1, 100)]
    assert result["has_torch"] is False
    assert job.report()["run"]["events"]["endpoint restarts"] == 1


def test_script_without_a_launcher_gets_the_same_from_processes_of_its_own_and_leaves_none(
    script: Any, tmp_path: Path
) -> None:
    marker = uuid.uuid4().hex
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path), "--num-samples", "40"]
    done = subprocess.run(command, env={**os.environ, MARKER: marker}, capture_output=True, text=True, check=False)
    sweep(marker, done.stderr)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "rank-0.json").read_text())
    expected = wanted(script, 40)
    assert (result["indices"], result["digests"]) == (expected["indices"], expected["digests"])
    assert [(state["epoch"], state["batches"]) for state in result["states"]] == [(0, 5), (1, 5)]


def test_strategy_over_two_trainer_hosts_shares_the_data(start_job: StartJob, tmp_path: Path) -> None:
    flags = ["--framework", "tensorflow", "--endpoints-per-host", "1"]
    args = ["--output", str(tmp_path), "--num-samples", "80"]
    job = start_job([data(1), TWO_TRAINERS], *flags, script=WORKERS, args=args)
    assert job.wait() == 0, job.output
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert sorted(results[0]["indices"] + results[1]["indices"]) == list(range(80))
    assert [len(result["indices"]) for result in results] == [40, 40]
    assert [result["total"] for result in results] == [sum(range(80))] * 2  # a variable of both
    assert [result["state"] for result in results] == [results[0]["state"]] * 2
    assert [result["has_torch"] for result in results] == [False, False]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "other"])
def test_rank_that_raises_is_the_cause_and_not_the_collective_that_it_broke(
    start_job: StartJob, tmp_path: Path, rank: int
) -> None:
    flags = ["--framework", "tensorflow", "--endpoints-per-host", "1"]
    args = ["--output", str(tmp_path), "--num-samples", "800", "--fail-rank", str(rank)]
    job = start_job([data(1), TWO_TRAINERS], *flags, script=WORKERS, args=args)
    assert job.wait() == 30, job.output
    cause = f"HET-30 algo-{rank + 2}: rank {rank}: the training script raised RuntimeError: training fails on purpose"
    assert [job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2, 3)] == [cause] * 3


IN_FIT = """
import sys
import time

import numpy as np

import hetero
import hetero.tf


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40 and sys.argv[1] == "raise":
            raise ValueError("sample 40 is broken on purpose")
        if index == 40:
            print("sample 40 does not come", flush=True)
            time.sleep(600)
        return np.float32([index])


@hetero.dataset(collate_fn=hetero.collate_arrays)
def numbers():
    return Numbers()


def main():
    sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))  # Keras would import them: half its time
    import tensorflow as tf

    hetero.on_stop(lambda: print("callback ran", flush=True))
    data = hetero.tf.from_dataset(numbers(), batch_size=8)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(loss="mse", jit_compile=False)
    model.fit(data.map(lambda batch: (batch, batch)), verbose=0, shuffle=False, callbacks=[data.callback()])


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def in_fit(tmp_path: Path) -> Path:
    """A script whose data set fails, or hangs, while Keras waits for a batch inside of TensorFlow."""
    path = tmp_path / "in_fit.py"
    path.write_text(IN_FIT)
    return path


def test_data_set_that_raises_while_keras_waits_is_the_cause(start_job: StartJob, in_fit: Path) -> None:
    flags = ["--framework", "tensorflow", "--endpoints-per-host", "1"]
    job = start_job([data(1), DNN], *flags, script=in_fit, args=["raise"])
    assert job.wait() == 34, job.output
    (first_line,) = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2)}
    assert "/0 at sample 40: ValueError: sample 40 is broken on purpose" in first_line


@pytest.mark.fault("F12")
def test_request_finds_a_rank_that_waits_inside_of_tensorflow_and_callbacks_run(
    start_job: StartJob, in_fit: Path
) -> None:
    flags = ["--framework", "tensorflow", "--endpoints-per-host", "1"]
    job = start_job([data(1), DNN], *flags, script=in_fit, args=["hang"])
    job.wait_line("sample 40 does not come")
    job.process.terminate()
    assert job.wait() == 143, job.output
    assert job.output.count("callback ran") == 1
