"""Is the homogeneous job of `hetero launch` the baseline that the same script has without hetero?

Question: how much longer than under torchrun, with torch's loader, does a whole homogeneous job take, and how much more
CPU, from the command to its exit? A launcher that made the baseline slower would flatter every comparison with it.

Method: a run of the table is one job. The script imports Lightning and a module that takes two seconds to import. It
makes five short passes with two loader processes. The jobs are interleaved. The first job of each competitor is a
warm-up, because it fills the page cache. Lightning has to be installed.

    torchrun    torchrun --nproc-per-node 1 train_passes.py --loader torch
    hetero      hetero launch train_passes.py --loader hetero, with a cluster of one host

    python benchmarks/bench_baseline.py
    python benchmarks/bench_baseline.py --passes 20 --runs 10
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from harness import Column, Competitor, Trial

SCRIPT = harness.HERE / "scripts" / "train_passes.py"
PASSES = 5
BOUND = 1.02
JOB_S = 12.0
"""Estimate for one job. Only the announcement uses it."""

COLUMNS = (
    Column(title="job s", metric="job_s"),
    Column(title="job CPU-s", metric="job_cpu_s"),
)


class Torchrun(Competitor):
    """Jobs under torchrun, with torch's loader."""

    min_warmup_s = 0.0

    def start(self) -> None:
        self._exits = contextlib.ExitStack()
        self._folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._job_s = self._job_cpu_s = 0.0

    def command(self) -> list[str]:
        """Return what a user types."""
        return ["-m", "torch.distributed.run", "--nproc-per-node", "1", str(SCRIPT), "--loader", "torch"]

    def batches(self) -> Iterator[Any]:
        """Run one job after the other, and yield each when it has ended."""
        while True:
            before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(
                [sys.executable, *self.command(), "--passes", str(self.config["passes"])],
                check=True,
                cwd=self._folder,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self._job_s, after = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
            self._job_cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            yield None

    def consume(self, batch: Any) -> tuple[int, int]:
        return 1, 0

    def facts(self) -> dict[str, Any]:
        return {"job_s": self._job_s, "job_cpu_s": self._job_cpu_s}

    def stop(self) -> None:
        self._exits.close()


class HeteroLaunch(Torchrun):
    """Homogeneous jobs of `hetero launch`, with hetero's loader."""

    def start(self) -> None:
        super().start()
        self._cluster = self._folder / "cluster.json"
        group = {"instance_group_name": "train", "instance_type": "ml.p3.2xlarge", "hosts": ["localhost"]}
        self._cluster.write_text(json.dumps({"instance_groups": [group]}), encoding="utf-8")

    def command(self) -> list[str]:
        options = ["--cluster-file", str(self._cluster), "--host", "localhost", "--nproc-per-node", "1"]
        return ["-m", "hetero", "launch", *options, str(SCRIPT), "--loader", "hetero"]


COMPETITORS = {"torchrun": Torchrun, "hetero": HeteroLaunch}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=0.0, short_seconds=0.0)
    parser.add_argument("--passes", type=int, default=PASSES, help="over the data, in each job (%(default)s)")
    args = parser.parse_args(argv)
    plan = harness.plan("baseline", parser, args)
    trials = make_trials({"passes": args.passes}, args.only)
    rows = plan.compare(__file__, trials, warmup_batches=0, min_batches=1, fresh=False)
    plan.write(rows, harness.report("A homogeneous job", rows, COLUMNS, figures, ratio_metric="job_s"))
    return 0


def make_trials(config: Mapping[str, Any], only: Sequence[str] | None = None) -> list[Trial]:
    """Return the rows to be."""
    return [Trial(competitor=name, config=config, start_s=JOB_S, warmup_s=JOB_S) for name in only or COMPETITORS]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say how much longer a job takes, and how much more CPU."""
    return [
        harness.target(
            f"{what}, hetero / torchrun", harness.ratio(rows, "hetero", "torchrun", metric), BOUND, at_most=True
        )
        for what, metric in (("wall time", "job_s"), ("CPU time", "job_cpu_s"))
    ]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS)
    sys.exit(main())
