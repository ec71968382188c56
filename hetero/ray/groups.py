"""The groups of a job on Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.cluster.document import MAX_HOSTS
from hetero.cluster.groups import StatedGroup, parse_stated_group
from hetero.cluster.rendering.request import resources_of
from hetero.errors import ConfigError

__all__ = ["ElasticGroup", "bundle_of", "check_groups", "parse_group"]

_BOUNDS = re.compile(r"(.+:)([0-9]+)\.\.([0-9]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGroup:
    """A group of the job."""

    stated: StatedGroup
    """The group as stated, with the number of hosts at the start."""
    max_hosts: int
    """Largest number of hosts. Only a data group may have more hosts than at the start."""


def parse_group(text: str) -> ElasticGroup:
    """Parse ``NAME=RESOURCES:COUNT`` or ``NAME=RESOURCES:MIN..MAX``, for example ``data=CPU:16:2..8``.

    Raises:
        ConfigError: If the text is malformed.
    """
    # With MIN..MAX, parse the text with MIN alone, as for a group whose number of hosts does not change.
    bounds = _BOUNDS.fullmatch(text)
    stated = parse_stated_group(text if bounds is None else bounds[1] + bounds[2])
    resources = resources_of(stated)
    if not (resources.cpus or resources.gpus):
        raise ConfigError(
            f"--group {text!r:.80}: Ray does not know the type {stated.instance_type!r:.60}\n"
            f"  to do: state what a host needs, for example {stated.name}=CPU:16:{stated.count}"
        )
    if not _NAME.fullmatch(stated.name):
        raise ConfigError(
            f"--group {text!r:.80}: found the name {stated.name!r:.60}; expected letters, digits, '_', '.' and '-', of "
            "which the first is a letter or a digit"
        )
    max_hosts = stated.count if bounds is None else int(bounds[3])
    if max_hosts > MAX_HOSTS:
        raise ConfigError(f"--group {text!r:.80}: found {max_hosts} hosts; expected at most {MAX_HOSTS}")
    if max_hosts < stated.count:
        raise ConfigError(f"--group {text!r:.80}: found {stated.count}..{max_hosts}; expected the smaller number first")
    return ElasticGroup(stated=stated, max_hosts=max_hosts)


def check_groups(groups: Sequence[ElasticGroup]) -> None:
    """Check that groups can be those of one job.

    Raises:
        ConfigError: If two groups have the same name, or more than one group has a number of hosts that may change.
    """
    names = [group.stated.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"--group: found the names {', '.join(names)}; expected a different name for each group")
    elastic = [group.stated.name for group in groups if group.max_hosts > group.stated.count]
    if len(elastic) > 1:
        raise ConfigError(f"--group: found MIN..MAX in {' and '.join(elastic)}; expected it in one data group at most")


def bundle_of(group: ElasticGroup) -> dict[str, float]:
    """Return the resources of one host, as Ray names them."""
    resources = resources_of(group.stated)
    # A host with GPUs also needs a CPU, for its launcher.
    bundle: dict[str, float] = {"CPU": resources.cpus or 1}
    if resources.gpus:
        bundle["GPU"] = resources.gpus
    return bundle
