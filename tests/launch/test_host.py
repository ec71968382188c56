"""A host: where it finds others, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from hetero.launch.host import LaunchedHost, StoppedEarlyError
from hetero.system.waits import END_TIMEOUT_S, POLL_S
from hetero.wire.channels import client_options

_ENDS = """
import os, sys, threading
from pathlib import Path
from hetero.cluster import find_platform
from hetero.config import LaunchOptions
from hetero.launch import host
from hetero.launch.ranks.ranks import AgentStarter
starter = AgentStarter("torch")
folder = Path(sys.argv[1])
seen = []
def end_descendants(*, on_poll):
    on_poll()
    seen.append("watchdog" in [thread.name for thread in threading.enumerate()])
host.end_descendants = end_descendants
platform = find_platform({}, cluster_file=str(folder / "cluster.json"))
cluster = platform.read_cluster(host="127.0.0.1")
options = LaunchOptions(script=__file__, port=17807)
with host.LaunchedHost(options, cluster, platform=platform, environ={}, starter=starter) as this:
    before = this.watchdog._ticked_s
assert this.watchdog._ticked_s > before, "the loop counts as stuck while descendants end"
print("watched" if seen == [True] else seen)
"""

_PROXY = """
import sys
from pathlib import Path
from hetero.cluster import find_platform
from hetero.config import LaunchOptions
from hetero.launch.host import LaunchedHost
from hetero.launch.ranks.ranks import AgentStarter
starter = AgentStarter("torch")
folder = Path(sys.argv[1])
platform = find_platform({}, cluster_file=str(folder / "cluster.json"))
cluster = platform.read_cluster(host="127.0.0.1")
for framework in ("torch", "tensorflow"):
    options = LaunchOptions(script=__file__, port=17807, framework=framework)
    environ = {"http_proxy": "http://proxy:3128"}
    with LaunchedHost(options, cluster, platform=platform, environ=environ, starter=starter) as this:
        print(framework, "no_grpc_proxy" in this.child_environment)
"""

_TOKEN = """
import logging, sys
from pathlib import Path
from hetero.cluster import find_platform
from hetero.config import LaunchOptions
from hetero.launch.host import LaunchedHost
from hetero.launch.ranks.ranks import AgentStarter
starter = AgentStarter("torch")
logging.basicConfig(stream=sys.stdout, format="%(message)s")
folder = Path(sys.argv[1])
(folder / "token").write_text("secret-of-the-job-0123456789")
(folder / "token").chmod(0o600)
platform = find_platform({}, cluster_file=str(folder / "cluster.json"))
cluster = platform.read_cluster(host="127.0.0.1")
for data_service, environ in (("tf", {"HETERO_TOKEN_FILE": str(folder / "token")}), ("tf", {}),
                              ("grpc", {"HETERO_TOKEN_FILE": str(folder / "token")})):
    print(data_service, *environ, flush=True)
    options = LaunchOptions(script=__file__, port=17807, data_service=data_service)
    with LaunchedHost(options, cluster, platform=platform, environ=environ, starter=starter):
        pass
"""


def run_host(folder: Path, text: str, *, group: str = "dnn") -> subprocess.CompletedProcess[str]:
    """Run a program that makes a host in this group of a cluster."""
    hosts = {"dnn": ["127.0.0.1"]} if group == "dnn" else {"dnn": ["127.0.0.2"], group: ["127.0.0.1", "127.0.0.3"]}
    groups = [
        {"instance_group_name": name, "instance_type": "ml.p3.2xlarge", "hosts": each} for name, each in hosts.items()
    ]
    (folder / "cluster.json").write_text(json.dumps({"instance_groups": groups}))
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_watchdog_watches_until_the_descendants_are_gone(tmp_path: Path) -> None:
    done = run_host(tmp_path, _ENDS)
    assert done.stdout == "watched\n", done.stderr


def test_connections_of_tensorflow_take_no_proxy(tmp_path: Path) -> None:
    done = run_host(tmp_path, _PROXY)
    assert done.stdout == "torch False\ntensorflow True\n", done.stderr


def test_token_that_does_not_protect_tf_data_service_is_warned_of_once(tmp_path: Path) -> None:
    done = run_host(tmp_path, _TOKEN, group="data_group")
    with_token, without_token, grpc = re.split(r"^(?:tf|grpc)\b.*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert with_token.count("the job's token does not protect tf.data.service") == 1, done.stderr
    assert "tf.data.service" not in without_token + grpc


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
    host = SimpleNamespace(hub=hub, publish=lambda: None)
    host.wait = lambda: LaunchedHost.wait(host)  # type: ignore[arg-type]
    monkeypatch.setattr(host_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    LaunchedHost.farewell(host)  # type: ignore[arg-type]
    assert (now_s[0] >= 104.0) is is_patient


def test_peer_that_backs_off_calls_within_the_time_that_it_is_given() -> None:
    heartbeat_s = Timings().heartbeat_s
    backoff_s = 1.2 * dict(client_options())["grpc.max_reconnect_backoff_ms"] / 1000  # gRPC's jitter
    assert backoff_s + 1.1 * heartbeat_s + POLL_S < END_TIMEOUT_S  # and the one of links, and their pause
