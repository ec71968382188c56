"""A host, in the order in which it goes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
