"""The hosts of this job. Only this folder reads ``resourceconfig.json`` and the description in ``SM_*`` variables.

There are three sources. All have the schema of the platform's file:

- ``<base>/input/config/resourceconfig.json``. The base is ``SAGEMAKER_BASE_DIR``, or ``/opt/ml``.
- The ``SM_*`` variables, only if that file does not exist. Under ``mpirun`` every rank has the variables of the first
  host.
- The file of ``--cluster-file F --host NAME`` for any other cluster. It may leave out ``current_host`` and
  ``instance_type``.

Hosts are always in natural order (``algo-2`` before ``algo-10``). The sources do not guarantee an order. Ranks follow
from the order of the hosts, so every host derives the same ranks.
"""

from __future__ import annotations

from hetero.cluster.addresses import resolve_address
from hetero.cluster.roles import has_accelerator, several_trainers
from hetero.cluster.sources import base_dir, parse_cluster, platform_variables, read_cluster, read_host_names
from hetero.cluster.spec import ClusterSpec, Host, InstanceGroup, Role, natural_key, slug

__all__ = [
    "ClusterSpec",
    "Host",
    "InstanceGroup",
    "Role",
    "base_dir",
    "has_accelerator",
    "natural_key",
    "parse_cluster",
    "platform_variables",
    "read_cluster",
    "read_host_names",
    "resolve_address",
    "several_trainers",
    "slug",
]
