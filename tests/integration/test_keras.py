"""A `keras.utils.PyDataset` in simulated jobs: its batches do not depend on who computes them, nor on a restart."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.batches.fetch import fetch
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators
from hetero.datasets import build
from hetero.loaders.sampling import BuiltInOrder, Shard
from tests.support.integration.harness import DNN, Start, StartJob, data

SCRIPT = Path(__file__).parent / "scripts" / "keras_chain.py"
NUM_SAMPLES = 44

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
    ),
    pytest.mark.timeout(800),  # every process that fetches imports it
]


@pytest.fixture
def script() -> Iterator[Any]:
    """The job's script: its data set, in this process too."""
    spec = importlib.util.spec_from_file_location("keras_chain_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def wanted(script: Any) -> list[str]:
    """Return what two epochs must consist of."""
    spec = script.keras_chain_photos(NUM_SAMPLES)
    built = build(spec)
    order = BuiltInOrder(num_samples=len(built), batch_size=1, seed=17, shuffle=True)
    found = []
    for epoch in range(2):
        for planned in order.batches(epoch, Shard()):
            request = BatchRequest(
                spec=spec,
                work=planned.work,
                seed=17,
                epoch=epoch,
                position=planned.position,
                collate=False,
                as_is=True,
            )
            with preserved_generators():
                found.append(script.digest(*fetch(built, request)))
    return found


def test_batches_of_keras_are_the_same_on_a_data_host_and_resumed_without_any(
    start_job: StartJob, start: Start, script: Any, tmp_path: Path
) -> None:
    args = ["--output", str(tmp_path), "--num-samples", str(NUM_SAMPLES)]
    flags = ["--framework", "tensorflow", "--endpoints-per-host", "1", "--trainer-endpoints", "0"]
    job = start_job([data(2), DNN], *flags, script=SCRIPT, args=args)
    assert job.wait(300.0) == 0, job.output
    alone = start([sys.executable, str(SCRIPT), *args, "--resume"], tmp_path, {})
    assert alone.wait(300.0) == 0, alone.output
    begun, resumed = (json.loads((tmp_path / name).read_text()) for name in ("begun.json", "resumed.json"))
    expected = wanted(script)
    assert len(expected) == 12
    assert begun["taken"] == expected[:8]
    assert resumed["taken"] == expected[8:]
    assert (begun["has_torch"], resumed["has_torch"]) == (False, False)
