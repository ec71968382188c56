from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import cluster
from hetero.cluster import (
    Role,
    has_accelerator,
    natural_key,
    parse_cluster,
    resolve_address,
    several_trainers,
    slug,
)
from hetero.cluster.roles import assign_roles
from hetero.errors import ClusterError, ConfigError


def read_cluster(
    env: Mapping[str, str], *, cluster_file: str | None = None, host: str | None = None, roles: Sequence[str] = ()
) -> cluster.ClusterSpec:
    return cluster.find_platform(env, cluster_file=cluster_file).read_cluster(host=host, roles=roles)


def group(name: str, kind: str, *hosts: str) -> dict[str, Any]:
    return {"instance_group_name": name, "instance_type": kind, "hosts": list(hosts)}


def document(*groups: dict[str, Any], current_host: str = "algo-1", **others: Any) -> dict[str, Any]:
    """Return a description as the platform writes it: top-level hosts in lexicographic order."""
    hosts = sorted(host for item in groups for host in item["hosts"])
    return {"current_host": current_host, "hosts": hosts, "instance_groups": list(groups)} | others


def parse(*groups: dict[str, Any], roles: tuple[str, ...] = (), **others: Any) -> cluster.ClusterSpec:
    return parse_cluster(document(*groups, **others), source="test", roles=roles)


DATA = group("data_group", "ml.c5.xlarge", "algo-1")
DNN = group("dnn_group", "ml.m4.xlarge", "algo-2")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "input/config").mkdir(parents=True)
    return tmp_path


def write(base: Path, content: object) -> dict[str, str]:
    """Write the platform's file. Return the environment that names it."""
    text = content if isinstance(content, str) else json.dumps(content)
    (base / "input/config/resourceconfig.json").write_text(text, encoding="utf-8")
    return {"SAGEMAKER_BASE_DIR": str(base)}


def test_heterogeneous_file_gives_groups_and_roles(base: Path) -> None:
    groups = (DATA, DNN)
    spec = read_cluster(
        write(base, document(*groups, current_group_name="data_group", network_interface_name="ens5", topology={}))
    )
    assert spec.current_host == "algo-1"
    assert spec.current_group.name == "data_group"
    assert spec.role is Role.DATA
    assert spec.network_interface_name == "ens5"
    assert [host.name for host in spec.trainer_hosts] == ["algo-2"]
    assert [host.name for host in spec.data_hosts] == ["algo-1"]
    assert [host.instance_type for host in spec.hosts] == ["ml.c5.xlarge", "ml.m4.xlarge"]


def test_hosts_in_any_order_are_sorted_naturally() -> None:
    spec = parse(
        group("train", "ml.p3.2xlarge", "algo-10", "algo-2"),
        group("train-b", "ml.p3.2xlarge", "algo-3"),
        group("data", "ml.c5.xlarge", "algo-11", "algo-9"),
        current_host="algo-10",
    )
    assert [host.name for host in spec.hosts] == ["algo-2", "algo-3", "algo-9", "algo-10", "algo-11"]
    assert [host.name for host in spec.trainer_hosts] == ["algo-2", "algo-3", "algo-10"]  # over groups
    assert spec.groups[0].hosts == ("algo-2", "algo-10")


def test_local_mode_without_groups_is_homogeneous(base: Path) -> None:
    spec = read_cluster(write(base, {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}))
    assert [(g.name, g.role, g.instance_type) for g in spec.groups] == [("homogeneousCluster", Role.TRAINER, "")]
    assert not spec.data_hosts


@pytest.mark.parametrize("name", ["homogeneousCluster", "data_group"])
def test_single_group_trains_whatever_its_name(name: str) -> None:
    assert parse(group(name, "ml.c5.xlarge", "algo-1")).role is Role.TRAINER


