"""The service of an endpoint in this process, for the test modules of this folder."""

from __future__ import annotations

from hetero.dataplane.compute import Compute
from hetero.dataplane.service import DataService
from hetero.wire.limits import Limits


def make_service(compute: Compute, *, address: str = "127.0.0.1") -> DataService:
    """Return the service of a host's only endpoint."""
    return DataService(
        compute,
        address=address,
        max_requests=8,
        name="algo-1/0",
        worker_index=0,
        num_workers=1,
        sample_time_s=0.0,
        limits=Limits(),
    )
