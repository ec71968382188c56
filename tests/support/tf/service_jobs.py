"""A job with servers of tf.data.service, as a rank sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hetero.control.members.directory import Directory, EndpointRecord
from hetero.metrics.logged import MetricLog


class Job:
    """A job whose session is this object. It has what a launcher tells a rank.

    It ends before the step ``stop_at``, counted from 1, or never if that is 0.
    """

    job_id = "tf-test"
    remote = False

    def __init__(self, data_service: str) -> None:
        self.rank, self.world_size, self.generation = 0, 1, 0
        self.tf_servers = Directory()
        self.metrics = MetricLog()
        self.options = SimpleNamespace(
            profile=False,
            data_service=data_service,
            data_timeout_s=60.0,
            emulate_step_s=None,
            warmup_steps=0,
            max_pass_batches=None,
        )
        self.timers: list[Any] = []
        self.stop_at = self.num_steps = 0

    def register_timer(self, timer: Any) -> None:
        self.timers.append(timer)

    def check_stop(self, timer: object) -> None:
        self.num_steps += 1
        if self.num_steps == self.stop_at:
            raise SystemExit(143)

    def check_wait(self, is_starved: bool) -> None: ...


def dispatcher_record(address: str) -> EndpointRecord:
    return EndpointRecord(
        endpoint_id="algo-1/dispatcher", host="algo-1", address=address, incarnation="0", kind="tf-dispatcher"
    )
