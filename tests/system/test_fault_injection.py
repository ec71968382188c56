"""Faults on purpose: their grammar, when they strike, where they are refused, what they do to endpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.system import fault_injection
from hetero.system.fault_injection import FAULTS_VARIABLE, Strike, address_via, faults_at, parse_faults, permit_faults


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Rules count per process: forget those of other tests."""
    fault_injection._parsed.cache_clear()
    yield
    fault_injection._parsed.cache_clear()


def test_rules_are_read() -> None:
    text = "Fetch:unavailable:p=0.1:seed=7; compute:hang:at=50;heartbeat:delay_s=2;send:corrupt:times=3:host=algo-1;"
    found = parse_faults(text)
    assert [(fault.site, fault.action) for fault in found] == [
        ("Fetch", "unavailable"),
        ("compute", "hang"),
        ("heartbeat", "delay"),
        ("send", "corrupt"),
    ]
    assert (found[0].p, found[0].seed, found[1].at, found[2].delay_s) == (0.1, 7, 50, 2.0)
    assert (found[3].times, found[3].host) == (3, "algo-1")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("Ftech:unavailable", ["'Ftech'", "Fetch", "heartbeat"]),
        ("Fetch:explode", ["'explode'", "unavailable, busy, delay"]),
        ("Fetch:unavailable:busy", ["unavailable and busy", "expected one"]),
        ("Fetch", ["delay_s=SECONDS"]),
        ("Fetch:unavailable:p=2", ["p is '2'", "(0, 1]"]),
        ("Fetch:unavailable:p=nan", ["p is 'nan'"]),
        ("Fetch:unavailable:at=0", ["at is '0'", "1 or more"]),
        ("Fetch:unavailable:when=now", ["'when'", "at, p, seed"]),
        ("compute:delay_s=1e9", ["at most an hour"]),
        ("link:via", ["network="]),
        ("link:via:network=300.1.1", ["network is '300.1.1'"]),
    ],
)
def test_malformed_rule_is_named_with_what_was_expected(rule: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(f"send:corrupt;{rule}")
    text = str(caught.value)
    assert [word for word in [FAULTS_VARIABLE, repr(rule), *words] if word not in text] == []


def test_nothing_is_there_where_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_at("compute") is None
    assert address_via("127.0.0.1:5") == "127.0.0.1:5"
    monkeypatch.setenv(FAULTS_VARIABLE, "send:corrupt")
    assert faults_at("compute") is None
    assert faults_at("send") is not None


def test_at_and_times_bound_when_a_fault_strikes() -> None:
    at = Strike(parse_faults("Fetch:busy:at=3"))
    assert [at() is not None for _ in range(5)] == [False, False, True, False, False]
    times = Strike(parse_faults("Fetch:busy:times=2"))
    assert [times() is not None for _ in range(5)] == [True, True, False, False, False]


def test_chance_is_the_same_for_the_same_seed() -> None:
    def struck(seed: int) -> list[bool]:
        strike = Strike(parse_faults(f"Fetch:busy:p=0.3:seed={seed}"))
        return [strike() is not None for _ in range(200)]

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert 30 < sum(struck(1)) < 90


def test_rule_for_one_host_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "send:corrupt:host=algo-1")
    monkeypatch.setenv("HETERO_FAULTS_HOST", "algo-2")
    assert faults_at("send") is None
    monkeypatch.setenv("HETERO_FAULTS_HOST", "algo-1")
    assert faults_at("send") is not None


def test_delay_waits() -> None:
    begin_s = time.monotonic()
    assert Strike(parse_faults("Fetch:delay_s=0.2:at=1"))() is None
    assert time.monotonic() - begin_s >= 0.2


def test_links_lead_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "link:via:network=127.7.7")
    assert address_via("127.0.0.3:4711") == "127.7.7.3:4711"
    assert address_via("[::1]:4711") == "[::1]:4711"


def test_platform_refuses_faults_unless_they_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    environ = {FAULTS_VARIABLE: "send:corrupt"}
    with pytest.raises(ConfigError, match=r"resourceconfig.json describes its cluster(.|\n)*--allow-faults"):
        permit_faults(environ, allow=False, host="algo-1", platform="/opt/ml/input/config/resourceconfig.json")
    with caplog.at_level(logging.WARNING):
        permit_faults(environ, allow=True, host="algo-1", platform="resourceconfig.json")
        permit_faults(environ, allow=False, host="algo-1", platform="")
    assert caplog.text.count("wrong on purpose") == 2
    assert environ["HETERO_FAULTS_HOST"] == "algo-1"


def test_malformed_faults_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no site 'x'"):
        permit_faults({FAULTS_VARIABLE: "x"}, allow=False, host="algo-1", platform="")


def test_no_faults_no_word(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    permit_faults(environ, allow=False, host="algo-1", platform="resourceconfig.json")
    assert environ == {}
    assert caplog.text == ""


def test_launcher_on_a_platform_refuses_faults(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero.cluster import find_platform, parse_cluster
    from hetero.config import LaunchOptions
    from hetero.launch.launcher import launch

    script = tmp_path / "train.py"
    script.write_text("")
    document = {"current_host": "algo-1", "hosts": ["algo-1"]}
    monkeypatch.setenv(FAULTS_VARIABLE, "send:corrupt")
    with pytest.raises(ConfigError, match="no simulated job: the platform describes its cluster"):
        launch(
            LaunchOptions(script=str(script)),
            parse_cluster(document, source="the platform"),
            platform=find_platform({}),
        )
