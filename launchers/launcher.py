"""`hetero launch` as the entry point of a training job on a platform such as SageMaker.

Name it as ``entry_point`` of the estimator and put the training script beside it::

    PyTorch(entry_point="launcher.py", source_dir=..., instance_groups=[...],
            hyperparameters={"hetero_script": "train.py", "epochs": 3})

The platform starts this on every host. Options come from hyperparameters named
``hetero_<option>``, read from the platform's file; every other hyperparameter
is handed to the training script as ``--name value``, as the platform would do.
By hand it takes the arguments of `hetero launch`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.cli import main
from hetero.cluster import base_dir


def command(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of `hetero` for this host."""
    parameters = read_hyperparameters(base_dir(environ) / "input/config/hyperparameters.json")
    if "hetero_script" not in parameters:
        return ["launch", *arguments]
    # The command line repeats the hyperparameters, joined by a shell without quotes: the file is the truth.
    ours = [(name, value) for name, value in parameters.items() if not name.startswith(("hetero_", "sagemaker_"))]
    return ["launch", "--", *(part for name, value in ours for part in (f"--{name}", unquote(value)))]


def read_hyperparameters(path: Path) -> dict[str, str]:
    """Return the job's hyperparameters; none if the platform left no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {str(name): str(value) for name, value in content.items()}


def unquote(value: str) -> str:
    """Undo the JSON quotes that the platform's SDK puts around text."""
    try:
        content = json.loads(value)
    except ValueError:
        return value
    return content if isinstance(content, str) else value


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:], os.environ)))
