"""Is a batch from endpoints as good as one from a local loader process, in pipelines that users have?

Question: how many samples per second reach one consumer that touches every batch, when two processes preprocess? What
CPU and memory do both sides use? How long does the first batch take? What does strict order cost?

Method: six pipelines (`pipelines/`), each run by the competitors of `peers/`, interleaved:

    hetero        two endpoints of a real pool, `hetero.torch.DataLoader`
    torch         torch.utils.data.DataLoader, two workers on this host
    torch-spawn   the same with workers that start as endpoints do, to compare the time of the first batch (jpeg,
                  audio)
    sample        the published sample's way: loader, bytes, queue, gRPC stream of protobuf messages
    ray           Ray Data
    tf            tf.data service, in TensorFlow's operators
    rpc           RPCDataloader
    alone         two processes compute batches and drop them (jpeg): what every competitor's CPU time consists of

In the pipelines with torch-spawn the first three get new processes in every round. So does ray in every pipeline,
because it is never idle. Its warm-up is seven seconds. All other processes are kept through the rounds. tf begins a new
epoch in each round, because its workers would go on computing.

The clock for the first batch starts after the trainer's imports. hetero's time includes the start of the endpoints,
which in a job happens before the trainer starts. All processes share this machine, so the CPU time of a transport is
missing for preprocessing. On separate hosts it would not be.

The order tables are simulated: samples wait instead of computing. ``first-come`` is hetero with a window that
delivers batches in the order of arrival. All other code is the same.

    python benchmarks/bench_pipelines.py --pipelines jpeg text --only hetero torch
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import harness
from harness import Row, Trial, found_in
from peers import tf_service
from pipelines import NAMES

PHOTOS = harness.HERE.parent / "data" / "bench-photos"
MAKE_PHOTOS = harness.HERE.parent / "examples" / "photos" / "make_data.py"
NUM_PHOTOS = 1_000
IN_SHORT_FORM = ("jpeg", "video", "tabular")
IN_TENSORFLOW = ("jpeg", "tabular")
FIRST_BATCH_OF = ("jpeg", "audio")
REMOTE_PEERS = ("sample", "ray", "tf", "rpc")
START_S = {
    "hetero": 6.0,
    "torch": 3.5,
    "torch-spawn": 6.0,
    "alone": 6.0,
    "sample": 9.0,
    "rpc": 6.0,
    "tf": 25.0,
    "ray": 22.0,
}
WARMUP_S = {"sample": 1.5, "tf": 2.0, "ray": 7.5}
OF_VARYING_SHAPES = ("detection", "text")
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ORDER_GROUPS = {"order, uniform cost": (0.0, 0.97), "order, 5 % of samples 20 x slower": (0.05, 0.9)}
"""Share of slow samples, and the throughput wanted of in-order delivery over first-come."""

COMPETITORS = {
    "hetero": found_in("peers.hetero_endpoints", "HeteroEndpoints"),
    "torch": found_in("peers.local_torch", "LocalTorch"),
    "torch-spawn": found_in("peers.local_torch", "LocalTorch"),
    "sample": found_in("peers.published_sample", "PublishedSample"),
    "ray": found_in("peers.ray_data", "RayData"),
    "tf": found_in("peers.tf_data_service", "TfDataService"),
    "rpc": found_in("peers.rpc_dataloader", "RpcDataLoader"),
    "alone": found_in("peers.computing_alone", "ComputingAlone"),
    "in order": found_in("peers.hetero_endpoints", "HeteroEndpoints"),
    "first-come": found_in("peers.hetero_endpoints", "HeteroEndpoints"),
}

COLUMNS = harness.columns(
    *("samples_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
    *("first_batch_s", "trainer_peak_bytes", "trainer_growth_bytes"),
)

BOUNDS = {
    "jpeg": {"torch": 1.2, "sample": 1.7, "ray": 1.5, "tf": 1.1},
    **dict.fromkeys(("text", "tabular"), dict.fromkeys(("torch", "sample", "rpc", "tf", "ray"), 1.0)),
}
"""Throughput wanted over each competitor. In the other pipelines, 0.9 of local torch."""
OVERHEAD_BOUND = 0.7


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipelines and keep the tables."""
    parser = harness.parser(__doc__, seconds=2.0, short_seconds=1.5)
    parser.add_argument(
        "--pipelines", nargs="*", choices=NAMES, help="default: all; jpeg, video and tabular with --short"
    )
    parser.add_argument("--order", action="store_true", help="only what strict order costs")
    args = parser.parse_args(argv)
    plan = harness.plan("pipelines", parser, args)
    names = plan.choose(args.pipelines, full=NAMES, short=IN_SHORT_FORM)
    trials = [trial for name in names for trial in pipeline_trials(name, short=args.short)]
    trials = [] if args.order else trials
    trials += order_trials() if args.order or not (args.short or args.pipelines) else []
    trials = [trial for trial in trials if not args.only or trial.competitor in args.only]
    if not args.estimate:
        make_photos()
    rows = plan.compare(__file__, trials, warmup_batches=12, min_batches=8)
    plan.write(rows, report(rows))
    return 0


