"""RPCDataloader (CEA LIST), from its package: two workers and its loader, a thread and a connection per batch."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rpcdataloader import RPCDataloader, RPCDataset

from peers import NUM_PROCESSES, PipelineCompetitor


class RpcDataLoader(PipelineCompetitor):
    """``RPCDataloader`` over ``RPCDataset``."""

    def start(self) -> None:
        """Start its workers. It connects by itself when they listen."""
        ports = [_free_port() for _ in range(NUM_PROCESSES)]
        self._workers = [
            subprocess.Popen([sys.executable, "-m", "rpcdataloader.launch", "--host", "127.0.0.1", "--port", str(port)])
            for port in ports
        ]
        remote = RPCDataset(
            [f"127.0.0.1:{port}" for port in ports], self.pipeline.build, length=self.length, root=self.root
        )
        self._loader = RPCDataloader(
            remote, batch_size=self.pipeline.batch_size, shuffle=True, collate_fn=self.pipeline.collate
        )

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        yield from self._loader

    def stop(self) -> None:
        """End its workers."""
        for worker in self._workers:
            worker.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
