"""Launchers and ranks under TLS: they meet, and those with other certificates do not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from job_certificates import tls

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control import security
from hetero.control.hub import Hub, RankFacts
from hetero.control.membership import Member, Membership
from hetero.control.session import RankSession
from hetero.control.status import HostState, HostStatus
from hetero.errors import ExitCode, HeteroError
from hetero.wire.tls import Tls

TOKEN = security.Token.generate()
MEMBERS = (Member(host="trainer", role=Role.TRAINER), Member(host="data", role=Role.DATA))
FACTS = RankFacts(
    remote=True, data_timeout_s=1, prepare_timeout_s=2, emulate_step_s=None, purity_checks=0, warmup_steps=1
)


def make_hub(host: str, ports: dict[str, int], own_tls: Tls | None, *, token: security.Token = TOKEN) -> Hub:
    """Return the hub of one of two hosts; ``ports`` collects where they listen."""
    own = HostStatus(host=host, incarnation=f"{host}-1", version="1", script_digest="d")
    hub = Hub(
        Membership(MEMBERS, own, timings=Timings(), clock=time.monotonic),
        address="127.0.0.1",
        port=0,
        resolve=lambda name: f"127.0.0.1:{ports[name]}",
        peers=tuple(member.host for member in MEMBERS if member.host != host),
        token=token,
        job_id="job-a",
        facts=FACTS,
        heartbeat_s=0.3,
        tls=own_tls,
    )
    ports[host] = hub.port
    return hub


@contextlib.contextmanager
def both(trainer_tls: Tls | None, data_tls: Tls | None, **options: security.Token) -> Iterator[tuple[Hub, Hub]]:
    """Give the hubs of both hosts; ``options`` are the data host's."""
    ports: dict[str, int] = {}
    trainer, data = make_hub("trainer", ports, trainer_tls), make_hub("data", ports, data_tls, **options)
    with trainer, data:
        yield trainer, data


def wait_for(hub: Hub, predicate: Callable[[Membership], bool], timeout_s: float = 20.0) -> None:
    """Wait until the membership fulfils ``predicate``."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with hub.membership() as membership:
            if predicate(membership):
                return
        hub.wait(0.1)
    pytest.fail("the awaited state did not come")


def is_failed(membership: Membership) -> bool:
    return membership.own.decided is not None


def test_hubs_under_tls_meet_and_their_ranks_register() -> None:
    with both(tls(host="trainer"), tls(host="data")) as (trainer, data):
        data.update(state=HostState.SERVING)
        wait_for(trainer, lambda membership: not membership.missing(Role.DATA, at_least=HostState.SERVING))
        session = RankSession(
            f"127.0.0.1:{trainer.port}", TOKEN, job_id="job-a", rank=0, world_size=1, tls=tls(host="trainer")
        )
        with contextlib.closing(session):
            assert session.options.prepare_timeout_s == 2


@pytest.mark.attack("A18")
def test_token_is_demanded_under_tls_as_without() -> None:
    with both(tls(host="trainer"), tls(host="data"), token=security.Token.generate()) as (_, data):
        wait_for(data, is_failed)
        with data.membership() as membership:
            assert membership.own.decided is not None
            assert "refuses this host's token" in membership.own.decided.summary


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    ("kind", "host", "words"),
    [
        ("other", "data", "another authority signed it"),
        ("job", "intruder", "its certificate is not valid"),
        ("expired", "data", "certificate has expired"),
    ],
)
def test_peer_whose_certificate_fails_a_check_ends_the_start_naming_it(kind: str, host: str, words: str) -> None:
    with both(tls(host="trainer"), tls(kind, host)) as (trainer, _):
        wait_for(trainer, is_failed)
        with trainer.membership() as membership:
            assert membership.own.decided is not None
            assert membership.own.decided.exit_code is ExitCode.AUTHENTICATION
            assert words in membership.own.decided.summary
            assert "data" in membership.own.decided.summary


@pytest.mark.attack("A18")
@pytest.mark.parametrize("plain", ["trainer", "data"])
def test_hubs_that_do_not_agree_on_tls_never_meet_and_one_says_why(plain: str) -> None:
    given = {host: None if host == plain else tls(host=host) for host in ("trainer", "data")}
    with both(given["trainer"], given["data"]) as (trainer, data):
        hubs = {"trainer": trainer, "data": data}
        secured = "data" if plain == "trainer" else "trainer"
        role = Role.TRAINER if plain == "trainer" else Role.DATA
        wait_for(
            hubs[secured],
            lambda membership: "it does not speak TLS" in str(membership.missing(role, at_least=HostState.SERVING)),
        )
        other = Role.DATA if plain == "trainer" else Role.TRAINER
        wait_for(
            hubs[plain],
            lambda membership: (
                "does it demand TLS (--tls-dir)" in str(membership.missing(other, at_least=HostState.SERVING))
            ),
        )


@pytest.mark.attack("A18")
@pytest.mark.parametrize("given", [lambda: None, lambda: tls("other", "trainer")], ids=["plaintext", "other authority"])
def test_rank_with_other_tls_than_its_launcher_is_refused(
    given: Callable[[], Tls | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.control.session._CALL_TIMEOUT_S", 1.0)
    ports = {"data": 1}
    with make_hub("trainer", ports, tls(host="trainer")) as trainer, pytest.raises(HeteroError, match="cannot reach"):
        RankSession(f"127.0.0.1:{trainer.port}", TOKEN, job_id="job-a", rank=0, world_size=1, tls=given())
