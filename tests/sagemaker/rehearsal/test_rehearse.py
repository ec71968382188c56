"""A rehearsal from the SDK's object on, and what a request has to be for one."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hetero import cli
from hetero.cluster import Role, parse_cluster
from hetero.cluster.groups import group_document
from hetero.errors import ClusterError, ConfigError, ExitCode
from hetero.metrics.profile.profile import load_profile
from hetero.sagemaker import TrainingRequest, offline_session, prepare, rehearse
from hetero.sagemaker.rehearsal import local_job
from hetero.sagemaker.rehearsal.containers import Container
from hetero.sagemaker.rehearsal.inputs import local_channels
from hetero.simulate.launchers import SimulatedHost
from hetero.simulate.opt_ml import InputChannel, write_opt_ml
from hetero.simulate.simulate import locked_folder
from tests.support.sagemaker.estimators import pytorch

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests" / "integration" / "scripts"


def estimator_of(script: Path, folder: Path, *, num_trainers: int = 1, **hyperparameters: object) -> Any:
    """Return an estimator for a script, on one data host and some trainer hosts."""
    instance_group = pytest.importorskip("sagemaker.instance_group")
    pytorch = pytest.importorskip("sagemaker.pytorch")
    source_dir = folder / "source"
    source_dir.mkdir()
    shutil.copy(script, source_dir)
    return pytorch.PyTorch(
        entry_point=script.name,
        source_dir=str(source_dir),
        role="arn:aws:iam::111122223333:role/training",
        framework_version="2.3",
        py_version="py311",
        sagemaker_session=offline_session(),
        instance_groups=[
            instance_group.InstanceGroup("data_group", "ml.c5.9xlarge", 1),
            instance_group.InstanceGroup("dnn_group", "ml.p3.2xlarge", num_trainers),
        ],
        hyperparameters=hyperparameters,
    )


@pytest.fixture
def estimator(tmp_path: Path) -> Any:
    """Return an estimator, prepared, on one data host and two trainer hosts.

    Its script needs no torch. The notebooks rehearse examples with it.
    """
    found = estimator_of(SCRIPTS / "arrays.py", tmp_path, num_trainers=2, output=str(tmp_path), epochs=1)
    return prepare(found, price_profile="seed-2022", framework="tensorflow", nproc_per_node=1, warmup_steps=2)


def estimator_of_statement(statement: str, folder: Path) -> Any:
    """Return a prepared estimator for a script of one statement, which needs no torch."""
    script = folder / "plain.py"
    dataset = "import sys\nimport time\nimport hetero\n@hetero.dataset\ndef numbers():\n    return range(4)\n"
    script.write_text(f'{dataset}if __name__ == "__main__":\n    {statement}\n')
    return prepare(estimator_of(script, folder), framework="tensorflow", nproc_per_node=1)


@pytest.mark.integration
def test_job_runs_from_the_estimator_on_three_hosts(
    estimator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_TOKEN_FILE", "/of/another/job")  # not this one's, which came with the code
    folders = {name: tmp_path / name for name in ("raw", "labels")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    inputs = pytest.importorskip("sagemaker.inputs")
    channels = {
        "raw": inputs.TrainingInput(f"file://{folders['raw']}", instance_groups=["data_group"]),
        "labels": inputs.TrainingInput(str(folders["labels"]), instance_groups=["dnn_group"]),
    }
    before = dict(estimator.hyperparameters())
    found = rehearse(estimator, channels, output_dir=tmp_path / "run", endpoints_per_host=1)
    output = capsys.readouterr().err
    assert (found.exit_code, found.failure) == (0, ""), output
    assert estimator.hyperparameters() == before
    run = found.report.run
    assert [(group.name, group.role, group.count) for group in run.groups] == [
        ("data_group", "data", 1),
        ("dnn_group", "trainer", 2),
    ]
    assert [(rank.rank, rank.host) for rank in run.ranks] == [(0, "algo-2"), (1, "algo-3")]
    hourly = found.report.cost.hourly
    assert hourly is not None
    assert hourly.value == pytest.approx(1.836 + 2 * 3.825)
    channel_of = {"algo-1": "raw", "algo-2": "labels", "algo-3": "labels"}
    for host, name in channel_of.items():
        data = found.output_dir / "hosts" / host / "ml" / "input" / "data"
        assert [path.name for path in data.iterdir()] == [name]
        assert (data / name / "file").read_text() == name
    parameters = json.loads((found.output_dir / "hosts/algo-1/ml/input/config/hyperparameters.json").read_text())
    assert (parameters["hetero_script"], parameters["epochs"]) == ('"arrays.py"', "1")


@pytest.mark.long
@pytest.mark.integration
def test_hyperparameter_before_prepare_makes_a_profile_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Emulated, because hosts measure their samples on every CPU, for many seconds.
    emulated = {"emulate_sample_s": 0.001, "emulate_step_s": 0.02}
    arguments = {"output": str(tmp_path), "cpu-s": 0.0, "step-s": 0.0, "hetero_profile": True}
    estimator = prepare(estimator_of(SCRIPTS / "profiled.py", tmp_path, **arguments))
    found = rehearse(estimator, output_dir=tmp_path / "run", endpoints_per_host=1, **emulated)
    output = capsys.readouterr().err
    assert (found.exit_code, found.failure) == (0, ""), output
    hosts = found.output_dir / "hosts"
    written = [path.relative_to(hosts) for path in sorted(hosts.rglob("profile.json"))]
    assert written == [Path("algo-2/ml/output/data/algo-2/profile.json")], "the trainer host writes the profile"
    profile = load_profile(hosts / written[0])
    training = profile.training
    assert (training.instance_type, training.num_hosts, training.ranks_per_host) == ("ml.p3.2xlarge", 1, 1)
    assert training.headspace_s.num_measured >= 50, "batches were repeated"
    assert (training.num_local_processes, training.has_data_hosts) == (0, True)
    assert list(hosts.rglob("report.json")) == []
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.integration
def test_interrupt_is_handed_on_and_the_rehearsal_ends_with_what_it_started(tmp_path: Path) -> None:
    estimator = estimator_of_statement("print('begun', flush=True), time.sleep(600)", tmp_path)
    was_pressed = threading.Event()

    class Lines(io.StringIO):
        def write(self, line: str) -> int:
            if "begun" in line and not was_pressed.is_set():
                was_pressed.set()
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(line)

    lines, real = Lines(), sys.stderr
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, say, in a background job of a shell
    sys.stderr = lines
    try:
        found = rehearse(estimator, output_dir=tmp_path / "run", through="plain", endpoints_per_host=1)
    finally:
        sys.stderr = real
        signal.signal(signal.SIGINT, handler)
    assert found.exit_code == 143, lines.getvalue()
    assert found.failure == ""


@pytest.mark.integration
def test_rehearsal_without_hetero_is_warned_of_and_has_no_report(
    source_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("sagemaker.pytorch")
    (source_dir / "train.py").write_text("print('trains')")
    found = rehearse(pytorch(source_dir, entry_point="train.py"), output_dir=tmp_path / "run", through="plain")
    assert found.exit_code == 0
    assert [message[:14] for message in caplog.messages if "SM-" in message] == ["SM-26 warning:"]
    with pytest.raises(ConfigError, match="has no report, because no launcher of hetero wrote one; exit code 0"):
        _ = found.report


def test_input_in_s3_is_refused_before_anything_is_started(estimator: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"channel training is s3://bucket/photos, .* data=\{'training': DIR\}"):
        rehearse(estimator, {"training": "s3://bucket/photos"}, output_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="did you mean 'endpoints_per_host'"):
        rehearse(estimator, output_dir=tmp_path / "run", endpoints_per_hosts=1)
    assert not (tmp_path / "run").exists()


def test_rehearsal_in_a_folder_of_another_leaves_that_one_s_files(estimator: Any, tmp_path: Path) -> None:
    report = tmp_path / "run" / "report.json"
    report.parent.mkdir()
    report.touch()
    with (
        locked_folder(tmp_path / "run"),
        pytest.raises(ConfigError, match="another simulation writes to"),
    ):
        rehearse(estimator, output_dir=tmp_path / "run")
    assert report.exists()


def test_what_hosts_could_not_be_told_is_refused_before_anything_is_started(
    estimator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("HETERO_TIME_SCALE", "slow")
        with pytest.raises(ConfigError, match="HETERO_TIME_SCALE is 'slow'"):
            rehearse(estimator, output_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="the request has the hyperparameter hetero_warmup_steps"):
        rehearse(estimator, output_dir=tmp_path / "run", warmup_steps=3)
    with pytest.raises(ConfigError, match="start_timeout_s"):
        rehearse(estimator, output_dir=tmp_path / "run", start_timeout_s=-1)
    estimator.environment = {"DATA": "/opt/ml/input/data"}
    with pytest.raises(ConfigError, match="a shell would misread the path"):
        rehearse(estimator, output_dir=tmp_path / "a run")
    estimator.environment = {}
    for group in estimator.instance_groups:
        group.instance_count = 126
    with pytest.raises(ConfigError, match="252 hosts; expected at most 250"):
        rehearse(estimator, output_dir=tmp_path / "run")
    for group, name in zip(estimator.instance_groups, "ab", strict=True):
        group.instance_type, group.instance_group_name, group.instance_count = "ml.c5.9xlarge", name, 1
    with pytest.raises(ClusterError, match="role"):
        rehearse(estimator, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_failure_is_the_jobs_own_and_not_an_earlier_ones(tmp_path: Path) -> None:
    estimator = estimator_of_statement("print('no such rounds'), sys.exit(2)", tmp_path)
    earlier = tmp_path / "run" / "hosts" / "algo-9" / "ml" / "output" / "failure"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("HET-31 algo-9: long ago")
    found = rehearse(estimator, output_dir=tmp_path / "run", endpoints_per_host=1)
    assert found.exit_code == 30
    assert found.failure == "HET-30 algo-2: rank 0: the training script exited with status 2"
    assert "no such rounds" in (found.output_dir / "hosts" / "algo-2" / "log.txt").read_text()


def request(**changes: Any) -> dict[str, Any]:
    """Return a request of two groups."""
    groups = [
        {"InstanceGroupName": "data_group", "InstanceType": "ml.c5.9xlarge", "InstanceCount": 3},
        {"InstanceGroupName": "dnn_group", "InstanceType": "ml.p3.2xlarge", "InstanceCount": 1},
    ]
    return {
        "TrainingJobName": "job",
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceGroups": groups},
        "HyperParameters": {"hetero_script": '"train.py"', "sagemaker_program": '"launcher.py"'},
        **changes,
    }


def channel(name: str = "train", **more: Any) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://bucket/{name}"} | more.pop("source", {})
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, **more}


@pytest.fixture
def source_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "launcher.py").write_text("")
    return folder


def refused(tmp_path: Path, document: dict[str, Any], *flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return why `hetero simulate --request` refuses a request."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(document))
    status = cli.main(["simulate", "--request", str(path), "--output-dir", str(tmp_path / "run"), *flags])
    assert status == ExitCode.USAGE
    assert not (tmp_path / "run" / "hosts").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"InputDataConfig": [channel()]}, [], "channel train is s3://bucket/train"),
        ({}, ["--channel=other=."], "no channel 'other'"),
        ({"InputDataConfig": [channel()]}, ["--channel=train=/no/such"], "/no/such"),
        ({"InputDataConfig": [channel("../out")]}, ["--channel=../out=."], "the channel '../out'"),
        ({"InputDataConfig": [channel(InputMode="Stream")]}, ["--channel=train=."], "the mode Stream"),
        (
            {"InputDataConfig": [channel(source={"InstanceGroupNames": ["gpu"]})]},
            ["--channel=train=."],
            "the group 'gpu', but the request has data_group, dnn_group",
        ),
        ({"InputDataConfig": [channel(RecordWrapperType="RecordIO")]}, ["--channel=train=."], "RecordWrapperType"),
        ({}, ["--through=docker"], "expected one of plain, toolkit"),
        ({}, ["--group=a=ml.c5.xlarge:1"], "a request has groups, script and options"),
        ({}, ["--source-dir=/no/such"], "/no/such does not exist"),
        ({"HyperParameters": {"hetero_port": "17200"}}, ["--port=1"], "the hyperparameter hetero_port"),
        ({"HyperParameters": {}}, [], "the request names no program"),
        ({"HyperParameters": {"sagemaker_program": '"other.py"'}}, [], "has no 'other.py'"),
        (
            {"AlgorithmSpecification": {"ContainerEntrypoint": ["/image/only"]}},
            [],
            "'/image/only' is not on this machine",
        ),
        ({"HyperParameters": {"sagemaker_program": '"launcher.py"', "hetero_sript": '"x"'}}, [], "'hetero_script'"),
    ],
)
def test_request_that_cannot_be_rehearsed_says_why(
    tmp_path: Path,
    source_dir: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    flags: list[str],
    message: str,
) -> None:
    found = refused(tmp_path, request(**changes), f"--source-dir={source_dir}", *flags, capsys=capsys)
    assert message.replace("the mode Stream", "the mode 'Stream'") in found


def test_code_in_s3_has_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--source-dir DIR" in refused(tmp_path, request(), capsys=capsys)


def test_ranks_of_the_toolkit_are_not_rehearsed(
    tmp_path: Path, source_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sagemaker_training")
    document = request()
    document["HyperParameters"]["sagemaker_mpi_enabled"] = "true"
    assert "the distribution mpi" in refused(tmp_path, document, f"--source-dir={source_dir}", capsys=capsys)


@pytest.mark.parametrize("flag", ["--source-dir=.", "--through=plain"])
def test_flag_of_a_request_without_one_is_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert cli.main(["simulate", flag, "train.py"]) == ExitCode.USAGE
    assert "--request FILE" in capsys.readouterr().err


def test_hosts_of_a_group_follow_no_order() -> None:
    names = local_job.host_names([("data", 7), ("trainers", 5)])
    assert names["data"][:2] == ["algo-1", "algo-3"]
    assert names["trainers"] == ["algo-2", "algo-4", "algo-6", "algo-8", "algo-10"]
    assert sorted(name for own in names.values() for name in own)[:4] == ["algo-1", "algo-10", "algo-11", "algo-12"]


def test_resource_config_is_the_platforms() -> None:
    parsed = TrainingRequest.parse(request())
    names = local_job.host_names([(group.name, group.count) for group in parsed.groups])
    groups = [group_document(group.name, group.instance_type, names[group.name]) for group in parsed.groups]
    document = {"instance_groups": groups, "network_interface_name": "lo"}
    cluster = parse_cluster(document, current_host="algo-1", source="test")
    assert local_job.resource_config(cluster, "algo-3") == {
        "current_group_name": "data_group",
        "current_host": "algo-3",
        "current_instance_type": "ml.c5.9xlarge",
        "hosts": ["algo-1", "algo-2", "algo-3", "algo-4"],
        "instance_groups": [
            {
                "instance_group_name": "data_group",
                "instance_type": "ml.c5.9xlarge",
                "hosts": ["algo-4", "algo-3", "algo-1"],
            },
            {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-2"]},
        ],
        "network_interface_name": "lo",
    }


def test_write_to_what_the_platform_has_read_only_is_told(
    tmp_path: Path, source_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = {name: tmp_path / name for name in ("fast", "file")}
    for folder in data.values():
        folder.mkdir()
        (folder / "0").write_text("0")

    def write_and_end(*_: object, **__: object) -> int:
        for folder in data.values():
            (folder / "1").write_text("1")
        return 0

    monkeypatch.setattr(local_job, "run_hosts", write_and_end)
    channels = [channel("fast", InputMode="FastFile"), channel("file")]
    document = TrainingRequest.parse(request(InputDataConfig=channels))
    assert local_job.run_request(document, output_dir=tmp_path, data=data, source_dir=source_dir) == 0
    assert [record.getMessage() for record in caplog.records if "read-only" in record.getMessage()] == [
        "a program wrote to the data of channel fast, which is read-only on the platform"
    ]


def test_entry_point_without_a_toolkit_gets_the_arguments_that_the_real_one_gives(
    tmp_path: Path, source_dir: Path
) -> None:
    mapping = pytest.importorskip("sagemaker_training.mapping", exc_type=ImportError)
    values = {"hetero_script": "train.py", "v": True, "lr": 1e-5, "data": {"b": 2, "a": "x"}, "name": "two words"}
    texts = {name: json.dumps(value) for name, value in values.items()} | {"sagemaker_program": '"launcher.py"'}
    container = Container.of(
        TrainingRequest.parse(request(HyperParameters=texts)),
        source_dir=source_dir,
        through="plain",
        output_dir=tmp_path,
    )
    host = SimulatedHost(name="algo-1", group="data_group", role=Role.DATA, address="127.0.0.1", root=tmp_path)
    found = container.set_up(host, {}, []).arguments
    assert found == [sys.executable, "launcher.py", *mapping.to_cmd_args(values)]


def test_program_of_the_container_may_come_with_the_code(tmp_path: Path, source_dir: Path) -> None:
    algorithm = {"TrainingImage": "image", "ContainerEntrypoint": ["/opt/ml/code/run.sh", "/opt/ml/model"]}
    parsed = TrainingRequest.parse(request(AlgorithmSpecification=algorithm))
    container = Container.of(parsed, source_dir=source_dir, through="plain", output_dir=tmp_path)
    host = SimulatedHost(name="algo-1", group="data_group", role=Role.DATA, address="127.0.0.1", root=tmp_path)
    with pytest.raises(
        ConfigError, match="'/opt/ml/code/run.sh' is not an executable file; expected it with mode 0755 in"
    ):
        container.set_up(host, {}, [])
    (source_dir / "run.sh").touch(mode=0o755)
    found = container.set_up(host, {}, []).arguments
    assert found == [f"{tmp_path}/ml/code/run.sh", f"{tmp_path}/ml/model"]


def test_code_that_cannot_be_copied_is_refused(tmp_path: Path, source_dir: Path) -> None:
    container = Container.of(
        TrainingRequest.parse(request()), source_dir=source_dir, through="plain", output_dir=tmp_path
    )
    os.mkfifo(source_dir / "pipe")
    host = SimulatedHost(name="algo-1", group="data_group", role=Role.DATA, address="127.0.0.1", root=tmp_path)
    with pytest.raises(ConfigError, match=r"cannot copy .*/pipe with the code: .* named pipe"):
        container.set_up(host, {}, [])


@pytest.mark.parametrize(("program", "is_copied"), [("hetero-launcher.py", False), ("launcher.py", True)])
def test_hosts_lack_what_prepare_would_ignore(tmp_path: Path, source_dir: Path, program: str, is_copied: bool) -> None:
    (source_dir / ".heteroignore").write_text("*.ckpt\n")
    (source_dir / "last.ckpt").touch()
    parsed = TrainingRequest.parse(request(HyperParameters={"sagemaker_program": program}))
    container = Container.of(parsed, source_dir=source_dir, through="plain", output_dir=tmp_path)
    host = SimulatedHost(name="algo-1", group="data_group", role=Role.DATA, address="127.0.0.1", root=tmp_path)
    container.set_up(host, {}, [])
    assert (tmp_path / "ml" / "code" / program).is_file()
    assert (tmp_path / "ml" / "code" / "last.ckpt").exists() == is_copied


def test_only_the_platforms_tree_is_a_hosts_in_the_environment(tmp_path: Path, source_dir: Path) -> None:
    texts = {"DATA": "/opt/ml/input/data:/opt/ml", "URI": "s3://bucket/opt/ml/x", "OTHER": "/opt/mlflow /opt/ml-data"}
    parsed = TrainingRequest.parse(request(Environment={**texts, "FILE": "file:///opt/ml/model"}))
    container = Container.of(parsed, source_dir=source_dir, through="plain", output_dir=tmp_path)
    host = SimulatedHost(name="algo-1", group="data_group", role=Role.DATA, address="127.0.0.1", root=tmp_path)
    found = container.set_up(host, {}, []).environment
    expected = {"DATA": f"{tmp_path}/ml/input/data:{tmp_path}/ml", "FILE": f"file://{tmp_path}/ml/model"}
    assert {name: found[name] for name in (*texts, "FILE")} == {**texts, **expected}


def test_single_file_lies_in_the_folder_of_its_channel(tmp_path: Path) -> None:
    (tmp_path / "digits.npz").write_bytes(b"1")
    found = InputChannel(name="train", path=tmp_path / "digits.npz")
    write_opt_ml(tmp_path / "ml", resource_config={}, hyperparameters={}, channels=[found])
    assert (tmp_path / "ml" / "input" / "data" / "train" / "digits.npz").read_bytes() == b"1"


def test_files_of_a_channel_are_in_the_order_of_the_objects_in_s3(tmp_path: Path) -> None:
    for name in ("a/1", "a-1", "a.1", "B"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (found,) = local_channels(TrainingRequest.parse(request(InputDataConfig=[channel()])), {"train": tmp_path})
    names = [str(path.relative_to(tmp_path)) for path in found.files("algo-1", ["algo-1"])]
    assert names == ["B", "a-1", "a.1", "a/1"]
