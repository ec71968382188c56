"""Ports that are taken, hosts that answer, refuse or are silent, and proxies with passwords."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.doctor import Level
from hetero.doctor.connections import examine_ports, last_ephemeral_port
from tests.support.doctor import here, in_cluster, levels

PORT = 17994
PROXY = "http://user:secret-word@proxy.corp:3128"
LISTEN = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(address: str, port: int = PORT) -> Iterator[socket.socket]:
    with socket.create_server((address, port)) as server:
        yield server


@contextlib.contextmanager
def silent(address: str, port: int = PORT) -> Iterator[None]:
    """Open a port with a full queue, where the kernel drops connections."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((address, port))
        yield


def test_free_port_without_a_cluster_is_bound(tmp_path: Path) -> None:
    (diagnosis,) = examine_ports(here(tmp_path, port=PORT))
    assert diagnosis.level is Level.OK
    assert diagnosis.found == f"127.0.0.1:{PORT} is free for a launcher"


def test_taken_port_is_an_error_that_names_the_process(tmp_path: Path) -> None:
    with listening("127.0.0.1"):
        (diagnosis,) = examine_ports(here(tmp_path, port=PORT))
    assert diagnosis.level is Level.ERROR
    assert f"127.0.0.1:{PORT} is taken (HET-23): process {os.getpid()} (" in diagnosis.found


def test_port_that_a_launcher_has_is_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LISTEN, "hetero", "launch"]
    environment = {**os.environ, "HETERO_JOB_ID": "job-17"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        (diagnosis,) = examine_ports(here(tmp_path, port=port))
        process.kill()
    assert diagnosis.level is Level.WARNING
    assert f"process {process.pid} " in diagnosis.found
    assert "of the job job-17 listens on it" in diagnosis.found


def test_own_name_with_an_address_of_another_machine_is_an_error(tmp_path: Path) -> None:
    (diagnosis,) = examine_ports(in_cluster(tmp_path, {"a-1": "192.0.2.7"}, port=PORT))
    assert diagnosis.level is Level.ERROR
    assert diagnosis.found.startswith(f"192.0.2.7:{PORT} is not an address of this machine")


def test_matrix_says_which_hosts_answer_refuse_and_are_silent(tmp_path: Path) -> None:
    last = last_ephemeral_port()
    names = ("own", "answers", "refuses", "launcher-closed", "others-closed", "gone", "unknown")
    addresses = {name: f"127.31.78.{number + 2}" for number, name in enumerate(names)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(addresses["answers"]))
        stack.enter_context(silent(addresses["launcher-closed"]))
        stack.enter_context(silent(addresses["others-closed"], last))
        for port in (PORT, last):
            stack.enter_context(silent(addresses["gone"], port))
        own, summary, *rest = examine_ports(in_cluster(tmp_path, {**addresses, "unknown": ""}, port=PORT))
    assert own.level is Level.OK
    assert (summary.level, summary.found) == (Level.WARNING, "reached 2 of 6 other hosts")
    assert summary.details["matrix"] == {
        "answers": {str(PORT): "answers", str(last): "refuses"},
        "refuses": {str(PORT): "refuses", str(last): "refuses"},
        "launcher-closed": {str(PORT): "silent", str(last): "refuses"},
        "others-closed": {str(PORT): "refuses", str(last): "silent"},
        "gone": {str(PORT): "silent", str(last): "silent"},
        "unknown": {str(PORT): "unresolved", str(last): "unresolved"},
    }
    by_host = {diagnosis.found.partition(":")[0]: diagnosis for diagnosis in rest}
    assert {host: diagnosis.level for host, diagnosis in by_host.items()} == {
        "answers": Level.OK,
        "refuses": Level.OK,
        "launcher-closed": Level.ERROR,
        "others-closed": Level.ERROR,
        "gone": Level.ERROR,
    }
    assert "no launcher listens yet, which is fine" in by_host["refuses"].found
    assert "endpoints and ranks need any" in by_host["others-closed"].found
    assert "a rule that names itself" in by_host["others-closed"].to_do


@pytest.mark.netns
def test_host_without_a_route_is_an_error(tmp_path: Path) -> None:
    _, summary, diagnosis = examine_ports(in_cluster(tmp_path, {"a-1": "127.31.78.2", "a-2": "192.0.2.9"}, port=PORT))
    assert summary.found == "reached 0 of 1 other hosts"
    assert diagnosis.level is Level.ERROR
    assert diagnosis.found.startswith("a-2: ")


def test_many_hosts_that_behave_alike_share_a_line(tmp_path: Path) -> None:
    addresses = {f"algo-{number}": f"127.31.79.{number + 1}" for number in range(1, 101)}
    diagnoses = examine_ports(in_cluster(tmp_path, addresses, port=PORT))
    assert levels(diagnoses) == [Level.OK] * 3
    assert "and 91 more" in diagnoses[2].found
