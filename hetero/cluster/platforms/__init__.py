"""Platforms: where a job runs, what the platform tells a host about the job, and what starts a job. One module each.

platform.py      the interface, and the base of cluster_file.py and joined.py
pods.py          what the platforms of Kubernetes share
sagemaker.py     SageMaker: ``/opt/ml`` and the ``SM_*`` variables
trainjob.py      Kubeflow TrainJob, which makes a JobSet
jobset.py        Kubernetes JobSet
volcano.py       Volcano
vertex.py        Vertex AI custom training
aws_batch.py     AWS Batch multi-node parallel jobs, whose hosts register with the main host
slurm.py         Slurm
cluster_file.py  any machines: ``--cluster-file`` lists the hosts, and another platform gives everything else
joined.py        a job that this host has joined: a trainer host of the job describes the cluster, and another platform
                 gives everything else

A platform reads only the environment and files, so tests can use recorded environments. No other folder reads the
variables of a platform. To add a platform, write its module with a subclass of `Platform`, name it in
`hetero.system.extensions`, and add a test. A package of your own adds a platform with the entry point
``hetero.platforms``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from hetero.cluster.platforms.cluster_file import ClusterFile
from hetero.cluster.platforms.platform import Folders, JobParameters, Platform
from hetero.cluster.platforms.sagemaker import SageMaker
from hetero.errors import ConfigError
from hetero.system import extensions

__all__ = ["Folders", "JobParameters", "Platform", "describes_a_job", "find_platform", "rendered_platforms"]


def find_platform(environ: Mapping[str, str], *, cluster_file: str | None = None, name: str | None = None) -> Platform:
    """Return the platform that this process runs on.

    Args:
        environ: The process environment. It is copied.
        cluster_file: File with a description of the cluster, which replaces the platform's description.
        name: Name of the platform. None: the first that is detected.

    Raises:
        ConfigError: If the name is unknown.
    """
    name = name or environ.get("HETERO_PLATFORM") or None
    if name is None:
        found = next((platform for kind in _platforms() if (platform := kind(environ)).is_here()), None)
        # If no platform is detected, use SageMaker. Its folders are the default, and its error names what to do.
        found = found or SageMaker(environ)
    else:
        kind = extensions.find(extensions.PLATFORMS, name)
        if kind is None:
            # The name of a driver is valid too, but only in commands that run a whole job, such as `hetero launch
            # --platform ray`.
            known = ", ".join([*extensions.names(extensions.PLATFORMS), *extensions.names(extensions.DRIVERS)])
            raise ConfigError(f"platform {name!r:.60}: unknown name, expected one of {known}")
        found = kind(environ)
    return found if cluster_file is None else ClusterFile(found, cluster_file)


def rendered_platforms() -> list[type[Platform]]:
    """Return the platforms whose jobs ``hetero render`` writes."""
    return [kind for kind in _platforms() if kind.renders]


def describes_a_job(variable: str) -> bool:
    """Return whether any platform uses a variable to describe its job. Simulated hosts must not inherit it."""
    return any(variable.startswith(platform.variables) for platform in _platforms())


@functools.cache
def _platforms() -> tuple[type[Platform], ...]:
    """Return all platforms in the order of detection."""
    return tuple(extensions.find(extensions.PLATFORMS, name) for name in extensions.names(extensions.PLATFORMS))
