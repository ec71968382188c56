"""Slurm: recorded environments of real jobs, and what is wrong in others."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.cluster import Role, find_platform
from hetero.cluster.platforms.slurm import Slurm, node_names
from hetero.config import resolve_options
from hetero.errors import ClusterError, ConfigError
from tests.support.platforms import changed, recorded

GPU = ("gpu-0", ("gpu01",), Role.TRAINER)
CPU = ("cpu-1", ("cpu01", "cpu02"), Role.DATA)


def groups_of(environ: Mapping[str, str], **options: object) -> list[tuple[str, tuple[str, ...], Role]]:
    cluster = Slurm(environ).read_cluster(**options)
    return [(group.name, group.hosts, group.role) for group in cluster.groups]


def het(**changes: str | None) -> dict[str, str]:
    return recorded("slurm", "het-one-srun-cpu02", **changes)


def single(**changes: str | None) -> dict[str, str]:
    return recorded("slurm", "single-cpu01", **changes)


@pytest.mark.parametrize("launched", ["one-srun", "two-sruns"])
@pytest.mark.parametrize("node", ["gpu01", "cpu01", "cpu02"])
def test_heterogeneous_job_has_a_group_per_component(launched: str, node: str) -> None:
    environ = recorded("slurm", f"het-{launched}-{node}")
    platform = find_platform(environ)
    cluster = platform.read_cluster()
    assert platform.name == "slurm"
    assert groups_of(environ) == [GPU, CPU]
    assert cluster.current_host == node
    assert cluster.role is (Role.TRAINER if node == "gpu01" else Role.DATA)
    assert platform.job_id(cluster) == "slurm-1"
    assert {group.instance_type for group in cluster.groups} == {"CPU:1"}


@pytest.mark.parametrize("node", ["cpu01", "cpu02"])
def test_one_component_is_one_group_that_trains(node: str) -> None:
    environ = recorded("slurm", f"single-{node}")
    assert groups_of(environ) == [("trainer", ("cpu01", "cpu02"), Role.TRAINER)]
    assert Slurm(environ).read_cluster().current_host == node
    assert Slurm(environ).job_name() == "slurm-3"


@pytest.mark.parametrize("node", ["cpu01", "cpu02"])
def test_variable_divides_the_nodes_of_one_component(node: str) -> None:
    environ = recorded("slurm", f"single-{node}", HETERO_GROUPS="dnn_group=GPU:8:1 data_group=CPU:32:1")
    assert groups_of(environ) == [
        ("dnn_group", ("cpu01",), Role.TRAINER),
        ("data_group", ("cpu02",), Role.DATA),
    ]
    cluster = Slurm(environ).read_cluster()
    assert [group.instance_type for group in cluster.groups] == ["GPU:8", "CPU:32"]
    assert cluster.role is (Role.TRAINER if node == "cpu01" else Role.DATA)


def test_variable_names_the_components() -> None:
    environ = het(HETERO_GROUPS="dnn_group=ml.p3.2xlarge:1 data_group=ml.c5.4xlarge:2")
    cluster = Slurm(environ).read_cluster()
    assert [(group.name, group.instance_type) for group in cluster.groups] == [
        ("dnn_group", "ml.p3.2xlarge"),
        ("data_group", "ml.c5.4xlarge"),
    ]


def test_job_names_of_components_name_the_groups_if_they_differ() -> None:
    environ = het(SLURM_JOB_NAME_HET_GROUP_0="train", SLURM_JOB_NAME_HET_GROUP_1="preprocess")
    assert groups_of(environ, roles=["preprocess=data"]) == [
        ("train", ("gpu01",), Role.TRAINER),
        ("preprocess", ("cpu01", "cpu02"), Role.DATA),
    ]


def test_gpus_per_node_make_a_component_train() -> None:
    environ = het(
        SLURM_JOB_PARTITION_HET_GROUP_0="batch",
        SLURM_JOB_PARTITION_HET_GROUP_1="batch",
        SLURM_GPUS_PER_NODE_HET_GROUP_0="a100:8",
    )
    assert groups_of(environ) == [("batch-0", ("gpu01",), Role.TRAINER), ("batch-1", ("cpu01", "cpu02"), Role.DATA)]
    assert Slurm(environ).read_cluster().groups[0].instance_type == "GPU:8"


def test_flags_give_roles_where_nothing_shows_them() -> None:
    environ = het(SLURM_JOB_PARTITION_HET_GROUP_0="a", SLURM_JOB_PARTITION_HET_GROUP_1="a")
    with pytest.raises(ClusterError, match=r"cannot tell whether group 'a-0' preprocesses or trains"):
        groups_of(environ)
    assert groups_of(environ, roles=["a-0=trainer", "a-1=data"])[1][2] is Role.DATA


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (recorded("slurm", "het-batch-script"), "no SLURM_STEP_ID, so the batch script itself started the launcher"),
        (recorded("slurm", "single-batch-script"), "no SLURM_STEP_ID, .*\n.*\n.*srun --ntasks-per-node=1"),
        (het(SLURM_STEP_TASKS_PER_NODE="1,4(x2)"), "srun started several launchers on a node"),
        (het(SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE="2(x3)"), "several launchers on a node"),
        (het(SLURMD_NODENAME=None), "SLURMD_NODENAME is not set"),
        (het(SLURMD_NODENAME="gpu07"), "'gpu07', which is not among the hosts"),
        (het(SLURM_HET_SIZE="two"), "SLURM_HET_SIZE is 'two'"),
        ({"SLURM_PACK_SIZE": "2", "SLURM_JOB_NODELIST": "cpu01"}, "so Slurm is older than 20.02"),
        (het(SLURM_HET_SIZE="1000000"), "SLURM_HET_SIZE is '1000000'"),
        (het(SLURM_HET_SIZE="3"), "SLURM_JOB_NODELIST_HET_GROUP_2 is not set"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0=None), "SLURM_JOB_NODELIST_HET_GROUP_0 is not set"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="gpu[1-"), "HET_GROUP_0 is 'gpu.1-': the brackets .* do not match"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="gpu[x]"), "'x' is no number and no range"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="gpu[1-9999999]"), "no range of at most 4096 numbers"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="gpu[2-1]"), "no range"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="a[1-2000],b[1-3000]"), "more than 4096 nodes"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="gpu01,"), "a name is empty"),
        (het(SLURM_JOB_NODELIST_HET_GROUP_0="cpu02"), "node cpu02 belongs to the components 0 and 1"),
        (het(HETERO_GROUPS="a=GPU:1:1 b=CPU:1:1"), "has a=GPU:1:1, b=CPU:1:1, and the components have 1, 2 nodes"),
        (het(HETERO_GROUPS="a=GPU:1:1"), "one group for each component"),
        (het(HETERO_GROUPS="a=GPU"), "HETERO_GROUPS 'a=GPU': expected NAME=TYPE:COUNT"),
        (het(HETERO_GROUPS="a=GPU:1:0 b=CPU:1:2"), "HETERO_GROUPS 'a=GPU:1:0': found 0 hosts"),
        (single(HETERO_GROUPS="a=GPU:1:1 b=CPU:1:2"), "has 3 hosts, and SLURM_STEP_NODELIST has 2 nodes"),
        (single(SLURM_STEP_NODELIST=None, SLURM_JOB_NODELIST=None), "SLURM_JOB_NODELIST is not set"),
        (single(SLURM_STEP_NODELIST="a]"), "brackets .* do not match"),
    ],
)
def test_wrong_environment_is_one_clear_sentence(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        Slurm(environ).read_cluster()
    assert str(caught.value).startswith(("the description of the cluster is wrong", "HETERO_GROUPS"))


@pytest.mark.parametrize("groups", [None, "trainer=GPU:8:1 data=CPU:32:1"])
def test_step_has_only_its_own_nodes(groups: str | None) -> None:
    environ = single(SLURM_JOB_NODELIST="cpu[01-04]", HETERO_GROUPS=groups)
    assert Slurm(environ).host_names() == ["cpu01", "cpu02"]


def test_jobs_that_share_a_node_have_ports_of_their_own() -> None:
    def port(environ: Mapping[str, str], **stated: int) -> int:
        namespace = argparse.Namespace(script="train.py", **stated)
        return resolve_options(namespace, environ, Slurm(environ).parameters()).port

    assert [port(single(SLURM_JOB_ID=number)) for number in ("7", "8", "1234567")] == [20007, 20008, 24567]
    assert {port(recorded("slurm", f"het-two-sruns-{node}")) for node in ("gpu01", "cpu01")} == {20001}
    assert port(single(), port=4000) == 4000
    assert port(single(HETERO_PORT="4000")) == 4000
    assert port({}) == 17170


def test_batch_script_of_one_node_may_start_the_launcher() -> None:
    environ = recorded("slurm", "single-batch-script", SLURM_JOB_NODELIST="cpu01")
    assert groups_of(environ) == [("trainer", ("cpu01",), Role.TRAINER)]


def test_folders_are_below_the_folder_of_the_submission() -> None:
    folders = Slurm(het()).folders
    assert folders.output == Path("/home/user/project/hetero-slurm-1")
    assert folders.failure == folders.output / "failure"
    assert folders.checkpoints == Path("/home/user/project/checkpoints")


@pytest.mark.parametrize(("text", "expected"), [("8", 8), ("", None), ("many", None)])
def test_gpus_of_this_node_are_those_that_slurm_states(text: str, expected: int | None) -> None:
    assert Slurm(het(SLURM_GPUS_ON_NODE=text)).num_gpus() == expected


def test_ranks_do_not_inherit_what_frameworks_misread() -> None:
    left = [name for name in het() if not name.startswith(Slurm.stripped)]
    assert "SLURM_JOB_ID" in left
    assert not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"} & set(left)


def test_platform_that_is_named_is_used_although_another_is_detected(tmp_path: Path) -> None:
    (tmp_path / "input/config").mkdir(parents=True)
    (tmp_path / "input/config/resourceconfig.json").touch()
    environ = {**het(), "SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert find_platform(environ).name == "sagemaker"
    assert find_platform(environ, name="slurm").name == "slurm"
    assert find_platform({**environ, "HETERO_PLATFORM": "slurm"}).name == "slurm"
    with pytest.raises(ConfigError, match="platform 'pbs': unknown name, expected one of sagemaker, "):
        find_platform(het(), name="pbs")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nid[00001,00011-00012]", ["nid00001", "nid00011", "nid00012"]),
        ("a1,b[2-3],c", ["a1", "b2", "b3", "c"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("gpu-[1]-x", ["gpu-1-x"]),
        ("ip-10-0-0-[9-11]", ["ip-10-0-0-9", "ip-10-0-0-10", "ip-10-0-0-11"]),
        ("n[9-10].example.org", ["n9.example.org", "n10.example.org"]),
    ],
)
def test_node_lists_keep_order_and_zeros(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@given(st.text(alphabet="ab0123456789[],-", max_size=40))
def test_any_text_is_a_list_of_names_or_an_error(text: str) -> None:
    try:
        names = node_names(text)
    except ValueError:
        return
    assert names
    assert all(name and "[" not in name and "," not in name for name in names)


SCONTROL = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm: apt-get install slurm-wlm")


@SCONTROL
@pytest.mark.parametrize(
    "text", ["nid[00001,00011-00012]", "r[1-2]n[08-10]", "a1,b[2-3],c", "x[1-3]y[7,9],k[001-003]", "a[9-11,1]"]
)
def test_node_lists_are_those_of_scontrol(text: str, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert node_names(text) == done.stdout.split()


def test_unknown_variables_change_nothing() -> None:
    assert groups_of(changed(het(), SLURM_NEW_THING="x")) == [GPU, CPU]