def test_current_group_is_checked() -> None:
    assert parse(DATA, DNN, current_group_name="data_group").current_group.name == "data_group"
    found = "wrong at current_group_name\n.*\n  found: 'dnn_grup', although 'algo-1' is a host of"
    with pytest.raises(ClusterError, match=found):
        parse(DATA, DNN, current_group_name="dnn_grup")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # By name, in any case, whatever the type.
        ([("Data-1", "ml.p3.2xlarge"), ("TRAINERS", "ml.c5.xlarge")], "DT"),
        ([("cpu", ""), ("gpu", "")], "DT"),
        ([("data_a", ""), ("data_b", ""), ("dnn_a", ""), ("dnn_b", "")], "DDTT"),
        # By accelerator, and by the other groups.
        ([("a", "ml.c5.xlarge"), ("b", "ml.p4d.24xlarge")], "DT"),
        ([("a", "ml.trn1.32xlarge"), ("b", "ml.m5.large"), ("c", "")], "TDD"),
        ([("a", "ml.g5.xlarge"), ("b", "ml.g6.xlarge")], "TT"),
        # The name beats the type: accelerators that decode.
        ([("data", "ml.g4dn.xlarge"), ("b", "ml.p5.48xlarge")], "DT"),
        # Flags beat both.
        ([("data", "ml.c5.xlarge"), ("gpu", "ml.p5.48xlarge"), ("gpu=2", "ml.p5.48xlarge")], "TDT"),
    ],
)
def test_role_is_derived_from_flag_name_and_type(groups: list[tuple[str, str]], expected: str) -> None:
    flags = ("data=trainer", "gpu=data") if groups[-1][0] == "gpu=2" else ()
    flags += ("gpu=2=trainer",) if flags else ()
    items = [{"instance_group_name": n, "hosts": [f"algo-{i}"]} | ({"instance_type": t} if t else {})
             for i, (n, t) in enumerate(groups, 1)]  # fmt: skip
    spec = parse(*items, roles=flags)
    assert "".join("D" if g.role is Role.DATA else "T" for g in spec.groups) == expected


@pytest.mark.parametrize(
    ("groups", "flags", "expected"),
    [
        (
            [("a", "ml.p3.2xlarge"), ("train_b", "ml.c5.xlarge")],
            (),
            "a (ml.p3.2xlarge has accelerators), train_b (by its",
        ),
        (
            [("a", "ml.p3.2xlarge"), ("b", "ml.g5.xlarge")],
            ("b=trainer",),
            "b (by its flag); if 'a' should preprocess, give --role 'a=data'",
        ),
        ([("a", "ml.p3.2xlarge"), ("b", "ml.g5.xlarge")], ("a=trainer", "b=trainer"), ""),
        ([("data", "ml.c5.xlarge"), ("dnn_a", "x"), ("dnn_b", "x")], (), ""),
        ([("gpu_data", "x"), ("train", "x")], (), "if 'gpu_data' should preprocess, give --role 'gpu_data=data'"),
        ([("a", "ml.c5.xlarge")], (), ""),
    ],
)
def test_groups_that_all_train_are_told_with_the_reason(
    groups: list[tuple[str, str]], flags: tuple[str, ...], expected: str
) -> None:
    warning = several_trainers(groups, assign_roles(groups, flags, "test"), flags)
    assert expected in warning
    assert bool(warning) is bool(expected)


