"""`prepare`: what is uploaded for a prepared estimator of SDK 2, and what the request says."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import stat
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.control.security import Token, write_token
from hetero.errors import AuthenticationError, ConfigError
from hetero.sagemaker import TrainingRequest, offline_session, prepare, record
from tests.support.sagemaker.estimators import ROLE, groups

pytest.importorskip("sagemaker.estimator", reason="needs the SageMaker SDK 2")

LAUNCHER = Path(hetero.__file__).parents[1] / "launchers" / "launcher.py"
METRICS = [{"Name": "hetero:step", "Regex": "step ([0-9]+)"}, {"Name": "loss", "Regex": "ours ([0-9.]+)"}]


@pytest.fixture(autouse=True)
def _metric_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.sagemaker.preparation.staging.METRIC_DEFINITIONS", METRICS)


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    """Return the code of a user. It has a launcher, as that of the published sample."""
    folder = tmp_path / "code"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("print('train')\n")
    (folder / "launcher.py").write_text("print('the launcher of the sample')\n")
    (folder / "lib" / "model.py").write_text("LAYERS = 3\n")
    (folder / "requirements.txt").write_text("# ours\neinops==0.8.1\n")
    return folder


@functools.cache
def session() -> Any:
    return offline_session()


def make(source_dir: Path | str | None, **arguments: Any) -> Any:
    from sagemaker.pytorch import PyTorch

    given = {
        "entry_point": "train.py",
        "source_dir": None if source_dir is None else str(source_dir),
        "role": ROLE,
        "sagemaker_session": session(),
        "instance_groups": groups(),
        "hyperparameters": {"epochs": 3, "name": "two words"},
        "framework_version": "2.3",
        "py_version": "py311",
    }
    return PyTorch(**given | arguments)


def staged(estimator: Any) -> dict[str, bytes]:
    """Return the files in the staged folder of an estimator."""
    folder = Path(estimator.source_dir)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def parameter(estimator: Any, name: str) -> Any:
    """Return a hyperparameter as the job would have it."""
    return json.loads(estimator.hyperparameters()[name])


def sent(estimator: Any) -> tuple[TrainingRequest, dict[str, tuple[int, bytes]]]:
    """Return the request, and the uploaded code: name -> mode and content."""
    recording = record(estimator, {"training": "s3://bucket/training"})
    (archive,) = [content for uri, content in recording.objects.items() if uri.endswith("/sourcedir.tar.gz")]
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {
            member.name: (member.mode, file.read()) for member in tar if (file := tar.extractfile(member)) is not None
        }
    return recording.request, files


def test_prepared_estimator_starts_the_launcher_with_the_script_as_hyperparameter(code_dir: Path) -> None:
    estimator = make(code_dir)
    assert prepare(estimator, trainer_endpoints=2, roles=("dnn_group=trainer",)) is estimator
    request, files = sent(estimator)
    ours = {name: json.loads(value) for name, value in request.hyperparameters.items() if name.startswith("hetero_")}
    assert ours == {"hetero_script": "train.py", "hetero_trainer_endpoints": 2, "hetero_roles": ["dnn_group=trainer"]}
    assert request.hyperparameters["sagemaker_program"] == '"hetero-launcher.py"'
    assert [request.hyperparameters[name] for name in ("epochs", "name")] == ["3", '"two words"']
    assert request.document["AlgorithmSpecification"]["MetricDefinitions"] == METRICS
    assert [group.name for group in request.groups] == ["data_group", "dnn_group"]
    assert files["hetero-launcher.py"][1] == LAUNCHER.read_bytes()


def test_staged_code_is_the_users_with_ours_beside_it(code_dir: Path) -> None:
    before = {path: path.read_bytes() for path in code_dir.rglob("*") if path.is_file()}
    files = staged(prepare(make(code_dir)))
    ours = {
        "hetero-launcher.py",
        f"hetero-job/hetero-{hetero.__version__}-py3-none-any.whl",
        "hetero-job/token",
        "requirements.txt",
    }
    assert {name: content for name, content in files.items() if name not in ours} == {
        str(path.relative_to(code_dir)): content for path, content in before.items() if path.name != "requirements.txt"
    }
    assert ours < set(files)
    assert {path: path.read_bytes() for path in code_dir.rglob("*") if path.is_file()} == before


def test_what_a_rehearsal_beside_the_code_has_left_is_not_staged(code_dir: Path) -> None:
    tree = code_dir / "rehearsal" / "hosts" / "algo-1" / "ml"
    (tree / "input" / "config").mkdir(parents=True)
    (tree / "input" / "config" / "resourceconfig.json").write_text("{}")
    (tree / "input" / "data").mkdir()
    (tree / "input" / "data" / "training").symlink_to(code_dir / "lib")
    os.mkfifo(tree / "input" / "data" / "stream_0")  # which no copy gets past
    (code_dir / "lib" / "hosts").mkdir()
    (code_dir / "lib" / "hosts" / "list.py").write_text("HOSTS = []\n")
    files = staged(prepare(make(code_dir)))
    assert [name for name in files if name.startswith("rehearsal")] == []
    assert "lib/hosts/list.py" in files


def test_requirements_have_our_wheel_and_the_lines_of_the_user(code_dir: Path) -> None:
    lines = staged(prepare(make(code_dir)))["requirements.txt"].decode().splitlines()
    assert lines == [
        "# hetero.sagemaker.prepare: hetero comes with the code",
        "--find-links hetero-job",
        f"./hetero-job/hetero-{hetero.__version__}-py3-none-any.whl",
        "# the job's own",
        "# ours",
        "einops==0.8.1",
    ]


def test_token_is_in_its_file_only(code_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    estimator = prepare(make(code_dir, environment={"A": "1"}))
    request, files = sent(estimator)
    mode, content = files["hetero-job/token"]
    secret = content.decode().strip()
    assert stat.S_IMODE(mode) == 0o600
    assert Token(secret).reveal() == secret
    everywhere_else = json.dumps(request.document) + caplog.text + repr(vars(estimator)) + repr(dict(os.environ))
    assert secret not in everywhere_else
    assert [name for name, (_, other) in files.items() if secret.encode() in other] == ["hetero-job/token"]
    staged = Path(estimator.source_dir)
    assert stat.S_IMODE(staged.parent.stat().st_mode) == 0o700


def test_each_job_has_a_token_of_its_own_unless_a_file_has_one(code_dir: Path, tmp_path: Path) -> None:
    tokens = {staged(prepare(make(code_dir)))["hetero-job/token"] for _ in range(2)}
    assert len(tokens) == 2
    path = tmp_path / "own"
    write_token(str(path), Token("a-secret-of-our-own-0123"))
    assert staged(prepare(make(code_dir), token=path))["hetero-job/token"] == b"a-secret-of-our-own-0123\n"
    assert "hetero-job/token" not in staged(prepare(make(code_dir), token=False))


def test_token_that_others_can_read_or_that_is_no_path_is_refused(code_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.write_text("a-secret-of-our-own-0123")
    path.chmod(0o644)
    with pytest.raises(AuthenticationError, match="others have access; chmod 600 it"):
        prepare(make(code_dir), token=path)
    with pytest.raises(ConfigError, match="expected True, False, or a pathlib.Path of a token file") as caught:
        prepare(make(code_dir), token="a-secret-of-our-own-0123")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_preparing_again_stages_the_users_code_of_now(code_dir: Path) -> None:
    estimator = prepare(make(code_dir), trainer_endpoints=2, port=17000)
    first, parameters, metrics = staged(estimator), estimator.hyperparameters(), estimator.metric_definitions
    (code_dir / "train.py").write_text("print('changed')\n")
    assert prepare(estimator, trainer_endpoints=3) is estimator
    changed = {"train.py", "hetero-job/token"}
    assert {name for name, content in staged(estimator).items() if first[name] != content} == changed
    assert set(staged(estimator)) == set(first)
    assert estimator.hyperparameters() == parameters | {"hetero_trainer_endpoints": "3"}
    assert estimator.metric_definitions == metrics
    assert estimator.entry_point == "hetero-launcher.py"


def test_another_script_can_be_chosen_the_second_time(code_dir: Path) -> None:
    estimator = prepare(make(code_dir, entry_point="launcher.py"), script="train.py")
    assert parameter(estimator, "hetero_script") == "train.py"
    prepare(estimator, "lib/model.py")
    assert parameter(estimator, "hetero_script") == "lib/model.py"
    prepare(estimator)
    assert parameter(estimator, "hetero_script") == "lib/model.py"


def test_module_of_the_source_folder_can_be_the_script(code_dir: Path) -> None:
    estimator = prepare(make(code_dir), script="lib.model", module=True)
    assert estimator.hyperparameters()["hetero_script"] == '"lib.model"'
    assert estimator.hyperparameters()["hetero_module"] == "true"
    assert (Path(estimator.source_dir) / "lib" / "model.py").is_file()
    prepare(estimator)
    assert estimator.hyperparameters()["hetero_script"] == '"lib.model"'
    for script in ("lib.absent", "lib/model.py"):
        with pytest.raises(ConfigError, match=f"code has no module '{script}'"):
            prepare(make(code_dir), script=script, module=True)
    with pytest.raises(ConfigError, match="needs a source folder"):
        prepare(make(None, entry_point=str(code_dir / "train.py")), script="lib.model", module=True)


def test_script_that_the_hyperparameters_name_is_kept(code_dir: Path) -> None:
    estimator = make(code_dir, entry_point="launcher.py", hyperparameters={"hetero_script": "train.py"})
    assert parameter(prepare(estimator), "hetero_script") == "train.py"


def test_single_file_is_staged_alone_also_from_another_folder(
    code_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code_dir)
    estimator = prepare(make(None))
    monkeypatch.chdir(tmp_path)
    prepare(estimator)
    assert parameter(estimator, "hetero_script") == "train.py"
    files = staged(estimator)
    assert {name for name in files if not name.startswith("hetero-")} == {"train.py", "requirements.txt"}
    assert b"einops" not in files["requirements.txt"]


def test_metric_definitions_of_the_user_come_first_and_stay(code_dir: Path) -> None:
    own = [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]
    assert prepare(make(code_dir, metric_definitions=own)).metric_definitions == [own[0], METRICS[0]]
    assert own == [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]


def test_metric_definitions_beyond_the_limit_are_left_out_and_named(
    code_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = [{"Name": f"own-{number}", "Regex": "x ([0-9]+)"} for number in range(39)]
    estimator = prepare(make(code_dir, metric_definitions=own))
    assert estimator.metric_definitions == [*own, METRICS[0]]
    assert "at most 40 metric definitions; left out: loss" in caplog.text


def test_dict_of_the_users_hyperparameters_is_left_alone(code_dir: Path) -> None:
    own = {"epochs": 3}
    prepare(make(code_dir, hyperparameters=own))
    assert own == {"epochs": 3}


def test_estimator_of_an_own_image_is_prepared(code_dir: Path) -> None:
    from sagemaker.estimator import Estimator

    estimator = Estimator(
        image_uri="000000000000.dkr.ecr.us-east-1.amazonaws.com/own:1",
        role=ROLE,
        sagemaker_session=session(),
        instance_groups=groups(),
        hyperparameters={"epochs": 3},
    )
    prepare(prepare(estimator, str(code_dir / "train.py"), audit=True))
    request, files = sent(estimator)
    assert request.hyperparameters["hetero_script"] == '"train.py"'
    assert request.hyperparameters["hetero_audit"] == "true"
    assert request.hyperparameters["epochs"] == "3"
    assert request.hyperparameters["sagemaker_program"] == '"hetero-launcher.py"'
    assert "train.py" in files


def test_tensorflow_is_told_from_the_estimator_and_from_the_image(code_dir: Path) -> None:
    from sagemaker.tensorflow import TensorFlow

    arguments = {"role": ROLE, "instance_groups": groups(), "entry_point": "train.py", "source_dir": str(code_dir)}
    estimator = TensorFlow(**arguments, framework_version="2.16", py_version="py310", sagemaker_session=session())
    assert prepare(estimator)._hyperparameters["hetero_framework"] == "tensorflow"
    assert prepare(estimator, framework="torch")._hyperparameters["hetero_framework"] == "torch"
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/tensorflow-training:2.16-gpu-py310"
    by_image = make(code_dir, framework_version=None, py_version=None, image_uri=image)
    assert parameter(prepare(by_image), "hetero_framework") == "tensorflow"


def test_isolated_job_asks_no_index(code_dir: Path) -> None:
    files = staged(prepare(make(code_dir, enable_network_isolation=True)))
    assert "--no-index" in files["requirements.txt"].decode().splitlines()


def test_wheels_of_a_folder_go_with_the_job(code_dir: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(ConfigError, match=r"contains no wheels\n  Fill it with: pip download -d"):
        prepare(make(code_dir), wheels=wheels)
    (wheels / "xxhash-3.0-py3-none-any.whl").write_bytes(b"zip")
    assert staged(prepare(make(code_dir), wheels=wheels))["hetero-job/xxhash-3.0-py3-none-any.whl"] == b"zip"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"entry_point": "train.py", "source_dir": "s3://bucket/sourcedir.tar.gz"},
            "expected a folder on this machine",
        ),
        ({"git_config": {"repo": "https://example.com/repo"}}, "clone the repository and give source_dir"),
        ({"container_entry_point": ["python"]}, "has a container_entry_point, which starts without the uploaded code"),
        ({"dependencies": ["elsewhere/requirements.txt"]}, "move it into source_dir"),
        ({"py_version": "py38", "framework_version": "1.11.0"}, "the image has Python 3.8; hetero needs 3.10 or newer"),
        ({"image_uri": "x/pytorch-training:1.13-gpu-py39-cu117"}, "the image has Python 3.9; hetero needs 3.10"),
        ({"hyperparameters": {"hetero_prot": 1}}, "unknown option 'hetero_prot' in .*; did you mean 'hetero_port'"),
    ],
)
def test_estimator_that_cannot_be_prepared_is_an_error_and_unchanged(
    code_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    if "image_uri" in arguments:
        arguments |= {"framework_version": None, "py_version": None}
    estimator = make(arguments.pop("source_dir", code_dir), **arguments)
    before = (estimator.source_dir, estimator.entry_point, dict(estimator._hyperparameters))
    with pytest.raises(ConfigError, match=message):
        prepare(estimator)
    assert (estimator.source_dir, estimator.entry_point, dict(estimator._hyperparameters)) == before


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("none.py", {}, "the training script 'none.py' is not in .*code; give its path relative to this folder"),
        ("../code/train.py", {}, "is not in .*code"),
        (None, {"prot": 1}, "unknown option 'hetero_prot' in the options of prepare .*; did you mean 'hetero_port'"),
        (None, {"nproc_per_node": 0}, "nproc_per_node is 0; expected a whole number, 1 or more"),
    ],
)
def test_wrong_options_are_errors(code_dir: Path, script: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(make(code_dir), script, **options)


def test_estimator_without_any_script_is_an_error() -> None:
    from sagemaker.estimator import Estimator

    estimator = Estimator(image_uri="own:1", role=ROLE, sagemaker_session=session(), instance_groups=groups())
    with pytest.raises(ConfigError, match="found no training script; give its path"):
        prepare(estimator)
    with pytest.raises(ConfigError, match="the training script 'none.py' does not exist in"):
        prepare(estimator, "none.py")


@pytest.mark.parametrize("name", ["hetero-launcher.py", "hetero-job"])
def test_name_that_is_ours_is_not_overwritten(code_dir: Path, name: str) -> None:
    (code_dir / name).mkdir()
    with pytest.raises(ConfigError, match=f"has a {name}, which prepare makes itself"):
        prepare(make(code_dir))


def test_code_with_data_in_it_is_refused(code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.sagemaker.preparation.staging.MAX_CODE_BYTES", 30)
    with pytest.raises(ConfigError, match=r"more than 30 bytes; move the data .*code/\.heteroignore"):
        prepare(make(code_dir))


def test_ignored_files_are_not_copied_and_stay_ignored(code_dir: Path) -> None:
    (code_dir / ".heteroignore").write_text("/data/\n*.whl\n")
    (code_dir / "data").mkdir()
    (code_dir / "data" / "photo.jpg").touch()
    (code_dir / "own.whl").touch()
    names = set(staged(prepare(make(code_dir))))
    assert {"train.py", "lib/model.py", "hetero-launcher.py"} <= names
    assert not names & {".heteroignore", "data/photo.jpg", "own.whl"}
    assert any(name.endswith(".whl") for name in names), "hetero's own files are never ignored"


def test_script_that_is_ignored_is_an_error(code_dir: Path) -> None:
    (code_dir / ".heteroignore").write_text("*.py\n")
    with pytest.raises(ConfigError, match=r"script 'train\.py' is ignored; correct .*code/\.heteroignore"):
        prepare(make(code_dir))


def test_requirements_with_hashes_have_ours(code_dir: Path) -> None:
    (code_dir / "requirements.txt").write_text("einops==0.8.1 --hash=sha256:00\n")
    lines = staged(prepare(make(code_dir)))["requirements.txt"].decode().splitlines()
    assert ".whl --hash=sha256:" in lines[2]


def test_staged_folder_ends_with_the_process(code_dir: Path) -> None:
    script = """
        import os, sys
        from hetero.sagemaker import prepare
        class EstimatorBase:  # the SDK takes long to import, and is not asked anything
            __module__ = "sagemaker.estimator"
            source_dir, entry_point, git_config, dependencies = sys.argv[1], "train.py", None, None
            _hyperparameters, metric_definitions = {}, None
            enable_network_isolation = lambda self: False
            set_hyperparameters = lambda self, **parameters: None
        folder = prepare(EstimatorBase()).source_dir
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print(folder, os.path.exists(folder))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(code_dir)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    folder, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(folder).parent.exists()
