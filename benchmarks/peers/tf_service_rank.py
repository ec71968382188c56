"""The rank of a job whose tf.data service somebody else uses: says where its servers are, and stays as long as he does.

    hetero simulate --data-service tf ... benchmarks/tf_service_rank.py NUM_WORKERS FIFO

It ends when nobody has the FIFO open for writing any more, and the job with it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path

from hetero.control.rank import session as control

MARK = "tf-servers: "
"""Before the servers' records in JSON, on a line of their own."""


def main(num_workers: int, fifo: Path) -> None:
    """Wait for the servers, print them, and stay."""
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
