"""Who is in this job: the only reader of ``resourceconfig.json`` and of the ``SM_*`` variables.

Three sources have one schema, that of the platform's file:

- ``<base>/input/config/resourceconfig.json`` (base: ``SAGEMAKER_BASE_DIR``, or ``/opt/ml``);
- the ``SM_*`` variables, only where that file does not exist: under ``mpirun`` they are the first host's on every rank;
- ``--cluster-file F --host NAME`` for any other cluster. There ``current_host`` and ``instance_type`` may be left out.

Hosts are always in natural order (``algo-2`` before ``algo-10``), which no
source guarantees; ranks follow from it, so every host derives the same ones.
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
