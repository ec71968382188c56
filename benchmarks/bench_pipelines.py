"""Is a batch from endpoints as good as one from a local loader process, in pipelines that users have?

Question: how many samples per second reach one consumer that touches every batch, when two processes preprocess;
what it costs in CPU and memory on both sides; how long the first batch takes; and what strict order costs.

Method: six pipelines (`pipelines/`), each run by the competitors of `peers/`, interleaved:

    hetero        two endpoints of a real pool, `hetero.torch.DataLoader`
    torch         torch.utils.data.DataLoader, two workers on this host
    torch-spawn   the same with workers started as endpoints have to be: what the first batch is compared with (jpeg,
                  audio)
    sample        the published sample's way: loader, bytes, queue, gRPC stream of protobuf messages
    ray           Ray Data
    tf            tf.data service, in TensorFlow's operators
    rpc           RPCDataloader

In the pipelines with torch-spawn the first three get new processes in every round, and so does ray everywhere, which
is never idle; its warm-up is seven seconds. All other processes are kept through the rounds, where tf begins a new
epoch in each because its workers would go on computing.

The clock for the first batch starts when the trainer has its imports; hetero's includes the start of the endpoints,
which in a job happens before the trainer starts. All processes share this machine, so a competitor that burns
CPU takes it from its own preprocessing, which on separate hosts it would not.

The order tables are simulated: samples wait instead of computing. ``first-come`` is hetero with a window that
delivers whatever has arrived; everything else is the same code.

    python benchmarks/bench_pipelines.py --pipelines jpeg text --only hetero torch
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
from harness import Column, Competitor, Row, Trial
from pipelines import NAMES

PHOTOS = harness.HERE.parent / "data" / "bench-photos"
MAKE_PHOTOS = harness.HERE.parent / "examples" / "photos" / "make_data.py"
NUM_PHOTOS = 1_000
IN_SHORT_FORM = ("jpeg", "video", "tabular")
IN_TENSORFLOW = ("jpeg", "tabular")
FIRST_BATCH_OF = ("jpeg", "audio")
REMOTE_PEERS = ("sample", "ray", "tf", "rpc")
START_S = {"hetero": 6.0, "torch": 3.5, "torch-spawn": 6.0, "sample": 9.0, "rpc": 6.0, "tf": 25.0, "ray": 22.0}
WARMUP_S = {"sample": 1.5, "tf": 2.0, "ray": 7.5}
OF_VARYING_SHAPES = ("detection", "text")
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ORDER_GROUPS = {"order, uniform cost": (0.0, 0.97), "order, 5 % of samples 20 x slower": (0.05, 0.9)}
"""Share of slow samples, and the throughput wanted of in-order delivery over first-come."""


def competitor(module: str, name: str) -> Callable[[Mapping[str, Any]], Competitor]:
    """Return the maker of a competitor whose module is imported in its own process only."""

    def make(config: Mapping[str, Any]) -> Competitor:
        made: Competitor = getattr(importlib.import_module(f"peers.{module}"), name)(config)
        return made

    return make


COMPETITORS = {
    "hetero": competitor("hetero_endpoints", "HeteroEndpoints"),
    "torch": competitor("local_torch", "LocalTorch"),
    "torch-spawn": competitor("local_torch", "LocalTorch"),
    "sample": competitor("published_sample", "PublishedSample"),
    "ray": competitor("ray_data", "RayData"),
    "tf": competitor("tf_data_service", "TfDataService"),
    "rpc": competitor("rpc_dataloader", "RpcDataLoader"),
    "in order": competitor("hetero_endpoints", "HeteroEndpoints"),
    "first-come": competitor("hetero_endpoints", "HeteroEndpoints"),
}

COLUMNS = tuple(
    Column(title=title, metric=metric, form=form, scale=scale)
    for title, metric, form, scale in (
        ("samples/s", "samples_per_s", "{:,.0f}", 1),
        ("GB/s", "gb_per_s", "{:.3f}", 1),
        ("trainer CPU-s/GB", "trainer_cpu_s_per_gb", "{:.2f}", 1),
        ("supply CPU-s/GB", "supply_cpu_s_per_gb", "{:.2f}", 1),
        ("first batch s", "first_batch_s", "{:.2f}", 1),
        ("trainer peak MB", "trainer_peak_bytes", "{:,.0f}", 1e-6),
        ("grown by MB", "trainer_growth_bytes", "{:,.0f}", 1e-6),
    )
)

JPEG_BOUNDS = {"torch": 0.97, "sample": 1.8, "ray": 2.5, "tf": 1.3}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipelines and keep the tables."""
    parser = harness.parser(__doc__, seconds=2.0, short_seconds=1.5)
    parser.add_argument(
        "--pipelines", nargs="*", choices=NAMES, help="default: all; jpeg, video and tabular with --short"
    )
    parser.add_argument("--order", action="store_true", help="only what strict order costs")
    args = parser.parse_args(argv)
    plan = harness.plan("pipelines", parser, args)
    names = args.pipelines if args.pipelines is not None else IN_SHORT_FORM if args.short else NAMES
    trials = [trial for name in names for trial in pipeline_trials(name, short=args.short)]
    trials = [] if args.order else trials
    trials += order_trials() if args.order or not (args.short or args.pipelines) else []
    trials = [trial for trial in trials if not args.only or trial.competitor in args.only]
    if not args.estimate:
        make_photos()
    rows = plan.compare(__file__, trials, warmup_batches=12, min_batches=8)
    plan.write(rows, report(rows))
    return 0


