"""Whether the tf.data.service that ranks read from is still the one that they began with, and all of it there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from hetero.control.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.control.status import Cause, RankReport
from hetero.errors import ExitCode
from hetero.launch.host import Host

__all__ = ["ServiceWatch"]


class ServiceWatch:
    """Ends the job, or has the trainer group start over, where TensorFlow's clients would wait for an hour in silence.

    For the ranks of one generation; without effect in a job that has no tf.data.service.

    Args:
        host: On which they run.
        clock: Monotonic seconds.
    """

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._served_s = clock()
        self._dispatcher = ""
        """Incarnation of the one that the ranks' datasets are registered with; empty: none was seen yet."""
        self._waiting: dict[int, tuple[int, float]] = {}
        """By rank that waits for a batch while workers are missing: its steps so far, and since when."""

    def check(self) -> None:
        """See what is there now.

        Raises:
            JobEndsError: There has been no dispatcher, or no worker, for the data timeout; or a rank has waited for so
                long while workers were missing; or there is a dispatcher that knows nothing of the ranks.
            RestartError: The trainer group starts over because of the last.
        """
        if self._host.placement.data_service != "tf":
            return
        with self._host.hub.membership() as membership:
            records = membership.endpoints()
            reports = membership.own.ranks
        self._check_presence(records)
        self._check_dispatcher(records)
        self._check_waits(records, reports)

    def _check_presence(self, records: Sequence[EndpointRecord]) -> None:
        kinds = {record.kind for record in records}
        words = {TF_DISPATCHER: "its dispatcher, on the first data host", TF_WORKER: "every worker"}
        lost = " and ".join(word for kind, word in words.items() if kind not in kinds)
        now_s = self._clock()
        if not lost:
            self._served_s = now_s
        elif now_s - self._served_s > self._host.timings.data_timeout_s:
            self._fail(f"tf.data.service has been without {lost} for {now_s - self._served_s:.0f} s")

    def _check_dispatcher(self, records: Sequence[EndpointRecord]) -> None:
        found = next((record.incarnation for record in records if record.kind == TF_DISPATCHER), "")
        self._dispatcher = self._dispatcher or found
        if found not in ("", self._dispatcher):
            self._fail(
                "the dispatcher of tf.data.service was started again and knows nothing of this training; "
                "with --tf-work-dir it keeps a journal",
                of_rank=True,  # ranks that start over register what they read with the new one
            )

    def _check_waits(self, records: Sequence[EndpointRecord], reports: Sequence[RankReport]) -> None:
        """End the job if a rank waits for too long for a worker.

        A pass has no end before every worker has come to its own. Where there is none, or not yet, others go on.
        """
        present = Counter(record.host for record in records if record.kind == TF_WORKER)
        missing = [host for host, number in self._host.placement.tf_workers.items() if present[host] < number]
        now_s = self._clock()
        before, self._waiting = self._waiting, {}
        for report in reports:
            if report.waiting and missing:
                steps = sum(report.steps_started.values())
                is_same = report.rank in before and before[report.rank][0] == steps
                since_s = before[report.rank][1] if is_same else now_s
                self._waiting[report.rank] = steps, since_s
                if now_s - since_s > self._host.timings.data_timeout_s:
                    self._fail(
                        f"rank {report.rank} has waited for a batch for {now_s - since_s:.0f} s, and workers of "
                        f"tf.data.service are missing on {', '.join(missing)}"
                    )

    def _fail(self, summary: str, *, of_rank: bool = False) -> None:
        cause = Cause(host=self._host.name, summary=summary, exit_code=ExitCode.DATA_PLANE_LOST, of_rank=of_rank)
        self._host.fail(cause)
