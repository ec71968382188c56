"""What do 500 connections of strangers cost a reader?

Question: which share of its throughput does a legitimate loader keep while 500 connections hang on the endpoint that
feeds it: silent ones, half-said greetings and HTTP/2 prefaces, connections without calls, calls that are refused and
health checks whose answers nobody reads, and a few dozen readers of the same job that asked for a batch and never read?

Method: one endpoint and one reader, which are two processes here as on hosts, and the strangers in a third. Batches of
1 MB are drawn at random, so that the endpoint has work to do. Rounds of equal length without and with the strangers
take turns; the ratio is the median over the rounds of the ratio within a round. All of them come anew in every
round, and the calm stretch before includes what it takes the endpoint to be rid of the last ones.

    python benchmarks/strangers.py --rounds 9 --seconds 10
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
BOUND = 0.8
SCRIPT = """
import numpy as np
import hetero

class Noise:
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return np.random.bytes(2**18)

@hetero.dataset(collate_fn=lambda samples: np.frombuffer(b"".join(samples), np.uint8), fingerprint="noise")
def noise():
    return Noise()
"""


def requests(spec: object) -> Iterator[object]:
    """Ask for batches of four samples without an end."""
    from hetero.batches.request import BatchRequest

    for position in range(10**9):
        indices = np.arange(4, dtype=np.int64) + 4 * position
        yield BatchRequest(spec=spec, indices=indices % 10**6, seed=1, epoch=0, position=position, step=position)


def rate(batches: Iterator[object], seconds: float) -> float:
    """Return how many batches come in a second."""
    begin_s = time.monotonic()
    number = 0
    while time.monotonic() < begin_s + seconds:
        next(batches)
        number += 1
    return number / (time.monotonic() - begin_s)


class Strangers:
    """The process that is them."""

    def __init__(self, calls: str, batches_port: int, number: int, asking: bytes) -> None:
        host, _, port = calls.rpartition(":")
        script = REPOSITORY / "tests" / "attacks" / "strangers.py"
        path = os.pathsep.join((str(REPOSITORY), str(script.parent)))
        self._process = subprocess.Popen(
            [sys.executable, str(script), host, port, str(batches_port), str(number), asking.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def tell(self, word: str) -> int:
        """Have them open or close; return how many connections there are."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def facts_of(pid: int) -> tuple[int, int]:
    """Return descriptors and threads of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the rounds."""
    from hetero.control.directory import Directory
    from hetero.control.security import Token, call_metadata, write_token
    from hetero.dataplane.delivery import GREETING
    from hetero.dataplane.fleet import Fleet
    from hetero.dataplane.link import Link
    from hetero.dataplane.pool import EndpointPool, PoolOptions
    from hetero.dataplane.reader import Reader
    from hetero.datasets import DatasetSpec
    from hetero.wire.limits import Limits
    from hetero.wire.requests import to_proto

    script = folder / "script.py"
    script.write_text(SCRIPT)
    token = Token.generate()
    write_token(str(folder / "token"), token)
    options = PoolOptions(
        script=str(script),
        host="algo-1",
        address="127.0.0.1",
        num_endpoints=1,
        job_id="strangers",
        token_path=str(folder / "token"),
    )
    directory = Directory()
    spec = DatasetSpec("noise")
    found: list[dict[str, float]] = []
    with EndpointPool(options, directory.replace, lambda name, text: None) as pool:
        pool.wait_ready(60.0)
        (record,) = pool.records
        insider = Link(record, call_metadata(token, "strangers"), Limits())
        insider.attend()  # its ticket is the one of those who never read
        message = to_proto(next(requests(spec))).SerializeToString()  # type: ignore[arg-type]
        asking = insider._hello + struct.pack("<I", len(message)) + message
        assert asking.startswith(GREETING)
        fleet = Fleet(directory, token, job_id="strangers", prepare_timeout_s=60.0, data_timeout_s=60.0)
        strangers = Strangers(record.address, insider._port, arguments.number, asking)
        try:
            with Reader(fleet, requests(spec)) as reader:  # type: ignore[arg-type]
                batches = iter(reader)
                rate(batches, arguments.seconds)
                before = facts_of(pool.pids[0])
                for _ in range(arguments.rounds):
                    calm = rate(batches, arguments.seconds)
                    opened = strangers.tell("open")
                    descriptors, threads = facts_of(pool.pids[0])
                    attacked = rate(batches, arguments.seconds)
                    strangers.tell("close")
                    found.append(
                        {
                            "calm_batches_per_s": calm,
                            "attacked_batches_per_s": attacked,
                            "ratio": attacked / calm,
                            "connections": opened,
                            "descriptors_more": descriptors - before[0],
                            "threads_more": threads - before[1],
                        }
                    )
        finally:
            strangers.end()
            insider.close()
            fleet.close()
    return {
        "ratio": statistics.median(each["ratio"] for each in found),
        "bound": BOUND,
        "number": arguments.number,
        "rounds": found,
    }


def main() -> int:
    """Measure, print, and tell by the status whether the bound was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--output", type=Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    text = json.dumps(result, indent=2) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")
    print(
        f"with {arguments.number} strangers a reader keeps {100 * result['ratio']:.0f} % (bound: {100 * BOUND:.0f} %)"
    )
    return 0 if result["ratio"] >= BOUND else 1  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
