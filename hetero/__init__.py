"""Train on accelerators, preprocess on cheap CPU machines of the same job.

A training script needs three names: `dataset` registers a function that builds a
data set, `hetero.torch.DataLoader` or `hetero.tf.from_dataset` loads its batches, and
`on_stop` lets the script save a checkpoint when the platform stops the job. `log_metric`
logs the quality of the model. `collate_arrays` makes batches without torch. The other
names are the types that these functions raise and return.

Each name, and each of the modules `shards`, `tf` and `torch`, is imported when it is
first used. ``import hetero`` therefore loads neither NumPy nor gRPC nor a deep learning
framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero import shards as shards
    from hetero import tf as tf
    from hetero import torch as torch
    from hetero.batches.collation import collate_arrays
    from hetero.control.rank.metrics import log_metric
    from hetero.control.rank.session import on_stop
    from hetero.datasets import dataset
    from hetero.errors import (
        AuthenticationError,
        BatchTimeoutError,
        BudgetError,
        CapacityError,
        ChildFailedError,
        ClusterError,
        ConfigError,
        DataPlaneError,
        DatasetError,
        DatasetMismatchError,
        DisagreementError,
        EndpointUnavailableError,
        ExitCode,
        HeteroError,
        PortError,
        ProtocolError,
        ProtocolMismatchError,
        ResourcesError,
    )
    from hetero.plans.mixtures import Mixture
    from hetero.plans.sources import Sources
    from hetero.plans.token_budgets import TokenBudget
    from hetero.spec import Cache, DatasetSpec

__version__ = "0.1.0"
"""Version of hetero. No other file states it."""

__all__ = [
    "AuthenticationError",
    "BatchTimeoutError",
    "BudgetError",
    "Cache",
    "CapacityError",
    "ChildFailedError",
    "ClusterError",
    "ConfigError",
    "DataPlaneError",
    "DatasetError",
    "DatasetMismatchError",
    "DatasetSpec",
    "DisagreementError",
    "EndpointUnavailableError",
    "ExitCode",
    "HeteroError",
    "Mixture",
    "PortError",
    "ProtocolError",
    "ProtocolMismatchError",
    "ResourcesError",
    "Sources",
    "TokenBudget",
    "__version__",
    "collate_arrays",
    "dataset",
    "log_metric",
    "on_stop",
    # Not the modules, because ``from hetero import *`` must work without TensorFlow.
]

_MODULES = ("shards", "tf", "torch")
_HOMES = {
    "Cache": "hetero.spec",
    "DatasetSpec": "hetero.spec",
    "Mixture": "hetero.plans.mixtures",
    "Sources": "hetero.plans.sources",
    "TokenBudget": "hetero.plans.token_budgets",
    "collate_arrays": "hetero.batches.collation",
    "dataset": "hetero.datasets",
    "log_metric": "hetero.control.rank.metrics",
    "on_stop": "hetero.control.rank.session",
}


# With a module __getattr__, a type checker would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name from its module, or a module, the first time it is used."""
        if name in _MODULES:
            return importlib.import_module(f"hetero.{name}")  # allowed: a module of ours
        if name not in __all__:
            names = ", ".join((*__all__, *_MODULES))
            raise AttributeError(f"module 'hetero' has no attribute {name!r}; it has {names}")
        home = importlib.import_module(_HOMES.get(name, "hetero.errors"))  # allowed: a name of ours
        value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__) | set(_MODULES))
