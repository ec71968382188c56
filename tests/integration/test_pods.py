"""The pods of rendered manifests as processes: each has the environment and the command that its manifest says.

This is not Kubernetes. `Controller` does what the controllers of JobSet, TrainJob and Volcano promise: it restarts
data pods that fail, it ends the job when the trainers have ended, and it then deletes the pods that are left. A pod
without a node is pending, without a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero import cli
from hetero.errors import ExitCode
from tests.support.integration.arrays_job import ARRAYS, WITHOUT_TORCH, check_fed_as_alone
from tests.support.integration.harness import CHAIN, chains, chains_alone

OPTIONS = ["--nproc-per-node", "2", "--endpoints-per-host", "1", "--trainer-endpoints", "0", "--start-timeout", "60"]
LONG = ["--step-s", "0.05", "--until"]
"""Arguments of arrays.py before the file until which it trains."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodGroup:
    """What a controller makes pods from."""

    name: str
    count: int
    spec: dict[str, Any]
    """Template of the pods."""
    prefix: str
    """Name of a pod without its number."""
    failures: int
    """Failures of its pods until the job fails."""
    is_target: bool
    """Whether the job has ended when these pods have."""
    ignores_disruptions: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the controller adds to the environment. A value may have ``{index}``, the number of the pod."""


def groups_of_jobset(spec: dict[str, Any], name: str, *, training: Mapping[str, Any] | None = None) -> list[PodGroup]:
    """Return the groups of a JobSet. ``training`` is what a TrainJob says about its job ``node``."""
    found = []
    for job in spec["replicatedJobs"]:
        own = job["template"]["spec"]
        is_node = training is not None and job["name"] == "node"
        variables = {"JOB_COMPLETION_INDEX": "{index}"}
        if training is not None and is_node:
            variables |= {
                "PET_NNODES": str(training["numNodes"]),
                "PET_NODE_RANK": "{index}",
                "PET_NPROC_PER_NODE": "7",  # of torchrun, not of hetero
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29400",
            }
        rules = own.get("podFailurePolicy", {}).get("rules", [])
        found.append(
            PodGroup(
                name=job["name"],
                count=training["numNodes"] if training is not None and is_node else own["completions"],
                spec=own["template"]["spec"],
                prefix=f"{name}-{job['name']}-0",
                failures=own["backoffLimit"],
                is_target=job["name"] in spec["successPolicy"]["targetReplicatedJobs"],
                ignores_disruptions=any(
                    rule["action"] == "Ignore" and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
                    for rule in rules
                ),
                variables=variables,
            )
        )
    return found


def groups_of_volcano(spec: dict[str, Any], name: str) -> list[PodGroup]:
    """Return the tasks of a Volcano job with the plugins ``env`` and ``svc``."""
    assert {"env", "svc"} <= spec["plugins"].keys()
    hosts = {
        f"VC_{task['name'].replace('-', '_').upper()}_HOSTS": ",".join(
            f"{name}-{task['name']}-{index}.{name}" for index in range(task["replicas"])
        )
        for task in spec["tasks"]
    }
    found = []
    for task in spec["tasks"]:
        actions = {policy["event"]: policy["action"] for policy in task["policies"]}
        found.append(
            PodGroup(
                name=task["name"],
                count=task["replicas"],
                spec=task["template"]["spec"],
                prefix=f"{name}-{task['name']}",
                failures=0 if actions.get("PodFailed") == "AbortJob" else spec["maxRetry"],
                is_target=actions.get("TaskCompleted") == "CompleteJob",
                variables={"VC_TASK_INDEX": "{index}", **hosts},
            )
        )
    return found


def groups_of(manifests: list[dict[str, Any]]) -> list[PodGroup]:
    """Return the groups that the controllers make from the manifest."""
    last = manifests[-1]
    name = last["metadata"]["name"]
    if last["kind"] == "TrainJob":
        return groups_of_jobset(manifests[0]["spec"]["template"]["spec"], name, training=last["spec"]["trainer"])
    return groups_of_jobset(last["spec"], name) if last["kind"] == "JobSet" else groups_of_volcano(last["spec"], name)


class Controller:
    """The controllers of a job and of its groups."""

    def __init__(self, manifests: list[dict[str, Any]], folder: Path) -> None:
        self.groups = groups_of(manifests)
        name = manifests[-1]["metadata"]["name"]
        token = folder / "token"
        token.write_text("a-token-of-a-test-0123456789")
        token.chmod(0o600)
        self.pods: dict[str, list[Pod]] = {}
        hosts: list[str] = []
        for group in self.groups:
            labels = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": group.name,
                "jobset.sigs.k8s.io/job-index": "0",
                "jobset.sigs.k8s.io/restart-attempt": "0",
            }
            for index in range(group.count):
                own = f"{group.prefix}-{index}"
                hosts.append(f"127.0.17.{len(hosts) + 1} {own}.{name}")
                (container,) = group.spec["containers"]
                environment = {"HOSTNAME": own, "PATH": os.environ["PATH"]}
                for each in container["env"]:
                    field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                    environment[each["name"]] = each.get("value") or labels[field[len("metadata.labels['") : -2]]
                environment |= {key: value.format(index=index) for key, value in group.variables.items()}
                # What is not the same as in a cluster: volumes are folders, and a file has the names.
                environment |= {
                    "HETERO_TOKEN_FILE": str(token),
                    "HETERO_WORKSPACE": str(folder / "workspace" / own),
                    "HETERO_HOSTS_FILE": str(folder / "hosts"),
                    "HETERO_TIME_SCALE": "0.2",
                    "PYTHONPATH": str(CHAIN.parents[3]),
                }
                self.pods.setdefault(group.name, []).append(Pod(own, group.spec, environment, folder))
        (folder / "hosts").write_text("\n".join(hosts) + "\n")

    @property
    def all_pods(self) -> list[Pod]:
        return [pod for pods in self.pods.values() for pod in pods]

    @contextlib.contextmanager
    def running(self, *, pending: Sequence[Pod] = ()) -> Iterator[Controller]:
        try:
            for pod in self.all_pods:
                if pod not in pending:
                    pod.start()
            yield self
        finally:
            for pod in self.all_pods:
                pod.delete()

    def reconcile(self) -> str:
        """Do what is due. Return ``Completed`` or ``Failed`` if the job has ended, else an empty text."""
        have_ended = []
        for group in self.groups:
            for pod in self.pods[group.name]:
                code = None if pod.process is None else pod.process.poll()
                if code:
                    pod.num_failures += 1
                    if pod.num_failures > group.failures:
                        return "Failed"
                    pod.start()  # in the same pod or in a new one: both have the same name and environment
                    code = None
                if group.is_target:
                    have_ended.append(code == 0)
        return "Completed" if all(have_ended) else ""

    def take_node(self, pod: Pod) -> int:
        """Take a spot node back: its pod is asked to end, and a new one is pending. Return the code of the pod."""
        assert next(group for group in self.groups if pod in self.pods[group.name]).ignores_disruptions
        assert pod.process is not None
        pod.process.terminate()
        code = pod.process.wait(300)
        pod.process = None
        return code

    def wait(self, timeout_s: float = 300.0) -> str:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if state := self.reconcile():
                return state
            time.sleep(0.1)
        raise AssertionError("\n".join(pod.log for pod in self.all_pods))

    def wait_until(self, pod: Pod, text: str, timeout_s: float = 300.0, *, begin: int = 0) -> None:
        """Wait until a pod has logged a text, after a number of characters."""
        deadline_s = time.monotonic() + timeout_s
        while text not in pod.log[begin:]:
            assert time.monotonic() < deadline_s, pod.log
            assert not self.reconcile(), pod.log
            time.sleep(0.1)


def submitted(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *arguments: str,
    platform: str = "jobset",
    options: Sequence[str] = WITHOUT_TORCH,
    script: Path = ARRAYS,
    num_data: int = 1,
) -> Controller:
    """Return the controller of a rendered job with the groups ``node``, which trains, and ``data``."""
    (folder / "out").mkdir()
    groups = ["--group", "node=GPU:1:1", "--group", f"data=CPU:1:{num_data}"]
    command = ["render", platform, *groups, "--name", "photos", "--image", "x", *OPTIONS, *options, str(script), "--"]
    assert cli.main([*command, "--output", str(folder / "out"), *arguments]) == ExitCode.OK
    return Controller(list(yaml.safe_load_all(capsys.readouterr().out)), folder)


def check_report(folder: Path, trainer: Pod, platform: str) -> None:
    assert f"platform: {platform}, from the " in trainer.log
    (report,) = (folder / "workspace" / trainer.name / "output").glob(f"{trainer.name}.*/report.json")
    assert json.loads(report.read_text())["run"]["exit_code"] == 0


def test_pods_of_a_trainjob_are_fed_as_one_host_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its operator sets variables that torchrun would take, so torchrun starts these ranks."""
    with submitted(
        capsys, tmp_path, platform="trainjob", options=["--nproc-per-node", "1"], script=CHAIN
    ).running() as job:
        assert job.wait() == "Completed"
        (trainer,) = job.pods["node"]
        check_report(tmp_path, trainer, "trainjob")
    assert chains(tmp_path / "out", 1) == chains_alone()


