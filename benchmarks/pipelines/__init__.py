"""Six pipelines that users have, as plain torch data sets: no framework knows of the others here.

A module of this package has ``build(length, root)``, which returns a map-style data set of ``length`` samples,
``collate`` (None for torch's own), ``BATCH_SIZE``, and ``HAS_FIXED_SHAPES``. ``length`` is virtual: the data repeat.
All randomness comes from ``random`` and NumPy's global generator, which torch's loader and `hetero` both seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["NAMES", "Pipeline", "load"]

NAMES = ("jpeg", "detection", "audio", "text", "video", "tabular")
"""In the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One of the modules."""

    name: str
    build: Callable[..., Any]
    """Called with ``length`` in samples and ``root``, the folder of the photographs."""
    collate: Callable[[list[Any]], Any] | None
    """Makes a batch of samples. None for torch's ``default_collate``."""
    batch_size: int
    """Samples."""
    has_fixed_shapes: bool
    """Whether all batches have the same structure, shapes and types. Then a receiver can know them beforehand."""
    seeding: Literal["sample", "batch"]
    """As ``@hetero.dataset`` takes it: per sample, or per batch for samples cheaper than their seeding."""


def load(name: str) -> Pipeline:
    """Return a pipeline, and import the packages that its samples need.

    Raises:
        ModuleNotFoundError: If no pipeline has that name.
    """
    module = importlib.import_module(f"pipelines.{name}")
    return Pipeline(
        name=name,
        build=module.build,
        collate=module.collate,
        batch_size=module.BATCH_SIZE,
        has_fixed_shapes=module.HAS_FIXED_SHAPES,
        seeding=getattr(module, "SEEDING", "sample"),
    )
