"""When do the first batches of a pass arrive if one batch takes seconds?

Question: one endpoint computes a whole batch. When do the first ones of a pass arrive, and the later ones?

Method: eight endpoints, each presented as one host. A batch has 128 samples of 30 ms, which wait instead of
computing: 3.8 s on one endpoint. Each run begins a long pass of a data set that the endpoints have built, and ends when
32 batches have arrived. The later batches are those from the 17th to the 32nd. Their mean time of arrival counts,
because batches arrive eight at a time. One loop takes batches as fast as they come. The other one needs 0.6 s per
batch, a little more than the endpoints.

    python benchmarks/bench_first_batches.py
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import harness
import numpy as np
from feeds import served, slow_samples
from harness import Column, Competitor, Trial

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.reader.reader import Reader

NUM_ENDPOINTS = 8
BATCH_SIZE = 128
SAMPLE_S = 0.03
NUM_BATCHES, NUM_EARLY = 32, 16
STEPS_S = {"as fast as they come": 0.0, "0.6 s per batch": 0.6}

COLUMNS = harness.columns(
    Column(title="first batch s", metric="first_s", form="{:.2f}"),
    Column(title="second batch s", metric="second_s", form="{:.2f}"),
    Column(title="later batches s", metric="later_s", form="{:.2f}"),
)


class Endpoints(Competitor):
    """hetero's endpoints."""

    def start(self) -> None:
        """Start the endpoints, which build the data set."""
        self._exits = contextlib.ExitStack()
        options = {"script": slow_samples.__file__, "num_endpoints": NUM_ENDPOINTS, "spread": True}
        server = self._exits.enter_context(harness.server("endpoints", options))
        self._fleet = self._exits.enter_context(served.fleet(server.ask()))
        self._fleet.describe(slow_samples.slow_samples(0.0))
        self._fleet.describe(slow_samples.slow_samples(SAMPLE_S))

    def batches(self) -> Iterator[Any]:
        """Read short batches without end, for the harness."""
        while True:
            self._short = self._read(0.0, 4)
            yield from self._short

    def consume(self, batch: Any) -> tuple[int, int]:
        """Count it."""
        return BATCH_SIZE, batch["image"].nbytes

    def facts(self) -> dict[str, Any]:
        """Begin a pass. Return when its batches arrived."""
        self._short.close()
        step_s = STEPS_S[self.config["loop"]]
        begin_s = time.perf_counter()
        arrived_s = []
        with contextlib.closing(self._read(SAMPLE_S, 3 * NUM_BATCHES)) as batches:
            for _ in itertools.islice(batches, NUM_BATCHES):
                arrived_s.append(time.perf_counter() - begin_s)
                time.sleep(step_s)
        later_s = sum(arrived_s[NUM_EARLY:]) / (NUM_BATCHES - NUM_EARLY)
        return {"first_s": arrived_s[0], "second_s": arrived_s[1], "later_s": later_s}

    def stop(self) -> None:
        """End the endpoints."""
        self._exits.close()

    def _read(self, sample_s: float, num_batches: int) -> Generator[Any, None, None]:
        spec = slow_samples.slow_samples(sample_s)
        order = np.random.default_rng(1)
        requests = (
            BatchRequest(
                spec=spec,
                work=IndexedWork(order.integers(0, slow_samples.NUM_SAMPLES, BATCH_SIZE)),
                seed=0,
                epoch=0,
                position=step,
                step=step,
            )
            for step in range(num_batches)
        )
        with Reader(self._fleet, requests) as reader:
            yield from reader


COMPETITORS = {"hetero": Endpoints}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=0.2, short_seconds=0.2)
    args = parser.parse_args(argv)
    plan = harness.plan("first_batches", parser, args)
    trials = [
        Trial(
            competitor=name,
            group=f"loop: {loop}",
            config={"loop": loop},
            basis="simulated",
            start_s=6.0,
            warmup_s=18.0,
        )
        for loop in STEPS_S
        for name in plan.choose(args.only, full=list(COMPETITORS), short=list(COMPETITORS))
    ]
    rows = plan.compare(__file__, trials, warmup_batches=4, min_batches=4)
    title = "The first batches of a pass"
    plan.write(rows, harness.report(title, rows, COLUMNS, ratio_metric="later_s"))
    return 0


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
