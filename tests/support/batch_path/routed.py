"""A router with connections to endpoints that do not exist."""

from __future__ import annotations

import functools

from hetero.control.members.directory import EndpointRecord
from hetero.reader.connection import EndpointConnection
from hetero.reader.routing import ConnectionTable, Router
from hetero.spec import DatasetSpec
from hetero.wire.limits import Limits


class Routed:
    """A router with its table, and how often it reported a free endpoint."""

    def __init__(
        self, hosts: list[str], *, rank: int = 0, world_size: int = 1, spec: DatasetSpec | None = None
    ) -> None:
        records = [self.record(host, hosts[:n].count(host)) for n, host in enumerate(hosts)]
        self.num_free = 0
        self.now_s = 0.0
        self.table = ConnectionTable(functools.partial(EndpointConnection, token=None, job_id="x", limits=Limits()))
        self.table.follow(records, set(hosts))
        self.router = Router(
            self.table, rank=rank, world_size=world_size, clock=lambda: self.now_s, on_free=self.count_free
        )
        self.router.update()
        if spec is not None:
            for connection in self.table:
                connection.mark_ready()
                connection.prepared.add(spec)

    @staticmethod
    def record(host: str, number: int = 0) -> EndpointRecord:
        """Return the record of an endpoint of a host."""
        return EndpointRecord(endpoint_id=f"{host}/{number}", host=host, address="127.0.0.1:9", incarnation="a")

    def count_free(self) -> None:
        self.num_free += 1
