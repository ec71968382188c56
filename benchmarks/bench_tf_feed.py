"""What does a TensorFlow trainer pay for photographs that another process has preprocessed?

Question: how many samples per second reach one consumer that touches every batch, when two threads or processes
preprocess? They belong to tf.data in the trainer process, to tf.data service, or to hetero's own data plane as a
`tf.data.Dataset`. What CPU do both sides use? How long does the first batch take? Does it matter who starts tf.data
service?

Method: one JPEG pipeline (decode, random crop, resize to 224, flip) with batches of 9.6 MB, interleaved:

    tf-local       tf.data in the trainer process, two threads
    tf-by-hand     tf.data service: a dispatcher and two workers of one thread, started as its manual says
    tf-launcher    tf.data service, started by the launchers of a simulated job of two data hosts with a worker each
                   (``--data-service tf``), and read by `hetero.tf.distribute`
    from_dataset   `hetero.tf.from_dataset`: two endpoints of a real pool

The first three run TensorFlow's operators, which fuse decoding with the crop. The last one runs Python and OpenCV,
which tf.data service cannot run. Both services shard dynamically, sample by sample, and compress nothing.

All processes are kept through the rounds. Both services begin a new epoch in each, because their workers would go on
computing. The clock for the first batch starts when the trainer has imported TensorFlow, and includes the start of all
servers. For tf-launcher this is the start of a whole job. Its launchers and one idle rank count as supply.

Figure: tf-launcher x tf-by-hand at least 0.97. The short form leaves out both services, which take long to start.

    python benchmarks/bench_tf_feed.py
    python benchmarks/bench_tf_feed.py --only tf-by-hand tf-launcher
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import bench_pipelines
import harness
from feeds import served
from harness import Row, Trial, found_in
from peers import tf_service

COMPETITORS = {
    "tf-local": found_in("peers.tf_feeds", "TfLocal"),
    "tf-by-hand": found_in("peers.tf_feeds", "TfByHand"),
    "tf-launcher": found_in("peers.tf_feeds", "TfLauncher"),
    "from_dataset": found_in("peers.tf_feeds", "FromDataset"),
}
IN_SHORT_FORM = ("tf-local", "from_dataset")
START_S = {"tf-local": 8.0, "tf-by-hand": 25.0, "tf-launcher": 35.0, "from_dataset": 12.0}
BY_HAND_RATIO = 0.97
"""Samples/s through the launcher over hand-started servers: what was asked for."""

COLUMNS = harness.columns(
    *("samples_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
    *("first_batch_s", "trainer_peak_bytes"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=8.0, short_seconds=1.5)
    args = parser.parse_args(argv)
    plan = harness.plan("tf_feed", parser, args)
    names = plan.choose(args.only, full=tuple(COMPETITORS), short=IN_SHORT_FORM)
    if not args.estimate:
        bench_pipelines.make_photos()
    rows = plan.compare(__file__, make_trials(names), warmup_batches=12, min_batches=8, fresh=False)
    title = "A TensorFlow trainer fed with photographs: two preprocessing threads or processes"
    plan.write(
        rows,
        harness.report(title, rows, COLUMNS, figures, ratio_metric="samples_per_s", references=["from_dataset"]),
    )
    return 0


def make_trials(names: Sequence[str]) -> list[Trial]:
    """Return the rows to be."""
    return [
        Trial(
            competitor=name,
            config={"root": str(bench_pipelines.PHOTOS)},
            environment=bench_pipelines.ENVIRONMENT,
            start_s=START_S[name],
            warmup_s=1.5,
        )
        for name in names
    ]


def figures(rows: Sequence[Row]) -> list[str]:
    """Say whether the launcher's servers are as good, and what the others cost beside each other."""
    lines = [
        harness.target(
            "tf-launcher x tf-by-hand", harness.ratio(rows, "tf-launcher", "tf-by-hand", "samples_per_s"), BY_HAND_RATIO
        )
    ]
    for name, other in (("tf-launcher", "tf-local"), ("from_dataset", "tf-local"), ("from_dataset", "tf-launcher")):
        found = harness.ratio(rows, name, other, "samples_per_s")
        if not math.isnan(found):
            lines.append(f"- samples/s, {name} / {other}: {found:.2f}")
    return lines


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints, "tf-data": tf_service.serve})
    sys.exit(main())
