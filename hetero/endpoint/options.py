"""The settings of an endpoint, and their JSON form. Imports nothing heavy, because launchers use this module."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero.errors import ConfigError
from hetero.wire.limits import Limits

__all__ = ["EndpointOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The settings of an endpoint.

    All endpoints of a pool have the same settings, except for ``index`` and ``incarnation``.

    Raises:
        ConfigError: If a number is out of its bounds.
    """

    host: str
    """Name of this host."""
    address: str
    """Numeric address of this host that the endpoint binds to. Never all interfaces."""
    num_endpoints: int
    """Number of endpoints on this host, >= 1."""
    job_id: str
    """Id of the job. Endpoints refuse calls for another job."""
    index: int = -1
    """Number of this endpoint on its host, from 0. The fork server sets it."""
    incarnation: str = ""
    """Id of this process. If the endpoint is restarted, its new process has another id. The pool sets the id."""
    script: str = ""
    """Path of the user's script, or the name of a module."""
    is_module: bool = False
    """Whether ``script`` is the name of a module."""
    script_args: tuple[str, ...] = ()
    """The script's command line after its name."""
    tls_dir: str | None = None
    """Folder of certificates (see `hetero.wire.tls.Tls`), None for plaintext."""
    num_slots: int = 1
    """Batches that the endpoint computes at the same time, one per emulated vCPU, >= 1."""
    sample_time_s: float = 0.0
    """Emulated seconds for one sample on one vCPU, 0 for real time only."""
    max_batch_bytes: int = Limits().max_batch_bytes
    """Largest batch that the endpoint sends, in bytes, >= 1. A request may set a lower bound, but no higher one."""
    grace_s: float = 5.0
    """Seconds that requests in progress have to end when the endpoint is stopped."""
    log_level: str = "INFO"
    """Level of the endpoint's own logging."""
    compares_shards: bool = False
    """Whether to compare all files of a data set of `hetero.shards` with their index when the data set is built."""

    def __post_init__(self) -> None:
        bounds = {"num_endpoints": 1, "num_slots": 1, "sample_time_s": 0, "max_batch_bytes": 1, "grace_s": 0}
        for name, bound in bounds.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least {bound}")

    @property
    def name(self) -> str:
        """Id of the endpoint in the directory, for example ``algo-1/0``."""
        return f"{self.host}/{self.index}"

    def to_json(self) -> bytes:
        """Return the options as JSON for a child of this process, with this process's id as ``parent_pid``."""
        return json.dumps({**dataclasses.asdict(self), "parent_pid": os.getpid()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> tuple[EndpointOptions, int]:
        """Parse the text that `to_json` returned. Return the options and the parent's process id."""
        fields: Mapping[str, Any] = json.loads(text)
        values = {name: value for name, value in fields.items() if name != "parent_pid"}
        return cls(**{**values, "script_args": tuple(fields["script_args"])}), fields["parent_pid"]
