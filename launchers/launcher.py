"""`hetero launch` as the entry point of a training job on a platform such as SageMaker.

Name this file as ``entry_point`` of the estimator (SDK 2), as ``entry_script`` of the `ModelTrainer` (SDK 3) or as the
program of the container. Put the training script into the same folder::

    PyTorch(entry_point="launcher.py", source_dir=..., instance_groups=[...],
            hyperparameters={"hetero_script": "train.py", "epochs": 3})

The platform starts this program on every host. The program reads its options from the platform's file of
hyperparameters, where they are named ``hetero_<option>``. The training script gets every other hyperparameter as
``--name value``, as it would from the platform. In a shell, the program takes the arguments of `hetero launch`.

Under ``mpirun``, the processes that it started are the ranks. If each group has its own ``torchrun``, the first of its
processes on a host works, and the others wait for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

try:
    from hetero.cli import main
    from hetero.launch.entry import run
except ModuleNotFoundError as error:
    reason = f"hetero cannot start: the image has no module {error.name}; add its package to requirements.txt"
    output = Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml") / "output"
    if output.is_dir() and not (output / "failure").exists():
        (output / "failure").write_text(reason, encoding="utf-8")
    sys.exit(reason)

if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:], folder=Path(__file__).absolute().parent))
