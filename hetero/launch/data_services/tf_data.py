"""tf: data hosts run tf.data.service, a dispatcher on the first data host and workers on all data hosts.

`TfDataWatch` checks that the service is complete, and that its dispatcher has not restarted since the ranks started.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hetero.cluster import ClusterSpec
from hetero.config import LaunchOptions, Timings
from hetero.control.members.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.control.status import Cause, RankReport
from hetero.endpoint.options import EndpointOptions
from hetero.errors import ExitCode
from hetero.launch.data_services.service import DataService, HostFacts, Servers
from hetero.pool.pool import EndpointPool

if TYPE_CHECKING:
    from hetero.pool.tf_pool import ServiceOptions

__all__ = ["TfData", "TfDataWatch", "service_options"]

logger = logging.getLogger(__name__)


class TfData(DataService):
    """A dispatcher on the first data host, and workers on data hosts. Options may add workers on trainer hosts."""

    computes_batches = False

    def plan(self, options: LaunchOptions, cluster: ClusterSpec) -> Servers:
        """Return which servers run on the current host of a cluster. Empty without data hosts."""
        if not cluster.data_hosts:
            return Servers(number=0)
        dispatcher_host = cluster.data_hosts[0].name
        workers = {host.name: options.tf_workers_per_host for host in cluster.data_hosts}
        if options.trainer_tf_workers:
            workers.update((host.name, options.trainer_tf_workers) for host in cluster.trainer_hosts)
        num_dispatchers = int(cluster.current_host == dispatcher_host)
        num_servers = num_dispatchers + workers.get(cluster.current_host, 0)
        return Servers(number=num_servers, dispatcher_host=dispatcher_host, workers=workers)

    def make_pool(
        self,
        facts: HostFacts,
        on_change: Callable[[tuple[EndpointRecord, ...]], None],
        on_line: Callable[[str, str], None],
    ) -> EndpointPool:
        """Return the pool of the servers of a host. Log once per job that the token does not protect the servers."""
        # Import this module here, because it imports NumPy. Without NumPy, the import of the launcher takes 0.34 s of
        # CPU time instead of 0.47, and most jobs do not use tf.data.service.
        from hetero.pool.tf_pool import ServicePool

        if facts.token_path is not None and facts.name == facts.servers.dispatcher_host:
            logger.warning(
                "the job's token does not protect tf.data.service. Its servers accept every peer that reaches "
                "their ports. Allow only the hosts of the job on its network"
            )
        return ServicePool(service_options(facts), on_change=on_change, on_line=on_line)

    def report_options(self, options: LaunchOptions, cluster: ClusterSpec) -> dict[str, str]:
        """Return the report's entries on the planned workers of each host and the dispatcher's journal."""
        return {
            "tf.data workers per data host": str(options.tf_workers_per_host),
            "tf.data workers per trainer host": str(options.trainer_tf_workers),
            "journal of the dispatcher": "no" if options.tf_work_dir is None else "yes",
        }

    def watch(self, host: str, servers: Servers, timings: Timings) -> TfDataWatch:
        """Return a watch for the ranks of ``host``."""
        return TfDataWatch(host, servers, data_timeout_s=timings.data_timeout_s)


def service_options(facts: HostFacts) -> ServiceOptions:
    """Return the settings of a host's pool of servers."""
    # Import this module here, because it imports NumPy, which the launchers of other jobs do not need.
    from hetero.pool.tf_pool import ServiceOptions

    options, servers, timings = facts.options, facts.servers, facts.timings
    has_dispatcher = facts.name == servers.dispatcher_host
    return ServiceOptions(
        endpoint=EndpointOptions(
            host=facts.name,
            address=facts.address,
            num_endpoints=servers.number,
            job_id=facts.job_id,
            log_level=options.log_level.upper(),
        ),
        has_dispatcher=has_dispatcher,
        is_trainer=facts.is_trainer,
        # Static sharding needs the list of the workers when the dispatcher starts.
        workers=servers.workers if has_dispatcher else {},
        # The pool waits for the names of the workers. When the launcher waited for them, its main loop stood still for
        # 10 s for each name, and with five data hosts the watchdog ended it.
        address_of=facts.address_of,
        work_dir=None if options.tf_work_dir is None else str(options.tf_work_dir.absolute()),
        endpoint_restarts=options.endpoint_restarts,
        # `TfDataWatch` ends the job if servers are gone for too long.
        gives_up=False,
        stuck_s=timings.lease_s,
        stable_s=timings.stable_s,
        environment=facts.environment,
    )


