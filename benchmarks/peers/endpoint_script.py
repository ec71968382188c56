"""What the endpoints import: registers the pipeline that the command line names."""

from __future__ import annotations

import sys

from pipelines import load

import hetero

CACHE_VARIABLE = "BENCH_CACHE_FOLDER"


def register(name: str, cache: str = "") -> hetero.datasets.DatasetFactory:
    """Register a pipeline's factory.

    Args:
        name: Name of the pipeline.
        cache: ``memory``, ``disk`` for the folder that `CACHE_VARIABLE` names, or empty for no cache.
    """
    pipeline = load(name)
    kept = {"memory": {"memory": "4 GB"}, "disk": {"disk": "4 GB", "folder": f"${CACHE_VARIABLE}"}}
    return hetero.dataset(
        name=name,
        collate_fn=pipeline.collate,
        seeding=pipeline.seeding,
        cache=hetero.Cache(**kept[cache]) if cache else None,
    )(pipeline.build)


if __name__ == "__hetero_script__":
    register(*sys.argv[1:])
