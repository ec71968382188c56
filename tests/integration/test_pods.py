"""The pods of a rendered JobSet as processes: each has the environment and the command that its manifest says.

There is no Kubernetes here. `Controller` does what the JobSet and the jobs in it promise: it restarts data pods that
fail, it ends the JobSet when the trainers have ended, and it then deletes the pods that are left. A pod without a node
is pending and has no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero import cli
from hetero.errors import ExitCode

CHAIN = Path(__file__).parent / "scripts" / "chain.py"
OPTIONS = ["--nproc-per-node", "2", "--endpoints-per-host", "1", "--trainer-endpoints", "0", "--start-timeout", "60"]

pytestmark = pytest.mark.timeout(240)


class Pod:
    """One pod, which may be started several times."""

    def __init__(self, name: str, spec: dict[str, Any], environment: dict[str, str], folder: Path) -> None:
        self.name, self.spec, self.environment, self.folder = name, spec, environment, folder
        self.num_starts = 0
        self.num_failures = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    def start(self) -> None:
        (container,) = self.spec["containers"]
        program, *arguments = container["command"]
        assert program == "hetero"
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hetero.cli", *arguments],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.num_starts += 1

    def delete(self) -> None:
        """Ask the pod to end, and kill it after its grace."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(self.spec["terminationGracePeriodSeconds"])
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Controller:
    """The controllers of a JobSet and of its jobs."""

    def __init__(self, manifest: dict[str, Any], folder: Path) -> None:
        self.spec = manifest["spec"]
        name = manifest["metadata"]["name"]
        token = folder / "token"
        token.write_text("a-token-of-a-test-0123456789")
        token.chmod(0o600)
        self.pods: list[Pod] = []
        hosts = []
        for job in self.spec["replicatedJobs"]:
            template = job["template"]["spec"]
            for index in range(template["completions"]):
                labels = {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
                    "jobset.sigs.k8s.io/job-index": "0",
                    "jobset.sigs.k8s.io/restart-attempt": "0",
                }
                own = f"{name}-{job['name']}-0-{index}"
                hosts.append(f"127.0.17.{len(hosts) + 1} {own}.{name}")
                pod = template["template"]["spec"]
                (container,) = pod["containers"]
                environment = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": own, "PATH": os.environ["PATH"]}
                for each in container["env"]:
                    field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                    environment[each["name"]] = each.get("value") or labels[field[len("metadata.labels['") : -2]]
                # What is not the same as in a cluster: volumes are folders, and a file has the names.
                environment |= {
                    "HETERO_TOKEN_FILE": str(token),
                    "HETERO_WORKSPACE": str(folder / "workspace" / own),
                    "HETERO_HOSTS_FILE": str(folder / "hosts"),
                    "HETERO_TIME_SCALE": "0.2",
                    "PYTHONPATH": str(CHAIN.parents[3]),
                }
                self.pods.append(Pod(own, pod, environment, folder))
        (folder / "hosts").write_text("\n".join(hosts) + "\n")

    @contextlib.contextmanager
    def running(self, *, pending: Sequence[str] = ()) -> Iterator[Controller]:
        try:
            for pod in self.pods:
                if pod.name not in pending:
                    pod.start()
            yield self
        finally:
            for pod in self.pods:
                pod.delete()

    def of(self, group: str) -> list[Pod]:
        return [pod for pod in self.pods if f"-{group}-0-" in pod.name]

    def reconcile(self) -> str:
        """Do what is due. Return ``Completed`` or ``Failed`` if the JobSet has ended, else an empty text."""
        targets = self.spec["successPolicy"]["targetReplicatedJobs"]
        codes: dict[str, list[int | None]] = {}
        for job in self.spec["replicatedJobs"]:
            for pod in self.of(job["name"]):
                code = None if pod.process is None else pod.process.poll()
                if code:
                    pod.num_failures += 1
                    if pod.num_failures > job["template"]["spec"]["backoffLimit"]:
                        return "Failed"
                    pod.start()  # in the same pod or in a new one: both have the same name and environment
                    code = None
                codes.setdefault(job["name"], []).append(code)
        return "Completed" if all(code == 0 for name in targets for code in codes[name]) else ""

    def take_node(self, pod: Pod) -> int:
        """Take a spot node back: its pod is asked to end, and a new one is pending. Return the code of the pod."""
        job = next(job for job in self.spec["replicatedJobs"] if pod in self.of(job["name"]))
        (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert pod.process is not None
        pod.process.terminate()
        code = pod.process.wait(60)
        pod.process = None
        return code

    def wait(self, timeout_s: float = 100.0) -> str:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if state := self.reconcile():
                return state
            time.sleep(0.1)
        raise AssertionError("\n".join(pod.log for pod in self.pods))

    def wait_until(self, pod: Pod, text: str, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in pod.log:
            assert time.monotonic() < deadline_s, pod.log
            assert not self.reconcile(), pod.log
            time.sleep(0.1)


def jobset(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, options: Sequence[str] = ()
) -> Controller:
    (folder / "out").mkdir()
    groups = ["--group", "dnn=GPU:1:1", "--group", "data=CPU:1:2", *options]
    command = ["render", "jobset", *groups, "--name", "photos", "--image", "x", *OPTIONS, str(CHAIN), "--"]
    assert cli.main([*command, "--output", str(folder / "out"), *arguments]) == ExitCode.OK
    return Controller(yaml.safe_load(capsys.readouterr().out), folder)


def chains(folder: Path) -> list[str]:
    return [json.loads((folder / f"rank-{rank}.json").read_text())["chain"] for rank in range(2)]


def chains_alone(folder: Path, *arguments: str) -> list[str]:
    (folder / "alone").mkdir()
    command = [sys.executable, "-m", "hetero.cli", "simulate", "--group", "dnn=ml.p3.2xlarge:1"]
    command += ["--output-dir", str(folder / "report"), *OPTIONS, str(CHAIN), "--", "--output", str(folder / "alone")]
    done = subprocess.run([*command, *arguments], capture_output=True, cwd=folder, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout.decode()}"
    return chains(folder / "alone")


def test_pods_are_fed_as_one_host_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jobset(capsys, tmp_path).running() as job:
        assert job.wait() == "Completed"
        (trainer,) = job.of("dnn")
        assert "platform: jobset, from the JOBSET_* environment" in trainer.log
        assert json.loads(
            (tmp_path / "workspace" / trainer.name / "output" / f"{trainer.name}.photos" / "report.json").read_text()
        )
    assert chains(tmp_path / "out") == chains_alone(tmp_path)


def test_data_pod_that_is_killed_is_restarted_and_joins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--epochs", "8", "--step-s", "0.1"]
    with jobset(capsys, tmp_path, *arguments).running() as job:
        (trainer,) = job.of("dnn")
        victim, other = job.of("data")
        job.wait_until(trainer, "epoch 1 step")
        assert victim.process is not None
        os.killpg(victim.process.pid, signal.SIGKILL)
        assert job.wait() == "Completed"
        assert (victim.num_starts, other.num_starts, trainer.num_starts) == (2, 1, 1)
    assert chains(tmp_path / "out") == chains_alone(tmp_path, "--epochs", "8")


def test_trainer_that_fails_fails_the_jobset_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jobset(capsys, tmp_path, "--fail-at", "3").running() as job:
        assert job.wait() == "Failed"
        (trainer,) = job.of("dnn")
        assert trainer.process is not None
        assert trainer.process.wait(30) == ExitCode.SCRIPT_FAILED
        assert "HET-30" in trainer.log


def test_pods_that_are_deleted_stop_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jobset(capsys, tmp_path, "--epochs", "1000", "--step-s", "0.05").running() as job:
        (trainer,) = job.of("dnn")
        job.wait_until(trainer, "epoch 1 step")
        begin_s = time.monotonic()
        for pod in job.pods:
            assert pod.process is not None
            pod.process.terminate()
        codes = {pod.name: pod.process.wait(60) for pod in job.pods if pod.process is not None}
        assert set(codes.values()) == {128 + signal.SIGTERM}
        assert time.monotonic() - begin_s < 60


def test_spot_group_starts_without_a_host_and_loses_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--epochs", "24", "--step-s", "0.1"]
    controller = jobset(capsys, tmp_path, *arguments, options=["--spot", "data=0.1"])
    (trainer,) = controller.of("dnn")
    first, late = controller.of("data")
    with controller.running(pending=[late.name]) as job:
        job.wait_until(trainer, "epoch 1 step")  # one spot node was there
        late.start()
        job.wait_until(late, "serving with")
        assert job.take_node(first) == 128 + signal.SIGTERM
        assert job.wait() == "Completed"
        assert (first.num_starts, late.num_starts, trainer.num_starts) == (1, 1, 1)
    report = json.loads(next((tmp_path / "workspace").glob("*/output/*/report.json")).read_text())
    assert {group["name"]: group.get("spot_usd") for group in report["run"]["groups"]} == {"dnn": None, "data": 0.1}
    assert chains(tmp_path / "out") == chains_alone(tmp_path, "--epochs", "24")
