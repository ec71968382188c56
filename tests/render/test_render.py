"""Scripts and manifests: their platform reads back what they say, on every host."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero import cli
from hetero.cluster import Role, find_platform
from hetero.errors import ExitCode

GROUPS = ["--group", "data=CPU:16:3", "--group", "node=GPU:8:2"]  # data first: render puts the trainers first
COMMAND = [*GROUPS, "--name", "photos", "--hours", "1.5", "--audit"]
IMAGE = ["--image", "registry/photos:1"]
SCRIPT = ["train.py", "--", "--lr", "0.1", "--note", "it's a test"]
WORDS = ["hetero", "launch", "--audit", "train.py", "--", "--lr", "0.1", "--note", "it's a test"]


def rendered(capsys: pytest.CaptureFixture[str], platform: str, *options: str) -> str:
    image = [] if platform == "slurm" else IMAGE
    assert cli.main(["render", platform, *COMMAND, *image, *options, *SCRIPT]) == ExitCode.OK
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["render", *arguments]) in (ExitCode.USAGE, ExitCode.CLUSTER)
    return capsys.readouterr().err


def environment_of(pod: dict[str, Any], labels: dict[str, str], **more: str) -> dict[str, str]:
    """Return the variables of a pod's container, as Kubernetes makes them."""
    (container,) = pod["containers"]
    found = {}
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            found[variable["name"]] = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
    return {**found, **more}


