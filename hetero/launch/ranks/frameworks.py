"""What ranks of each training framework need: environment variables, ports, packages. The rest is equal for all."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Protocol

from hetero.launch.ranks.starter import RanksOptions
from hetero.wire.channels import join_address

__all__ = ["RANK_FRAMEWORKS", "RankFramework", "TensorFlow", "Torch"]

_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NCCL_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class RankFramework(Protocol):
    """What the ranks of one training framework need."""

    meets_everywhere: bool
    """Whether every rank listens on its own port. Otherwise all connect to one port of rank 0."""
    has_rank_per_gpu: bool
    """Whether each GPU of the host has its own rank by default. Otherwise one rank uses all GPUs."""
    uses_grpc: bool
    """Whether the framework connects the ranks over gRPC, which must then not use a proxy."""

    def obstacle(self) -> str:
        """Return why ranks cannot run on this host, and what to do. Empty if they can run."""

    def variables(self, options: RanksOptions, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables to set for one rank.

        Args:
            options: Options of the ranks of this host.
            local_rank: Local rank on this host.
            environ: Environment that all ranks get.
        """


class Torch:
    """PyTorch. Rank 0 has the ``TCPStore`` where all ranks meet."""

    meets_everywhere = False
    has_rank_per_gpu = True
    uses_grpc = False

    def obstacle(self) -> str:
        """Return a message if torch is not installed, else an empty text."""
        if importlib.util.find_spec("torch") is not None:
            return ""
        return (
            "this host has no torch, and ranks need it by default; pip install torch, or give --framework tensorflow "
            "(hetero_framework, HETERO_FRAMEWORK) for a job that trains without torch"
        )

    def variables(self, options: RanksOptions, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that ``torchrun`` sets for a rank, because scripts and libraries read them.

        Only ``TORCHELASTIC_USE_AGENT_STORE`` has another value than under torchrun. Here rank 0 has the ``TCPStore``.
        Under torchrun the process of torchrun has the store, if the job is not elastic.
        """
        place = _place(options, local_rank)
        return {
            **place,
            # Set these variables as torchrun does for a static rendezvous without restarts. A test compares them with
            # the installed torchrun. TORCHELASTIC_ERROR_FILE is left out, because only torchrun reads that file.
            "GROUP_WORLD_SIZE": str(options.num_hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": place["RANK"],
            "ROLE_WORLD_SIZE": place["WORLD_SIZE"],
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": str(options.generation),
            "TORCHELASTIC_RUN_ID": "none",
            # The store is in rank 0. With "True", torch would look for it in an agent on the first host.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # As under torchrun, this variable is 1 unless the user has set it. torch 2.1 reads
            # NCCL_ASYNC_ERROR_HANDLING instead, which is not set here, because newer versions warn of it.
            _NCCL_VARIABLE: environ.get(_NCCL_VARIABLE, "1"),
        }


class TensorFlow:
    """TensorFlow. Each rank has a server."""

    meets_everywhere = True
    # MultiWorkerMirroredStrategy drives all GPUs of a host from one process.
    has_rank_per_gpu = False
    uses_grpc = True

    def obstacle(self) -> str:
        """Return an empty text, because scripts without any framework are ranks of this kind too."""
        return ""

    def variables(self, options: RanksOptions, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return a rank's place, ``TF_CONFIG`` and its GPUs.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are the address of rank 0 in ``TF_CONFIG``. They are for scripts that do not
        use TensorFlow's own communication.
        """
        workers = [
            join_address(address, first_port + number)
            for address, first_port in options.meeting_points
            for number in range(options.num_ranks)
        ]
        place = _place(options, local_rank)
        task = {"type": "worker", "index": int(place["RANK"])}
        added = {**place, "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}
        gpus = self._gpus(options, local_rank, environ.get(_GPU_VARIABLE))
        return added if gpus is None else {**added, _GPU_VARIABLE: gpus}

    def _gpus(self, options: RanksOptions, local_rank: int, stated: str | None) -> str | None:
        """Return a rank's share of the usable GPUs, because TensorFlow takes the memory of all GPUs that it sees.

        Return None if the rank may see all GPUs, because it is the only rank or there are fewer GPUs than ranks.

        Args:
            options: Options of the ranks of this host.
            local_rank: Local rank of the rank.
            stated: The usable GPUs as the user has stated them, for example ``0,1``. None if all GPUs are usable.
        """
        gpus = [str(number) for number in range(options.num_gpus)] if stated is None else stated.split(",")
        gpus_per_rank = len(gpus) // options.num_ranks
        if options.num_ranks == 1 or gpus_per_rank == 0:
            return None
        return ",".join(gpus[local_rank * gpus_per_rank : (local_rank + 1) * gpus_per_rank])


RANK_FRAMEWORKS: dict[str, RankFramework] = {"torch": Torch(), "tensorflow": TensorFlow()}
"""The frameworks by name. `hetero.config.options.FRAMEWORKS` has the same names."""


def _place(options: RanksOptions, local_rank: int) -> dict[str, str]:
    """Return the variables for a rank's place in the job, and for the address where rank 0 may listen."""
    address, port = options.meeting_points[0]
    return {
        "RANK": str(options.host_index * options.num_ranks + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(options.host_index),
        "WORLD_SIZE": str(options.num_hosts * options.num_ranks),
        "LOCAL_WORLD_SIZE": str(options.num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
