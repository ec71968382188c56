"""Groups as a user states them: ``NAME=TYPE:COUNT``, on a command line or in a variable of the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.cluster.document import MAX_HOSTS
from hetero.errors import ClusterError, ConfigError

__all__ = ["GROUPS_VARIABLE", "StatedGroup", "group_document", "parse_stated_group", "stated_groups"]

GROUPS_VARIABLE = "HETERO_GROUPS"
"""Environment variable with the groups of a job, for platforms that do not tell a host about all of them. For example
``dnn_group=GPU:8:1 data_group=CPU:32:2``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedGroup:
    """One group of a job."""

    name: str
    instance_type: str
    """An instance type, or what each host has: ``CPU:16`` or ``GPU:8``."""
    count: int
    """Number of hosts."""

    @property
    def text(self) -> str:
        """The group as it is stated."""
        return f"{self.name}={self.instance_type}:{self.count}"


def parse_stated_group(text: str, *, source: str = "--group", max_hosts: int = MAX_HOSTS) -> StatedGroup:
    """Parse a ``NAME=TYPE:COUNT`` text.

    Args:
        text: The text, for example ``data_group=ml.c5.9xlarge:2`` or ``trainer=GPU:8:1``.
        source: The option or variable that has the text, for messages.
        max_hosts: Largest number of hosts.

    Raises:
        ConfigError: If the text has another form or the count is out of range.
    """
    name, equals, rest = text.partition("=")
    # Split from the right, because a type such as GPU:8 has a colon too.
    instance_type, colon, count = rest.rpartition(":")
    # isdigit alone accepts digits such as ², which int() rejects.
    if not (equals and colon and name and instance_type and count.isascii() and count.isdigit()):
        raise ConfigError(f"{source} {text!r}: expected NAME=TYPE:COUNT, for example data_group=ml.c5.9xlarge:2")
    if not 1 <= int(count) <= max_hosts:
        raise ConfigError(f"{source} {text!r}: found {count} hosts; expected 1 to {max_hosts}")
    return StatedGroup(name=name, instance_type=instance_type, count=int(count))


def stated_groups(environ: Mapping[str, str]) -> list[StatedGroup]:
    """Return the groups in `GROUPS_VARIABLE`. Empty if it is not set.

    Raises:
        ClusterError: If the variable is malformed.
    """
    texts = environ.get(GROUPS_VARIABLE, "").split()
    try:
        return [parse_stated_group(text, source=GROUPS_VARIABLE) for text in texts]
    except ConfigError as error:
        raise ClusterError(str(error)) from error


def group_document(name: str, instance_type: str, hosts: Sequence[str]) -> dict[str, object]:
    """Return a group in the schema of ``resourceconfig.json``. An empty instance type is left out."""
    document: dict[str, object] = {"instance_group_name": name, "hosts": list(hosts)}
    return document | ({"instance_type": instance_type} if instance_type else {})
