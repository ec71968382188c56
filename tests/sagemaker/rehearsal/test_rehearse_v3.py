"""A rehearsal from a ``ModelTrainer`` on: the SDK's own scripts and drivers run on every host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.sagemaker import offline_session, prepare, rehearse

# The SDK leaves the folder into which it copies code for the collector.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning")
train = pytest.importorskip("sagemaker.train", reason="this is about version 3 of the SDK")

SCRIPT = """
import json, os, pathlib, sys
import hetero

@hetero.dataset
def nothing():
    return [0]

def main():
    config = json.loads(os.environ["TF_CONFIG"])
    facts = {"rank": config["task"]["index"], "size": len(config["cluster"]["worker"]), "arguments": sys.argv[1:]}
    facts["channels"] = [path.name for path in pathlib.Path(os.environ["SM_INPUT_DATA_DIR"]).iterdir()]
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "facts.json").write_text(json.dumps(facts))

if __name__ == "__main__":
    main()
"""


@pytest.mark.integration
def test_trainer_runs_through_the_drivers_of_its_sdk(tmp_path: Path) -> None:
    from sagemaker.core.shapes import InstanceGroup
    from sagemaker.train.configs import Compute, InputData, SourceCode

    source_dir, labels = tmp_path / "source", tmp_path / "labels"
    source_dir.mkdir()
    labels.mkdir()
    (source_dir / "train.py").write_text(SCRIPT)
    (source_dir / "requirements.txt").write_text("no-such-package-anywhere\n")
    groups = [("data_group", "ml.c5.9xlarge", 1), ("dnn_group", "ml.p3.2xlarge", 2)]
    trainer = train.ModelTrainer(
        training_image="tensorflow-training:2.19-gpu-py311",
        source_code=SourceCode(source_dir=str(source_dir), entry_script="train.py", requirements="requirements.txt"),
        compute=Compute(
            instance_groups=[
                InstanceGroup(instance_group_name=name, instance_type=kind, instance_count=count)
                for name, kind, count in groups
            ]
        ),
        hyperparameters={"epochs": 3},
        role="arn:aws:iam::111122223333:role/training",
        sagemaker_session=offline_session(),
        base_job_name="rehearsal",
    )
    prepare(trainer, framework="tensorflow")
    found = rehearse(trainer, [InputData(channel_name="labels", data_source=str(labels))], output_dir=tmp_path / "run")
    trees = {host: found.output_dir / "hosts" / host / "ml" for host in ("algo-1", "algo-2", "algo-3")}
    logs = {host: (tree.parent / "log.txt").read_text() for host, tree in trees.items()}
    assert (found.exit_code, found.failure) == (0, ""), logs
    tokens = [tree / "input" / "data" / "code" / "hetero-job" / "token" for tree in trees.values()]
    assert [token.stat().st_mode & 0o777 for token in tokens] == [0o600] * 3
    for log in logs.values():
        assert "Running Basic Script driver" in log
        assert "a rehearsal does not install" in log
        assert "Training Container Execution Completed" in log
    facts = [json.loads((trees[host] / "output" / "data" / "facts.json").read_text()) for host in ("algo-2", "algo-3")]
    assert [(each["rank"], each["size"]) for each in facts] == [(0, 2), (1, 2)]
    for each in facts:
        assert each["arguments"] == ["--epochs", "3"]
        assert sorted(each["channels"]) == ["code", "labels", "sm_drivers"]
