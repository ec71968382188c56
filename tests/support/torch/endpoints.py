"""Hosts with endpoints, with the test's own process as a rank, and the script that both of them import."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hetero.datasets
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.control.security import Token, write_token
from hetero.endpoint.options import EndpointOptions
from hetero.loaders import remote
from hetero.metrics.logged import MetricLog
from hetero.pool.pool import EndpointPool, PoolOptions


class ServedJob:
    """A job whose session is this object. ``rank`` and ``world_size`` may be set at any time.

    Args:
        folder: For the token.
        script: What the endpoints import.
        purity_checks: How many batches a loader computes twice.
    """

    job_id = "served-test"
    remote = True
    tls = None

    def __init__(self, folder: Path, script: Path, *, purity_checks: int = 0) -> None:
        self.rank, self.world_size = 0, 1
        self.script = script
        self.token = Token.generate()
        self.token_path = folder / f"token-{id(self)}"
        write_token(str(self.token_path), self.token)
        self.directory = Directory()
        self.metrics = MetricLog()
        self.options = SimpleNamespace(
            profile=False,
            data_timeout_s=60.0,
            prepare_timeout_s=60.0,
            emulate_step_s=None,
            purity_checks=purity_checks,
            warmup_steps=0,
            max_pass_batches=None,
            max_batch_bytes=2**28,
            data_service="grpc",
        )
        self.timers: list[Any] = []
        """What loaders have registered."""
        self.pools: list[EndpointPool] = []
        """One for each host."""

    @property
    def pool(self) -> EndpointPool | None:
        """The endpoints of the first host."""
        return self.pools[0] if self.pools else None

    def start(self, num_endpoints: int, *, num_hosts: int = 1) -> None:
        records: dict[str, Sequence[EndpointRecord]] = {}

        def change(host: str, found: Iterable[EndpointRecord]) -> None:
            records[host] = tuple(found)
            self.directory.replace(itertools.chain(*records.values()))

        for host in (f"algo-{number}" for number in range(1, num_hosts + 1)):
            options = PoolOptions(
                endpoint=EndpointOptions(
                    host=host,
                    script=str(self.script),
                    num_endpoints=num_endpoints,
                    address="127.0.0.1",
                    job_id=self.job_id,
                ),
                token_path=str(self.token_path),
            )
            self.pools.append(EndpointPool(options, partial(change, host), lambda name, text: None))
        for pool in self.pools:
            pool.start()
        assert all(pool.wait_ready(300.0) for pool in self.pools)

    def lose_host(self, place: int) -> None:
        """Kill the endpoints of a host, and do not replace them."""
        for pid in self.pools[place].pids:
            os.kill(pid, signal.SIGKILL)
        self.pools[place].stop(0.0)

    @staticmethod
    def disconnect() -> None:
        """Close this rank's connections, as the end of its process does."""
        if remote._fleet is not None:
            remote._fleet[2].close()
        remote._fleet = None

    def stop(self) -> None:
        self.disconnect()
        for pool in self.pools:
            pool.stop(0.0)
        self.pools = []

    def register_timer(self, timer: Any) -> None:
        self.timers.append(timer)

    def set_counters(self, counters: Any) -> None: ...

    def check_stop(self, timer: object) -> None: ...

    def check_wait(self, is_starved: bool) -> None: ...


@contextmanager
def imported_script(folder: Path, name: str, text: str) -> Iterator[Any]:
    """Write a script, and import it: its data sets are known in this process too, until the context ends.

    Args:
        folder: Where it is written, as ``train.py``.
        name: Of the module, until the context ends.
        text: The script. It may be indented.
    """
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
        # Scripts of other files of tests may give a data set the same name.
        factories = hetero.datasets._factories
        for dataset in [dataset for dataset, factory in factories.items() if factory.function.__module__ == name]:
            del factories[dataset]
