"""The groups of a job on Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero.cluster.groups import StatedGroup, parse_stated_group
from hetero.errors import ConfigError
from hetero.render.request import resources_of

__all__ = ["ElasticGroup", "bundle_of", "parse_group"]

_BOUNDS = re.compile(r"(.+:)([0-9]+)\.\.([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGroup:
    """A group of the job."""

    stated: StatedGroup
    """With the number of hosts at the start."""
    max_hosts: int
    """Largest number of hosts. More than the number at the start only in a data group."""


def parse_group(text: str) -> ElasticGroup:
    """Parse ``NAME=RESOURCES:COUNT`` or ``NAME=RESOURCES:MIN..MAX``, for example ``data=CPU:16:2..8``.

    Raises:
        ConfigError: If the text is malformed.
    """
    bounds = _BOUNDS.fullmatch(text)
    stated = parse_stated_group(text if bounds is None else bounds[1] + bounds[2])
    resources = resources_of(stated)
    if not (resources.cpus or resources.gpus):
        raise ConfigError(
            f"--group {text!r:.80}: Ray does not know the type {stated.instance_type!r:.60}\n"
            f"  to do: state what a host needs, for example {stated.name}=CPU:16:{stated.count}"
        )
    max_hosts = stated.count if bounds is None else int(bounds[3])
    if max_hosts < stated.count:
        raise ConfigError(f"--group {text!r:.80}: found {stated.count}..{max_hosts}; expected the smaller number first")
    return ElasticGroup(stated=stated, max_hosts=max_hosts)


def bundle_of(group: ElasticGroup) -> dict[str, float]:
    """Return the resources of one host, as Ray names them."""
    resources = resources_of(group.stated)
    return {"CPU": resources.cpus or 1, **({"GPU": resources.gpus} if resources.gpus else {})}