def test_ambiguous_group_error_shows_the_flag() -> None:
    with pytest.raises(ClusterError) as caught:
        parse(group("a", "ml.c5.xlarge", "algo-1"), group("b", "ml.m5.large", "algo-2"))
    assert "cannot tell whether group 'a' preprocesses or trains" in str(caught.value)
    assert "--role 'a=data' --role 'b=data', or the same with =trainer" in str(caught.value)
    assert "a (ml.c5.xlarge), b (ml.m5.large)" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (("dta_group=data",), ClusterError, "no group has that name; did you mean 'data_group'"),
        (("data_group",), ConfigError, "expected GROUP=data or GROUP=trainer"),
        (("data_group=worker",), ConfigError, "expected GROUP=data or GROUP=trainer"),
        (("dnn_group=data",), ClusterError, "no group trains.*\n.*\n.*--role 'data_group=trainer'"),
        (("dnn_group=data", "dnn_group=trainer"), ConfigError, "both roles"),
    ],
)
def test_wrong_role_flag_is_refused(flags: tuple[str, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(DATA, DNN, roles=flags)


@pytest.mark.parametrize(
    ("change", "path", "found"),
    [
        ({"current_host": None}, "current_host", "no such key"),
        ({"current_host": "algo-7"}, "current_host", "'algo-7', which is not among the hosts"),
        ({"current_host": 1}, "current_host", "1"),
        ({"hosts": "algo-1"}, "hosts", "'algo-1'"),
        ({"hosts": []}, "hosts", "0 entries"),
        ({"hosts": ["algo-1", "../etc"]}, r"hosts\[1\]", "'../etc'"),
        ({"hosts": ["algo-1", "algo-2", "algo-3"]}, "hosts", "algo-3 in only one of hosts and instance_groups"),
        ({"hosts": ["algo-1", "algo-1"]}, "hosts", "'algo-1' twice"),
        ({"instance_groups": {"a": 1}}, "instance_groups", "{'a': 1}"),
        ({"instance_groups": [3]}, r"instance_groups\[0\]", "3"),
        ({"instance_groups": [DATA, {"hosts": ["algo-2"]}]}, r"instance_groups\[1\].instance_group_name", "no such"),
        ({"instance_groups": [DATA, {"instance_group_name": "b"}]}, r"instance_groups\[1\].hosts", "no such key"),
        (
            {"instance_groups": [DATA, group("b", "c", "algo-1")]},
            r"instance_groups\[1\].hosts",
            "'data_group' also has",
        ),
        ({"instance_groups": [DATA, group("data_group", "c", "algo-2")]}, r"instance_groups\[1\].in", "a second time"),
        ({"instance_groups": [group("x" * 65, "c", "algo-1")]}, r"instance_groups\[0\].ins", "65 characters"),
        ({"instance_groups": [group("a\nb", "c", "algo-1")]}, r"instance_groups\[0\].ins", r"'a\\nb'"),
        ({"instance_groups": [DATA] * 65}, "instance_groups", "65 entries"),
    ],
)
@pytest.mark.fault("F35")
def test_malformed_file_error_names_file_and_key(
    base: Path, change: Mapping[str, object], path: str, found: str
) -> None:
    content = {key: value for key, value in (document(DATA, DNN) | change).items() if value is not None}
    with pytest.raises(ClusterError, match=rf"wrong at {path}") as caught:
        read_cluster(write(base, content))
    assert "resourceconfig.json" in str(caught.value)
    assert "\n  expected: " in str(caught.value)
    assert len(str(caught.value).splitlines()[0]) <= 120
    with pytest.raises(ClusterError, match=rf"found: .*{found}"):
        read_cluster(write(base, content))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"data": ["algo-1"]}'])
def test_broken_file_is_shown_the_schema_of_the_readme(base: Path, content: str) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (documented,) = re.findall(r"```json\n(\{.*?)```", readme, re.DOTALL)
    with pytest.raises(ClusterError, match="expected: an object such as") as caught:
        read_cluster(write(base, content))
    shown = str(caught.value).partition("such as ")[2].splitlines()[0]
    assert json.loads(shown) == json.loads(documented)
    example = parse_cluster(json.loads(shown), source="README.md", current_host="node-7")
    assert [group.role for group in example.groups] == [Role.DATA, Role.TRAINER]


@pytest.mark.fault("F35")
def test_misspelled_key_is_pointed_out() -> None:
    with pytest.raises(ClusterError, match="write 'current_host' for 'curent_host'"):
        parse_cluster({"curent_host": "algo-1", "hosts": ["algo-1"]}, source="test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected: an object"),
        ("[" * 100_000, "is not JSON"),
        (" " * (1 << 20) + "{}", "is over 1048576 bytes"),
    ],
)
def test_unusable_file_is_refused(base: Path, content: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read_cluster(write(base, content))


def test_unreadable_file_says_why(base: Path) -> None:
    (base / "input/config/resourceconfig.json").mkdir()
    with pytest.raises(ClusterError, match="cannot read the description of the cluster: Is a directory"):
        read_cluster({"SAGEMAKER_BASE_DIR": str(base)})


@pytest.mark.fault("F35")
def test_missing_description_says_what_to_do(base: Path) -> None:
    with pytest.raises(ClusterError, match="hetero simulate\n.*--cluster-file FILE --host NAME"):
        read_cluster({"SAGEMAKER_BASE_DIR": str(base)})


@given(
    content=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["algo-1", "algo-2"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["current_host", "hosts", "instance_groups", "instance_group_name", "instance_type", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).filter(lambda value: isinstance(value, dict))
)
def test_any_document_is_read_or_refused(content: dict[str, object]) -> None:
    try:
        spec = parse_cluster(content, source="test")
    except ClusterError:
        return
    assert spec.current_group.role is spec.role


def test_variables_of_the_toolkit_describe_no_cluster(base: Path) -> None:
    # As under mpirun: every rank has the first host's variables.
    env = {"SM_CURRENT_HOST": "algo-1", "SM_CURRENT_INSTANCE_GROUP": "data_group", "SM_HOSTS": '["algo-1"]'}
    with pytest.raises(ClusterError, match="resourceconfig.json does not exist"):
        read_cluster({"SAGEMAKER_BASE_DIR": str(base), **env})
    assert read_cluster(write(base, document(DATA, DNN, current_host="algo-2")) | env).current_host == "algo-2"


def test_cluster_file_for_all_hosts_needs_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.json"
    groups = [group("data", "", "n1"), group("train", "", "n2.local")]
    path.write_text(json.dumps({"instance_groups": [{**g, "instance_type": None} for g in groups]}), encoding="utf-8")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert read_cluster({}, cluster_file=str(path), host="n2.local").role is Role.TRAINER
    with pytest.raises(ClusterError, match="wrong at current_host"):
        read_cluster({}, cluster_file=str(path))
    with pytest.raises(ClusterError, match="did you mean 'n2.local'"):
        read_cluster({}, cluster_file=str(path), host="n2.locl")
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.example.org")
    assert read_cluster({}, cluster_file=str(path)).current_host == "n1"


@pytest.mark.parametrize("unusable", ["", 7, "two\nlines"])
def test_given_host_replaces_an_unusable_one(unusable: Any) -> None:
    described = document(DATA, DNN, current_host=unusable)
    assert parse_cluster(described, source="test", current_host="algo-2").current_host == "algo-2"


def test_missing_cluster_file_is_an_error() -> None:
    with pytest.raises(ClusterError, match="No such file"):
        read_cluster({}, cluster_file="/nonexistent/cluster.json")


def test_resource_config_reads_back_as_the_same_cluster() -> None:
    spec = parse(DATA, DNN, current_host="algo-2")
    assert parse_cluster(spec.to_resource_config(), source="test") == spec


@pytest.mark.attack("A13")
@pytest.mark.parametrize("name", ["../../etc/x", ".", "..", "/", "a/b", "a b", "-rf", ".hidden", "ü" * 64, "x\u0000y"])
def test_slug_of_an_odd_name_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    path = (tmp_path / slug(name)).resolve()
    assert path.parent == tmp_path.resolve()
    assert slug(name) != name
    assert len(slug(name)) <= 64
    assert not slug(name).startswith("-")


@pytest.mark.attack("A13")
@given(st.text(min_size=1, max_size=64), st.text(min_size=1, max_size=64))
def test_slugs_of_different_names_differ(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) is (one == other)


@given(st.lists(st.text(alphabet="a1-2", min_size=1, max_size=8), unique=True))
def test_natural_key_orders_any_names_without_ties(names: list[str]) -> None:
    assert len({natural_key(name) for name in names}) == len(names)
    assert [natural_key(name) for name in sorted(names, key=natural_key)] == sorted(map(natural_key, names))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ml.p4d.24xlarge", True),
        ("p5en.48xlarge", True),
        ("ml.g6e.xlarge", True),
        ("ml.gr6.4xlarge", True),
        ("ml.trn2.48xlarge", True),
        ("ml.inf2.xlarge", True),
        ("local_gpu", True),
        ("ml.c5.18xlarge", False),
        ("ml.m7g.large", False),  # g is the processor here
        ("ml.c7gn.large", False),
        ("local", False),
        ("", False),
    ],
)
def test_accelerated_types_are_told_by_family(kind: str, expected: bool) -> None:
    assert has_accelerator(kind) is expected


