"""`hetero launch` as the entry point of a training job on a platform such as SageMaker.

Name it as ``entry_point`` of the estimator (SDK 2), as ``entry_script`` of the `ModelTrainer` (SDK 3) or as what the
container starts, and put the training script beside it::

    PyTorch(entry_point="launcher.py", source_dir=..., instance_groups=[...],
            hyperparameters={"hetero_script": "train.py", "epochs": 3})

The platform starts this on every host. Options come from hyperparameters named
``hetero_<option>``, read from the platform's file; every other hyperparameter
is handed to the training script as ``--name value``, as the platform would do.
By hand it takes the arguments of `hetero launch`.

Under ``mpirun`` the processes that it made are the ranks. Where each group has a ``torchrun`` of its own, the first of
the processes on a host works, and the others wait for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

try:
    from hetero.cli import main
    from hetero.launch.entry import run
except ModuleNotFoundError as error:
    reason = f"hetero cannot be started: there is no {error.name} in this image; name it in requirements.txt"
    output = Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml") / "output"
    if output.is_dir() and not (output / "failure").exists():
        (output / "failure").write_text(reason, encoding="utf-8")
    sys.exit(reason)

if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:], folder=Path(__file__).absolute().parent))
