"""Runs as child processes: their commands, what is read from their output, and how they are stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero import cli, config
from hetero.decide.studies.executors import LaunchExecutor, SimulateExecutor, phases_of
from hetero.decide.studies.runs import PlannedRun
from hetero.documents.records import json_text
from hetero.errors import ConfigError
from hetero.metrics.logged import MetricPattern
from hetero.metrics.steps import StepTimer
from hetero.pricing import Catalogue
from hetero.report.model import RankFacts
from tests.support.studies import PRICED, report_of, small_runs

LOSS = MetricPattern(name="loss", regex=r"loss: ([0-9.]+)")


class ScriptExecutor(SimulateExecutor):
    """Runs Python code in place of a simulation. ``{folder}`` in it is the folder of the run."""

    def __init__(self, code: str, **options: Any) -> None:
        super().__init__(catalogue=PRICED, **options)
        self._code = code

    def _commands(self, run: PlannedRun, folder: Path) -> list[list[str]]:
        return [[sys.executable, "-c", self._code.replace("{folder}", str(folder))]]


@pytest.fixture
def run() -> PlannedRun:
    return small_runs(1)[0]


def test_simulation_gets_groups_channels_options_and_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    planned = PlannedRun(
        run_id="000",
        levels={},
        script=str(script),
        script_args=("--epochs", "3"),
        groups=("trainer=ml.p3.2xlarge:1", "data=ml.c5.xlarge:2"),
        channels={"train": "/data"},
        options={"nproc_per_node": 2, "audit": True, "prices": ("ml.x=1",)},
    )
    (command,) = SimulateExecutor(catalogue=PRICED)._commands(planned, tmp_path)
    parser = cli._make_parser()
    own, script_args = config.split_at_script(parser, command[3:])
    namespace = config.parse(parser, own)
    assert namespace.group == list(planned.groups)
    assert namespace.channel == ["train=/data"]
    assert (namespace.nproc_per_node, namespace.audit, namespace.price_file) == ("2", True, None)
    assert (namespace.script, script_args) == (str(script), ["--epochs", "3"])


def test_run_without_groups_or_script_is_rejected(tmp_path: Path) -> None:
    executor = SimulateExecutor(catalogue=PRICED)
    with pytest.raises(ConfigError, match="groups are missing"):
        executor.execute(PlannedRun(run_id="r", levels={}, script="train.py"), tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        executor.execute(small_runs(1)[0], tmp_path)


def test_price_is_that_of_all_hosts(run: PlannedRun) -> None:
    assert SimulateExecutor(catalogue=PRICED).hourly_usd(run) == 3.825
    assert SimulateExecutor(catalogue=Catalogue.load()).hourly_usd(run) is None


def test_result_has_the_report_and_what_the_expressions_found(run: PlannedRun, tmp_path: Path) -> None:
    report = json_text(report_of(wall_s=120.0, f1=0.5))
    code = (
        f"open('{{folder}}/report.json', 'w').write({report!r})\n"
        "print('[trainer algo-1 trainer] rank 1: loss: 2.5')\nprint('loss: none')\n"
        "print('rank 0: hetero.log_metric f1=0.5')\n"
    )
    result = ScriptExecutor(code, patterns=[LOSS]).execute(run, tmp_path)
    assert (result.state, result.exit_code, result.cause) == ("finished", 0, "")
    assert result.wall_s == 120.0
    assert result.usd == pytest.approx(3.825 * 120 / 3600)
    assert sorted((value.name, value.value, value.rank) for value in result.metrics) == [
        ("f1", 0.5, 0),
        ("loss", 2.5, 1),
    ]
    assert "loss: 2.5" in (tmp_path / "log.txt").read_text()


def test_run_with_a_malformed_report_has_the_values_of_its_log(run: PlannedRun, tmp_path: Path) -> None:
    code = "open('{folder}/report.json', 'w').write('{'); print('rank 0: hetero.log_metric f1=0.25')"
    result = ScriptExecutor(code).execute(run, tmp_path)
    assert (result.state, result.report) == ("finished", None)
    assert [value.value for value in result.metrics] == [0.25]


def test_run_without_a_report_has_the_values_of_its_log(run: PlannedRun, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")  # of an earlier run
    code = "print('rank 2: hetero.log_metric f1=0.25 step=7'); print('HET-34 algo-1: it raised'); raise SystemExit(34)"
    result = ScriptExecutor(code).execute(run, tmp_path)
    assert (result.state, result.exit_code, result.cause) == ("failed", 34, "HET-34 algo-1: it raised")
    (value,) = result.metrics
    assert (value.name, value.value, value.step, value.rank) == ("f1", 0.25, 7, 2)
    assert result.report is None


def test_cause_without_a_code_is_the_last_line(run: PlannedRun, tmp_path: Path) -> None:
    result = ScriptExecutor("print('first'); print('the last words'); print(); raise SystemExit(3)").execute(
        run, tmp_path
    )
    assert (result.exit_code, result.cause) == (3, "the last words")
    killed = ScriptExecutor("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").execute(run, tmp_path)
    assert killed.exit_code == 128 + signal.SIGKILL
    assert killed.cause


def test_variables_of_the_run_reach_its_processes(run: PlannedRun, tmp_path: Path) -> None:
    planned = PlannedRun(run_id="r", levels={}, script="", groups=run.groups, environment={"OWN_LEVEL": "7"})
    code = "import os; print('loss:', os.environ['OWN_LEVEL'])"
    result = ScriptExecutor(code, patterns=[LOSS]).execute(planned, tmp_path)
    assert [value.value for value in result.metrics] == [7.0]


@pytest.mark.parametrize("name", ["A=B", "A\0"])
def test_variable_that_no_process_can_have_is_rejected(run: PlannedRun, tmp_path: Path, name: str) -> None:
    planned = PlannedRun(run_id="r", levels={}, script="", groups=run.groups, environment={name: "1"})
    with pytest.raises(ConfigError, match="cannot start(.|\n)*check the args and the environment"):
        ScriptExecutor("pass").execute(planned, tmp_path)


def test_first_and_last_value_of_a_long_series_are_kept(
    run: PlannedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.decide.studies.executors.MAX_METRICS", 10)
    code = "for number in range(100): print(f'loss: {number}'); print(f'hetero.log_metric f1={number}')"
    result = ScriptExecutor(code, patterns=[LOSS]).execute(run, tmp_path)
    for name in ("f1", "loss"):
        values = [value.value for value in result.metrics if value.name == name]
        assert (values[0], values[-1]) == (0, 99)
        assert len(values) <= 10


def test_stopped_run_ends_and_later_ones_end_at_once(run: PlannedRun, tmp_path: Path) -> None:
    code = "import signal, sys; print('loss: 1', flush=True); signal.sigwait([signal.SIGTERM]); sys.exit(143)"
    code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n" + code
    executor = ScriptExecutor(code)
    results = []
    thread = threading.Thread(target=lambda: results.append(executor.execute(run, tmp_path)))
    thread.start()
    executor.stop()
    thread.join(100.0)
    assert [(result.state, result.exit_code) for result in results] == [("failed", 143)]
    assert executor.execute(run, tmp_path).exit_code == 143


CLUSTER = {
    "instance_groups": [
        {"instance_group_name": "data", "instance_type": "ml.c5.xlarge", "hosts": ["node-1"]},
        {"instance_group_name": "trainer", "instance_type": "ml.p3.2xlarge", "hosts": ["node-2", "node-3"]},
    ]
}


def test_launch_starts_each_host_of_the_cluster_file(tmp_path: Path) -> None:
    script, cluster = tmp_path / "train.py", tmp_path / "cluster.json"
    script.write_text("")
    cluster.write_text(json.dumps(CLUSTER))
    planned = PlannedRun(
        run_id="r",
        levels={},
        script=str(script),
        script_args=("a b",),
        channels={"training": "/data/photos"},
        environment={"X": "1"},
        options={"audit": True},
    )
    executor = LaunchExecutor(
        cluster_file=cluster, start=["ssh", "{host}", "--"], host="node-2", catalogue=Catalogue.load("seed-2022")
    )
    first, second, third = executor._commands(planned, tmp_path / "run")
    assert second[1:5] == ["-m", "hetero.cli", "launch", f"--cluster-file={cluster}"]
    assert f"--output-dir={tmp_path}/run" in second  # the first trainer host writes the report
    assert second[-3:] == [str(script), "--", "a b"]
    assert first[:3] == ["ssh", "node-1", "--"]
    assert first[3].endswith(f"--output-dir={tmp_path}/run/hosts/node-1 --audit {script} -- 'a b'")
    assert " && env SM_CHANNEL_TRAINING=/data/photos X=1 " in third[3]
    assert executor._types(planned) == [("ml.c5.xlarge", 1), ("ml.p3.2xlarge", 2)]


def test_paths_in_options_are_relative_to_the_study(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    options = {"price_file": "prices.json", "tls_dir": "/etc/tls"}
    groups = ("trainer=ml.p3.2xlarge:1",)
    planned = PlannedRun(
        run_id="r", levels={}, script=str(script), groups=groups, options=options, study_folder="/studies/a"
    )
    (command,) = SimulateExecutor(catalogue=PRICED)._commands(planned, tmp_path / "run")
    assert {"--price-file=/studies/a/prices.json", "--tls-dir=/etc/tls"} <= {
        *command,
        *(f"{flag}={value}" for flag, value in itertools.pairwise(command)),
    }


def test_run_whose_output_another_process_holds_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.decide.studies.child_job.END_TIMEOUT_S", 0.5)
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    (planned,) = small_runs(1)
    result = ScriptExecutor(code).execute(planned, tmp_path)
    assert result.state == "finished"
    os.kill(int((tmp_path / "log.txt").read_text().splitlines()[-1]), signal.SIGKILL)


def test_other_hosts_without_a_way_to_start_them_are_rejected(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps(CLUSTER))
    executor = LaunchExecutor(cluster_file=cluster, host="node-1", catalogue=PRICED)
    with pytest.raises(ConfigError, match=r'start: \["ssh", "\{host\}"\]'):
        executor._commands(PlannedRun(run_id="r", levels={}, script="train.py"), tmp_path)


def test_phases_of_a_run_without_steps_are_one() -> None:
    assert phases_of(report_of(wall_s=12.0)) == {"other": 12.0}


def test_phases_of_a_run_begin_with_its_start_and_have_its_wall_time_as_sum() -> None:
    report = report_of(wall_s=12.0)
    loaders = []
    for name, first_batch_at_s, num_steps in (("validation", 7.0, 2), ("train", 4.0, 6)):
        clock = iter(range(100))
        timer = StepTimer(
            name, warmup_steps=0, run_clock=lambda at_s=first_batch_at_s: at_s, clock=lambda c=clock: next(c)
        )
        for _ in range(num_steps + 1):
            timer.begin_wait()
            timer.end_wait(1)
        loaders.append(timer.summary())
    ranks = (RankFacts(rank=0, host="node-1", loaders=tuple(loaders)),)
    phases = phases_of(replace(report, run=replace(report.run, ranks=ranks, wall_s=20.0)))
    assert phases == {"start": 4.0, "compute": 6.0, "data wait": 6.0, "other": 4.0}