class TfDataWatch:
    """Finds a reason to end the job or to restart the trainer group if the service is lost.

    Without this check, TensorFlow's clients would wait silently for an hour.

    Args:
        host: Name of the host of the ranks.
        servers: The planned servers.
        data_timeout_s: Maximum seconds that the ranks may be without the service.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, host: str, servers: Servers, *, data_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host
        self._servers = servers
        self._data_timeout_s = data_timeout_s
        self._clock = clock
        self._served_s = clock()
        """Time when the dispatcher and a worker were last present, in monotonic seconds."""
        self._dispatcher = ""
        """Incarnation of the dispatcher that knows the ranks' datasets. Empty until it is known."""
        self._waiting: dict[int, tuple[int, float]] = {}
        """For each rank that waits for a batch while workers are missing: its number of started steps, and the time
        when the wait began, in monotonic seconds."""

    def check(self, records: Sequence[EndpointRecord], reports: Sequence[RankReport]) -> Cause | None:
        """Return why the job must end or the trainer group must restart, or None.

        There are three reasons. The dispatcher or every worker was gone for the data timeout. A rank waited for a batch
        for the data timeout while workers were missing. A new dispatcher does not know the ranks' datasets.
        """
        return self._lost(records) or self._replaced(records) or self._waits_in_vain(records, reports)

    def _lost(self, records: Sequence[EndpointRecord]) -> Cause | None:
        """Return a cause if the dispatcher or every worker has been missing for the data timeout."""
        present_kinds = {record.kind for record in records}
        texts = {TF_DISPATCHER: "no dispatcher (on the first data host)", TF_WORKER: "no worker"}
        missing = " and ".join(text for kind, text in texts.items() if kind not in present_kinds)
        now_s = self._clock()
        if not missing:
            self._served_s = now_s
        elif now_s - self._served_s > self._data_timeout_s:
            return self._cause(f"tf.data.service has had {missing} for {now_s - self._served_s:.0f} s")
        return None

    def _replaced(self, records: Sequence[EndpointRecord]) -> Cause | None:
        """Return a cause if a new dispatcher runs that does not know the ranks' datasets."""
        found = next((record.incarnation for record in records if record.kind == TF_DISPATCHER), "")
        # The first dispatcher that this host sees knows the datasets.
        self._dispatcher = self._dispatcher or found
        # No dispatcher serves now, or it is the same one. A dispatcher that has read its journal has the same
        # incarnation as before its restart.
        if found in ("", self._dispatcher):
            return None
        return self._cause(
            "the dispatcher of tf.data.service was started again and has lost the datasets of this run; "
            "give --tf-work-dir to keep them in a journal",
            # Restarted ranks register their datasets with the new dispatcher.
            of_rank=True,
        )

    def _waits_in_vain(self, records: Sequence[EndpointRecord], reports: Sequence[RankReport]) -> Cause | None:
        """Return a cause if a rank waits too long for a batch while workers are missing.

        Ranks read from the workers that are present. Only the end of a pass needs every worker, because each must have
        finished its part.
        """
        # A missing worker alone does not end the job. In a pass without end, the other workers feed the ranks.
        present = Counter(record.host for record in records if record.kind == TF_WORKER)
        missing = [host for host, number in self._servers.workers.items() if present[host] < number]
        now_s = self._clock()
        # Keep only ranks that still wait.
        waiting_before, self._waiting = self._waiting, {}
        for report in reports:
            if not report.waiting or not missing:
                continue
            num_steps = sum(report.steps_started.values())
            num_steps_before, began_s = waiting_before.get(report.rank, (num_steps, now_s))
            # If the rank has begun a step since the last call, its batch arrived, and this is a new wait.
            if num_steps != num_steps_before:
                began_s = now_s
            self._waiting[report.rank] = num_steps, began_s
            if now_s - began_s > self._data_timeout_s:
                return self._cause(
                    f"rank {report.rank} has waited for a batch for {now_s - began_s:.0f} s, and workers of "
                    f"tf.data.service are missing on {', '.join(missing)}"
                )
        return None

    def _cause(self, summary: str, *, of_rank: bool = False) -> Cause:
        return Cause(host=self._host, summary=summary, exit_code=ExitCode.DATA_PLANE_LOST, of_rank=of_rank)
