"""Names: unknown ones, several hosts at one address, and name servers that do not answer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero.doctor import Level, Snapshot
from hetero.doctor.cluster import examine_names
from tests.support.doctor import DOCTOR, TIMEOUT_S, here, in_cluster, levels, write_cluster

SILENT_SERVER = """
import json, os, socket, subprocess, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(done.stdout)
"""


def test_without_hosts_there_is_nothing_to_resolve(tmp_path: Path) -> None:
    assert levels(examine_names(here(tmp_path))) == [Level.OK]


def test_every_host_is_resolved(tmp_path: Path) -> None:
    (diagnosis,) = examine_names(in_cluster(tmp_path, {"a-1": "127.31.70.2", "a-2": "127.31.70.3"}))
    assert diagnosis.level is Level.OK
    assert diagnosis.details == {"addresses": {"a-1": "127.31.70.2", "a-2": "127.31.70.3"}}


def test_name_that_is_not_resolved_is_an_error(tmp_path: Path) -> None:
    first, second = examine_names(in_cluster(tmp_path, {"a-1": "127.31.70.2", "a-2": ""}))
    assert first.found == "resolved 1 of 2 hosts"
    assert second.level is Level.ERROR
    assert "'a-2' is not in the hosts file" in second.found


def test_name_that_the_system_does_not_know_is_an_error(tmp_path: Path) -> None:
    write_cluster(tmp_path, {"no-such-host.invalid": ""})
    snapshot = here(tmp_path, cluster_file=str(tmp_path / "cluster.json"), host="no-such-host.invalid")
    (diagnosis,) = examine_names(snapshot)
    assert diagnosis.level is Level.ERROR
    assert "name resolution (DNS) of host 'no-such-host.invalid' failed" in diagnosis.found


def test_two_hosts_at_one_address_are_an_error(tmp_path: Path) -> None:
    _, diagnosis = examine_names(in_cluster(tmp_path, {"a-1": "127.31.70.2", "a-2": "127.31.70.2"}))
    assert diagnosis.level is Level.ERROR
    assert diagnosis.found == "a-1, a-2 have the same address, 127.31.70.2"


def test_name_on_the_loopback_device_is_an_error_unless_all_are(tmp_path: Path) -> None:
    def found(other: str, own: str = "127.0.1.1", **environ: str) -> list[Level]:
        described = write_cluster(tmp_path, {"a-1": own, "a-2": other})
        cluster_file = str(tmp_path / "cluster.json")
        snapshot: Snapshot = here(tmp_path, {**described, **environ}, cluster_file=cluster_file, host="a-1")
        return levels(examine_names(snapshot))

    assert found("192.0.2.3") == [Level.OK, Level.ERROR]
    assert found("127.0.1.2") == [Level.OK]
    assert found("192.0.2.3", HETERO_SIMULATED="1") == [Level.OK]
    assert found("127.0.0.1", own="192.0.2.3") == [Level.OK, Level.ERROR]
    assert found("0.0.0.0", own="192.0.2.3") == [Level.OK, Level.ERROR]
    assert found("192.0.2.3", own="192.0.2.4") == [Level.OK]


@pytest.mark.netns
def test_name_server_that_does_not_answer_holds_the_command_up_for_seconds_only(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-nm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make namespaces")
    write_cluster(tmp_path, {f"host-{number}.example": "" for number in range(100)})
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:2\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
    mounts = "".join(f"mount --bind {tmp_path}/{name} /etc/{name} && " for name in ("resolv.conf", "nsswitch.conf"))
    script = f'ip link set lo up && {mounts} exec "$@"'
    doctor = [*DOCTOR, "--cluster-file", str(tmp_path / "cluster.json"), "--host", "host-0.example"]
    begin_s = time.monotonic()
    done = subprocess.run(
        ["unshare", "-nm", "bash", "-c", script, "-", sys.executable, "-c", SILENT_SERVER, *doctor],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    took_s = time.monotonic() - begin_s
    assert "the name service did not answer within 10 s for host-0.example, host-1.example" in done.stdout
    assert "and 92 more" in done.stdout
    assert took_s < 30  # the resolver alone would take a minute
