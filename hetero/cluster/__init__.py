"""The hosts of this job: their groups, roles and addresses, and which of them this host is.

spec.py         the validated cluster
document.py     validation of an untrusted description
description.py  turns a description into the validated cluster
roles.py        the role of each group
addresses.py    addresses of host names
platforms/      where a job runs and what starts it, one module for each platform
rendering/      what the scripts and manifests of platforms share

A platform describes the cluster. Hosts are sorted in natural order (``algo-2`` before ``algo-10``), because platforms
list them in any order. Ranks follow from the order of the hosts, so every host derives the same ranks.
"""

from __future__ import annotations

from hetero.cluster.addresses import resolve_address
from hetero.cluster.description import parse_cluster
from hetero.cluster.platforms import (
    Folders,
    JobParameters,
    Platform,
    describes_a_job,
    find_platform,
    rendered_platforms,
)
from hetero.cluster.platforms.cluster_file import read_host_names
from hetero.cluster.roles import has_accelerator, several_trainers
from hetero.cluster.spec import ClusterSpec, Host, InstanceGroup, Role, natural_key, slug

__all__ = [
    "ClusterSpec",
    "Folders",
    "Host",
    "InstanceGroup",
    "JobParameters",
    "Platform",
    "Role",
    "describes_a_job",
    "find_platform",
    "has_accelerator",
    "natural_key",
    "parse_cluster",
    "read_host_names",
    "rendered_platforms",
    "resolve_address",
    "several_trainers",
    "slug",
]
