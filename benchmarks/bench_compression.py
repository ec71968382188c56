"""Up to which bandwidth does compression between endpoints and trainer pay?

Question: how many batches per second arrive, and what CPU do both sides spend, without compression, with lz4 and with
zstd, on networks of 25 to 1,000 MB/s and on one without a limit? Where do the curves cross?

Method: endpoints run in a network namespace behind a token bucket (`limited_link.py`). This needs root. Without root
the benchmark is skipped. Endpoints hold their batches ready, because only delivery is measured. Batches are decoded
photographs (uint8) and token ids (int64) as the pipelines make them. Users' `DataLoader` delivers them, and the
consumer touches every page. Bytes on the wire are counted at the interface. One endpoint compresses with one core. With
more endpoints on more cores (``--endpoints``), compression pays up to a higher bandwidth.

    python benchmarks/bench_compression.py --short
    python benchmarks/bench_compression.py --kinds photos --rates 50 250
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import bench_pipelines
import harness
from feeds import served
from harness import Column, Competitor, Trial, limited_link

from hetero.wire.compression import COMPRESSIONS, is_installed, package_of

SCRIPT = str(harness.HERE / "feeds" / "compressible.py")
KINDS = ("photos", "tokens")
CODECS = ("none", "lz4", "zstd")
UNLIMITED = 0
RATES_MB_S = (25, 50, 100, 250, 500, 1000, UNLIMITED)
SHORT_RATES_MB_S = (100, UNLIMITED)
PAYS = 1.03
"""Compression pays if batches/s grow by at least this factor."""

COLUMNS = harness.columns(
    "batches_per_s",
    Column(title="MB/s", metric="gb_per_s", form="{:,.0f}", scale=1e3),
    Column(title="bytes / bytes on the wire", metric="compression_ratio"),
    "trainer_cpu_s_per_gb",
    "supply_cpu_s_per_gb",
)


class Limited(Competitor):
    """``compression``, ``kind``, ``rate_mb_s`` (0: no limit), ``num_endpoints``, ``root``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        import torch

        torch.set_num_threads(1)

    def start(self) -> None:
        from feeds import compressible

        from hetero.torch import DataLoader

        self._wire_bytes = self._payload_bytes = 0
        self._link = limited_link.LimitedLink(self.config["rate_mb_s"] or None).__enter__()
        options = {"script": SCRIPT, "num_endpoints": self.config["num_endpoints"], "address": self._link.address}
        self._pool = harness.server("endpoints", options, prefix=self._link.prefix)
        served.Session(self._pool.ask()).enter()
        codec = self.config["compression"]
        more: dict[str, Any] = {} if codec == "none" else {"compression": codec}
        data = compressible.prepared(kind=self.config["kind"], root=self.config["root"])
        self._loader: Any = DataLoader(data, batch_size=None, **more)

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def consume(self, batch: Any) -> tuple[int, int]:
        from peers import touch

        nbytes = touch(batch)
        self._payload_bytes += nbytes
        return 1, nbytes

    def begin_run(self) -> None:
        self._payload_bytes = 0
        self._wire_bytes = self._link.received_bytes

    def facts(self) -> dict[str, Any]:
        wire_bytes = self._link.received_bytes - self._wire_bytes
        return {"wire_bytes": wire_bytes, "compression_ratio": self._payload_bytes / max(1, wire_bytes)}

    def stop(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.stop(2.0)
        if hasattr(self, "_link"):
            self._link.__exit__()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=2.0, short_seconds=1.0)
    parser.add_argument("--rates", type=int, nargs="+", help="MB/s; 0: no limit")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all; photos with --short")
    parser.add_argument("--endpoints", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    plan = harness.plan("compression", parser, args)
    codecs = args.only or CODECS
    reason = limited_link.why_not() or why_no_codec(codecs)
    if reason and not args.estimate:
        harness.say(f"compression: skipped: {reason}")
        return 0
    limited_link.remove_leftovers()
    trials = make_trials(
        plan.choose(args.kinds, full=KINDS, short=KINDS[:1]),
        plan.choose(args.rates, full=RATES_MB_S, short=SHORT_RATES_MB_S),
        codecs,
        args.endpoints,
    )
    if not args.estimate:
        bench_pipelines.make_photos()
    # A slow network takes seconds for a few batches: two windows of warm-up, and no minimum beyond two batches.
    rows = plan.compare(__file__, trials, warmup_batches=6 * args.endpoints, min_batches=2, fresh=False)
    plan.write(rows, report(rows))
    return 0


def why_no_codec(codecs: Sequence[str]) -> str:
    """Return the missing packages of these codecs. Empty if all are installed."""
    missing = [package_of(codec) for codec in codecs if codec in COMPRESSIONS and not is_installed(codec)]
    return f"needs {', '.join(missing)}; install hetero[compression]" if missing else ""


def make_trials(
    kinds: Sequence[str], rates_mb_s: Sequence[int], codecs: Sequence[str], num_endpoints: int
) -> list[Trial]:
    """Return the rows to be."""
    return [
        Trial(
            competitor=codec,
            group=f"{kind}, {f'{rate:,} MB/s' if rate else 'no limit'}",
            config={
                "compression": codec,
                "kind": kind,
                "rate_mb_s": rate,
                "num_endpoints": num_endpoints,
                "root": str(bench_pipelines.PHOTOS),
            },
            environment=bench_pipelines.ENVIRONMENT,
            start_s=7.0,
            warmup_s=0.3 + (6 * 9.6 / rate if rate and kind == "photos" else 0.0),
        )
        for kind in kinds
        for rate in rates_mb_s
        for codec in codecs
    ]


def report(rows: Sequence[harness.Row]) -> str:
    """Return the tables, and where each codec stops to pay."""
    title = "Compression between endpoints and trainer"
    text = harness.report(title, rows, COLUMNS, ratio_metric="batches_per_s", references=["none"])
    parts = [text, "", "## Where it pays", ""]
    for kind in dict.fromkeys(row.trial.config["kind"] for row in rows):
        for codec in CODECS[1:]:
            gains = gains_by_rate(rows, kind, codec)
            if gains:
                parts.append(f"- {kind}, {codec}: {describe_gains(gains)}")
    return "\n".join(parts)


def gains_by_rate(rows: Sequence[harness.Row], kind: str, codec: str) -> dict[float, float]:
    """Return batches/s with a codec over those without, by bandwidth in MB/s. Infinity means no limit."""
    members = [row for row in rows if row.trial.config["kind"] == kind]
    found = {}
    for group in harness.grouped(members).values():
        gain = harness.ratio(group, codec, "none", "batches_per_s")
        if not math.isnan(gain):
            found[float(group[0].trial.config["rate_mb_s"]) or math.inf] = gain
    return dict(sorted(found.items()))


def crossover_mb_s(gains: dict[float, float]) -> float | None:
    """Return the highest bandwidth that compression pays at. Interpolate between measured ones on a logarithmic scale.

    Returns:
        None if it never pays. Infinity if it pays without a limit. If it pays at the highest limit but not without a
        limit, the highest limit.
    """
    crossing: float | None = None
    before: tuple[float, float] | None = None
    for rate, gain in gains.items():
        if gain >= PAYS:
            crossing = rate
        elif before is not None and before[1] >= PAYS:
            lower, upper = before[0], rate
            if math.isinf(upper):
                return lower
            share = (before[1] - PAYS) / (before[1] - gain)
            return math.exp(math.log(lower) + share * (math.log(upper) - math.log(lower)))
        before = rate, gain
    return crossing


def describe_gains(gains: dict[float, float]) -> str:
    """Return in words up to which bandwidth a codec pays."""
    crossing = crossover_mb_s(gains)
    curve = ", ".join(f"{'no limit' if math.isinf(rate) else f'{rate:g}'}: {gain:.2f}" for rate, gain in gains.items())
    if crossing is None:
        verdict = "pays at none of these"
    elif math.isinf(crossing):
        verdict = "pays even without a limit"
    elif crossing in gains:
        verdict = f"pays up to {crossing:,.0f} MB/s at least"
    else:
        verdict = f"pays up to about {crossing:,.0f} MB/s"
    return f"{verdict} (batches/s over those without, by MB/s: {curve})"


COMPETITORS = dict.fromkeys(CODECS, Limited)

if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
