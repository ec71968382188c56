"""A study of real jobs on simulated hosts: killed in the middle, continued, and its results."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from hetero.report import load_report
from tests.support.integration.harness import CHAIN, TIME_SCALE, Job, Start

EXAMPLE = Path(__file__).parents[2] / "examples" / "decide"
SCRIPT = CHAIN.with_name("studied.py")
FILE = """
name: killed
script: studied.py
args: [--epochs, "{epochs}", --samples, "{samples}", --most, "2000"]
factors:
  cluster:
    one: {options: {nproc_per_node: 1}}
    two: {options: {nproc_per_node: 2}}
  samples: [1000, 3000]
groups: ["trainer=ml.p3.2xlarge:1"]
constraints: {fix: steps, steps: 750, batch_per_device: 8, learning_rate: 1.0e-3, learning_rate_rule: sqrt}
options: {price_profile: seed-2022, framework: tensorflow}
metrics: [{name: accuracy, target: 0.7}, {name: loss, goal: min, regex: "loss: ([0-9.]+)"}]
budget: {usd: 1}
"""


@pytest.mark.integration
def test_killed_study_goes_on_and_compares_its_runs(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    (folder / "STUDY.yaml").write_text(FILE)
    command = [sys.executable, "-m", "hetero.cli", "study", str(folder / "STUDY.yaml")]

    command += ["--output-dir", str(folder / "out")]

    def begin() -> Job:
        return start(command, folder, {})

    killed = begin()
    killed.wait_line("run 2 of 4: ")
    killed.process.kill()  # the job of the second run dies with it
    killed.wait()
    continued = begin()
    assert continued.wait(300.0) == 30, continued.output  # as runs failed
    assert "run 2 of 4: " in continued.output
    assert "run 1 of 4: " not in continued.output
    assert "interrupted after" in continued.output
    assert "left: nothing; 2 failed" in continued.output

    with (folder / "out" / "runs.csv").open() as file:
        rows = {(row["cluster"], row["samples"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    for cluster, ranks in (("one", 1), ("two", 2)):
        row = rows[cluster, "1000"]
        assert (row["state"], row["epochs"], row["ranks"]) == ("finished", "6", str(ranks))
        assert float(row["accuracy"]) == pytest.approx(1 - 0.5**6 - 0.01 * ranks)
        assert float(row["loss"]) == 0.5**6
        assert float(row["usd"]) == pytest.approx(3.825 * float(row["wall_s"]) / 3600)
        assert 0 < float(row["accuracy_time_to_target_s"]) <= float(row["wall_s"])
        assert rows[cluster, "3000"]["state"] == "failed"
        assert "3000 samples are too many" in rows[cluster, "3000"]["cause"]

    report = load_report(folder / "out" / "runs" / rows["two", "1000"]["run_id"])
    assert [value.step for value in report.run.metrics if value.rank == 1] == [1, 2, 3, 4, 5, 6]
    assert [value.rank for value in report.run.metrics] == [0] * 6 + [1] * 6
    page = (folder / "out" / "study.html").read_text()
    assert page.count("<svg") >= 5
    lines = [json.loads(line) for line in (folder / "out" / "runs.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines].count("ended") == 5  # one of them stopped with the study


@pytest.mark.integration
def test_example_leads_from_a_study_to_a_plan(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE / "fit.py", tmp_path)
    designed = (EXAMPLE / "cluster.yaml").read_text(encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(designed.replace('"0.05"', '"0.01"'))  # the fewest steps that suffice
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    commands = [shlex.split(block.replace("\\\n", " "))[1:] for language, block in blocks if language == "sh"]
    assert [words[0] for words in commands] == ["canary", "study", "plan"]
    assert commands[0][-1] == "fit.py"
    study = start([sys.executable, "-m", "hetero.cli", *commands[1], "--only", "cluster=one host"], tmp_path, {})
    assert study.wait() == 0, study.output
    plan = start([sys.executable, "-m", "hetero.cli", *commands[2]], tmp_path, {})
    code = plan.wait()
    if "so no plan follows from the profile" in plan.output:  # a busy machine
        assert "may be due to other work of the machine" in plan.output
        assert code == 2
    else:
        assert code == 0, plan.output
        assert "Add 1 x ml.c5.9xlarge as data hosts: a step takes " in plan.output


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_run_and_the_results_are_written(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    waits = tmp_path / "waits"
    os.mkfifo(waits)
    (tmp_path / "waits.py").write_text(
        "import time\nimport hetero\nhetero.on_stop(lambda: print('saved', flush=True))\n"
        f"open({str(waits)!r}, 'w').close()\nwhile True:\n    time.sleep(0.1)\n"
    )
    (tmp_path / "STUDY.yaml").write_text(
        "name: waits\nscript: waits.py\nfactors: {samples: [1, 2]}\ngroups: ['trainer=ml.p3.2xlarge:1']\n"
        "options: {framework: tensorflow, nproc_per_node: 1}\n"
    )
    command = [sys.executable, "-m", "hetero.cli", "study", "STUDY.yaml", "--output-dir", "out"]
    environment = {"HETERO_TIME_SCALE": str(TIME_SCALE)}
    job = start(["env", "-C", str(tmp_path), *command], tmp_path, environment)
    waits.read_text()  # blocks until the script runs
    job.process.send_signal(number)
    assert job.wait(300.0) == 128 + number, job.output
    assert "Traceback" not in job.output
    (log,) = (tmp_path / "out" / "runs").glob("*/log.txt")
    assert "saved" in log.read_text()
    last = json.loads((tmp_path / "out" / "runs.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["state"]) == ("ended", "stopped")
    assert (tmp_path / "out" / "study.html").is_file()


@pytest.mark.integration
def test_study_is_launched_on_the_hosts_of_cluster_files(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    group = {"instance_group_name": "trainer", "instance_type": "ml.p3.2xlarge", "hosts": ["127.0.0.1"]}
    (folder / "cluster.json").write_text(json.dumps({"instance_groups": [group]}))
    (folder / "STUDY.yaml").write_text(
        "name: launched\nscript: studied.py\nargs: [--epochs, '2', --samples, '{samples}', --most, '2000']\n"
        "factors: {samples: [1000, 3000], ranks_per_host: {one: {options: {nproc_per_node: 2}}}}\n"
        "options: {price_profile: seed-2022, framework: tensorflow, port: 17809}\n"
        "executor: {launch: {cluster_file: cluster.json, host: 127.0.0.1}}\n"
    )
    command = [sys.executable, "-m", "hetero.cli", "study", str(folder / "STUDY.yaml")]
    environment = {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
    job = start([*command, "--output-dir", str(folder / "out")], tmp_path, environment)
    assert job.wait(300.0) == 30, job.output  # as a run failed
    with (folder / "out" / "runs.csv").open() as file:
        rows = {row["samples"]: row for row in csv.DictReader(file)}
    assert {samples: (row["state"], row["ranks"], row["hosts"]) for samples, row in rows.items()} == {
        "1000": ("finished", "2", "1"),
        "3000": ("failed", "2", "1"),
    }
    report = load_report(folder / "out" / "runs" / rows["1000"]["run_id"])
    assert [(group.name, group.count) for group in report.run.groups] == [("trainer", 1)]
    assert {value.rank for value in report.run.metrics} == {0, 1}
    assert float(rows["1000"]["usd"]) == pytest.approx(3.825 * report.run.wall_s / 3600)