def pods_of_jobset(spec: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Return the name, the spec and the variables of each pod of a JobSet, as its controller makes them."""
    found = []
    for job in spec["replicatedJobs"]:
        template = job["template"]["spec"]
        for index in range(template.get("completions", 2)):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
                "jobset.sigs.k8s.io/job-index": "0",
                "jobset.sigs.k8s.io/restart-attempt": "0",
            }
            pod = template["template"]["spec"]
            host = f"{name}-{job['name']}-0-{index}"
            found.append((host, pod, environment_of(pod, labels, JOB_COMPLETION_INDEX=str(index), HOSTNAME=host)))
    return found


def check_places(places: list[tuple[str, dict[str, str]]], platform: str) -> None:
    """Check that each host finds the same cluster and its own place."""
    clusters = []
    for host, environ in places:
        found = find_platform(environ)
        assert found.name == platform
        cluster = found.read_cluster()
        assert cluster.current_host.partition(".")[0] == host
        clusters.append([(each.name, each.hosts, each.role, each.instance_type) for each in cluster.groups])
        assert found.kill_after_s == 120
    assert all(each == clusters[0] for each in clusters)
    assert {name: (len(hosts), role) for name, hosts, role, _ in clusters[0]} == {
        "node": (2, Role.TRAINER),
        "data": (3, Role.DATA),
    }
    assert len({host for host, _ in places}) == 5


def check_pod(pod: dict[str, Any], *, restarts: str) -> None:
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == restarts
    assert pod["terminationGracePeriodSeconds"] == 120
    assert container["image"] == "registry/photos:1"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["token"]["secret"] == {"secretName": "photos-token", "defaultMode": 0o400}
    assert mounts["token"]["subPath"] == "token"  # a file and no link, which hetero would not follow
    assert mounts["shm"]["mountPath"] == "/dev/shm"
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["HETERO_TOKEN_FILE"] == mounts["token"]["mountPath"]
    assert "token" not in str(variables["HETERO_GROUPS"])


def test_jobset_places_every_pod(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = yaml.safe_load(rendered(capsys, "jobset"))
    spec = manifest["spec"]
    pods = pods_of_jobset(spec, manifest["metadata"]["name"])
    check_places([(host, environ) for host, _, environ in pods], "jobset")
    for host, pod, _ in pods:
        check_pod(pod, restarts="Never" if "node" in host else "OnFailure")
        assert pod["containers"][0]["command"] == WORDS
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert list(jobs) == ["node", "data"]
    assert {name: job["backoffLimit"] for name, job in jobs.items()} == {"node": 0, "data": 100}
    assert {job["activeDeadlineSeconds"] for job in jobs.values()} == {5400}
    limits = {name: job["template"]["spec"]["containers"][0]["resources"]["limits"] for name, job in jobs.items()}
    assert limits == {"node": {"nvidia.com/gpu": 8}, "data": {"cpu": 16}}


def test_trainjob_places_every_pod(capsys: pytest.CaptureFixture[str]) -> None:
    runtime, job = yaml.safe_load_all(rendered(capsys, "trainjob"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    pods = pods_of_jobset(runtime["spec"]["template"]["spec"], job["metadata"]["name"])
    training = {"PET_NNODES": "2", "PET_MASTER_ADDR": "photos-node-0-0.photos", "PET_MASTER_PORT": "29400"}
    places = []
    for host, pod, environ in pods:
        is_data = "data" in host
        check_pod(pod, restarts="OnFailure" if is_data else "Never")
        places.append((host, environ if is_data else {**environ, **training, "PET_NODE_RANK": host[-1]}))
    kinds = {find_platform(environ).name for _, environ in places}
    assert kinds == {"jobset", "trainjob"}
    clusters = [find_platform(environ).read_cluster() for _, environ in places]
    assert {tuple(host.name for host in cluster.hosts) for cluster in clusters} == {
        tuple(sorted(f"{host}.photos" for host, _ in places))
    }
    assert (
        len({find_platform(environ).job_id(cluster) for (_, environ), cluster in zip(places, clusters, strict=True)})
        == 1
    )


def test_volcano_places_every_pod(capsys: pytest.CaptureFixture[str]) -> None:
    spec = yaml.safe_load(rendered(capsys, "volcano", "--queue", "research"))["spec"]
    assert (spec["minAvailable"], spec["queue"]) == (5, "research")
    hosts = {
        f"VC_{task['name'].upper()}_HOSTS": ",".join(
            f"photos-{task['name']}-{index}.photos" for index in range(task["replicas"])
        )
        for task in spec["tasks"]
    }
    places = []
    for task in spec["tasks"]:
        pod = task["template"]["spec"]
        check_pod(pod, restarts="Never" if task["name"] == "node" else "OnFailure")
        for index in range(task["replicas"]):
            host = f"photos-{task['name']}-{index}"
            environ = environment_of(pod, {}, HOSTNAME=host, VC_TASK_INDEX=str(index), **hosts)
            places.append((host, environ))
    check_places(places, "volcano")
    (trainer, data) = spec["tasks"]
    assert {policy["event"]: policy["action"] for policy in trainer["policies"]} == {
        "PodFailed": "AbortJob",
        "TaskCompleted": "CompleteJob",
    }
    assert data["policies"] == []


def test_vertex_has_the_trainers_in_the_first_two_pools(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "data=n2-highcpu-32:3", "--group", "train=n1-standard-16+NVIDIA_TESLA_V100:4:2"]
    command = ["render", "vertex", *groups, "--image", "gcr.io/x", "--token", "gs://bucket/token", *SCRIPT]
    assert cli.main(command) == ExitCode.OK
    pools = yaml.safe_load(capsys.readouterr().out)["workerPoolSpecs"]
    assert [pool["replicaCount"] for pool in pools] == [1, 1, 3]
    assert pools[0]["machineSpec"] == {
        "machineType": "n1-standard-16",
        "acceleratorType": "NVIDIA_TESLA_V100",
        "acceleratorCount": 4,
    }
    assert pools[2]["machineSpec"] == {"machineType": "n2-highcpu-32"}
    shell = pools[0]["containerSpec"]["command"]
    assert shell[:2] == ["/bin/sh", "-c"]
    assert shell[2].startswith("install -m 600 /gcs/bucket/token ")
    assert "'it'\"'\"'s a test'" in shell[2]


def test_vertex_with_one_trainer_leaves_pool_1_empty(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "train=a2-highgpu-1g:1", "--group", "data=n2-highcpu-32:2"]
    command = ["render", "vertex", *groups, "--image", "x", "--token", "gs://b/t", "train.py"]
    assert cli.main(command) == ExitCode.OK
    pools = yaml.safe_load(capsys.readouterr().out)["workerPoolSpecs"]
    assert [pool.get("replicaCount") for pool in pools] == [1, None, 2]


@pytest.mark.parametrize("separate", [False, True])
def test_slurm_script_has_a_component_per_group(capsys: pytest.CaptureFixture[str], separate: bool) -> None:
    text = rendered(capsys, "slurm", "--partition", "data:cpu", *(["--separate-steps"] if separate else []))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    trainer, data = text.split("#SBATCH hetjob")
    assert "#SBATCH --gpus-per-node=8" in trainer
    assert "#SBATCH --partition=cpu" in data
    assert "#SBATCH --cpus-per-task=16" in data
    for component, nodes in ((trainer, 2), (data, 3)):
        assert f"#SBATCH --nodes={nodes}" in component
        assert "#SBATCH --no-kill" in component
        assert "#SBATCH --signal=TERM@120" in component
        assert "#SBATCH --time=1:30:00" in component
    assert "export HETERO_GROUPS='node=GPU:8:2 data=CPU:16:3'" in text
    steps = [line for line in text.splitlines() if line.startswith("srun ")]
    assert [line.split()[1] for line in steps] == (
        ["--het-group=0", "--het-group=1"] if separate else ["--het-group=0,1"]
    )


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("codes", [(0, 0), (3, 0), (0, 26), (143, 26)])
def test_slurm_script_ends_with_the_code_of_its_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, separate: bool, codes: tuple[int, int]
) -> None:
    text = rendered(capsys, "slurm", *(["--separate-steps"] if separate else []))
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/bash\n"
        'stat -c %a "$HETERO_TOKEN_FILE" >> modes\n'
        f'case "$1" in --het-group=0) exit {codes[0]};; --het-group=1) exit {codes[1]};; *) exit {max(codes)};; esac\n'
    )
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == max(codes)
    assert set((tmp_path / "modes").read_text().split()) == {"600"}
    assert not list(tmp_path.glob(".hetero-token*"))  # removed at the end


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("code", [0, 143])
def test_slurm_script_ends_with_the_code_that_the_first_trainer_wrote(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, separate: bool, code: int
) -> None:
    text = rendered(capsys, "slurm", *(["--separate-steps"] if separate else []))
    (tmp_path / "hetero-slurm-7").mkdir()
    (tmp_path / "hetero-slurm-7" / "exit-code").write_text("99\n")  # of an earlier attempt of the job
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/bash\necho {code} > hetero-slurm-7/exit-code\nexit 137\n")  # a data node was lost
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == code


def test_slurm_single_group_is_no_heterogeneous_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "slurm", "--group", "train=GPU:4:2", "train.py"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "hetjob" not in text
    assert "\nsrun --ntasks-per-node=1 " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "train.py"], "--group NAME=TYPE:COUNT: missing"),
        (["slurm", "--group", "a", "train.py"], "expected NAME=TYPE:COUNT"),
        (["slurm", "--group", "a=GPU:1:1", "--group", "a=CPU:1:1", "train.py"], "'a' is given twice"),
        (["slurm", "--group", "a=x:1", "--group", "b=y:1", "train.py"], "cannot tell whether group 'a'"),
        (["slurm", "--group", "train=ml.p3.2xlarge:1", "train.py"], "Slurm does not know the type 'ml.p3.2xlarge'"),
        (["slurm", "--group", "train=GPU:1:1", "--hours", "0", "train.py"], "--hours 0: expected a number above 0"),
        (["slurm", "--group", "train=GPU:1:1", "--partition", "a b", "train.py"], "expected a word without quotes"),
        (["slurm", "--group", "train=GPU:1:1", "--partition", "a", "--partition", "b", "train.py"], "given twice"),
        (["jobset", "--group", "train=GPU:1:1", "train.py"], "--image IMAGE: missing"),
        (["jobset", "--group", "dnn_group=GPU:1:1", "--image", "x", "train.py"], "'dnn_group' cannot be the name"),
        (["volcano", "--group", "train=GPU:1:1", "--image", "x", "--name", "A", "train.py"], "'A' cannot be the name"),
        (["trainjob", "--group", "train=GPU:1:1", "--image", "x", "train.py"], "give --group node=GPU:1:1"),
        (["vertex", "--group", "train=GPU:1:1", "--image", "x", "train.py"], "--token gs://BUCKET/PATH: missing"),
        (
            ["vertex", "--group", "train=GPU:1:1", "--image", "x", "--token", "gs://b/t", "train.py"],
            "expected a machine type such as n2-highcpu-32",
        ),
    ],
)
def test_request_that_cannot_work_is_rejected(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refusal(capsys, *arguments)


def test_output_goes_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    assert rendered(capsys, "jobset", "--output", str(path)) == ""
    assert yaml.safe_load(path.read_text())["kind"] == "JobSet"
    assert "cannot write" in refusal(capsys, "jobset", *COMMAND, *IMAGE, "--output", str(tmp_path), *SCRIPT)
