"""How long does the loop of a job wait for its first batch, from the moment when it makes the loader?

Question: whatever can start before the script asks has started in a job: endpoints run, and the data set is built. Does
the first batch come sooner than from torch's loader with workers that are spawned?

Method: each run is a new process, or a new job, of the same script. The jpeg pipeline in batches of 64, two processes
preprocess. The time begins when the script makes its loader, after its imports, and ends with the first batch. The time
from the start of the command is shown beside it: a job also starts launchers and endpoints, on the same two cores here.

    hetero        `hetero simulate` with a data host of two endpoints
    torch-spawn   the script alone, with two workers that are spawned
    torch-fork    the same with workers that are forked

    python benchmarks/bench_job_start.py --only hetero
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_pipelines
import harness
from harness import Column, Competitor, Trial

SCRIPT = Path(__file__).parent / "scripts" / "train_first_batch.py"
JOB = [
    *("-m", "hetero.cli", "simulate", "--group", "data=ml.c5.xlarge:1", "--group", "trainer=ml.p3.2xlarge:1"),
    *("--endpoints-per-host", "2", "--trainer-endpoints", "0", "--nproc-per-node", "1"),
]
BOUND = 0.8

COLUMNS = harness.columns(
    Column(title="first batch s", metric="first_s", form="{:.2f}"),
    Column(title="third batch s", metric="third_s", form="{:.2f}"),
    Column(title="from the start of the command s", metric="whole_s", form="{:.1f}"),
)


class Script(Competitor):
    """A command that runs the script."""

    words: tuple[str, ...] = ()

    def start(self) -> None:
        """Start nothing: each run is a new command."""

    def batches(self) -> Iterator[int]:
        """Yield something for the harness."""
        yield from itertools.count()

    def consume(self, _batch: int) -> tuple[int, int]:
        """Count it."""
        return 1, 1

    def facts(self) -> dict[str, Any]:
        """Run the command, and return how long the script waited."""
        begin_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *self.command(folder), str(bench_pipelines.PHOTOS)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = re.search(r"waited (\[.*\])", done.stdout)
        assert found is not None, done.stdout
        waited_s = json.loads(found[1])
        whole_s = time.perf_counter() - begin_s
        return {"first_s": waited_s[0], "third_s": waited_s[2], "whole_s": whole_s}

    def stop(self) -> None:
        """Nothing runs."""

    def command(self, folder: str) -> list[str]:
        """Return the arguments after the interpreter, without the folder of the photographs."""
        raise NotImplementedError


class Job(Script):
    """A simulated job."""

    def command(self, folder: str) -> list[str]:
        """See `Script`."""
        return [*JOB, "--output-dir", folder, str(SCRIPT), "--", "hetero"]


class Spawned(Script):
    """torch's loader with workers that are spawned."""

    def command(self, folder: str) -> list[str]:
        """See `Script`."""
        return [str(SCRIPT), "spawn"]


class Forked(Script):
    """torch's loader with workers that are forked."""

    def command(self, folder: str) -> list[str]:
        """See `Script`."""
        return [str(SCRIPT), "fork"]


COMPETITORS = {"hetero": Job, "torch-spawn": Spawned, "torch-fork": Forked}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands and write their table."""
    parser = harness.parser(__doc__, seconds=0.1, short_seconds=0.1)
    args = parser.parse_args(argv)
    plan = harness.plan("job_start", parser, args)
    if not args.estimate:
        bench_pipelines.make_photos()
    trials = [
        Trial(competitor=name, group="jpeg", config={}, environment=bench_pipelines.ENVIRONMENT, start_s=9.0)
        for name in plan.choose(args.only, full=list(COMPETITORS), short=list(COMPETITORS))
    ]
    rows = plan.compare(__file__, trials, warmup_batches=1, min_batches=1)
    title = "The first batch of a job"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="first_s"))
    return 0


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Compare with torch's loader."""
    ratio = harness.ratio(rows, "hetero", "torch-spawn", "first_s")
    return [harness.target("first batch x torch-spawn", ratio, BOUND, at_most=True)]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {})
    sys.exit(main())
