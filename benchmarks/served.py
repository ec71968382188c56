"""Real endpoints for benchmarks: a pool in a server process, and a fleet in the trainer process that reads from it.

SERVERS = {"endpoints": served.endpoints}                      # for harness.dispatch
child = harness.Child(__file__, "server", "endpoints", {"script": ..., "num_endpoints": 2})
fleet = served.fleet(child.ask())
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero.control.directory import Directory, EndpointRecord
from hetero.dataplane.fleet import Fleet
from hetero.dataplane.pool import EndpointPool, PoolOptions
from hetero.errors import EndpointUnavailableError

JOB = "benchmark"
_READY_S = 300.0


@contextlib.contextmanager
def endpoints(config: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Serve a script's data sets; gives the endpoints' records.

    Args:
        config: Fields of `PoolOptions` (at least ``script`` and ``num_endpoints``). With ``spread`` each endpoint is
            presented as a host of its own.
    """
    options = dict(config)
    spread = options.pop("spread", False)
    given = {"host": "algo-1", "address": "127.0.0.1", "job_id": JOB, "log_level": "WARNING", **options}
    given["script_args"] = tuple(given.get("script_args", ()))
    with EndpointPool(PoolOptions(**given), lambda records: None) as pool:
        if not pool.wait_ready(_READY_S):
            raise EndpointUnavailableError(f"not all endpoints were ready within {_READY_S:g} s")
        records = list(pool.records)
        if spread:
            records = [
                dataclasses.replace(record, host=f"algo-{number}", endpoint_id=f"algo-{number}/0")
                for number, record in enumerate(records, 1)
            ]
        yield [dataclasses.asdict(record) for record in records]


def fleet(records: Sequence[Mapping[str, Any]], *, rank: int = 0, world_size: int = 1) -> Fleet:
    """Return a fleet of these endpoints."""
    directory = Directory(EndpointRecord(**record) for record in records)
    return Fleet(directory, None, job_id=JOB, rank=rank, world_size=world_size, prepare_timeout_s=_READY_S)
