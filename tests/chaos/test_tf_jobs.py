"""The judge of jobs in a row would notice what is left, and the seed alone says which jobs there are."""

from __future__ import annotations

import collections
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import tf_jobs
from tests.support.chaos.tf_plans import BATCH_SIZE, Fault, Plan, draw

PLAN = Plan(service="grpc", num_data=1, num_trainers=1)
STANDS_FOR_A_JOB = """
import json, os, pathlib, subprocess, sys, time

kind, out, journals, shared = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
temporary = pathlib.Path(os.environ["TMPDIR"])
for rank in range(2):
    elements = [] if kind == "element" and rank else list(range(80 * rank, 80 * rank + 80))
    (out / f"rank-{rank}.json").write_text(json.dumps(elements))
if kind == "port":
    program = "import socket; s = socket.socket(); s.bind(('', 0)); s.listen(); print(flush=True); s.accept()"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()
if kind == "file":
    (temporary / "mine").touch()
if kind == "source file":
    (temporary / "__autograph_generated_file1.py").touch()
if kind == "journal":
    (journals / "tf-dispatcher-mine").mkdir(parents=True)
if kind == "shared memory":
    shared.touch()
if kind == "cause":
    failure = out.parent / "run/hosts/algo-2/ml/output/failure"
    failure.parent.mkdir(parents=True)
    failure.touch()
print("rank 0 step 1", flush=True)
while not (out / "go on").exists():
    time.sleep(0.01)
if kind == "process":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
sys.exit(3 if kind == "code" else 0)
"""


class Standing(tf_jobs.Job):
    """A job of one small process, which leaves the files of the test."""

    def __init__(self, folder: Path, kind: str, shared: Path) -> None:
        super().__init__(PLAN, folder / "job", folder / "journals")
        self._kind, self._shared = kind, shared

    def _command(self) -> list[str]:
        paths = (self._output, self._work_dir, self._shared)
        return [sys.executable, "-c", STANDS_FOR_A_JOB, self._kind, *map(str, paths)]

    def go_on(self) -> None:
        """Let it end."""
        (self._output / "go on").touch()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A file of shared memory that does not exist yet, nor afterwards."""
    path = Path("/dev/shm") / f"hetero-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", []),
        ("process", ["process ", "gone after "]),
        ("port", ["process ", "port ", "gone after "]),
        ("file", ["file mine"]),
        ("source file", []),
        ("journal", ["journal tf-dispatcher-mine"]),
        ("shared memory", ["shared memory /dev/shm/hetero-test-"]),
        ("code", ["exit code 3, expected 0"]),
        ("cause", ["it says that it failed"]),
        ("element", ["80 elements are lost"]),
    ],
)
def test_judge_names_what_a_job_leaves(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: list[str]
) -> None:
    if "process " in words:
        monkeypatch.setattr(tf_jobs, "_HOPELESS", 0.05)  # what is left is left
    with Standing(tmp_path, kind, shared) as job:
        job.harm()
        job.go_on()
        outcome = job.end()
        left = job._living()
    assert len(outcome.violations) == len(words), outcome
    assert all(found.startswith(word) for found, word in zip(outcome.violations, words, strict=True))
    assert outcome.num_source_files == (kind == "source file")
    assert len(left) == (kind in ("process", "port"))
    assert job._living() == []  # whatever it was


def test_a_third_of_the_jobs_is_harmed_in_all_ways_and_the_seed_says_how() -> None:
    plans = draw(50, 1)
    assert plans == draw(50, 1)
    assert plans != draw(50, 2)
    kinds = collections.Counter(plan.fault for plan in plans)
    assert kinds.pop(None) == 33
    assert set(kinds) == set(Fault)
    assert set(kinds.values()) <= {2, 3}
    assert {plan.service for plan in plans} == {"tf", "grpc"}
    assert all(plan.service == "tf" for plan in plans if plan.fault is Fault.KILL_DISPATCHER or plan.has_work_dir)


def test_only_what_a_killed_worker_did_may_be_lost_and_nothing_twice() -> None:
    killed = Plan(service="tf", num_data=2, num_trainers=1, fault=Fault.KILL_SERVER, victim=1, at_step=1)
    assert killed.exit_code == 0
    half = list(range(killed.num_elements // 2))
    assert tf_jobs.check_elements(killed, {0: half, 1: []}) == []
    assert tf_jobs.check_elements(killed, {0: half, 1: half[:3]}) != []
    assert tf_jobs.check_elements(killed, {0: half}) != []
    served = Plan(service="grpc", num_data=2, num_trainers=1, fault=Fault.KILL_DATA, victim=1, at_step=1)
    assert tf_jobs.check_elements(served, {0: half, 1: []}) != []


def test_repeated_dataset_is_left_after_as_many_steps_by_every_rank() -> None:
    plan = Plan(service="tf", num_data=1, num_trainers=1, is_repeated=True)
    whole = [0] * (BATCH_SIZE * plan.num_steps)
    assert tf_jobs.check_elements(plan, {0: whole, 1: whole}) == []
    assert tf_jobs.check_elements(plan, {0: whole, 1: whole[1:]}) != []


@pytest.mark.parametrize(
    ("service", "fault", "victim", "num_data", "code"),
    [  # of jobs with a finite dataset
        ("tf", None, 0, 1, 0),
        ("tf", Fault.EXCEPTION, 1, 1, 30),
        ("grpc", Fault.KILL_RANK, 0, 1, 30),
        ("tf", Fault.TERM_JOB, 0, 1, 143),
        ("tf", Fault.TERM_TRAINER, 1, 1, 143),
        ("tf", Fault.KILL_SERVER, 0, 1, 0),
        ("tf", Fault.KILL_DISPATCHER, 0, 1, 31),
        ("tf", Fault.KILL_TRAINER, 0, 1, 137),
        ("tf", Fault.KILL_TRAINER, 1, 1, 32),
        ("tf", Fault.KILL_DATA, 0, 2, 31),
        ("tf", Fault.KILL_DATA, 1, 2, 31),
        ("grpc", Fault.KILL_DATA, 0, 2, 0),
        ("grpc", Fault.KILL_DATA, 0, 1, 31),
    ],
)
def test_exit_code_is_that_of_the_documentation(
    service: str, fault: Fault | None, victim: int, num_data: int, code: int
) -> None:
    plan = Plan(service=service, num_data=num_data, num_trainers=2, fault=fault, victim=victim, at_step=1)
    assert plan.exit_code == code


def test_job_without_an_end_goes_on_without_a_data_host_but_not_without_the_dispatcher() -> None:
    plan = Plan(service="tf", num_data=2, num_trainers=1, is_repeated=True, fault=Fault.KILL_DATA, at_step=1)
    assert [replace(plan, victim=victim).exit_code for victim in (0, 1)] == [31, 0]
    journal = replace(plan, fault=Fault.KILL_DISPATCHER, has_work_dir=True)
    assert journal.exit_code == 0
