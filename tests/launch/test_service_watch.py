"""When a tf.data.service that is lost, or another one, ends the job."""

from __future__ import annotations

import pytest
from stub_host import FailedError, StubHost

from hetero.cluster import Role
from hetero.control.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.control.membership import Member
from hetero.control.status import HostState, RankReport
from hetero.launch.service_watch import ServiceWatch

MEMBERS = (Member(host="trainer", role=Role.TRAINER), Member(host="data", role=Role.DATA))


SERVERS = (TF_DISPATCHER, TF_WORKER)


def server(kind: str, incarnation: str = "1-1") -> EndpointRecord:
    return EndpointRecord(
        endpoint_id=f"data/{kind}", host="data", address="127.0.0.1:1", incarnation=incarnation, kind=kind
    )


class Watched:
    """A trainer host of a job with tf.data.service, and its watch; ``num_workers`` are to be on the data host."""

    def __init__(self, data_service: str = "tf", *, num_workers: int = 1) -> None:
        self.now_s = 100.0
        self.host = StubHost(MEMBERS, "trainer", HostState.TRAINING, lambda _: None)
        self.host.placement.data_service = data_service
        self.host.placement.tf_workers = {"data": num_workers}
        self.watch = ServiceWatch(self.host, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def check(self, *servers: EndpointRecord, after_s: float = 0.0, waiting_at: int | None = None) -> None:
        """Look at what serves some time later, while a rank waits for the batch of a step, or for none."""
        self.now_s += after_s
        self.host.hear("data", HostState.SERVING, endpoints=servers)
        report = RankReport(rank=5, steps_started={"data": waiting_at or 0}, waiting=waiting_at is not None)
        self.host.known.store(report)
        self.watch.check()


@pytest.mark.parametrize(
    ("left", "lost"),
    [
        ((), "its dispatcher, on the first data host and every worker"),
        ((TF_WORKER,), "its dispatcher, on the first data host"),
        ((TF_DISPATCHER,), "every worker"),
    ],
)
def test_service_that_is_gone_for_longer_than_the_data_timeout_ends_the_job(left: tuple[str, ...], lost: str) -> None:
    watched = Watched()
    watched.check(*(server(kind) for kind in SERVERS), after_s=400)
    remaining = [server(kind) for kind in left]
    watched.check(*remaining, after_s=299)
    with pytest.raises(FailedError, match=rf"HET-31 trainer: tf\.data\.service has been without {lost} for 301 s"):
        watched.check(*remaining, after_s=2)


def test_dispatcher_that_has_forgotten_the_ranks_ends_the_job_and_says_what_helps() -> None:
    watched = Watched()
    watched.check(server(TF_WORKER))  # a dispatcher may be seen late, after a restart of the group
    watched.check(server(TF_DISPATCHER), server(TF_WORKER))
    watched.check(server(TF_WORKER))
    watched.check(server(TF_DISPATCHER), server(TF_WORKER, "1-2"))
    with pytest.raises(FailedError, match=r"HET-31 trainer: the dispatcher of .* knows nothing .* --tf-work-dir"):
        watched.check(server(TF_DISPATCHER, "1-2"), server(TF_WORKER))


def test_rank_that_waits_for_a_worker_that_does_not_come_ends_the_job() -> None:
    watched, left = Watched(num_workers=2), [server(kind) for kind in SERVERS]
    watched.check(*left, waiting_at=7)
    for _ in range(3):
        watched.check(*left, after_s=299, waiting_at=7)
        watched.check(*left, after_s=2, waiting_at=8)  # others feed it
        watched.check(*left, after_s=299, waiting_at=8)
        watched.check(*left, after_s=2)  # it computes
        watched.check(*left, after_s=299, waiting_at=9)
        watched.check(*left, server(TF_WORKER, "1-2"), after_s=2, waiting_at=9)  # the worker is back
        watched.check(*left, waiting_at=7)
    with pytest.raises(FailedError, match=r"HET-31 trainer: rank 5 has waited for a batch for 301 s, .* on data"):
        watched.check(*left, after_s=301, waiting_at=7)


def test_rank_that_waits_while_all_workers_are_there_waits_on() -> None:
    watched = Watched()
    for _ in range(3):
        watched.check(*(server(kind) for kind in SERVERS), after_s=1e6, waiting_at=7)


def test_job_of_endpoints_needs_no_servers_of_tensorflow() -> None:
    Watched("grpc").check(after_s=1e9)
