"""`prepare` for a ``ModelTrainer`` of SDK 3: the same as for an estimator, where that one is not asked for."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.errors import ConfigError
from hetero.sagemaker import offline_session, prepare, record
from tests.support.sagemaker.estimators import IMAGE, ROLE

pytest.importorskip("sagemaker.train", reason="needs the SageMaker SDK 3: make test-v3")

from sagemaker.core.shapes import InstanceGroup, MetricDefinition
from sagemaker.core.training.configs import Compute, Networking, SourceCode
from sagemaker.train import ModelTrainer
from sagemaker.train.distributed import Torchrun

WHEEL = f"hetero-{hetero.__version__}-py3-none-any.whl"


@pytest.fixture(autouse=True)
def _metric_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = [{"Name": "hetero:step", "Regex": "step ([0-9]+)"}, {"Name": "loss", "Regex": "ours ([0-9.]+)"}]
    monkeypatch.setattr("hetero.sagemaker.preparation.staging.METRIC_DEFINITIONS", definitions)


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "reqs").mkdir(parents=True)
    (folder / "train.py").write_text("print('train')\n")
    (folder / "notes.md").write_text("not for the job\n")
    (folder / "requirements.txt").write_text("einops==0.8.1\n")
    (folder / "reqs" / "job.txt").write_text("tqdm\n")
    return folder


@functools.cache
def session() -> Any:
    return offline_session()


def source(code_dir: Path, **more: Any) -> SourceCode:
    return SourceCode(
        **{"source_dir": str(code_dir), "entry_script": "train.py", "ignore_patterns": ["*.md", "*.whl"]} | more
    )


def make(source_code: SourceCode | None, **more: Any) -> ModelTrainer:
    groups = [
        InstanceGroup(instance_group_name="data_group", instance_type="ml.c5.9xlarge", instance_count=2),
        InstanceGroup(instance_group_name="dnn_group", instance_type="ml.g5.xlarge", instance_count=1),
    ]
    given = {
        "training_image": IMAGE,
        "source_code": source_code,
        "compute": Compute(instance_groups=groups),
        "role": ROLE,
        "sagemaker_session": session(),
        "hyperparameters": {"epochs": 3, "name": "two words"},
    }
    return ModelTrainer(**given | more)


def staged(trainer: ModelTrainer) -> dict[str, bytes]:
    """Return the files in the staged folder of a trainer."""
    folder = Path(trainer.source_code.source_dir)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_prepared_trainer_starts_the_launcher_with_the_script_as_hyperparameter(
    code_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    code = source(code_dir)
    trainer = make(code).with_metric_definitions([MetricDefinition(name="loss", regex="loss=([0-9.]+)")])
    assert prepare(trainer, trainer_endpoints=2, roles=("dnn_group=trainer",)) is trainer
    recording = record(trainer)
    request = recording.request
    assert request.hyperparameters == {
        "epochs": "3",
        "name": "two words",
        "hetero_script": "train.py",
        "hetero_trainer_endpoints": "2",
        "hetero_roles": '["dnn_group=trainer"]',
    }
    assert request.document["AlgorithmSpecification"]["MetricDefinitions"] == [
        {"Name": "loss", "Regex": "loss=([0-9.]+)"},
        {"Name": "hetero:step", "Regex": "step ([0-9]+)"},
    ]
    uploaded = {
        uri.partition("/input/code/")[2]: content for uri, content in recording.objects.items() if "/code/" in uri
    }
    assert uploaded == staged(trainer)
    assert set(uploaded) == {
        "train.py",
        "requirements.txt",
        "reqs/job.txt",
        "hetero-launcher.py",
        f"hetero-job/{WHEEL}",
        "hetero-job/token",
        "hetero-job/requirements.txt",
    }
    (script,) = [content.decode() for uri, content in recording.objects.items() if uri.endswith("/sm_train.sh")]
    assert "install_requirements.py hetero-job/requirements.txt" in script
    (driver,) = [json.loads(content) for uri, content in recording.objects.items() if uri.endswith("/sourcecode.json")]
    assert driver["entry_script"] == "hetero-launcher.py"
    secret = uploaded["hetero-job/token"].decode().strip()
    assert secret not in json.dumps(request.document) + caplog.text + repr(trainer)
    assert (code.source_dir, code.entry_script) == (str(code_dir), "train.py")  # the user's own object


def test_requirements_that_the_trainer_names_get_our_line_first(code_dir: Path) -> None:
    trainer = prepare(make(source(code_dir, requirements="reqs/job.txt")))
    assert trainer.source_code.requirements == "reqs/job.txt"
    lines = staged(trainer)["reqs/job.txt"].decode().splitlines()
    assert lines[2:] == [f"./hetero-job/{WHEEL}", "# the job's own", "tqdm"]
    assert staged(trainer)["requirements.txt"] == b"einops==0.8.1\n"


def test_requirements_that_nobody_names_are_not_installed(code_dir: Path) -> None:
    trainer = prepare(make(source(code_dir)))
    assert trainer.source_code.requirements == "hetero-job/requirements.txt"
    assert b"einops" not in staged(trainer)["hetero-job/requirements.txt"]


def test_preparing_again_stages_the_users_code_of_now(code_dir: Path) -> None:
    trainer = prepare(make(source(code_dir)), port=17000)
    first, parameters = staged(trainer), dict(trainer.hyperparameters)
    (code_dir / "train.py").write_text("print('changed')\n")
    prepare(trainer, audit=True)
    assert {name for name, content in staged(trainer).items() if first[name] != content} == {
        "train.py",
        "hetero-job/token",
    }
    assert set(staged(trainer)) == set(first)
    assert trainer.hyperparameters == parameters | {"hetero_audit": True}
    assert [each.name for each in trainer._metric_definitions] == ["hetero:step", "loss"]


def test_trainer_without_code_gets_the_script(code_dir: Path) -> None:
    trainer = prepare(make(None), str(code_dir / "train.py"))
    assert set(staged(trainer)) >= {"train.py", "hetero-launcher.py"}
    assert trainer.hyperparameters["hetero_script"] == "train.py"


def test_isolated_job_asks_no_index(code_dir: Path) -> None:
    trainer = prepare(make(source(code_dir), networking=Networking(enable_network_isolation=True)))
    assert b"--no-index" in staged(trainer)["hetero-job/requirements.txt"].splitlines()


@pytest.mark.parametrize(
    ("code", "more", "message"),
    [
        ({}, {"distributed": Torchrun()}, "distributed=Torchrun.*leave it out, because hetero starts the ranks"),
        ({"entry_script": None, "command": "python train.py"}, {}, "source_code has a command or args"),
        ({"ignore_patterns": ["train*"]}, {}, "the training script 'train.py' is ignored; correct .*ignore_patterns"),
        ({"source_dir": "s3://bucket/code/"}, {}, "expected a folder on this machine"),
        ({}, {"training_image": "x/pytorch-training:1.13-gpu-py39"}, "the image has Python 3.9; hetero needs 3.10"),
        ({}, {"hyperparameters": {"hetero_prot": 1}}, "did you mean 'hetero_port'"),
    ],
)
def test_trainer_that_cannot_be_prepared_is_an_error(
    code_dir: Path, code: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    trainer = make(source(code_dir, **code), **more)
    before = trainer.source_code.model_dump(), trainer.hyperparameters
    with pytest.raises(ConfigError, match=message):
        prepare(trainer)
    assert (trainer.source_code.model_dump(), trainer.hyperparameters) == before
