"""What do TLS and the audit's ledger cost?

Question: how many batches per second, and how much CPU on either side, does a trainer pay for mutual TLS between it and
its endpoints (`--tls-dir`), and for a ledger of its batches (`--audit`)?

Method: ready-made batches from one endpoint, as in `bench_transport.py`, each safeguard against the same without it.
TLS is between reader and endpoint, so those two are compared without the loader. The loader writes the ledger: in the
script's thread it computes a digest of each batch, and writes a line.

    hetero            endpoints of a real pool, a real reader
    hetero-tls        the same under mutual TLS
    hetero-loader     the loader that users have, over the same endpoint
    hetero-audit      the same with a ledger

    python benchmarks/bench_safeguards.py --short
    python benchmarks/bench_safeguards.py --sizes 1000000 --only hetero-loader hetero-audit
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import harness
from feeds import served
from harness import Trial, found_in

SIZES = (10_000, 1_000_000, 10_000_000)
SHORT_SIZES = (10_000_000,)
PAIRS = {"TLS": ("hetero-tls", "hetero"), "the ledger": ("hetero-audit", "hetero-loader")}
"""What costs, and who is compared with whom."""

COLUMNS = harness.columns(
    *("batches_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb", "first_batch_s")
)
COMPETITORS = {
    "hetero": found_in("transports.frameworks", "Hetero"),
    "hetero-tls": found_in("transports.frameworks", "HeteroTls"),
    "hetero-loader": found_in("transports.frameworks", "HeteroLoader"),
    "hetero-audit": found_in("transports.frameworks", "HeteroAudited"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=2.0, short_seconds=0.8)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes per batch")
    args = parser.parse_args(argv)
    plan = harness.plan("safeguards", parser, args)
    sizes = plan.choose(args.sizes, full=SIZES, short=SHORT_SIZES)
    rows = plan.compare(__file__, make_trials(sizes, args.only), warmup_batches=24, fresh=False)
    plan.write(rows, harness.report("What safeguards cost", rows, COLUMNS, figures, ratio_metric="batches_per_s"))
    return 0


def make_trials(sizes: Sequence[int], only: Sequence[str] | None = None) -> list[Trial]:
    """Return the rows to be."""
    return [
        Trial(
            competitor=name,
            group=f"{nbytes:,} bytes",
            config={"nbytes": nbytes, "num_endpoints": 1},
            start_s=3.0,
            warmup_s=0.3 + 24 * nbytes / 1e9,
        )
        for nbytes in sizes
        for name in only or COMPETITORS
    ]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say what each safeguard costs, over the same without it."""
    metrics = {
        "batches/s": "batches_per_s",
        "trainer CPU-s/GB": "trainer_cpu_s_per_gb",
        "supply CPU-s/GB": "supply_cpu_s_per_gb",
    }
    return [
        f"- {title} with {what} / without: {harness.ratio(rows, name, other, metric):.2f}"
        for what, (name, other) in PAIRS.items()
        for title, metric in metrics.items()
    ]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