def make_photos() -> None:
    """Make the photographs, unless they are there."""
    subprocess.run(
        [sys.executable, str(MAKE_PHOTOS), "--output", str(PHOTOS), "--count", str(NUM_PHOTOS), "--size", "500x375"],
        check=True,
        stdout=sys.stderr,
    )


def pipeline_trials(name: str, *, short: bool) -> list[Trial]:
    """Return one pipeline's competitors; the short form leaves out those that take long to start."""
    names = ["hetero", "torch"]
    if not short or name == "jpeg":
        names += ["sample", "rpc"]
    if not short:
        names += ["tf"] if name in IN_TENSORFLOW else []
        names += ["ray"]
        names += ["torch-spawn"] if name in FIRST_BATCH_OF else []
    if name in OF_VARYING_SHAPES and "sample" in names:
        names.remove("sample")  # it agrees shapes by convention
    return [
        Trial(
            competitor=kind,
            group=name,
            config={"pipeline": name, "root": str(PHOTOS), **({"context": "spawn"} if kind == "torch-spawn" else {})},
            environment=ENVIRONMENT,
            fresh=kind == "ray" or (name in FIRST_BATCH_OF and kind not in REMOTE_PEERS),
            start_s=START_S[kind],
            warmup_s=WARMUP_S.get(kind, 1.0) + (2.0 if name == "video" else 0.0),
        )
        for kind in names
    ]


def order_trials() -> list[Trial]:
    """Return what strict order is compared by."""
    return [
        Trial(
            competitor=order,
            group=group,
            config={"pipeline": "waiting", "root": str(share), "order": order},
            environment=ENVIRONMENT,
            basis="simulated",
            fresh=False,
            start_s=START_S["hetero"],
            warmup_s=1.5,
        )
        for group, (share, _) in ORDER_GROUPS.items()
        for order in ("in order", "first-come")
    ]


def report(rows: Sequence[Row]) -> str:
    """Return the tables and what they say about the figures wanted."""
    parts = ["# Pipelines: two preprocessing processes, one consumer", ""]
    groups = harness.grouped(rows)
    for group, members in groups.items():
        is_order = group in ORDER_GROUPS
        reference = "in order" if is_order else "hetero"
        parts += [f"## {group}", "", harness.table(members, COLUMNS, ratio_metric="samples_per_s", reference=reference)]
        parts += ["", *(order_targets(group, members) if is_order else pipeline_targets(group, members)), ""]
    if set(NAMES) <= set(groups):
        ahead = sum(is_ahead(groups[name]) for name in NAMES)
        parts += [harness.target("pipelines where hetero is ahead of every remote peer", ahead, 5)]
    return "\n".join(parts)


def is_ahead(rows: Sequence[Row]) -> bool:
    """Return whether hetero delivers no less than any remote peer that ran; False if either is missing."""
    peers = [row.trial.name for row in rows if row.trial.competitor in REMOTE_PEERS and row.runs]
    ratios = [harness.ratio(rows, "hetero", name, "samples_per_s") for name in peers]
    return bool(ratios) and all(ratio >= 1 for ratio in ratios)


def pipeline_targets(group: str, rows: Sequence[Row]) -> list[str]:
    """Say whether one pipeline's figures are met."""
    present = {row.trial.competitor for row in rows}
    lines = [
        harness.target(f"x {name}", harness.ratio(rows, "hetero", name, "samples_per_s"), bound)
        for name, bound in (JPEG_BOUNDS if group == "jpeg" else {"torch": 0.9}).items()
        if name in present
    ]
    if "torch-spawn" in present:
        first = harness.ratio(rows, "hetero", "torch-spawn", "first_batch_s")
        lines.append(harness.target("time to the first batch x torch-spawn", first, 1.2, at_most=True))
    return lines


def order_targets(group: str, rows: Sequence[Row]) -> list[str]:
    """Say what order costs."""
    found = harness.ratio(rows, "in order", "first-come", "samples_per_s")
    return [harness.target("in order x first-come", found, ORDER_GROUPS[group][1])]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS)
    sys.exit(main())
