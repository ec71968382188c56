"""The content of the file ``plan.json`` (`Plan`), and the reader of the file.

``hetero plan`` makes plans. The report of a job that runs with ``--plan`` compares the measured step time with that of
the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hetero.documents.records import limits, load
from hetero.metrics.figures import Figure

__all__ = [
    "AS_IS",
    "BOTTLENECKS",
    "FORMS",
    "GOALS",
    "PLAN_FILE_NAME",
    "PLAN_SCHEMA_VERSION",
    "REASONS",
    "STEPS_OF_SPENDING",
    "UINT8",
    "Plan",
    "PlannedCluster",
    "PlannedGroup",
    "load_plan",
]

PLAN_SCHEMA_VERSION = 1
PLAN_FILE_NAME = "plan.json"
GOALS = ("cost", "time")
REASONS = (
    "data hosts pay",
    "accelerator",
    "trainer network",
    "data network",
    "storage",
    "memory",
    "trainer CPU",
    "window",
    "break-even",
    "free CPUs",
    "bigger machine",
    "not registered",
)
"""Why a plan is as it is. The first reason is for plans with data hosts, the other reasons are for plans without."""
STEPS_OF_SPENDING = (
    "as it is",
    "free CPUs",
    "bigger machine",
    "data hosts",
    "two types",
    "spot data hosts",
)
"""What a cluster has in addition to the trainer hosts of the profile, from the cheapest to the most expensive.

A form of the batches with fewer bytes is not a separate step, because only batches from data hosts travel.
"""
AS_IS = "as is"
UINT8 = "uint8"
FORMS = (AS_IS, UINT8, "lz4", "zstd")
"""Forms of a batch on the network: unchanged, with uint8 instead of wider numbers, or compressed."""
BOTTLENECKS = (
    "accelerator",
    "preprocessing",
    "trainer network",
    "data network",
    "storage",
    "memory",
    "trainer CPU",
    "window",
    "epoch start",
)
"""What can limit the step time. An epoch starts without a ready batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One instance group of a planned cluster."""

    name: str
    role: str = field(metadata=limits(choices=("data", "trainer")))
    instance_type: str
    count: int = field(metadata=limits(minimum=1))
    is_spot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """A cluster with its predicted step time and cost."""

    spending: str = field(metadata=limits(choices=STEPS_OF_SPENDING))
    groups: tuple[PlannedGroup, ...]
    """The trainer group and the data groups."""
    local_endpoints: int
    """Processes per trainer host that preprocess."""
    endpoints_per_host: int | None
    """Endpoints per data host. None means one per vCPU, which is the launcher's default."""
    form: str = field(metadata=limits(choices=FORMS))
    """How batches travel: unchanged, as uint8, or compressed."""
    step_time: Figure
    step_time_low_s: float
    """End of the 90 % interval."""
    step_time_high_s: float
    hourly_usd: float | None
    """Price of all hosts. None if a price is unknown."""
    usd_per_1k_steps: Figure | None
    usd_per_1k_steps_low: float | None
    usd_per_1k_steps_high: float | None
    bottleneck: str = field(metadata=limits(choices=BOTTLENECKS))
    rejected: str
    """Why the plan does not choose this cluster. Empty for the chosen one."""

    @property
    def flags(self) -> str:
        """Flags of ``hetero simulate`` and ``hetero launch`` for this cluster."""
        words = [f"--group {group.name}={group.instance_type}:{group.count}" for group in self.groups]
        # Without the flag, a job with data hosts chooses the number itself and would differ from the plan.
        if any(group.role == "data" for group in self.groups):
            words.append(f"--trainer-endpoints {self.local_endpoints}")
        if self.endpoints_per_host is not None:
            words.append(f"--endpoints-per-host {self.endpoints_per_host}")
        return " ".join(words)

    @property
    def instance_groups(self) -> str:
        """Argument for a SageMaker estimator. Empty with spot instances.

        A plan has spot instances only as data hosts. A job on SageMaker cannot have both spot and other instances.
        """
        if any(group.is_spot for group in self.groups):
            return ""
        rows = "".join(f'    InstanceGroup("{g.name}", "{g.instance_type}", {g.count}),\n' for g in self.groups)
        return f"instance_groups=[\n{rows}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen cluster, the reason for it, and the alternatives. Immutable. `make_plan` creates it."""

    schema_version: int = field(metadata=limits(minimum=PLAN_SCHEMA_VERSION, maximum=PLAN_SCHEMA_VERSION))
    command: str
    """The training script of the profile and its arguments."""
    goal: str = field(metadata=limits(choices=GOALS))
    answer: str
    """One sentence: what to do, with the figures that decide it."""
    reason: str = field(metadata=limits(choices=REASONS))
    chosen: PlannedCluster
    baseline: PlannedCluster
    """The trainer hosts as the profile used them, without data hosts."""
    alternatives: tuple[PlannedCluster, ...] = field(metadata=limits(max_items=100))
    headspace: Figure
    """Step time with batches always ready, in seconds."""
    speedup: float
    """Step time of the baseline / step time of the chosen cluster."""
    break_even_speedup: float | None
    """Speed-up above which the chosen cluster costs less per step than the baseline."""
    chance_to_pay: float | None = field(metadata=limits(maximum=1))
    """Probability that the chosen cluster costs less per step than the baseline, given the uncertain figures. 1 if they
    are the same. None if a price is unknown."""
    notes: tuple[str, ...]
    """What the reader of the plan must know."""

    def cluster_of(
        self, groups: Iterable[PlannedGroup], local_endpoints: int | None, *, compression: str | None = None
    ) -> PlannedCluster | None:
        """Return the prediction for a job's groups, or None if the plan lacks the cluster.

        Clusters are equal if they have the same number of hosts of each role and instance type, the same number of
        endpoints per trainer host, and the same compression. The number of endpoints does not matter in a job without
        data hosts.

        Args:
            groups: The job's groups.
            local_endpoints: Endpoints per trainer host, or None for any number. With None, the chosen cluster comes
                first, then the others in their order.
            compression: Compression of the job's batches. None for batches that are sent unchanged or as uint8.
        """
        wanted = _sizes(groups)
        # The form of a cluster says how its batches travel. The job does not tell whether it sends uint8 instead of
        # wider numbers, so without compression both forms match.
        forms = (AS_IS, UINT8) if compression is None else (compression,)
        # In a job without data hosts the script decides how many processes preprocess.
        ignores_endpoints = local_endpoints is None or not any(role == "data" for role, _ in wanted)
        for cluster in (self.chosen, *self.alternatives):
            has_endpoints = ignores_endpoints or cluster.local_endpoints == local_endpoints
            if has_endpoints and _sizes(cluster.groups) == wanted and cluster.form in forms:
                return cluster
        return None


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Args:
        path: ``plan.json``, or the directory that contains it.

    Raises:
        ConfigError: If the plan is missing or malformed. The message names the file and the key path.
    """
    return load(Plan, path, PLAN_FILE_NAME, to_do="make one with hetero plan PROFILE --json")


def _sizes(groups: Iterable[PlannedGroup]) -> Counter[tuple[str, str]]:
    """Return the number of hosts by role and instance type."""
    sizes: Counter[tuple[str, str]] = Counter()
    for group in groups:
        sizes[group.role, group.instance_type] += group.count
    return sizes