@pytest.mark.parametrize("platform", ["jobset", pytest.param("volcano", marks=pytest.mark.long)])
def test_data_pod_that_is_killed_is_restarted_and_pods_are_fed_as_one_host_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], platform: str
) -> None:
    enough = tmp_path / "enough"
    with submitted(capsys, tmp_path, *LONG, str(enough), platform=platform, num_data=2).running() as job:
        (trainer,) = job.pods["node"]
        victim, other = job.pods["data"]
        job.wait_until(trainer, "epoch 1 step")
        assert victim.process is not None
        victim_log = len(victim.log)
        os.killpg(victim.process.pid, signal.SIGKILL)
        job.wait_until(victim, "serving with", begin=victim_log)
        enough.touch()
        assert job.wait() == "Completed"
        assert (victim.num_starts, other.num_starts, trainer.num_starts) == (2, 1, 1)
        check_report(tmp_path, trainer, platform)
    check_fed_as_alone(tmp_path / "out", num_ranks=2)


@pytest.mark.parametrize("platform", ["jobset", pytest.param("volcano", marks=pytest.mark.long)])
def test_trainer_that_fails_fails_the_job_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], platform: str
) -> None:
    with submitted(capsys, tmp_path, "--fail-at", "3", platform=platform).running() as job:
        assert job.wait() == "Failed"
        (trainer,) = job.pods["node"]
        assert trainer.process is not None
        assert trainer.process.wait(300) == ExitCode.SCRIPT_FAILED
        assert "HET-30" in trainer.log


