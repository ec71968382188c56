"""The rank of a job whose tf.data service another process uses: prints the servers, and waits for that process.

    hetero simulate --data-service tf ... benchmarks/tf_service_rank.py NUM_WORKERS FIFO

The rank and its job end when the other process closes the FIFO.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path

from hetero.control.rank import session as control

MARK = "tf-servers: "
"""Beginning of the line with the servers' records in JSON."""


def main(num_workers: int, fifo: Path) -> None:
    """Wait for the servers, print them, and wait until the FIFO is closed."""
    session = control.current()
    assert session is not None, "no launcher started this process"
    changed = threading.Event()
    session.tf_servers.subscribe(changed.set)
    while True:
        changed.clear()
        records = session.tf_servers.records()
        kinds = [record.kind for record in records]
        if "tf-dispatcher" in kinds and kinds.count("tf-worker") == num_workers:
            break
        changed.wait()
    print(MARK + json.dumps([dataclasses.asdict(record) for record in records]), flush=True)
    fifo.read_bytes()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
