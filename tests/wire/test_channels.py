"""The error of a port that cannot be bound."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero.errors import PortError
from hetero.wire import channels

import grpc  # isort: skip

STALE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hetero.wire import channels
import grpc
server = grpc.server(ThreadPoolExecutor(1), options=channels.server_options())
print(channels.bind(server, "127.0.0.1"), flush=True)
server.start()
sys.stdin.read()
"""


@pytest.mark.fault("F30")
def test_taken_port_names_the_process_and_its_run() -> None:
    environment = {**os.environ, "HETERO_JOB_ID": "run-7", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STALE, "a hetero launcher"]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as stale:
        assert stale.stdout is not None
        port = int(stale.stdout.readline())
        server = grpc.server(ThreadPoolExecutor(1), options=channels.server_options())
        with pytest.raises(PortError) as caught:
            channels.bind(server, "127.0.0.1", port)
        assert f": process {stale.pid} (" in str(caught.value)
        assert "of the job run-7 listens on it; end what holds the port" in str(caught.value)
        stale.kill()


def test_address_of_another_machine_is_an_error_that_names_it() -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=channels.server_options())
    with pytest.raises(PortError, match=r"cannot bind 192\.0\.2\.1:0"):
        channels.bind(server, "192.0.2.1")


def test_connections_of_the_job_are_excepted_from_a_proxy_and_what_was_excepted_stays_so() -> None:
    assert channels.without_proxy({"no_proxy": "a", "HTTP_PROXY": "http://proxy:1"}) == {}  # gRPC reads lower case only
    stated = channels.without_proxy({"http_proxy": "http://proxy:1", "no_proxy": "10.0.0.1,.corp"})["no_grpc_proxy"]
    assert stated.split(",") == ["10.0.0.1", ".corp", *"0123456789", "::/0"]
    assert channels.without_proxy({"grpc_proxy": "http://proxy:1"})["no_grpc_proxy"].split(",")[0] == "0"
    both = {"https_proxy": "http://proxy:1", "no_proxy": "a", "no_grpc_proxy": "b"}
    assert channels.without_proxy(both)["no_grpc_proxy"].split(",")[0] == "b"
