"""Does a batch from another process cost what the transport under it must cost, and how do peers compare?

Question: how many ready-made batches per second reach one trainer process, from one to four endpoints, and how
much CPU do both sides spend on a gigabyte?

Method: every batch is the same prepared array, copied and sent anew, without preprocessing. All processes are on this
machine (loopback or shared memory). The trainer process reads one byte of every page and drops the batch. Processes are
kept through the rounds, so the first batch's time is that of one start (`bench_pipelines.py` has the medians).

    raw-tcp           length-prefixed bytes over a socket, recv_into one buffer: the ceiling of loopback
    grpc-raw          identity serializers, one endless stream of 2 MiB frames, copied into one buffer: the ceiling
                      of gRPC from Python
    grpc-raw-malloc   the same, with glibc's mmap and trim thresholds raised in both processes
    hetero            endpoints of a real pool, a real reader: framing, checksums, order, window
    grpc-protobuf     one protobuf message with a bytes field per batch
    tf.data-service   dispatcher and workers, ready-made tensors, uncompressed
    torch             torch.utils.data.DataLoader, a worker process per endpoint, shared memory

With two and four endpoints only those run that the figures need or that bound them.

    python benchmarks/bench_transport.py --short
    python benchmarks/bench_transport.py --sizes 10000 10000000 --endpoints 1 2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import harness
from feeds import served
from harness import Trial, found_in
from peers import tf_service

SIZES = (10_000, 1_000_000, 10_000_000, 40_000_000)
SHORT_SIZES = (10_000, 10_000_000)
ENDPOINTS = (1, 2, 4)
WITH_SEVERAL = ("hetero", "raw-tcp", "grpc-raw", "torch")
RAISED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}
START_S = {"hetero": 3.0, "torch": 2.5, "tf.data-service": 14.0}

COLUMNS = harness.columns(
    *("batches_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
    *("trainer_peak_bytes", "trainer_growth_bytes", "first_batch_s"),
)

COMPETITORS = {
    "hetero": found_in("transports.frameworks", "Hetero"),
    "raw-tcp": found_in("transports.probes", "RawTcp"),
    "grpc-raw": found_in("transports.probes", "GrpcRaw"),
    "grpc-raw-malloc": found_in("transports.probes", "GrpcRaw"),
    "grpc-protobuf": found_in("transports.probes", "GrpcProtobuf"),
    "tf.data-service": found_in("transports.frameworks", "TfDataService"),
    "torch": found_in("transports.frameworks", "TorchWorkers"),
}
SERVERS = {
    "endpoints": served.endpoints,
    "raw-tcp": found_in("transports.probes", "serve_tcp"),
    "grpc-raw": found_in("transports.probes", "serve_grpc_raw"),
    "grpc-protobuf": found_in("transports.probes", "serve_grpc_protobuf"),
    "tf-data": tf_service.serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=1.2, short_seconds=0.8)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes per batch")
    parser.add_argument("--endpoints", type=int, nargs="+", help="numbers of endpoints")
    args = parser.parse_args(argv)
    plan = harness.plan("transport", parser, args)
    sizes = plan.choose(args.sizes, full=SIZES, short=SHORT_SIZES)
    endpoints = plan.choose(args.endpoints, full=ENDPOINTS, short=ENDPOINTS[:1])
    rows = plan.compare(__file__, make_trials(sizes, endpoints, args.only), warmup_batches=24, fresh=False)
    title = "Transport of ready-made batches"
    plan.write(rows, harness.report(title, rows, COLUMNS, targets, ratio_metric="batches_per_s", references=["hetero"]))
    return 0


def make_trials(sizes: Sequence[int], endpoints: Sequence[int], only: Sequence[str] | None = None) -> list[Trial]:
    """Return the rows to be."""
    return [
        Trial(
            competitor=name,
            group=f"{nbytes:,} bytes, {count} endpoint{'s' * (count > 1)}",
            config={"nbytes": nbytes, "num_endpoints": count},
            environment=RAISED_MALLOC if name == "grpc-raw-malloc" else {},
            start_s=START_S.get(name, 1.0),
            warmup_s=0.3 + 24 * nbytes / 1e9,
        )
        for count in endpoints
        for nbytes in sizes
        for name in only or (WITH_SEVERAL if count > 1 else COMPETITORS)
    ]


def targets(rows: Sequence[harness.Row]) -> list[str]:
    """Return lines that compare this group with its targets. The targets are for one endpoint."""
    config = rows[0].trial.config
    if config["num_endpoints"] != 1:
        return []
    if config["nbytes"] < 10_000_000:
        bounds = {"torch": 2.0, "tf.data-service": 1.0}
        return [
            harness.target(f"batches/s x {peer}", harness.ratio(rows, "hetero", peer, "batches_per_s"), bound)
            for peer, bound in bounds.items()
        ]
    own = next((row for row in rows if row.trial.competitor == "hetero" and row.runs), None)
    cpu = own.median("trainer_cpu_s_per_gb") if own else float("nan")
    return [
        harness.target("GB/s x grpc-raw", harness.ratio(rows, "hetero", "grpc-raw", "gb_per_s"), 0.9),
        harness.target("GB/s x tf.data-service", harness.ratio(rows, "hetero", "tf.data-service", "gb_per_s"), 1.8),
        harness.target("trainer CPU-s per GB", cpu, 0.25 if config["nbytes"] == 10_000_000 else 0.45, at_most=True),
    ]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, SERVERS)
    sys.exit(main())
