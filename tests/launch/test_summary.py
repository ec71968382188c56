"""What the report says of how a job was started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hetero.cluster import ClusterSpec, find_platform
from hetero.config import LaunchOptions, Timings
from hetero.control.status import HostStatus
from hetero.errors import ExitCode
from hetero.launch import placement
from hetero.launch.reporting.summary import JobHistory, run_facts
from hetero.report.build import COMPUTED_ON_DATA_HOSTS
from hetero.report.model import RunFacts
from tests.support.launch.clusters import cluster


def facts_of(
    options: LaunchOptions, hosts: ClusterSpec, statuses: Sequence[HostStatus], *, decisions: tuple[str, ...] = ()
) -> RunFacts:
    """Return the facts of a job that has ended well."""
    plan = placement.HostPlan(
        options=options,
        cluster=hosts,
        platform=find_platform({}),
        placement=placement.plan(options, hosts, num_gpus=0),
        timings=Timings(),
        job_id="job",
    )
    return run_facts(plan, statuses, JobHistory(decisions=decisions), exit_code=ExitCode.OK)


@pytest.mark.parametrize(
    ("options", "expected", "other"),
    [
        (
            {"data_service": "tf", "tf_workers_per_host": 3, "trainer_tf_workers": 1},
            {"data service": "tf", "tf.data workers per data host": "3", "tf.data workers per trainer host": "1"},
            "endpoints per data host",
        ),
        (
            {"endpoints_per_host": 4, "trainer_endpoints": 2},
            {"data service": "grpc", "endpoints per data host": "4", "endpoints per trainer host": "2"},
            "tf.data workers per data host",
        ),
    ],
    ids=["tf", "grpc"],
)
def test_options_name_what_preprocessed(options: dict[str, Any], expected: dict[str, str], other: str) -> None:
    hosts = cluster("algo-9")
    launched = LaunchOptions(script="train.py", **options)
    found = facts_of(launched, hosts, []).options
    assert expected.items() <= found.items()
    assert other not in found


@pytest.mark.parametrize(("data", "expected"), [(1, "auto"), (0, "0")])
def test_options_name_auto_only_where_the_job_chooses(data: int, expected: str) -> None:
    hosts = cluster("algo-9", data=data)
    launched = LaunchOptions(script="train.py", trainer_endpoints="auto")
    found = facts_of(launched, hosts, [])
    assert found.options["endpoints per trainer host"] == expected


@pytest.mark.parametrize(
    ("computed", "expected"),
    [({"algo-9": 7, "algo-1": 0}, 0), ({"algo-9": 7, "algo-1": 3}, 3), ({"algo-9": 7}, None)],
    ids=["idle", "busy", "not known"],
)
def test_batches_of_data_hosts_are_counted_apart(computed: dict[str, int], expected: int | None) -> None:
    hosts = cluster("algo-9")
    launched = LaunchOptions(script="train.py", trainer_endpoints=2)
    statuses = [
        HostStatus(host=host, incarnation="i", version="1", script_digest="d", counters={"batches computed": count})
        for host, count in computed.items()
    ]
    events = facts_of(launched, hosts, statuses).events
    assert events["batches computed"] == sum(computed.values())
    assert events.get(COMPUTED_ON_DATA_HOSTS) == expected


@pytest.mark.parametrize(("computed", "expected"), [(0, "heterogeneous"), (7, "hybrid")])
def test_placement_with_auto_is_hybrid_if_trainer_hosts_computed(computed: int, expected: str) -> None:
    hosts = cluster("algo-9")
    launched = LaunchOptions(script="train.py", trainer_endpoints="auto")
    status = HostStatus(
        host="algo-9", incarnation="i", version="1", script_digest="d", counters={"batches computed": computed}
    )
    facts = facts_of(launched, hosts, [status], decisions=("step 30: stays at 0",))
    assert (facts.placement, facts.decisions) == (expected, ("step 30: stays at 0",))