def test_pods_that_are_deleted_stop_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with submitted(capsys, tmp_path, *LONG, str(tmp_path / "enough")).running() as job:
        (trainer,) = job.pods["node"]
        job.wait_until(trainer, "epoch 1 step")
        for pod in job.all_pods:
            assert pod.process is not None
            pod.process.terminate()
        deadline_s = time.monotonic() + 60.0  # promised
        codes = {
            pod.name: pod.process.wait(deadline_s - time.monotonic()) for pod in job.all_pods if pod.process is not None
        }
        assert set(codes.values()) == {128 + signal.SIGTERM}


@pytest.mark.fault("F41")
def test_spot_group_starts_without_a_host_and_loses_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough = tmp_path / "enough"
    options = [*WITHOUT_TORCH, "--spot", "data=0.1"]
    controller = submitted(capsys, tmp_path, *LONG, str(enough), options=options, num_data=2)
    (trainer,) = controller.pods["node"]
    first, late = controller.pods["data"]
    with controller.running(pending=[late]) as job:
        job.wait_until(trainer, "epoch 1 step")  # one spot node was there
        late.start()
        job.wait_until(late, "serving with")
        assert job.take_node(first) == 128 + signal.SIGTERM
        enough.touch()
        assert job.wait() == "Completed"
        assert (first.num_starts, late.num_starts, trainer.num_starts) == (1, 1, 1)
    report = json.loads(next((tmp_path / "workspace").glob("*/output/*/report.json")).read_text())
    assert {group["name"]: group.get("spot_usd") for group in report["run"]["groups"]} == {"node": None, "data": 0.1}
    check_fed_as_alone(tmp_path / "out", num_ranks=2)