def answers(*addresses: str) -> Any:
    def resolver(*_: object, **__: object) -> list[tuple[Any, ...]]:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(family, 1, 6, "", (address, 0)) for family, address in zip(families, addresses, strict=True)]

    return resolver


def test_address_prefers_ipv4() -> None:
    assert resolve_address("algo-1", resolver=answers("fe80::1", "10.0.0.1", "10.0.0.2")) == "10.0.0.1"
    assert resolve_address("algo-1", resolver=answers("fe80::1")) == "fe80::1"
    assert resolve_address("127.0.0.9", resolver=answers()) == "127.0.0.9"


def test_address_that_dns_does_not_know_is_an_error() -> None:
    def resolver(*_: object, **__: object) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ClusterError, match=r"DNS.*'algo-1'.*not known"):
        resolve_address("algo-1", resolver=resolver)
    with pytest.raises(ClusterError, match="no IPv4 or IPv6"):
        resolve_address("algo-1", resolver=answers())


def test_hosts_file_replaces_dns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts"
    path.write_text("# simulated\n127.9.0.2 algo-1 algo-1.local # first\n\nnonsense algo-2\n", encoding="utf-8")
    monkeypatch.setenv("HETERO_HOSTS_FILE", str(path))
    assert resolve_address("algo-1.local", resolver=answers("10.0.0.1")) == "127.9.0.2"
    with pytest.raises(ClusterError, match="'algo-2' is not in the hosts file"):
        resolve_address("algo-2", resolver=answers("10.0.0.1"))
    with pytest.raises(ClusterError, match="cannot read the hosts file"):
        resolve_address("algo-1", hosts_file=str(tmp_path))
