"""Pods of rendered manifests pass Pod Security "restricted", and can read their token.

`violations` has the controls of the policy as text. Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/
as of Kubernetes 1.34, for Linux. The controls of the level "baseline" belong to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from hetero import cli
from hetero.errors import ExitCode

Pod = dict[str, Any]
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("image", "persistentVolumeClaim", "projected", "secret"),
}
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
SELINUX = {"container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(pod: Pod) -> Iterator[str]:
    """Yield the controls that a pod breaks."""
    own = pod.get("securityContext", {})
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from ("volume types" for volume in pod.get("volumes", []) if not volume.keys() - {"name"} <= VOLUMES)
    if not {sysctl["name"] for sysctl in own.get("sysctls", [])} <= SYSCTLS:
        yield "sysctls"
    yield from _of_any_context(own)
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in pod.get(kind, []):
            yield from _of_container(container, own)
            yield from _of_any_context(container.get("securityContext", {}))


def _of_container(container: dict[str, Any], of_pod: dict[str, Any]) -> Iterator[str]:
    """Yield the controls that a container breaks. It inherits a part of the pod's security context."""
    context = container.get("securityContext", {})
    capabilities = context.get("capabilities", {})
    profile = context.get("seccompProfile", of_pod.get("seccompProfile", {}))
    has_all = {
        "host ports": not any(port.get("hostPort") for port in container.get("ports", [])),
        "privileged": not context.get("privileged"),
        "procMount": context.get("procMount", "Default") == "Default",
        "capabilities": "ALL" in capabilities.get("drop", [])
        and {*capabilities.get("add", [])} <= {"NET_BIND_SERVICE"},
        "privilege escalation": context.get("allowPrivilegeEscalation") is False,
        "running as non-root": context.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is True,
        "seccomp": profile.get("type") in ("RuntimeDefault", "Localhost"),
    }
    yield from (control for control, holds in has_all.items() if not holds)


def _of_any_context(context: dict[str, Any]) -> Iterator[str]:
    """Yield the controls that the security context of a pod or of a container breaks."""
    apparmor = context.get("appArmorProfile", {}).get("type", "RuntimeDefault")
    has_all = {
        "running as non-root user": context.get("runAsUser") != 0,
        "AppArmor": apparmor in ("RuntimeDefault", "Localhost"),
        "SELinux": context.get("seLinuxOptions", {}).get("type", "container_t") in SELINUX,
        "host process": not context.get("windowsOptions", {}).get("hostProcess"),
    }
    yield from (control for control, holds in has_all.items() if not holds)


def pods_in(value: object) -> Iterator[Pod]:
    """Yield the specs of all pods of a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        else:
            for inner in value.values():
                yield from pods_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods_in(inner)


def rendered(capsys: pytest.CaptureFixture[str], platform: str, *options: str) -> list[Pod]:
    groups = ["--group", "node=GPU:8:2", "--group", "data=CPU:16:3", "--group", "more=n2-highcpu-32:1"]
    command = ["render", platform, *groups, "--image", "registry/photos:1", "--name", "photos", *options, "train.py"]
    assert cli.main(command) == ExitCode.OK
    return list(pods_in(list(yaml.safe_load_all(capsys.readouterr().out))))


@pytest.mark.parametrize("options", [[], ["--volume-claim", "results", "--spot", "data=0.2"]])
@pytest.mark.parametrize("platform", ["jobset", "trainjob", "volcano"])
def test_pods_pass_the_restricted_policy_and_can_read_their_token(
    capsys: pytest.CaptureFixture[str], platform: str, options: list[str]
) -> None:
    pods = rendered(capsys, platform, *options)
    assert len(pods) == 3
    for pod in pods:
        assert list(violations(pod)) == []
        context = pod["securityContext"]
        assert context["runAsUser"] > 0  # an image may name no user, and then the kubelet would refuse it
        assert context["fsGroup"] == context["runAsGroup"]  # the kubelet makes the token 0440, of root and this group
        resources = pod["containers"][0]["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"}


@pytest.mark.parametrize(
    ("control", "change"),
    [
        ("hostNetwork", lambda pod: pod.update(hostNetwork=True)),
        ("volume types", lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}})),
        ("sysctls", lambda pod: pod["securityContext"].update(sysctls=[{"name": "kernel.msgmax", "value": "1"}])),
        ("host ports", lambda pod: pod["containers"][0]["ports"][0].update(hostPort=17170)),
        ("privileged", lambda pod: pod["containers"][0]["securityContext"].update(privileged=True)),
        ("procMount", lambda pod: pod["containers"][0]["securityContext"].update(procMount="Unmasked")),
        ("capabilities", lambda pod: pod["containers"][0]["securityContext"].pop("capabilities")),
        ("capabilities", lambda pod: pod["containers"][0]["securityContext"]["capabilities"].update(add=["SYS_ADMIN"])),
        ("privilege escalation", lambda pod: pod["containers"][0]["securityContext"].pop("allowPrivilegeEscalation")),
        ("running as non-root", lambda pod: pod["securityContext"].pop("runAsNonRoot")),
        ("running as non-root user", lambda pod: pod["securityContext"].update(runAsUser=0)),
        ("seccomp", lambda pod: pod["securityContext"].pop("seccompProfile")),
        ("seccomp", lambda pod: pod["containers"][0]["securityContext"].update(seccompProfile={"type": "Unconfined"})),
        ("AppArmor", lambda pod: pod["securityContext"].update(appArmorProfile={"type": "Unconfined"})),
        ("SELinux", lambda pod: pod["securityContext"].update(seLinuxOptions={"type": "spc_t"})),
        ("host process", lambda pod: pod["securityContext"].update(windowsOptions={"hostProcess": True})),
    ],
)
def test_each_control_is_examined(
    capsys: pytest.CaptureFixture[str], control: str, change: Callable[[Pod], object]
) -> None:
    pod = copy.deepcopy(rendered(capsys, "jobset")[0])
    change(pod)
    assert list(violations(pod)) == [control]


def test_volume_of_several_pods_is_said_to_need_its_access_mode(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "node=GPU:8:2", "--image", "x", "--volume-claim", "results"]
    assert cli.main(["render", "jobset", *groups, "train.py"]) == ExitCode.OK
    assert '{claimName: "results"}}  # ReadWriteMany' in capsys.readouterr().out
