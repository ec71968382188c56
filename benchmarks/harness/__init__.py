"""What every benchmark shares: fresh trainer processes, interleaved rounds, CPU and memory of both sides, result files.

A `Competitor` is one way to feed a trainer. `compare` starts a separate *trainer process* for it. The workers and
servers that it starts to compute batches are descendants of that process and count as *supply*. `compare` runs the
trials of one table round by round. The order rotates, because a noisy minute should hit all of them alike. Each run
begins with warm-up batches, which are not counted. Then it measures at least ``seconds`` and ``min_batches``.

    class MyLoader(Competitor):
        def start(self): ...             # connect, start workers; timed together with the first batch
        def batches(self): yield ...     # endless
        def stop(self): ...

    def main():
        parser = harness.parser(__doc__, seconds=3.0, short_seconds=1.0)
        plan = harness.plan("question", parser, parser.parse_args())
        rows = plan.compare(__file__, [Trial(competitor="my-loader")], warmup_batches=8)
        plan.write(rows, harness.report("Is it fast?", rows, COLUMNS, ratio_metric="batches_per_s"))

    if __name__ == "__main__":
        harness.dispatch({"my-loader": MyLoader}, servers={"my-server": serve})   # returns in the parent only
        main()
"""

from __future__ import annotations

from harness.comparison import compare, estimate_s
from harness.options import Plan, parser, plan
from harness.processes import HERE, Child, ProcessFailedError, call, say, server
from harness.results import RESULTS, environment, save
from harness.tables import Column, columns, grouped, ratio, report, table, target
from harness.trainer import dispatch, found_in, run_once
from harness.trials import Competitor, Job, Row, Run, Trial
from harness.usage import descendants, resident_bytes, resident_bytes_of

__all__ = [
    "HERE",
    "RESULTS",
    "Child",
    "Column",
    "Competitor",
    "Job",
    "Plan",
    "ProcessFailedError",
    "Row",
    "Run",
    "Trial",
    "call",
    "columns",
    "compare",
    "descendants",
    "dispatch",
    "environment",
    "estimate_s",
    "found_in",
    "grouped",
    "parser",
    "plan",
    "ratio",
    "report",
    "resident_bytes",
    "resident_bytes_of",
    "run_once",
    "save",
    "say",
    "server",
    "table",
    "target",
]
