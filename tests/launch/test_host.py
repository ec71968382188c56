"""A host: where it finds others, and the order and the time in which it goes down."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.config import Timings
from hetero.control.status import Cause
from hetero.errors import ClusterError, ExitCode
from hetero.launch import host as host_module
from hetero.launch.addresses import Addresses
from hetero.launch.host import Host, StoppedEarlyError
from hetero.wire.channels import client_options

_ENDS = """
import os, sys, threading
from pathlib import Path
from hetero.cluster import read_cluster
from hetero.config import LaunchOptions
from hetero.launch import host
folder = Path(sys.argv[1])
seen = []
def end_descendants(*, on_poll):
    on_poll()
    seen.append("watchdog" in [thread.name for thread in threading.enumerate()])
host.end_descendants = end_descendants
cluster = read_cluster(env={}, cluster_file=str(folder / "cluster.json"), host="127.0.0.1", roles={})
with host.Host(LaunchOptions(script=__file__, port=17807), cluster, base_dir=folder, environ={}) as this:
    before = this.watchdog._ticked_s
assert this.watchdog._ticked_s > before, "standing still is no standstill while descendants end"
print("watched" if seen == [True] else seen)
"""

_PROXY = """
import sys
from pathlib import Path
from hetero.cluster import read_cluster
from hetero.config import LaunchOptions
from hetero.launch.host import Host
folder = Path(sys.argv[1])
cluster = read_cluster(env={}, cluster_file=str(folder / "cluster.json"), host="127.0.0.1", roles={})
for framework in ("torch", "tensorflow"):
    options = LaunchOptions(script=__file__, port=17807, framework=framework)
    with Host(options, cluster, base_dir=folder, environ={"http_proxy": "http://proxy:3128"}) as this:
        print(framework, "no_grpc_proxy" in this.child_environment)
"""


def run_host(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a host of its own, the only one of a cluster."""
    group = {"instance_group_name": "dnn", "instance_type": "ml.p3.2xlarge", "hosts": ["127.0.0.1"]}
    (folder / "cluster.json").write_text(json.dumps({"instance_groups": [group]}))
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_watchdog_watches_until_the_descendants_are_gone(tmp_path: Path) -> None:
    done = run_host(tmp_path, _ENDS)
    assert done.stdout == "watched\n", done.stderr


def test_connections_of_tensorflow_take_no_proxy(tmp_path: Path) -> None:
    done = run_host(tmp_path, _PROXY)
    assert done.stdout == "torch False\ntensorflow True\n", done.stderr


def test_launcher_of_a_host_is_looked_for_at_an_address_in_brackets_if_it_is_ipv6() -> None:
    addresses = Addresses(17807, Timings(), lambda: None)
    assert addresses.launcher_of("::1") == "[::1]:17807"
    assert addresses.of("::1") == "::1"
    assert addresses.launcher_of("127.0.0.1") == "127.0.0.1:17807"


def test_address_that_was_found_needs_no_name_service_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["127.9.0.1"]

    def resolve(name: str) -> str:
        if not found:
            raise ClusterError(f"no address of {name}")
        return found.pop()

    def check_stop() -> None:
        raise StoppedEarlyError

    monkeypatch.setattr("hetero.launch.addresses.resolve_address", resolve)
    addresses = Addresses(17807, Timings(), check_stop)
    assert addresses.known("algo-2") is None
    assert addresses.launcher_of("algo-2") == "127.9.0.1:17807"
    assert addresses.of("algo-2") == addresses.known("algo-2") == "127.9.0.1"
    with pytest.raises(ClusterError, match="no address of algo-2"):
        addresses.launcher_of("algo-2")
    with pytest.raises(StoppedEarlyError):
        addresses.of("algo-3")


@pytest.mark.parametrize(
    ("exit_code", "is_patient"),
    [(ExitCode.AUTHENTICATION, True), (ExitCode.DISAGREEMENT, True), (ExitCode.SCRIPT_FAILED, False)],
)
def test_host_that_ends_gives_a_peer_that_does_not_understand_it_the_time_to_call(
    monkeypatch: pytest.MonkeyPatch, exit_code: ExitCode, is_patient: bool
) -> None:
    now_s = [100.0]

    def wait(timeout_s: float) -> None:
        now_s[0] += timeout_s

    decided = Cause(host="algo-1", summary="it is over", exit_code=exit_code)
    membership = SimpleNamespace(own=SimpleNamespace(decided=decided), final_delivered=True)
    hub = SimpleNamespace(membership=lambda: contextlib.nullcontext(membership), wait=wait)
    host = SimpleNamespace(hub=hub, timings=SimpleNamespace(heartbeat_s=2.0), publish=lambda: None)
    monkeypatch.setattr(host_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    Host.farewell(host)  # type: ignore[arg-type]
    assert (now_s[0] >= 104.0) is is_patient


def test_peer_that_backs_off_calls_within_the_time_that_it_is_given() -> None:
    heartbeat_s = Timings().heartbeat_s
    backoff_s = 1.2 * dict(client_options())["grpc.max_reconnect_backoff_ms"] / 1000  # gRPC's jitter
    assert backoff_s + 1.1 * heartbeat_s + 0.5 < 2 * heartbeat_s  # and the one of links, and their pause
