"""Simulated TensorFlow jobs in a row, a third of them ended by an exception, SIGTERM or a kill: what does each leave?

    make tf-jobs N=50 SEED=1

Two ranks, fed by tf.data.service or by our endpoints, a finite dataset and a repeated one in turn; `tf_plans` says
which jobs, and by the seed alone what befalls them. Each has to end with the exit code that is documented, with the
elements that are promised, and to leave nothing: no process, port, shared memory or file. Prints a line per job and a
summary in JSON, and exits with 1 if anything was violated. The time that each took from its end, or from its fault,
until everything was gone is measured against what is promised: on a machine that does other work too it may be late,
and only three times as long is a violation.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hetero.system.process import adopt_descendants, kill_all, reap_adopted, start_child
from tests.support.chaos import leftovers
from tests.support.chaos.hosts import MARKER, signal_safely
from tests.support.chaos.tf_plans import BATCH_SIZE, NUM_RANKS, Fault, Plan, draw

SCRIPT = Path(__file__).with_name("tf_job_script.py")
_BEGIN_S, _JOB_S = 180.0, 300.0
"""Longest time until a job reaches the step of its fault, and until it ends."""
_POLL_S, _PUMP_S = 0.05, 10.0
_HOPELESS = 3
"""So many times the promised bound no other work on the machine explains."""
_STEP_S = 0.03
_LAUNCHER = "hetero.cli launch"


@dataclass(kw_only=True)
class Outcome:
    """How a job ended."""

    code: int | None = None
    """Exit code, as a shell reports it. None: the job was killed."""
    run_s: float = 0.0
    gone_s: float | None = None
    """Seconds from its end, or from its fault, until everything was gone."""
    num_source_files: int = 0
    """Of those that TensorFlow makes for its functions, and a process that fails or is killed leaves."""
    violations: list[str] = field(default_factory=list)


class JobError(Exception):
    """The job did not come to where it was to be harmed, or did not end."""


class Job:
    """One simulated job, as a context manager that kills what is left.

    Args:
        plan: What it is.
        folder: New folder for its files.
        work_dir: For dispatchers' journals, of all jobs.
    """

    def __init__(self, plan: Plan, folder: Path, work_dir: Path) -> None:
        self._plan, self._folder, self._work_dir = plan, folder, work_dir
        self._output, self._temporary = folder / "out", folder / "tmp"
        for path in (self._output, self._temporary):
            path.mkdir(parents=True)
        self._marker = uuid.uuid4().hex
        self._shared_before = leftovers.shared_memory()
        self._journals_before = leftovers.files(work_dir)
        self._ports: set[leftovers.Port] = set()
        self._children_before = set(psutil.Process().children(recursive=True))
        self._begun_s = self._harmed_s = time.time()
        self._lines: list[str] = []

    def __enter__(self) -> Job:
        environment = {**os.environ, MARKER: self._marker, "TMPDIR": str(self._temporary)}
        self._process = start_child(
            self._command(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pump_thread = threading.Thread(target=self._pump, daemon=True)
        self._pump_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        while left := self._living():
            kill_all(left)
            psutil.wait_procs(left, timeout=_POLL_S)
        self._pump_thread.join(_PUMP_S)

    def _pump(self) -> None:
        """Note what it prints, and when."""
        assert self._process.stdout is not None
        with self._process.stdout as source, (self._folder / "log.txt").open("w", buffering=1) as log:
            for line in source:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                log.write(f"{time.time() - self._begun_s:7.2f} s  {text}\n")

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "hetero.cli", "simulate", *self._flags(), str(SCRIPT), "--", *self._arguments()]

    def _flags(self) -> list[str]:
        plan = self._plan
        flags = ["--output-dir", str(self._folder / "run"), "--data-timeout", str(plan.data_timeout_s)]
        flags += ["--group", f"data_group=ml.c5.xlarge:{plan.num_data}"]
        flags += ["--group", f"dnn_group=ml.p3.2xlarge:{plan.num_trainers}"]
        flags += ["--nproc-per-node", str(NUM_RANKS // plan.num_trainers)]
        if plan.service == "grpc":
            return [*flags, "--framework", "tensorflow", "--endpoints-per-host", "1"]
        return [*flags, "--data-service", "tf", *(["--tf-work-dir", str(self._work_dir)] if plan.has_work_dir else [])]

    def _arguments(self) -> list[str]:
        plan = self._plan
        arguments = ["--output", str(self._output), "--service", plan.service, "--step-s", str(_STEP_S)]
        arguments += ["--num-elements", str(plan.num_elements), "--batch-size", str(BATCH_SIZE)]
        if plan.is_repeated:
            arguments += ["--repeated", *(["--steps", str(plan.num_steps)] if plan.exit_code == 0 else [])]
        if plan.fault is Fault.EXCEPTION:
            arguments += ["--fail-rank", str(plan.victim), "--fail-step", str(plan.at_step)]
        return arguments

    def _has_printed(self, text: str, *, is_end: bool = False) -> bool:
        return any(line.endswith(text) if is_end else text in line for line in self._lines[:])

    # Harm

    def harm(self) -> None:
        """Wait until it is where the plan says, and do what that says.

        Raises:
            JobError: It does not get there.
        """
        plan = self._plan
        if plan.at_step or plan.fault is None:
            step = max(1, plan.at_step - 1)  # by itself it fails at the next one
            self._wait_for(lambda: self._has_printed(f" step {step}", is_end=True), f"step {step}")
            self._ports = leftovers.ports_of({process.pid for process in self._living()})
        if plan.fault in (None, Fault.EXCEPTION):
            return
        victim = self._process if plan.fault is Fault.TERM_JOB else self._wait_for(self._find_victim, "the victim")
        due_s = time.monotonic() + plan.after_s
        self._wait_for(lambda: time.monotonic() >= due_s, "its moment")
        self._ports |= leftovers.ports_of({process.pid for process in self._living()})
        is_term = plan.fault in (Fault.TERM_JOB, Fault.TERM_TRAINER)
        self._harmed_s = time.time()
        if not signal_safely(psutil.Process(victim.pid), signal.SIGTERM if is_term else signal.SIGKILL):
            raise JobError("the fault came too late")

    def _find_victim(self) -> psutil.Process | None:
        """Return whom the fault befalls, None while it is not there."""
        plan = self._plan
        if plan.fault is Fault.KILL_RANK:
            per_host = NUM_RANKS // plan.num_trainers
            ranks = self._find("hetero.launch.ranks.rank", plan.trainer_hosts[plan.victim // per_host])
            with contextlib.suppress(psutil.Error):
                return next((each for each in ranks if each.environ().get("RANK") == str(plan.victim)), None)
            return None
        if plan.fault in (Fault.TERM_TRAINER, Fault.KILL_TRAINER, Fault.KILL_DATA):
            hosts = plan.data_hosts if plan.fault is Fault.KILL_DATA else plan.trainer_hosts
            host = hosts[plan.victim]
            # Before it has said something it may not have taken the signal into its own hands.
            return next(iter(self._find(_LAUNCHER, host)), None) if self._has_printed(f" {host} ") else None
        host = plan.data_hosts[plan.victim]
        if plan.service == "grpc":
            fork_servers = self._find("hetero.pool.fork_server", host)
            return next((child for fork_server in fork_servers for child in fork_server.children()), None)
        servers = self._find("hetero.pool.tf_server", host)
        index = 1 if plan.fault is Fault.KILL_SERVER and host == plan.data_hosts[0] else 0  # the dispatcher comes first
        return servers[index] if len(servers) > index else None

    def _find(self, words: str, host: str) -> list[psutil.Process]:
        """Return the processes of a host whose command line has these words, oldest first."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(process.cmdline()) and process.environ().get("SM_CURRENT_HOST") == host:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def _wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        deadline_s = time.monotonic() + _BEGIN_S
        while not (found := condition()):
            if self._process.poll() is not None:
                raise JobError(f"it ended before {what}")
            if time.monotonic() > deadline_s:
                raise JobError(f"not within {_BEGIN_S:.0f} s: {what}")
            time.sleep(_POLL_S)
        return found

    # The end

    def end(self) -> Outcome:
        """Wait until it has ended and everything is gone. Return how it ended, and what is left."""
        outcome, deadline_s = Outcome(), time.time() + _JOB_S
        while self._process.poll() is None and time.time() < deadline_s:
            time.sleep(_POLL_S)
        ended_s, code = time.time(), self._process.returncode
        if code is None:
            outcome.violations.append(f"hangs: runs {_JOB_S:.0f} s later still")
            return outcome
        while (left := self._living()) and time.time() < ended_s + _HOPELESS * self._plan.bound_s:
            time.sleep(_POLL_S)
        outcome.code = 128 - code if code < 0 else code
        outcome.run_s = time.time() - self._begun_s
        outcome.gone_s = time.time() - self._reference_s()
        outcome.violations += [f"process {each.pid} {_described(each)}" for each in left]
        outcome.violations += [f"port {ip}:{port}" for ip, port in sorted(self._ports & set(leftovers.listening()))]
        outcome.violations += [f"shared memory {each}" for each in leftovers.new_shared_memory(self._shared_before)]
        names = leftovers.files(self._temporary)
        # TensorFlow's files do not count. A killed process cannot remove those of Python's multiprocessing.
        sources = [name for name in names if name.startswith("__autograph_generated_file")]
        outcome.num_source_files = len(sources)
        outcome.violations += [f"file {name}" for name in names if name not in sources and "pymp-" not in name]
        outcome.violations += self._check_journals()
        outcome.violations += self._check_end(outcome)
        return outcome

    def _reference_s(self) -> float:
        """Return when its ranks ended, or it was ended: from then on it has time to go."""
        results = [path.stat().st_mtime for path in self._output.glob("rank-*.json")]
        if self._plan.exit_code == 0 and results:
            return max(results)
        if self._plan.fault is Fault.EXCEPTION:
            failed = [path.stat().st_mtime for path in self._output.glob("failing-*")]
            return max(failed, default=self._harmed_s)
        return self._harmed_s

    def _check_journals(self) -> list[str]:
        """Say which journals are left that should not be: that of a killed owner is, until another one is made."""
        plan, found = self._plan, leftovers.files(self._work_dir)
        new = [name for name in found if name not in self._journals_before]
        old = [name for name in found if name in self._journals_before]
        is_made = plan.has_work_dir and (plan.at_step > 0 or plan.fault is None)
        left = new[plan.leaves_journal :] + (old if is_made else [])
        return [f"journal {name}" for name in left]

    def _check_end(self, outcome: Outcome) -> list[str]:
        """Say what is wrong with how it ended."""
        plan, found = self._plan, []
        if outcome.code != plan.exit_code:
            found.append(f"exit code {outcome.code}, expected {int(plan.exit_code)}")
        if outcome.gone_s is not None and outcome.gone_s > _HOPELESS * plan.bound_s:
            found.append(f"gone after {outcome.gone_s:.1f} s, promised are {plan.bound_s:.0f} s")
        trees = [self._folder / "run" / "hosts" / host / "ml" / "output" / "failure" for host in plan.trainer_hosts]
        has_cause = any(tree.exists() for tree in trees)
        if has_cause != (plan.exit_code not in (0, 143)):
            found.append("no trainer host says why it failed" if not has_cause else "it says that it failed")
        if plan.exit_code == 0:
            found += check_elements(plan, _results(self._output))
        return found

    def _living(self) -> list[psutil.Process]:
        """Return the job's processes: those with its mark, and whatever else has come down from this process."""
        reap_adopted()
        children = set(psutil.Process().children(recursive=True)) - self._children_before
        found = {process for process in children if _lives(process)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == self._marker and _lives(process):
                    found.add(process)
        return sorted(found, key=lambda process: process.pid)


def check_elements(plan: Plan, results: dict[int, list[int]]) -> list[str]:
    """Return what is wrong with the batches of a job that ended well, by rank."""
    if sorted(results) != list(range(NUM_RANKS)):
        return [f"results of ranks {sorted(results)}"]
    if plan.is_repeated:
        wanted = BATCH_SIZE * plan.num_steps
        return [f"rank {rank} has {len(got)} elements" for rank, got in results.items() if len(got) != wanted]
    seen = collections.Counter(element for got in results.values() for element in got)
    num_repeated = sum(count - 1 for count in seen.values())
    num_lost = plan.num_elements - len(seen)
    # With dynamic sharding, what a worker that restarts was at is lost.
    may_lose = plan.service == "tf" and plan.fault is Fault.KILL_SERVER
    if num_repeated or (num_lost and not may_lose):
        return [f"{num_lost} elements are lost, {num_repeated} are there twice"]
    return []


def _results(folder: Path) -> dict[int, list[int]]:
    return {
        int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))
    }


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120]
    return "that has ended"


