"""Checks that the tf.data.service of the ranks is complete and still has the dispatcher that they started with."""

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
    """Ends the job or restarts the trainer group if TensorFlow's clients would otherwise wait silently for an hour.

    Use one object for the ranks of one generation. It does nothing in a job without tf.data.service.

    Args:
        host: The host of the ranks.
        clock: Returns monotonic seconds.
    """

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._served_s = clock()
        self._dispatcher = ""
        """Incarnation of the dispatcher that the ranks' datasets are registered with. Empty until one is seen."""
        self._waiting: dict[int, tuple[int, float]] = {}
        """For each rank that waits for a batch while workers are missing: its steps so far, and the wait's start in
        monotonic seconds."""

    def check(self) -> None:
        """Check the current state of the service and its ranks.

        Raises:
            JobEndsError: If the dispatcher or every worker has been gone for the data timeout, if a rank has waited for
                a batch for that long while workers were missing, or if a new dispatcher does not know the ranks'
                datasets.
            RestartError: If the trainer group restarts because of a new dispatcher.
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
                of_rank=True,  # restarted ranks register their datasets with the new dispatcher
            )

    def _check_waits(self, records: Sequence[EndpointRecord], reports: Sequence[RankReport]) -> None:
        """End the job if a rank waits too long for a batch while workers are missing.

        A pass over the data ends only when every worker has finished its part. Before that, ranks read from the workers
        that are there.
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
