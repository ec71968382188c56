"""Is a Ray Train job fed faster by hetero's data service than by Ray Data?

Question: how many samples per second does the worker of a Ray Train job receive from `hetero.ray.DataService`, and how
many from Ray Data? How long does its first batch take? What CPU does receiving cost the worker?

Method: a Ray cluster of two nodes on this machine. One node has a CPU for the worker of a ``TorchTrainer``, the other
one preprocesses. Six pipelines (`pipelines/`), the same Python function for both competitors:

    hetero   a `DataService` with one data host of two CPUs, `hetero.torch.DataLoader`, shuffled
    ray      ``datasets={"train": ...}``, ``get_dataset_shard``, ``iter_torch_batches``, not shuffled; two actors or two
             concurrent tasks, and one more CPU for Ray Data's own tasks

Ray Data runs as its guides recommend: order is not preserved, and batches are made on the data node, aligned with
blocks. Tables are computed by batch in NumPy by both competitors. FORMS has, for each pipeline, the form, block size
and prefetching that were the fastest of those tried. ``--forms`` measures the candidates.

Each run is a new driver with a new job, interleaved as A B B A. The cluster is the same for all runs. Measured in the
worker:

    samples/s          after at least 7 s of warm-up (Ray Data) or 2 s (hetero)
    first batch s      from ``connect()`` or ``get_dataset_shard()`` to the first batch. The data service starts before
                       the worker does, and Ray Data starts with the iteration.
    from job start s   from the start of the service and the trainer in the driver to the first batch
    trainer CPU-s/GB   the worker process, all threads. Ray's processes beside it are not included. The raylet receives
                       Ray Data's batches and keeps the object store.
    trainer node       the same with all processes of Ray on the trainer's node
    supply CPU-s/GB    all processes of the cluster and the driver, except the worker
    machine CPU-s/GB   this machine, from /proc/stat. It includes all other programs.

All processes share the CPUs of this machine. Loopback is the network.

    python benchmarks/bench_ray.py --pipelines jpeg text
    python benchmarks/bench_ray.py --forms --pipelines text
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import bench_pipelines
import harness
from harness import Column, Row, Trial, found_in
from harness.processes import Child
from ray_jobs import CLUSTER_VARIABLE

NAMES = ("jpeg", "detection", "audio", "text", "video", "tabular_batches")
IN_SHORT_FORM = ("jpeg",)
WITH_ROWS = ("jpeg", "audio", "video")
"""Pipelines of fixed shapes, whose samples are computed one by one."""

FORMS: Mapping[str, Mapping[str, Any]] = {
    "jpeg": {"form": "actors", "block_batches": 12, "prefetch": 4},
    "detection": {"form": "actors", "block_batches": 4, "prefetch": 4},
    "audio": {"form": "actors", "block_batches": 24, "prefetch": 4},
    "text": {"form": "tasks", "block_batches": 250, "prefetch": 4},
    "video": {"form": "actors", "block_batches": 2, "prefetch": 4},
    "tabular_batches": {"form": "tasks", "block_batches": 500, "prefetch": 4},
}
"""The form with the highest median of three runs. Its blocks have 64 to 115 MB, and Ray splits blocks at
128 MB. See `ray_jobs.job.RayDataJob`."""

BLOCKS_BATCHES = {
    "jpeg": (8, 12),
    "detection": (4, 8),
    "audio": (8, 24),
    "text": (64, 250),
    "video": (2, 3),
    "tabular_batches": (250, 500),
}
"""Two sizes of blocks that `--forms` compares. Ray recommends blocks of 1 to 128 MB. Smaller ones were slower in every
pipeline, in one run each."""

START_S = {"hetero": 12.0, "ray": 12.0}
WARMUP_S = {"hetero": 2.0, "ray": 7.5}

BOUNDS = {
    "samples/s": ("samples_per_s", 0.95, False),
    "first batch": ("first_batch_s", 0.3, True),
    "trainer CPU-s/GB": ("trainer_cpu_s_per_gb", 0.7, True),
}
"""Metric of each ratio hetero / ray, its bound in every pipeline, and whether the bound is the highest value."""
WITHOUT_BOUND = {
    "from job start to the first batch": "job_first_batch_s",
    "CPU-s/GB of the trainer's node": "trainer_node_cpu_s_per_gb",
    "CPU-s/GB of the machine": "machine_cpu_s_per_gb",
}
"""Metrics of further ratios."""
FAST = 1.3
"""Ratio of samples/s that is wanted in `NUM_FAST` of the pipelines."""
NUM_FAST = 4

COLUMNS = harness.columns(
    "samples_per_s",
    "gb_per_s",
    "first_batch_s",
    Column(title="from job start s", metric="job_first_batch_s"),
    "trainer_cpu_s_per_gb",
    Column(title="trainer node CPU-s/GB", metric="trainer_node_cpu_s_per_gb"),
    "supply_cpu_s_per_gb",
    Column(title="machine CPU-s/GB", metric="machine_cpu_s_per_gb"),
)

COMPETITORS = {"hetero": found_in("ray_jobs.job", "DataServiceJob"), "ray": found_in("ray_jobs.job", "RayDataJob")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs and keep the tables."""
    parser = harness.parser(__doc__, seconds=3.0, short_seconds=2.0)
    parser.add_argument("--pipelines", nargs="*", choices=NAMES, help="default: all; jpeg with --short")
    parser.add_argument("--forms", action="store_true", help="compare forms of Ray Data with each other")
    args = parser.parse_args(argv)
    plan = harness.plan("ray", parser, args)
    names = plan.choose(args.pipelines, full=NAMES, short=IN_SHORT_FORM)
    trials = [trial for name in names for trial in (form_trials(name) if args.forms else make_trials(name))]
    trials = [trial for trial in trials if not args.only or trial.competitor in args.only]
    if args.estimate:
        plan.compare(__file__, trials)
    bench_pipelines.make_photos()
    with Child(__file__, "server", "cluster", {}, bench_pipelines.ENVIRONMENT) as cluster:
        os.environ[CLUSTER_VARIABLE] = json.dumps(cluster.ask())
        rows = plan.compare(__file__, trials, warmup_batches=12, min_batches=8)
    plan.write(rows, report(rows))
    return 0


