"""Turns a description of the cluster into a `ClusterSpec`. Every platform uses SageMaker's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero.cluster.document import EXAMPLE, Document, Group, close, listing
from hetero.cluster.roles import assign_roles
from hetero.cluster.spec import ClusterSpec, InstanceGroup, natural_key

__all__ = ["host_names", "parse_cluster"]

HOMOGENEOUS_GROUP = "homogeneousCluster"


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
        document: The decoded JSON object, in the schema of ``resourceconfig.json``.
        source: Origin of the document, for messages.
        current_host: A name that replaces the document's ``current_host``.
        own_names: Names of this machine. If neither the argument nor the document gives a ``current_host``, the first
            of these names that is a host of the cluster is used.
        roles: Overrides of the derived roles, each ``GROUP=data`` or ``GROUP=trainer``.

    Raises:
        ClusterError: If the document is malformed, contradictory or ambiguous.
        ConfigError: If ``roles`` are malformed.
    """
    # The caller's name replaces the document's current_host, which may be unusable.
    if current_host is not None:
        document = {key: value for key, value in document.items() if key != "current_host"}
    # Check the groups and hosts.
    checked = Document(document, source)
    groups = _read_groups(checked)
    # Find which of them this host is: as the caller says, as the document says, or by the names of this machine.
    every_host = [name for group in groups for name in group.hosts]
    if current_host is None and checked.content.current_host is None:
        current_host = next((name for name in own_names if name in every_host), None)
    if current_host is None:
        current_host = checked.content.current_host
        if current_host is None:
            raise checked.missing("current_host", "a host name")
        # If the document also states the group of this host, that group must contain this host.
        checked.current_group_agrees(groups, current_host)
    if current_host not in every_host:
        raise checked.malformed(
            "current_host",
            found=f"{current_host!r}, which is not among the hosts",
            expected=f"one of {listing(every_host)}",
            advice="give --host NAME with this host's name in the description",
            guess=close(current_host, every_host),
        )
    # Give each group its role.
    assigned = assign_roles([(group.instance_group_name, group.instance_type) for group in groups], roles, source)
    return ClusterSpec(
        current_host=current_host,
        groups=tuple(
            InstanceGroup(
                name=group.instance_group_name,
                instance_type=group.instance_type,
                # Sort the hosts, because every host must derive the same ranks.
                hosts=tuple(sorted(group.hosts, key=natural_key)),
                role=role,
            )
            for group, role in zip(groups, assigned, strict=True)
        ),
        network_interface_name=checked.content.network_interface_name,
        source=source,
    )


def host_names(document: Mapping[str, object], *, source: str) -> list[str]:
    """Return all hosts of a description in natural order, without their roles or the name of this host.

    Raises:
        ClusterError: If the description is malformed.
    """
    groups = _read_groups(Document(document, source))
    return sorted((name for group in groups for name in group.hosts), key=natural_key)


def _read_groups(checked: Document) -> Sequence[Group]:
    """Return the checked groups. If the description has no groups, return one group of all its hosts."""
    content = checked.content
    groups = content.instance_groups
    if not groups:
        if content.hosts is None:
            raise checked.missing("instance_groups", EXAMPLE)
        name = content.current_group_name or HOMOGENEOUS_GROUP
        groups = (Group(instance_group_name=name, instance_type=content.current_instance_type, hosts=content.hosts),)
    checked.consistent(groups, content.hosts)
    return groups
