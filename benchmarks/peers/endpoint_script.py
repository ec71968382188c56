"""What the endpoints import: registers the pipeline that the command line names."""

from __future__ import annotations

import sys

from pipelines import load

import hetero


def register(name: str, cache: str = "") -> hetero.datasets.DatasetFactory:
    """Register a pipeline's factory.

    Args:
        name: Name of the pipeline.
        cache: ``memory``, a folder on a disk, or empty for no cache.
    """
    pipeline = load(name)
    kept = {"": None, "memory": hetero.Cache(memory="4 GB")}
    return hetero.dataset(
        name=name,
        collate_fn=pipeline.collate,
        seeding=pipeline.seeding,
        cache=kept[cache] if cache in kept else hetero.Cache(disk="4 GB", folder=cache),
    )(pipeline.build)


if __name__ == "__hetero_script__":
    register(*sys.argv[1:])
