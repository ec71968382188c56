"""Data services, which run on data hosts. ``--data-service`` names the service of a job.

service.py      the interface of a data service
endpoints.py    grpc: the endpoints of hetero's data plane
tf_data.py      tf: tf.data.service, with checks whether it still serves the ranks

CONTRIBUTING.md says how to add a service.
"""

from __future__ import annotations

from hetero.launch.data_services.endpoints import Endpoints
from hetero.launch.data_services.service import DataService, HostFacts, Servers, ServiceWatch
from hetero.launch.data_services.tf_data import TfData

__all__ = ["DataService", "HostFacts", "Servers", "ServiceWatch", "find_service"]

_SERVICES: dict[str, DataService] = {"grpc": Endpoints(), "tf": TfData()}


def find_service(name: str) -> DataService:
    """Return the data service with this name, which must be in `hetero.config.options.DATA_SERVICES`."""
    return _SERVICES[name]
