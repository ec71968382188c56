"""What the endpoints import: registers the pipeline that the command line names."""

from __future__ import annotations

import sys

from pipelines import load

import hetero


def register(name: str) -> hetero.datasets.DatasetFactory:
    """Register a pipeline's factory."""
    pipeline = load(name)
    return hetero.dataset(name=name, collate_fn=pipeline.collate, seeding=pipeline.seeding)(pipeline.build)


if __name__ == "__hetero_script__":
    register(sys.argv[1])
