"""Proxies: which one is set, and that its password is not shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from patients import here

from hetero.doctor import Level
from hetero.doctor.proxies import examine

PROXY = "http://user:secret-word@proxy.corp:3128"


def test_without_a_proxy_there_is_nothing_to_say(tmp_path: Path) -> None:
    (finding,) = examine(here(tmp_path, {"HTTP_PROXY": PROXY}))  # gRPC reads lower case only
    assert finding.level is Level.OK
    assert finding.found.startswith("none of ")


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_proxy_is_named_without_its_password(tmp_path: Path, variable: str) -> None:
    (finding,) = examine(here(tmp_path, {variable: PROXY}))
    assert finding.level is Level.OK
    assert finding.found.startswith(f"{variable} is http://proxy.corp:3128; connections between the hosts")
    assert "secret-word" not in finding.found


@pytest.mark.parametrize("url", ["proxy:port", "http://[", "proxy.corp:3128", "http://a:b@[::1]:3"])
def test_malformed_proxy_is_no_failure(tmp_path: Path, url: str) -> None:
    (finding,) = examine(here(tmp_path, {"http_proxy": url}))
    assert finding.level is Level.OK
