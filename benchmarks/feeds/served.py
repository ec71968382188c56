"""Real endpoints for benchmarks: a pool in a server process, and a fleet in the trainer process that reads from it.

SERVERS = {"endpoints": served.endpoints}                      # for harness.dispatch
child = harness.server("endpoints", {"script": ..., "num_endpoints": 2})
fleet = served.fleet(child.ask())
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.config.options import LaunchOptions
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.control.rank import session as control
from hetero.control.security import Token
from hetero.control.status import SessionOptions
from hetero.endpoint.options import EndpointOptions
from hetero.errors import EndpointUnavailableError
from hetero.metrics.logged import MetricLog
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.reader.fleet import Fleet
from hetero.system.memory import keep_freed_memory
from hetero.wire.tls import Tls

JOB = "benchmark"
READY_SCRIPT = str(Path(__file__).with_name("ready_batches.py"))
PREFETCH_FACTOR = 2
"""Batches in the window per endpoint, as users get it."""
_READY_S = 300.0
_FOLLOW_S = 0.05


@contextlib.contextmanager
def endpoints(config: Mapping[str, Any]) -> Iterator[list[str]]:
    """Serve a script's data sets. Yield the path of a file with the endpoints' records, in a list.

    Args:
        config: Fields of `EndpointOptions` (at least ``script`` and ``num_endpoints``), and ``token_path``. With
            ``spread`` each endpoint is presented as a separate host.
    """
    chosen = dict(config)
    spread = chosen.pop("spread", False)
    given = {"host": "algo-1", "address": "127.0.0.1", "job_id": JOB, "log_level": "WARNING", **chosen}
    given["script_args"] = tuple(given.get("script_args", ()))
    token_path = given.pop("token_path", None)
    options = PoolOptions(endpoint=EndpointOptions(**given), token_path=token_path)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "records.json"
        lock = threading.Lock()

        def publish(records: Sequence[EndpointRecord]) -> None:
            if spread:
                records = [
                    dataclasses.replace(record, host=f"algo-{number}", endpoint_id=f"algo-{number}/0")
                    for number, record in enumerate(records, 1)
                ]
            with lock:
                new = path.with_suffix(".new")
                new.write_text(json.dumps([dataclasses.asdict(record) for record in records]), encoding="utf-8")
                new.replace(path)

        with EndpointPool(options, publish) as pool:
            if not pool.wait_ready(_READY_S):
                raise EndpointUnavailableError(f"not all endpoints were ready within {_READY_S:g} s")
            publish(pool.records)
            yield [str(path)]


@contextlib.contextmanager
def hosts(config: Mapping[str, Any]) -> Iterator[list[str]]:
    """Serve a script's data sets from several pools. Yield the paths of the files with their endpoints' records.

    Args:
        config: As for `endpoints`, and ``variables``: environment variables of each host, one entry per host.
    """
    chosen = dict(config)
    with contextlib.ExitStack() as stack:
        paths: list[str] = []
        for number, variables in enumerate(chosen.pop("variables"), 1):
            os.environ.update(variables)  # the processes of the pool inherit them
            paths += stack.enter_context(endpoints({**chosen, "host": f"algo-{number}"}))
        yield paths


def directory(paths: Sequence[str]) -> Directory:
    """Return a directory that follows what `endpoints` or `hosts` yielded, as the launchers of a job would."""
    # As in a rank, before the first thread allocates: a thread that has an arena of its own keeps it. Without this, the
    # trainer of bench_memory.py took one or two batches of 10 MB more.
    keep_freed_memory()
    found = Directory(_records(paths))

    def follow() -> None:
        before: list[int] = []
        # The folders are gone when the servers have ended.
        with contextlib.suppress(OSError):
            while True:
                stamps = [Path(path).stat().st_mtime_ns for path in paths]
                if stamps != before:
                    found.replace(_records(paths))
                before = stamps
                time.sleep(_FOLLOW_S)

    threading.Thread(target=follow, name="bench-directory", daemon=True).start()
    return found


def _records(paths: Sequence[str]) -> list[EndpointRecord]:
    return [EndpointRecord(**record) for path in paths for record in json.loads(Path(path).read_text(encoding="utf-8"))]


def fleet(
    paths: Sequence[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    token: Token | None = None,
    tls: Tls | None = None,
) -> Fleet:
    """Return a fleet of the endpoints of `endpoints` or `hosts`."""
    return Fleet(
        directory(paths), token, job_id=JOB, rank=rank, world_size=world_size, prepare_timeout_s=_READY_S, tls=tls
    )


class Session:
    """What a rank learns from its launcher, for a trainer process without one: `DataLoader` finds these endpoints.

    Args:
        paths: What `endpoints` gave.
    """

    rank = 0
    world_size = 1
    job_id = JOB
    remote = True
    token: Token | None = None
    tls: Tls | None = None

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self.directory = directory(paths) if paths else Directory()
        defaults = LaunchOptions(script=READY_SCRIPT)
        self.options = SessionOptions(
            data_timeout_s=defaults.data_timeout_s,
            prepare_timeout_s=defaults.prepare_timeout_s,
            emulate_step_s=None,
            purity_checks=defaults.purity_checks,
            warmup_steps=0,
            max_batch_bytes=defaults.max_batch_bytes,
        )
        self.counters: Callable[[], Mapping[str, int]] = dict
        self.metrics = MetricLog(rank=0, elapsed_s=0.0)

    def enter(self) -> None:
        """Become this process's session."""
        control._session = self  # type: ignore[assignment]

    def register_timer(self, timer: object) -> None:
        """The benchmark does not use the summary."""

    def set_counters(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Keep what counts the data plane's work."""
        self.counters = counters

    def check_stop(self, timer: object) -> None:
        """Never asked to stop."""

    def check_wait(self, is_starved: bool) -> None:
        """Never asked to stop."""

    def must_end_wait(self, is_starved: bool) -> bool:
        """Never asked to stop."""
        return False
