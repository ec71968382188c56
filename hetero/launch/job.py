"""What a job is called: the same on all its hosts, whoever names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from hetero.cluster import ClusterSpec, slug

__all__ = ["job_id"]


def job_id(environ: Mapping[str, str], cluster: ClusterSpec) -> str:
    """Return the id of the job, the same on all its hosts: one plain word, since it travels in headers.

    Where neither the user nor the platform names the job, it is a digest of the cluster.
    """
    stated = environ.get("HETERO_JOB_ID") or environ.get("TRAINING_JOB_NAME") or _name_in_environment(environ)
    return slug(stated) if stated else _cluster_digest(cluster)


def _name_in_environment(environ: Mapping[str, str]) -> str:
    """Return what the platform's training toolkit calls the job: all that mpirun hands to hosts but its first."""
    try:
        content = json.loads(environ.get("SM_TRAINING_ENV") or "{}")
    except (ValueError, RecursionError):
        return ""
    return str(content.get("job_name") or "") if isinstance(content, dict) else ""


def _cluster_digest(cluster: ClusterSpec) -> str:
    text = json.dumps([[group.name, group.instance_type, *group.hosts] for group in cluster.groups])
    return "cluster-" + hashlib.sha256(text.encode()).hexdigest()[:16]
