"""Reads the description of the cluster from the platform's file, the user's file or the environment."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.cluster.document import Document, Group, close, decode, listing, load
from hetero.cluster.roles import assign_roles
from hetero.cluster.spec import ClusterSpec, InstanceGroup, natural_key
from hetero.errors import ClusterError

__all__ = ["base_dir", "parse_cluster", "platform_variables", "read_cluster", "read_host_names"]

HOMOGENEOUS_GROUP = "homogeneousCluster"

_logger = logging.getLogger(__name__)


def base_dir(env: Mapping[str, str]) -> Path:
    """Return the folder that the platform fills, which is ``SAGEMAKER_BASE_DIR`` or ``/opt/ml``."""
    return Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def read_cluster(
    env: Mapping[str, str],
    *,
    cluster_file: str | None = None,
    host: str | None = None,
    roles: Sequence[str] = (),
) -> ClusterSpec:
    """Read the description of the cluster from the first source that this job has.

    If the platform's file and the environment disagree, the file is used and a warning is logged.

    Args:
        env: The process environment.
        cluster_file: A file that replaces the platform's.
        host: This host's name. Defaults to the description's ``current_host``. If ``cluster_file`` lacks that key, the
            default is this machine's name, if the file lists it.
        roles: Overrides of the derived roles, each ``GROUP=data`` or ``GROUP=trainer``.

    Returns:
        The cluster, with a role for every group.

    Raises:
        ClusterError: If no source has a description, or if it is malformed or ambiguous.
        ConfigError: If ``roles`` are malformed.
    """
    if cluster_file is not None:
        document = load(Path(cluster_file))
        return parse_cluster(document, source=cluster_file, current_host=host, own_names=_own_names(), roles=roles)
    path = base_dir(env) / "input/config/resourceconfig.json"
    if _exists(path):
        document = load(path)
        cluster = parse_cluster(document, source=str(path), current_host=host, roles=roles)
        _warn_of_disagreement(cluster, env)
        return cluster
    if "SM_HOSTS" in env or "SM_RESOURCE_CONFIG" in env:
        return parse_cluster(_from_environment(env), source="the SM_* environment", current_host=host, roles=roles)
    raise ClusterError(
        f"no description of the cluster: {path} does not exist and SM_HOSTS is not set\n"
        "  on a training platform: start this as the job's entry point\n"
        "  on one machine: use hetero simulate\n"
        "  on any other cluster: say --cluster-file FILE --host NAME"
    )


def parse_cluster(
    document: Mapping[str, object],
    *,
    source: str,
    current_host: str | None = None,
    own_names: Sequence[str] = (),
    roles: Sequence[str] = (),
) -> ClusterSpec:
    """Validate a description and give every group its role.

    Args:
        document: The decoded JSON object. `hetero.cluster` describes the schema.
        source: Where the document comes from, for messages.
        current_host: A name that replaces the document's ``current_host``.
        own_names: Names of this machine. If neither the argument nor the document gives a ``current_host``, the first
            of these names that is a host of the cluster is used.
        roles: Overrides, as in `read_cluster`.

    Raises:
        ClusterError: If the document is malformed, contradictory or ambiguous.
        ConfigError: If ``roles`` are malformed.
    """
    checked = Document(document, source)
    groups = _read_groups(checked)
    every_host = [name for _, _, names in groups for name in names]
    if current_host is None and "current_host" not in document:
        current_host = next((name for name in own_names if name in every_host), None)
    if current_host is None:
        current_host = checked.text(document, "current_host", "")
        checked.current_group_agrees(groups, current_host)
    if current_host not in every_host:
        raise checked.malformed(
            "current_host",
            found=f"{current_host!r}, which is not among the hosts",
            expected=f"one of {listing(every_host)}",
            advice="say --host NAME with this host's name as the description has it",
            guess=close(current_host, every_host),
        )
    assigned = assign_roles([(name, kind) for name, kind, _ in groups], roles, source)
    return ClusterSpec(
        current_host=current_host,
        groups=tuple(
            InstanceGroup(name=name, instance_type=kind, hosts=tuple(sorted(names, key=natural_key)), role=role)
            for (name, kind, names), role in zip(groups, assigned, strict=True)
        ),
        network_interface_name=checked.text(document, "network_interface_name", "", default="eth0"),
        source=source,
    )


def read_host_names(cluster_file: Path) -> list[str]:
    """Return all hosts of a description in natural order, without deciding their roles or which one this is.

    Raises:
        ClusterError: If the description cannot be read, or if it is malformed.
    """
    groups = _read_groups(Document(load(cluster_file), str(cluster_file)))
    return sorted((name for _, _, names in groups for name in names), key=natural_key)


def _read_groups(checked: Document) -> list[Group]:
    document = checked.document
    hosts = checked.host_names(document, "hosts", "") if "hosts" in document else None
    default_type = checked.text(document, "current_instance_type", "", default="")
    if document.get("instance_groups"):
        groups = [checked.group(item, index) for index, item in enumerate(checked.group_list())]
    elif hosts is None:
        raise checked.missing("hosts", "", "a list of all host names", document)
    else:
        groups = [(checked.group_name() or HOMOGENEOUS_GROUP, default_type, hosts)]
    checked.consistent(groups, hosts)
    return groups


def _own_names() -> tuple[str, str]:
    """Return this machine's name, with and without its domain."""
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _exists(path: Path) -> bool:
    """Return whether the file exists. If that cannot be checked, return True, because reading it raises the error."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _from_environment(env: Mapping[str, str]) -> dict[str, object]:
    """Return the document that the variables of the platform's training toolkit describe."""
    document = decode(env["SM_RESOURCE_CONFIG"], "SM_RESOURCE_CONFIG") if env.get("SM_RESOURCE_CONFIG") else {}
    for key, variable in (
        ("current_host", "SM_CURRENT_HOST"),
        ("current_group_name", "SM_CURRENT_INSTANCE_GROUP"),
        ("current_instance_type", "SM_CURRENT_INSTANCE_TYPE"),
        ("network_interface_name", "SM_NETWORK_INTERFACE_NAME"),
    ):
        if env.get(variable):
            document[key] = env[variable]
    if env.get("SM_CURRENT_HOST") and not env.get("SM_CURRENT_INSTANCE_GROUP"):
        document.pop("current_group_name", None)  # it may be another host's group
        document.pop("current_instance_group", None)
    if env.get("SM_HOSTS"):
        document["hosts"] = decode('{"hosts": ' + env["SM_HOSTS"] + "}", "SM_HOSTS").get("hosts")
    if env.get("SM_INSTANCE_GROUPS_DICT"):
        document["instance_groups"] = list(decode(env["SM_INSTANCE_GROUPS_DICT"], "SM_INSTANCE_GROUPS_DICT").values())
    return document


def platform_variables(cluster: ClusterSpec) -> dict[str, str]:
    """Return the variables that identify this host, as the platform's training toolkit sets them."""
    return {
        "SM_CURRENT_HOST": cluster.current_host,
        "SM_CURRENT_INSTANCE_GROUP": cluster.current_group.name,
        "SM_CURRENT_INSTANCE_TYPE": cluster.current_group.instance_type,
    }


def _warn_of_disagreement(cluster: ClusterSpec, env: Mapping[str, str]) -> None:
    facts = platform_variables(cluster)
    odd = [f"{name} says {env[name]!r}, not {fact!r}" for name, fact in facts.items() if env.get(name, fact) != fact]
    if odd:
        _logger.warning("the environment disagrees with %s, which is used: %s", cluster.source, "; ".join(odd))
