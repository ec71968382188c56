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

from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.launch import host as host_module
from hetero.launch.host import Host

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


def test_watchdog_watches_until_the_descendants_are_gone(tmp_path: Path) -> None:
    group = {"instance_group_name": "dnn", "instance_type": "ml.p3.2xlarge", "hosts": ["127.0.0.1"]}
    (tmp_path / "cluster.json").write_text(json.dumps({"instance_groups": [group]}))
    script = tmp_path / "script.py"
    script.write_text(_ENDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "watched\n", done.stderr


def test_launcher_of_a_host_is_looked_for_at_an_address_in_brackets_if_it_is_ipv6() -> None:
    host = SimpleNamespace(_peer_addresses={}, options=SimpleNamespace(port=17807))
    assert [Host._resolve_peer(host, address) for address in ("::1", "127.0.0.1")] == [  # type: ignore[arg-type]
        "[::1]:17807",
        "127.0.0.1:17807",
    ]
    assert host._peer_addresses == {"::1": "::1", "127.0.0.1": "127.0.0.1"}


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
