"""Platforms: where a job runs, and what the platform tells a host about the job. One module for each platform.

platform.py      the interface
wrapper.py       what the last two share: another platform gives everything but the cluster
sagemaker.py     SageMaker: ``/opt/ml`` and the ``SM_*`` variables
trainjob.py      Kubeflow TrainJob, which makes a JobSet
jobset.py        Kubernetes JobSet
volcano.py       Volcano
vertex.py        Vertex AI custom training
aws_batch.py     AWS Batch multi-node parallel jobs, whose hosts register with the main host
slurm.py         Slurm
cluster_file.py  any machines: ``--cluster-file`` lists the hosts, and another platform gives everything else
joined.py        a job that this host has joined: a host of the job describes the cluster

A platform reads only the environment and files, so tests can use recorded environments. No other folder reads the
variables of a platform. To add a platform, write its module, list it in `PLATFORMS`, and add a test.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetero.cluster.platforms.aws_batch import AwsBatch
from hetero.cluster.platforms.cluster_file import ClusterFile
from hetero.cluster.platforms.jobset import JobSet
from hetero.cluster.platforms.platform import Folders, JobParameters, Platform
from hetero.cluster.platforms.sagemaker import SageMaker
from hetero.cluster.platforms.slurm import Slurm
from hetero.cluster.platforms.trainjob import TrainJob
from hetero.cluster.platforms.vertex import Vertex
from hetero.cluster.platforms.volcano import Volcano
from hetero.errors import ConfigError

__all__ = ["Folders", "JobParameters", "Platform", "describes_a_job", "find_platform"]

PLATFORMS: tuple[type[Platform], ...] = (SageMaker, TrainJob, JobSet, Volcano, Vertex, AwsBatch, Slurm)
"""All platforms in the order of detection. If none is detected, the first one gives the folders and the error."""


def find_platform(environ: Mapping[str, str], *, cluster_file: str | None = None, name: str | None = None) -> Platform:
    """Return the platform that this process runs on.

    Args:
        environ: The process environment. It is copied.
        cluster_file: File with a description of the cluster, which replaces the platform's description.
        name: Name of the platform. None: the first that is detected.

    Raises:
        ConfigError: If there is no platform of this name.
    """
    name = name or environ.get("HETERO_PLATFORM") or None
    platforms = [kind(environ) for kind in PLATFORMS if name in (None, kind.name)]
    if not platforms:
        names = ", ".join(kind.name for kind in PLATFORMS)
        raise ConfigError(f"platform {name!r:.60}: unknown name, expected one of {names}")
    found = next((platform for platform in platforms if platform.is_here()), platforms[0])
    return found if cluster_file is None else ClusterFile(found, cluster_file)


def describes_a_job(variable: str) -> bool:
    """Return whether any platform uses a variable to describe its job. Simulated hosts must not inherit it."""
    return any(variable.startswith(platform.variables) for platform in PLATFORMS)
