"""Launchers and ranks under TLS: they meet, and those with other certificates do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from hetero.cluster import Role
from hetero.control import security
from hetero.control.hub import Hub
from hetero.control.members.membership import Membership
from hetero.control.rank.session import RankSession
from hetero.control.status import HostState
from hetero.errors import ExitCode, HeteroError
from hetero.wire.tls import Tls
from tests.support.control.hubs import TOKEN, make_hub, wait_for
from tests.support.wire.job_certificates import GRPC_NAMES_THE_CHECK, tls


@contextlib.contextmanager
def both(trainer_tls: Tls | None, data_tls: Tls | None, *, token: security.Token = TOKEN) -> Iterator[tuple[Hub, Hub]]:
    """Yield the hubs of both hosts. ``token`` is the data host's."""
    ports: dict[str, int] = {}
    trainer, data = make_hub("trainer", ports, tls=trainer_tls), make_hub("data", ports, tls=data_tls, token=token)
    with trainer, data:
        yield trainer, data


def is_failed(membership: Membership) -> bool:
    return membership.own.decided is not None


def test_hubs_under_tls_meet_and_their_ranks_register() -> None:
    with both(tls(host="trainer"), tls(host="data")) as (trainer, data):
        data.update(state=HostState.SERVING)
        wait_for(trainer, lambda membership: not membership.missing(Role.DATA, at_least=HostState.SERVING))
        session = RankSession(
            f"127.0.0.1:{trainer.rank_port}", TOKEN, job_id="job-a", rank=0, world_size=1, tls=tls(host="trainer")
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
        ("job", "intruder", "it is one of another host"),
        ("expired", "data", "certificate has expired"),
    ],
)
def test_peer_whose_certificate_fails_a_check_ends_the_start_naming_it(kind: str, host: str, words: str) -> None:
    with both(tls(host="trainer"), tls(kind, host)) as (trainer, _):
        wait_for(trainer, is_failed)
        with trainer.membership() as membership:
            assert membership.own.decided is not None
            assert membership.own.decided.exit_code is ExitCode.AUTHENTICATION
            assert "its certificate is not valid" in membership.own.decided.summary
            assert words in membership.own.decided.summary or not GRPC_NAMES_THE_CHECK
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
    monkeypatch.setattr("hetero.control.launcher_link.CALL_TIMEOUT_S", 1.0)
    ports = {"data": 1}
    own = tls(host="trainer")
    with make_hub("trainer", ports, tls=own) as trainer, pytest.raises(HeteroError, match="its launcher at"):
        RankSession(f"127.0.0.1:{trainer.rank_port}", TOKEN, job_id="job-a", rank=0, world_size=1, tls=given())
