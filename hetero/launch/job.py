"""The id of a job, which is the same on all its hosts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from hetero.cluster import ClusterSpec, slug

__all__ = ["job_id"]


def job_id(environ: Mapping[str, str], cluster: ClusterSpec) -> str:
    """Return the id of the job. It is the same on all hosts, and a single plain word because it is sent in headers.

    If neither the user nor the platform names the job, the id is a digest of the cluster.
    """
    stated = environ.get("HETERO_JOB_ID") or environ.get("TRAINING_JOB_NAME") or _name_in_environment(environ)
    return slug(stated) if stated else _cluster_digest(cluster)


def _name_in_environment(environ: Mapping[str, str]) -> str:
    """Return the job's name from the training toolkit's ``SM_TRAINING_ENV``, empty if it is not there.

    Under mpirun this is the only name of the job on all hosts except the first.
    """
    try:
        content = json.loads(environ.get("SM_TRAINING_ENV") or "{}")
    except (ValueError, RecursionError):
        return ""
    return str(content.get("job_name") or "") if isinstance(content, dict) else ""


def _cluster_digest(cluster: ClusterSpec) -> str:
    text = json.dumps([[group.name, group.instance_type, *group.hosts] for group in cluster.groups])
    return "cluster-" + hashlib.sha256(text.encode()).hexdigest()[:16]
