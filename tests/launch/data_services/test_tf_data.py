"""When a tf.data.service that is lost, or another one, ends the job."""

from __future__ import annotations

import re

import pytest

from hetero.config import LaunchOptions, Timings
from hetero.control.members.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.control.status import RankReport
from hetero.launch.data_services import Servers, find_service
from hetero.launch.data_services.tf_data import TfDataWatch

SERVERS = (TF_DISPATCHER, TF_WORKER)


def server(kind: str, incarnation: str = "1-1") -> EndpointRecord:
    return EndpointRecord(
        endpoint_id=f"data/{kind}", host="data", address="127.0.0.1:1", incarnation=incarnation, kind=kind
    )


class Watched:
    """The ranks of a trainer host in a job with tf.data.service. ``num_workers`` are planned on the data host."""

    def __init__(self, *, num_workers: int = 1) -> None:
        self.now_s = 100.0
        servers = Servers(number=0, dispatcher_host="data", workers={"data": num_workers})
        self.watch = TfDataWatch("trainer", servers, data_timeout_s=300.0, clock=lambda: self.now_s)

    def check(self, *servers: EndpointRecord, after_s: float = 0.0, waiting_at: int | None = None) -> str:
        """Return why the job ends, some time later, while a rank waits for the batch of a step, or for none."""
        self.now_s += after_s
        report = RankReport(rank=5, steps_started={"data": waiting_at or 0}, waiting=waiting_at is not None)
        cause = self.watch.check(servers, [report])
        return "" if cause is None else cause.first_line


@pytest.mark.parametrize(
    ("left", "lost"),
    [
        ((), r"no dispatcher \(on the first data host\) and no worker"),
        ((TF_WORKER,), r"no dispatcher \(on the first data host\)"),
        ((TF_DISPATCHER,), "no worker"),
    ],
)
def test_service_that_is_gone_for_longer_than_the_data_timeout_ends_the_job(left: tuple[str, ...], lost: str) -> None:
    watched = Watched()
    assert not watched.check(*(server(kind) for kind in SERVERS), after_s=400)
    remaining = [server(kind) for kind in left]
    assert not watched.check(*remaining, after_s=299)
    assert re.match(
        rf"HET-31 trainer: tf\.data\.service has had {lost} for 301 s", watched.check(*remaining, after_s=2)
    )


def test_dispatcher_that_has_forgotten_the_ranks_ends_the_job_and_says_what_helps() -> None:
    watched = Watched()
    assert not watched.check(server(TF_WORKER))  # a dispatcher may be seen late, after a restart of the group
    assert not watched.check(server(TF_DISPATCHER), server(TF_WORKER))
    assert not watched.check(server(TF_WORKER))
    assert not watched.check(server(TF_DISPATCHER), server(TF_WORKER, "1-2"))
    assert re.match(
        r"HET-31 trainer: the dispatcher of .* has lost the datasets .* --tf-work-dir",
        watched.check(server(TF_DISPATCHER, "1-2"), server(TF_WORKER)),
    )


def test_rank_that_waits_for_a_worker_that_does_not_come_ends_the_job() -> None:
    watched, left = Watched(num_workers=2), [server(kind) for kind in SERVERS]
    assert not watched.check(*left, waiting_at=7)
    for _ in range(3):
        assert not watched.check(*left, after_s=299, waiting_at=7)
        assert not watched.check(*left, after_s=2, waiting_at=8)  # others feed it
        assert not watched.check(*left, after_s=299, waiting_at=8)
        assert not watched.check(*left, after_s=2)  # it computes
        assert not watched.check(*left, after_s=299, waiting_at=9)
        assert not watched.check(*left, server(TF_WORKER, "1-2"), after_s=2, waiting_at=9)  # the worker is back
        assert not watched.check(*left, waiting_at=7)
    assert re.match(
        r"HET-31 trainer: rank 5 has waited for a batch for 301 s, .* on data",
        watched.check(*left, after_s=301, waiting_at=7),
    )


def test_rank_that_waits_while_all_workers_are_there_waits_on() -> None:
    watched = Watched()
    for _ in range(3):
        assert not watched.check(*(server(kind) for kind in SERVERS), after_s=1e6, waiting_at=7)


def test_job_of_endpoints_needs_no_servers_of_tensorflow() -> None:
    service = find_service(LaunchOptions(script="train.py").data_service)
    assert service.watch("trainer", Servers(number=0), Timings()) is None