def run(plan: Plan, folder: Path, work_dir: Path) -> Outcome:
    """Run one job and return how it ended."""
    with Job(plan, folder, work_dir) as job:
        try:
            job.harm()
            return job.end()
        except JobError as error:
            return Outcome(violations=[str(error)])


def summarize(plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes of all jobs, by fault."""
    kinds: dict[str, list[tuple[Plan, Outcome]]] = {}
    for plan, outcome in zip(plans, outcomes, strict=True):
        kinds.setdefault("no fault" if plan.fault is None else plan.fault.value, []).append((plan, outcome))
    return {
        "num_jobs": len(outcomes),
        "num_faults": sum(plan.fault is not None for plan in plans),
        "num_violations": sum(len(outcome.violations) for outcome in outcomes),
        "num_late": sum(is_late(plan, outcome) for plan, outcome in zip(plans, outcomes, strict=True)),
        "kinds": {
            kind: {
                "num_jobs": len(jobs),
                "exit_codes": dict(collections.Counter(str(outcome.code) for _, outcome in jobs)),
                "gone_s": _spread([outcome.gone_s for _, outcome in jobs if outcome.gone_s is not None]),
                "source_files": sum(outcome.num_source_files for _, outcome in jobs),
            }
            for kind, jobs in sorted(kinds.items())
        },
    }


def _spread(values: Sequence[float]) -> str:
    """Return median and maximum."""
    return f"{statistics.median(values):.1f}, at most {max(values):.1f}" if values else ""


def describe(plan: Plan, outcome: Outcome) -> str:
    """Return how a job ended, in a line."""
    gone = "" if outcome.gone_s is None else f", gone {outcome.gone_s:.1f} s after its end"
    late = f", LATE: {plan.bound_s:.0f} s are promised" if is_late(plan, outcome) else ""
    return f"{outcome.code}; {outcome.run_s:.0f} s{gone}{late}"


def is_late(plan: Plan, outcome: Outcome) -> bool:
    """Tell whether a job took longer to go than is promised."""
    return outcome.gone_s is not None and outcome.gone_s > plan.bound_s


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="simulated TensorFlow jobs in a row, a third of them harmed")
    parser.add_argument("--jobs", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--fault", choices=[fault.name.lower() for fault in Fault], help="of all jobs. Default: various"
    )
    parser.add_argument("--summary", type=Path, help="where the summary goes, besides the output")
    args = parser.parse_args(argv)
    plans = draw(args.jobs, args.seed, tuple(Fault) if args.fault is None else (Fault[args.fault.upper()],))
    adopt_descendants()  # whatever of a job is orphaned comes to this process, and is found
    folder = Path(tempfile.mkdtemp(prefix="hetero-tf-jobs-"))
    outcomes: list[Outcome] = []
    begun_s = time.monotonic()
    try:
        for number, plan in enumerate(plans, start=1):
            own_folder = folder / f"job-{number}"
            outcome = run(plan, own_folder, folder / "journals")
            outcomes.append(outcome)
            print(f"{number:3d} {plan.describe()} -> {describe(plan, outcome)}", flush=True)
            for violation in outcome.violations:
                print(f"    VIOLATION {violation}; see {own_folder / 'log.txt'}", flush=True)
            if not outcome.violations and not is_late(plan, outcome):
                shutil.rmtree(own_folder)
    finally:
        shutil.rmtree(folder / "journals", ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # what there is to see stays
    is_well = not any(outcome.violations for outcome in outcomes)
    summary = {"seed": args.seed, "duration_s": round(time.monotonic() - begun_s), **summarize(plans, outcomes)}
    text = json.dumps(summary, indent=1)
    print(text, flush=True)
    if args.summary is not None:
        args.summary.write_text(text + "\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was begun is taken down
    sys.exit(main())