def make_photos(folder: Path = PHOTOS, *, count: int = NUM_PHOTOS, size: str = "500x375") -> None:
    """Make photographs, unless they are there.

    Args:
        folder: Where.
        count: How many.
        size: Mean width and height in pixels.
    """
    subprocess.run(
        [sys.executable, str(MAKE_PHOTOS), "--output", str(folder), "--count", str(count), "--size", size],
        check=True,
        stdout=sys.stderr,
    )


def pipeline_trials(name: str, *, short: bool) -> list[Trial]:
    """Return one pipeline's competitors. The short form leaves out competitors that take long to start."""
    names = ["hetero", "torch"]
    if not short or name == "jpeg":
        names += ["sample", "rpc"]
    if not short:
        names += ["tf"] if name in IN_TENSORFLOW else []
        names += ["ray"]
        names += ["torch-spawn"] if name in FIRST_BATCH_OF else []
        names += ["alone"] if name == "jpeg" else []
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
    title, references = "Pipelines: two preprocessing processes, one consumer", ("hetero", "in order")
    text = harness.report(title, rows, COLUMNS, figures, ratio_metric="samples_per_s", references=references)
    groups = harness.grouped(rows)
    if set(NAMES) <= set(groups):
        ahead = sum(is_ahead(groups[name]) for name in NAMES)
        text += "\n\n" + harness.target("pipelines where hetero is ahead of every remote peer", ahead, 5)
    return text


def is_ahead(rows: Sequence[Row]) -> bool:
    """Return whether hetero delivers as fast as every remote peer of the table, or faster. False if one failed."""
    peers = [row.trial.name for row in rows if row.trial.competitor in REMOTE_PEERS]
    ratios = [harness.ratio(rows, "hetero", name, "samples_per_s") for name in peers]
    return bool(ratios) and all(ratio >= 1 for ratio in ratios)  # NaN, of one that has failed, is not


def overheads(rows: Sequence[Row]) -> dict[str, float]:
    """Return each competitor's CPU-s/GB on both sides, less what computing alone takes: the median over the rounds.

    tf has other operators that decode, so its overhead cannot be told from its decoding.
    """
    alone = next(row for row in rows if row.trial.competitor == "alone")
    found = {}
    for row in rows:
        if row.trial.competitor in ("alone", "tf") or not alone.runs or len(row.runs) != len(alone.runs):
            continue
        metrics = ("trainer_cpu_s_per_gb", "supply_cpu_s_per_gb")
        whole, least = (map(sum, zip(*map(each.values, metrics), strict=True)) for each in (row, alone))
        found[row.trial.name] = statistics.median(own - base for own, base in zip(whole, least, strict=True))
    return found


def figures(rows: Sequence[Row]) -> list[str]:
    """Say whether one table's figures are met."""
    group = rows[0].trial.group
    if group in ORDER_GROUPS:
        found = harness.ratio(rows, "in order", "first-come", "samples_per_s")
        return [harness.target("in order x first-come", found, ORDER_GROUPS[group][1])]
    present = {row.trial.competitor for row in rows}
    lines = [
        harness.target(f"x {name}", harness.ratio(rows, "hetero", name, "samples_per_s"), bound)
        for name, bound in BOUNDS.get(group, {"torch": 0.9}).items()
        if name in present
    ]
    if "alone" in present:
        found = overheads(rows)
        others = [value for name, value in found.items() if name != "hetero"]
        # An overhead that is not positive is noise, so it can be compared with nothing.
        is_known = "hetero" in found and others and min(found.values()) > 0
        ratio = found["hetero"] / min(others) if is_known else float("nan")
        lines += [f"- CPU-s/GB beside computing, {name}: {value:.3f}" for name, value in found.items()]
        lines.append(
            harness.target("CPU beside computing x that of the best peer", ratio, OVERHEAD_BOUND, at_most=True)
        )
    if "torch-spawn" in present:
        first = harness.ratio(rows, "hetero", "torch-spawn", "first_batch_s")
        lines.append(harness.target("time to the first batch x torch-spawn", first, 1.2, at_most=True))
    return lines


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"tf-data": tf_service.serve})
    sys.exit(main())
