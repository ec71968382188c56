"""The validated cluster: hosts in groups, with roles."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass

__all__ = ["ClusterSpec", "Host", "InstanceGroup", "Role", "natural_key", "slug"]


class Role(enum.Enum):
    """Role of an instance group in the job."""

    DATA = "data"
    """The hosts of the group run endpoints, which preprocess samples."""
    TRAINER = "trainer"
    """The hosts of the group run ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of the job."""

    name: str
    """The platform's name for the host, for example ``algo-1``. Safe as a file name."""
    group: str
    """Name of its instance group."""
    instance_type: str
    """Instance type, for example ``ml.c5.xlarge``. Empty if unknown."""
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """Hosts of one instance type and one role."""

    name: str
    """Name of 1 to 64 characters. It may contain path characters, so use `slug` for files."""
    instance_type: str
    """Instance type, for example ``ml.c5.xlarge``. Empty if unknown."""
    hosts: tuple[str, ...]
    """Host names in natural order, at least one."""
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """All hosts of the job, and the name of this host."""

    current_host: str
    """Name of this host."""
    groups: tuple[InstanceGroup, ...]
    """Groups in the order of the description."""
    network_interface_name: str = "eth0"
    """Network interface that connects the hosts."""
    source: str = ""
    """Origin of the description, for messages."""

    @property
    def current_group(self) -> InstanceGroup:
        """The group of this host."""
        return next(group for group in self.groups if self.current_host in group.hosts)

    @property
    def role(self) -> Role:
        """The role of this host."""
        return self.current_group.role

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host, in natural order."""
        hosts = (
            Host(name=name, group=group.name, instance_type=group.instance_type, role=group.role)
            for group in self.groups
            for name in group.hosts
        )
        return tuple(sorted(hosts, key=lambda host: natural_key(host.name)))

    @property
    def trainer_hosts(self) -> tuple[Host, ...]:
        """Hosts that run ranks, in natural order. Never empty."""
        return tuple(host for host in self.hosts if host.role is Role.TRAINER)

    @property
    def data_hosts(self) -> tuple[Host, ...]:
        """Hosts that run endpoints only, in natural order. Empty in a homogeneous job."""
        return tuple(host for host in self.hosts if host.role is Role.DATA)

    def to_resource_config(self) -> dict[str, object]:
        """Return a document in the platform's schema, with hosts in the platform's order, for `parse_cluster`."""
        return {
            "current_group_name": self.current_group.name,
            "current_host": self.current_host,
            "current_instance_type": self.current_group.instance_type,
            "hosts": sorted(host.name for host in self.hosts),
            "instance_groups": [
                {"instance_group_name": group.name, "instance_type": group.instance_type, "hosts": list(group.hosts)}
                for group in self.groups
            ],
            "network_interface_name": self.network_interface_name,
        }


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sort key for natural order, which compares the numbers in names by value."""
    parts = re.split(r"([0-9]+)", name)
    # Parts with an odd index are the numbers, because the pattern has a group. The name decides between equal parts,
    # such as those of algo-1 and algo-01.
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


def slug(name: str) -> str:
    """Return a safe file name of at most 64 characters of ``[A-Za-z0-9._-]``.

    A name that is already safe does not change. Any other name gets a digest, so two names never share a slug.
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        return name
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:48]
    return f"{readable or 'group'}-{hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"
