"""Clusters for tests."""

from __future__ import annotations

from typing import Any

from hetero.cluster import ClusterSpec, parse_cluster


def cluster(current: str, *, data: int = 1) -> ClusterSpec:
    """Return a cluster of some data hosts and one trainer host."""
    groups = [{"instance_group_name": "dnn", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-9"]}]
    if data:
        hosts = [f"algo-{number + 1}" for number in range(data)]
        groups.append({"instance_group_name": "data", "instance_type": "ml.c5.xlarge", "hosts": hosts})
    document: dict[str, Any] = {"current_host": current, "instance_groups": groups}
    return parse_cluster(document, source="test")
