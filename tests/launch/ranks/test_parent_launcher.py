"""What other launchers say to the processes that they make."""

from __future__ import annotations

import pytest

from hetero.cluster import find_platform
from hetero.errors import ConfigError
from hetero.launch.ranks.parent_launcher import find_parent, take_variables
from tests.support.launch.clusters import cluster

MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-algo-3-12040@1",
}
TORCH = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "algo-1",
    "MASTER_PORT": "7777",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "OMP_NUM_THREADS": "1",
}


def test_process_that_nobody_else_made_has_no_outer_launcher() -> None:
    assert find_parent({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) is None


def test_process_of_mpirun_is_a_rank() -> None:
    parent = find_parent(MPI)
    assert parent is not None
    assert (parent.name, parent.rank, parent.world_size, parent.local_rank, parent.num_local) == ("mpirun", 2, 4, 0, 2)
    assert (parent.local_rank, parent.gives_ranks) == (0, True)


def test_process_of_torchrun_is_a_copy_and_no_rank() -> None:
    parent = find_parent(TORCH)
    assert parent is not None
    assert (parent.name, parent.rank, parent.world_size, parent.local_rank, parent.num_local) == (
        "torchrun",
        3,
        4,
        1,
        2,
    )
    assert (parent.local_rank > 0, parent.gives_ranks) == (True, False)


@pytest.mark.parametrize(("name", "value"), [("TORCHELASTIC_RESTART_COUNT", "1"), ("MASTER_PORT", "7778")])
def test_another_run_of_torchrun_is_told_apart(name: str, value: str) -> None:
    first, second = find_parent(TORCH), find_parent({**TORCH, name: value})
    assert first is not None
    assert second is not None
    assert first.run != second.run


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMM_WORLD_LOCAL_RANK", "2"),
        ("COMM_WORLD_LOCAL_SIZE", ""),
        ("COMM_WORLD_RANK", "-1"),
        ("COMM_WORLD_SIZE", "1"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"OMPI_{name}='{value}'"):
        find_parent({**MPI, f"OMPI_{name}": value})


def test_what_is_said_to_one_process_is_kept_from_its_children() -> None:
    parent = find_parent(MPI)
    assert parent is not None
    environ = {**MPI, "OMP_NUM_THREADS": "1", "PATH": "/bin"}
    assert take_variables(environ, parent) == MPI
    assert environ == {"OMP_NUM_THREADS": "1", "PATH": "/bin"}


@pytest.mark.parametrize(("threads", "num_local", "left"), [("1", "2", {}), ("4", "2", {"OMP_NUM_THREADS": "4"})])
def test_thread_count_of_torchruns_making_does_not_stay(threads: str, num_local: str, left: dict[str, str]) -> None:
    environ = {**TORCH, "OMP_NUM_THREADS": threads, "LOCAL_WORLD_SIZE": num_local}
    parent = find_parent(environ)
    assert parent is not None
    take_variables(environ, parent)
    assert environ == left


@pytest.mark.parametrize("text", ['{"job_name": "job-7"}', '{"job_name": null}', "[]", "{"])
def test_job_is_called_what_the_toolkit_calls_it_where_mpirun_hands_on_nothing_else(text: str) -> None:
    found = find_platform({"SM_TRAINING_ENV": text}).job_id(cluster("algo-1"))
    assert found == "job-7" if "job-7" in text else found.startswith("cluster-")
    named = find_platform({"SM_TRAINING_ENV": text, "TRAINING_JOB_NAME": "job-8"})
    assert named.job_id(cluster("algo-1")) == "job-8"
