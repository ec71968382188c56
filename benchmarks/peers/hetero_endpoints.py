"""hetero: two endpoints on this machine, a rank's session without a launcher, and the loader that users have."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from feeds import served

from hetero.control.security import Token, write_token
from hetero.endpoint.options import EndpointOptions
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.reader import reader
from hetero.reader.window import Window
from hetero.torch import DataLoader
from peers import LENGTH_BATCHES, NUM_PROCESSES, PipelineCompetitor, endpoint_script


class LocalSession(served.Session):
    """A session whose endpoints this process starts itself, as a launcher would, with a token."""

    def __init__(self, pipeline: str, cache: str = "") -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.token = Token.generate()
        token_path = str(Path(self._folder.name) / "token")
        write_token(token_path, self.token)
        self.pool = EndpointPool(
            PoolOptions(
                endpoint=EndpointOptions(
                    host="algo-1",
                    script=endpoint_script.__file__,
                    script_args=(pipeline, cache),
                    num_endpoints=NUM_PROCESSES,
                    address="127.0.0.1",
                    job_id=self.job_id,
                ),
                token_path=token_path,
            ),
            self.directory.replace,
            lambda name, text: print(f"{name}: {text}"),
        )

    def start(self) -> None:
        """Start the endpoints and become this process's session."""
        self.pool.start()
        self.enter()

    def stop(self) -> None:
        """End the endpoints."""
        self.pool.stop(0.0)
        self._folder.cleanup()


class FirstComeWindow(Window):
    """Delivers batches in the order of arrival. The difference to the ordered window is the cost of strict order.

    A batch that waits for its turn in the ordered window would be taken at once here, and its place in the window is
    free for the next request.
    """

    def deliverable(self) -> int | None:
        """Return the lowest batch that has arrived. ``next_sequence`` counts deliveries."""
        return min(self.outcomes, default=None)


class HeteroEndpoints(PipelineCompetitor):
    """``order``: ``first-come`` is what no user gets. ``cache``: as for `endpoint_script.register`.

    ``epoch_batches``: length of an epoch. The default is longer than a run.
    """

    def start(self) -> None:
        """Start the pool and make the loader. The pool becomes ready meanwhile."""
        if self.config.get("order") == "first-come":
            reader.Window = FirstComeWindow  # type: ignore[attr-defined]
        begin_s = time.perf_counter()
        name, cache = self.pipeline.name, self.config.get("cache", "")
        self.length = self.config.get("epoch_batches", LENGTH_BATCHES) * self.pipeline.batch_size
        self._session = LocalSession(name, cache)
        self._session.start()
        assert self._session.pool.wait_ready(120.0), "the endpoints are not ready after two minutes"
        self._ready_s = time.perf_counter() - begin_s
        self._loader: DataLoader[Any] = DataLoader(
            endpoint_script.register(name, cache)(length=self.length, root=self.root),
            batch_size=self.pipeline.batch_size,
            shuffle=True,
        )

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        yield from self._loader

    def facts(self) -> dict[str, Any]:
        """Return when the endpoints were ready, and what went wrong."""
        return {"ready_s": self._ready_s, "retries": dict(self._session.counters()).get("retries", 0)}

    def stop(self) -> None:
        """End the endpoints."""
        self._session.stop()
