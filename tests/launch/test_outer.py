"""What other launchers say to the processes that they make."""

from __future__ import annotations

import pytest

from hetero.errors import ConfigError
from hetero.launch.job import job_id
from hetero.launch.ranks.parent_launcher import outer_launcher, take_variables

from clusters import cluster  # isort: skip

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
    assert outer_launcher({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) is None


def test_process_of_mpirun_is_a_rank() -> None:
    outer = outer_launcher(MPI)
    assert outer is not None
    assert (outer.name, outer.rank, outer.world_size, outer.local_rank, outer.num_local) == ("mpirun", 2, 4, 0, 2)
    assert (outer.leads, outer.gives_ranks) == (True, True)


def test_process_of_torchrun_is_a_copy_and_no_rank() -> None:
    outer = outer_launcher(TORCH)
    assert outer is not None
    assert (outer.name, outer.rank, outer.world_size, outer.local_rank, outer.num_local) == ("torchrun", 3, 4, 1, 2)
    assert (outer.leads, outer.gives_ranks) == (False, False)


@pytest.mark.parametrize(("name", "value"), [("TORCHELASTIC_RESTART_COUNT", "1"), ("MASTER_PORT", "7778")])
def test_another_run_of_torchrun_is_told_apart(name: str, value: str) -> None:
    first, second = outer_launcher(TORCH), outer_launcher({**TORCH, name: value})
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
        outer_launcher({**MPI, f"OMPI_{name}": value})


def test_what_is_said_to_one_process_is_kept_from_its_children() -> None:
    outer = outer_launcher(MPI)
    assert outer is not None
    environ = {**MPI, "OMP_NUM_THREADS": "1", "PATH": "/bin"}
    assert take_variables(environ, outer) == MPI
    assert environ == {"OMP_NUM_THREADS": "1", "PATH": "/bin"}


@pytest.mark.parametrize(("threads", "num_local", "left"), [("1", "2", {}), ("4", "2", {"OMP_NUM_THREADS": "4"})])
def test_thread_count_of_torchruns_making_does_not_stay(threads: str, num_local: str, left: dict[str, str]) -> None:
    environ = {**TORCH, "OMP_NUM_THREADS": threads, "LOCAL_WORLD_SIZE": num_local}
    outer = outer_launcher(environ)
    assert outer is not None
    take_variables(environ, outer)
    assert environ == left


@pytest.mark.parametrize("text", ['{"job_name": "job-7"}', '{"job_name": null}', "[]", "{"])
def test_job_is_called_what_the_toolkit_calls_it_where_mpirun_hands_on_nothing_else(text: str) -> None:
    found = job_id({"SM_TRAINING_ENV": text}, cluster("algo-1"))
    assert found == "job-7" if "job-7" in text else found.startswith("cluster-")
    assert job_id({"SM_TRAINING_ENV": text, "TRAINING_JOB_NAME": "job-8"}, cluster("algo-1")) == "job-8"
