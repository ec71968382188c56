"""What needs no TensorFlow: what is imported, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

import hetero.tf
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.spec import DatasetSpec

SPEC = DatasetSpec("tf_test_nothing")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_of_the_package_imports_no_framework() -> None:
    code = "import sys, hetero.tf; print(sorted({'keras', 'tensorflow', 'torch'} & set(sys.modules)))"
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "call", ["from_dataset(DatasetSpec('some'), batch_size=1)", "distribute(None)"], ids=lambda call: call.split("(")[0]
)
def test_missing_tensorflow_is_reported_in_one_line_that_names_what_to_install(call: str) -> None:
    code = f"""
import sys
sys.modules["tensorflow"] = None
import hetero.tf
from hetero.spec import DatasetSpec
try:
    hetero.tf.{call}
except ImportError as error:
    print(error)
"""
    assert run(code) == "hetero.tf needs TensorFlow, which is not installed: pip install 'tensorflow>=2.16'"


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (range(3), {}, "was given a range, expected the result of a registered function"),
        (SPEC, {"batch_size": 0}, "batch_size is 0, expected an integer of at least 1"),
        (SPEC, {"batch_size": "all"}, "batch_size is 'all', expected an integer of at least 1"),
        (SPEC, {"batch_size": None, "on_sample_error": "skip"}, "on_sample_error='skip' with batch_size=None"),
        (SPEC, {"num_workers": 0}, "num_workers is 0, expected an integer of at least 1"),
        (SPEC, {"prefetch_factor": 0}, "prefetch_factor is 0, expected an integer of at least 1"),
        (SPEC, {"seed": 0.5}, "seed is 0.5"),
        (SPEC, {"compression": "gzip"}, "compression is 'gzip'"),
        (SPEC, {"on_sample_error": "ignore"}, "on_sample_error is 'ignore'"),
        (SPEC, {"max_skips": -1}, "max_skips is -1"),
        (SPEC, {"name": "tr\ud800in"}, r"name is 'tr\\ud800in', expected at most 200 printable characters"),
        (SPEC, {"name": "x" * 201}, "of 201 characters"),
    ],
)
def test_arguments_that_cannot_work_are_refused(spec: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hetero.tf.from_dataset(spec, **{"batch_size": 2, **options})


class Rank:
    """What `distribute` reads of a session before TensorFlow is there."""

    options = types.SimpleNamespace(data_service="grpc", profile=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sharding": "static"}, "sharding is 'static', expected one of 'dynamic', 'off', 'data', 'file', "),
        ({"sharding": None}, "sharding is None"),
        ({"compression": "snappy"}, "compression is 'snappy', expected one of 'auto', None"),
        ({"placement": "data"}, "placement is 'data', expected one of 'any', 'local', 'remote'"),
        ({"coordinated": 1}, "coordinated is 1, expected one of False, True"),
        ({"max_outstanding_requests": 0}, "max_outstanding_requests is 0, expected an integer of at least 1, or None"),
        ({"max_outstanding_requests": 1.5}, "max_outstanding_requests is 1.5"),
        ({"name": 3}, "name is 3, expected at most 200 printable characters"),
        ({"coordinated": True, "sharding": "file"}, "coordinated=True does not work with sharding='file'"),
        ({"coordinated": True, "placement": "local"}, "coordinated=True does not work with placement='local'"),
        ({}, "Start the job with --data-service tf, use hetero.tf.from_dataset"),
    ],
)
def test_distribute_refuses_what_cannot_work(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(control, "_session", Rank())
    with pytest.raises(ConfigError, match=words):
        hetero.tf.distribute(None, **options)
