"""The published way to launch a heterogeneous job, and what of it changes for hetero."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.sagemaker import offline_session, prepare
from tests.support.sagemaker.estimators import ROLE

pytest.importorskip("sagemaker.pytorch", reason="needs the SageMaker SDK 2")

from botocore.exceptions import ClientError

PAGE = Path(__file__).parents[3] / "docs" / "sagemaker.md"
# In the form of the published sample, whose launcher.py starts other scripts on each group.
PUBLISHED = """
from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch

data_group = InstanceGroup("data_group", "ml.c5.9xlarge", 1)
dnn_group = InstanceGroup("dnn_group", "ml.p3.2xlarge", 1)

estimator = PyTorch(
    entry_point="launcher.py",
    source_dir="code",
    framework_version="1.11.0",
    py_version="py38",
    role=role,
    sagemaker_session=session,
    instance_groups=[data_group, dnn_group],
    hyperparameters={"batch-size": 8192, "iterations": 100, "pin-memory": True},
    volume_size=10,
    max_run=1800,
    disable_profiler=True,
)
estimator.fit({"training": "s3://bucket/training"}, job_name="pt-heterogeneous")
"""
CONVERTED = """
from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch
from hetero.sagemaker import prepare

data_group = InstanceGroup("data_group", "ml.c5.9xlarge", 1)
dnn_group = InstanceGroup("dnn_group", "ml.p3.2xlarge", 1)

estimator = PyTorch(
    entry_point="train.py",
    source_dir="code",
    framework_version="2.3",
    py_version="py311",
    role=role,
    sagemaker_session=session,
    instance_groups=[data_group, dnn_group],
    hyperparameters={"batch-size": 8192, "iterations": 100, "pin-memory": True},
    volume_size=10,
    max_run=1800,
    disable_profiler=True,
)
prepare(estimator)
estimator.fit({"training": "s3://bucket/training"}, job_name="pt-heterogeneous")
"""


def submitted(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program with code beside it, and return the request that its fit() makes."""
    (folder / "code").mkdir(exist_ok=True)
    for name in ("launcher.py", "train.py"):
        (folder / "code" / name).touch()
    monkeypatch.chdir(folder)
    session, seen = offline_session(), []
    session.sagemaker_client.meta.events.register(
        "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: seen.append(params)
    )
    with pytest.raises(ClientError, match="this session is offline"):
        exec(program, {"role": ROLE, "session": session})
    (request,) = seen
    return dict(request)


def test_published_recipe_needs_three_changed_lines_beside_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list(difflib.ndiff(PUBLISHED.splitlines(), CONVERTED.splitlines()))
    removed = [line[2:].strip() for line in lines if line.startswith("- ")]
    added = [line[2:].strip() for line in lines if line.startswith("+ ")]
    assert len(removed) == 3
    assert [line for line in added if "prepare" in line] == [
        "from hetero.sagemaker import prepare",
        "prepare(estimator)",
    ]
    assert len(added) == 5

    before, after = (submitted(program, tmp_path, monkeypatch) for program in (PUBLISHED, CONVERTED))
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"AlgorithmSpecification", "HyperParameters"}  # the image, the metrics, what is started
    assert after["ResourceConfig"]["InstanceGroups"] == before["ResourceConfig"]["InstanceGroups"]
    parameters = {name: json.loads(value) for name, value in after["HyperParameters"].items()}
    assert parameters["sagemaker_program"] == "hetero-launcher.py"
    assert parameters["hetero_script"] == "train.py"
    assert (parameters["batch-size"], parameters["pin-memory"]) == (8192, True)


def test_published_recipe_as_it_is_is_told_what_its_image_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged = PUBLISHED.replace("estimator.fit", "prepare(estimator)\nestimator.fit")
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the image has Python 3.8; hetero needs 3.10 or newer\n.*framework_version"):
        exec(unchanged, {"role": ROLE, "session": offline_session(), "prepare": prepare})


def test_first_snippets_of_the_page_run_and_say_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    prepares, checks = [text for kind, text in blocks if kind == "python" and "estimator" in text][:2]
    (shown,) = [text for kind, text in blocks if text.startswith("SM-03 error")]
    exec(prepares + checks, {})
    assert capsys.readouterr().out == shown