def make_trials(name: str) -> list[Trial]:
    """Return both competitors of one pipeline."""
    return [_trial("hetero", name, {}), _trial("ray", name, FORMS[name])]


def form_trials(name: str) -> list[Trial]:
    """Return the candidates for `FORMS`, and hetero."""
    small, large = BLOCKS_BATCHES[name]
    forms = [("tasks", small, 4), ("tasks", small, 8), ("tasks", large, 4), ("actors", small, 4), ("actors", large, 4)]
    forms += [("rows", small, 4)] if name in WITH_ROWS else []
    found = [_trial("hetero", name, {})]
    for form, block_batches, prefetch in forms:
        config = {"form": form, "block_batches": block_batches, "prefetch": prefetch}
        found.append(_trial("ray", name, config, title=f"ray {form}, blocks of {block_batches}, prefetch {prefetch}"))
    return found


def _trial(competitor: str, name: str, config: Mapping[str, Any], *, title: str = "") -> Trial:
    return Trial(
        competitor=competitor,
        title=title,
        group=name,
        config={"pipeline": name, "root": str(bench_pipelines.PHOTOS), **config},
        environment=bench_pipelines.ENVIRONMENT,
        start_s=START_S[competitor],
        warmup_s=WARMUP_S[competitor],
    )


def report(rows: Sequence[Row]) -> str:
    """Return the tables, the ratios with their intervals, and what they say about the figures wanted."""
    title = "A Ray Train job, fed by hetero's data service or by Ray Data"
    text = harness.report(title, rows, COLUMNS, figures, ratio_metric="samples_per_s", references=["hetero"])
    groups = harness.grouped(rows)
    if set(NAMES) <= set(groups) and any(row.trial.name == "ray" for row in rows):
        ratios = [harness.ratio(groups[name], "hetero", "ray", "samples_per_s") for name in NAMES]
        num_fast = sum(ratio >= FAST for ratio in ratios)
        text += "\n\n## all\n\n"
        text += harness.target(f"pipelines with {FAST} x the samples/s of Ray Data", num_fast, NUM_FAST)
        for what, (metric, bound, at_most) in BOUNDS.items():
            found = [harness.ratio(groups[name], "hetero", "ray", metric) for name in NAMES]
            num_met = sum(ratio <= bound if at_most else ratio >= bound for ratio in found)
            sign = "at most" if at_most else "at least"
            text += "\n" + harness.target(f"pipelines with {sign} {bound} x the {what}", num_met, len(NAMES))
    return text


def figures(rows: Sequence[Row]) -> list[str]:
    """Return the ratios of one pipeline, with the lowest and highest of the rounds."""
    found = {row.trial.name: row for row in rows}
    if not {"hetero", "ray"} <= set(found):
        return []
    lines = []
    for what, (metric, bound, at_most) in BOUNDS.items():
        ratio, interval = harness.ratio(rows, "hetero", "ray", metric), _interval(found, metric)
        lines.append(harness.target(f"{what}, hetero / ray ({interval})", ratio, bound, at_most=at_most))
    for what, metric in WITHOUT_BOUND.items():
        ratio, interval = harness.ratio(rows, "hetero", "ray", metric), _interval(found, metric)
        lines.append(f"- {what}, hetero / ray ({interval}): {ratio:.3f}")
    return lines


def _interval(rows: Mapping[str, Row], metric: str) -> str:
    """Return the lowest and highest ratio of the rounds."""
    ratios = rows["hetero"].ratios(rows["ray"], metric)
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "no rounds"


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"cluster": found_in("ray_jobs.cluster", "serve")})
    sys.exit(main())
