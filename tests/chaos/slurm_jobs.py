"""Jobs of a real Slurm on this machine, one after the other, a third of them ended: how does each end, what is left?

    python -m tests.chaos.slurm_jobs --jobs 50

Heterogeneous jobs by one srun and by two, and one component that is divided, in turn. A third is ended by scancel, by
a kill of the launcher of a data node or of the trainer node, by the time limit, or by its script. Each must end with
the state and exit code that docs/slurm.md promises, and leave no process and no token. The chains of the batches of
finished jobs must be the same in all of them. Needs root, slurm-wlm and munge. Prints a summary in JSON, and exits with
1 if anything was violated.

Result with Slurm 22.05, times scaled by 0.5: of 50 jobs 34 finished, 5 were cancelled, 2 reached the time limit, 3 lost
a data node, 3 the trainer node, and 3 scripts failed. Nothing was violated.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from hetero import cli
from hetero.errors import ExitCode
from tests.support.integration.slurm_cluster import NUM_GPUS, SlurmCluster, missing

CHAIN = Path(__file__).parents[1] / "integration" / "scripts" / "chain.py"
OPTIONS = ["--nproc-per-node", "2", "--endpoints-per-host", "1", "--trainer-endpoints", "0", "--start-timeout", "60"]
TWO = [
    "--group",
    f"dnn=GPU:{NUM_GPUS}:1",
    "--group",
    "data=CPU:1:2",
    "--partition",
    "dnn:gpu",
    "--partition",
    "data:cpu",
]
FORMS = ("one srun", "two sruns", "one component")
FATES = ("scancel", "kill a data node", "kill the trainer node", "script fails", "scancel", "time limit")
LENGTH = ["--epochs", "4", "--step-s", "0.05"]
_BEGIN_S, _GONE_S = 60.0, 25.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=50)
    args = parser.parse_args(argv)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hetero-slurm-") as temporary:
        folder = Path(temporary)
        cluster = SlurmCluster(folder / "slurm")
        with cluster.running():
            summary = run_all(args.jobs, cluster, folder)
    print(json.dumps(summary, indent=2))
    return 1 if summary["violations"] else 0


def run_all(number: int, cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    """Run all jobs. Return what was found."""
    ends: collections.Counter[str] = collections.Counter()
    violations: list[str] = []
    reference = ""
    for index in range(number):
        form = FORMS[index % len(FORMS)]
        fate = FATES[index // 3 % len(FATES)] if index % 3 == 2 else ""
        form = FORMS[(index // 3) % 2] if fate else form  # a node to kill of each kind
        own = folder / f"job-{index}"
        (own / "out").mkdir(parents=True)
        found, text = run_one(cluster, own, form, fate)
        wrong = [*text, *left(own)]
        if fate in ("", "kill a data node"):
            chains = [json.loads((own / "out" / f"rank-{rank}.json").read_text())["chain"] for rank in range(2)]
            reference = reference or " ".join(chains)
            if " ".join(chains) != reference:
                wrong.append("other batches than in the job before")
        ends[f"{fate or 'finishes'}: {found}"] += 1
        violations += [f"job {index} ({form}, {fate or 'finishes'}): {each}" for each in wrong]
        print(f"{index + 1} of {number}: {form}, {fate or 'finishes'}: {found}", file=sys.stderr, flush=True)
    return {"jobs": number, "ends": dict(ends), "violations": violations}


def run_one(cluster: SlurmCluster, folder: Path, form: str, fate: str) -> tuple[str, list[str]]:
    """Run a job. Return how it ended, and what was wrong."""
    args = (
        ["--epochs", "1000", "--step-s", "0.05"]
        if fate in ("scancel", "time limit", "kill the trainer node")
        else LENGTH
    )
    args = [*args, "--fail-at", "5"] if fate == "script fails" else args
    text = script_of(folder, form, args)
    if fate == "time limit":  # a minute is the shortest, and the signal comes 50 s before it
        text = text.replace("--signal=TERM@120", "--time=1\n#SBATCH --signal=TERM@50")
    job = cluster.submit(text, folder)
    output = folder / "job.out"
    if fate in ("scancel", "kill a data node", "kill the trainer node"):
        if not wait_until(lambda: output.is_file() and "step 3" in output.read_text(), _BEGIN_S):
            return "did not begin", [output.read_text()[-2000:] if output.is_file() else "no output"]
        if fate == "scancel":
            cluster.run(["scancel", str(job)])
        else:
            node = "gpu01" if fate == "kill the trainer node" else "cpu02"
            for process in launchers(folder, node):
                process.send_signal(signal.SIGKILL)
    state, code, _ = cluster.wait(job)
    path = folder / f"hetero-slurm-{job}" / "exit-code"
    deadline_s = time.monotonic() + _GONE_S
    while fate == "scancel" and not path.is_file() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    stated = path.read_text().strip() if path.is_file() else "none"
    found = f"{state} {code}, launcher {stated}"
    expected: dict[str, Callable[[], bool]] = {
        "": lambda: (state, code, stated) == ("COMPLETED", 0, "0"),
        "kill a data node": lambda: (state, code, stated) == ("COMPLETED", 0, "0"),
        "script fails": lambda: (state, code, stated) == ("FAILED", ExitCode.SCRIPT_FAILED, "30"),
        "scancel": lambda: (state, stated) == ("CANCELLED", "143"),
        "time limit": lambda: (state, code, stated) == ("FAILED", 143, "143"),
        "kill the trainer node": lambda: state == "FAILED" and code in (137, ExitCode.ORPHANED) and stated == "none",
    }
    return found, [] if expected[fate]() else [f"ended as {found}: {output.read_text()[-1500:]}"]


def script_of(folder: Path, form: str, args: Sequence[str]) -> str:
    """Return the rendered script, with the paths of this checkout."""
    groups = ["--group", "dnn=CPU:1:2", "--partition", "cpu"] if form == "one component" else TWO
    flags = ["--separate-steps"] if form == "two sruns" else []
    command = ["render", "slurm", *groups, *flags, *OPTIONS, str(CHAIN), "--", "--output", str(folder / "out"), *args]
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        assert cli.main(command) == ExitCode.OK
    text = written.getvalue()
    if form == "one component":
        text = text.replace("export HETERO_GROUPS=dnn=CPU:1:2", "export HETERO_GROUPS='dnn=CPU:1:1 data=CPU:1:1'")
    lines = [line for line in text.splitlines() if not line.startswith("#SBATCH --exclusive")]
    first = next(at for at, line in enumerate(lines) if line.startswith("set -euo"))
    bin_folder, root = Path(sys.executable).parent, CHAIN.parents[3]
    variables = {"PATH": f"{bin_folder}:$PATH", "PYTHONPATH": str(root), "HETERO_TIME_SCALE": "0.5"}
    lines[first + 1 : first + 1] = [f"export {name}={value}" for name, value in variables.items()]
    return "\n".join(lines) + "\n"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command line has a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()) and process.pid != psutil.Process().pid:
                found.append(process)
    return found


def launchers(folder: Path, node: str) -> list[psutil.Process]:
    """Return the launchers of a node."""
    found = []
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):
            if "launch" in process.cmdline() and process.environ().get("SLURMD_NODENAME") == node:
                found.append(process)
    return found


def left(folder: Path) -> list[str]:
    """Return what a job has left."""
    wait_until(lambda: not processes_of(folder), _GONE_S)
    found = [f"left a process: {process}" for process in processes_of(folder)]
    return found + [f"left {path.name}" for path in folder.glob(".hetero-token*")]


def wait_until(condition: Callable[[], object], timeout_s: float) -> bool:
    """Wait until a condition holds. Return whether it did in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(main())
