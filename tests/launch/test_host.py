"""A host: where it finds others, and the order in which it goes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
