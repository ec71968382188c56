"""Run the real training toolkit of SageMaker on a simulated host, like ``train`` in a framework's container.

Each image of PyTorch or TensorFlow passes its own module to the toolkit. The module makes the toolkit run the user's
entry point and watch its output. This file is such a module. It is also the program that starts the toolkit::

    SAGEMAKER_BASE_DIR=TREE python -m hetero.sagemaker.rehearsal.toolkit IMAGE

A rehearsal omits three steps of the toolkit. It does not install requirements, because it runs in the user's
environment. It does not wait until host names resolve, because only hetero knows these names. It does not print the
whole environment. The user's code is already in the tree.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

__all__ = ["main", "run_entry_point"]

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    """Run the toolkit and end the process with the toolkit's status, which is 1 for every failure.

    Args:
        arguments: Name of the simulated image.
    """
    from hetero.system.process import PARENT_VARIABLE, bind_to_parent

    bind_to_parent()
    # The processes that the toolkit starts must end with it.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    # With this variable, the toolkit does not wait until the host names resolve. Only hetero knows them here.
    os.environ["SM_STUDIO_LOCAL_MODE"] = "true"
    # The toolkit calls this function, as it calls the function of an image's own module.
    os.environ["SAGEMAKER_TRAINING_MODULE"] = "hetero.sagemaker.rehearsal.toolkit:run_entry_point"
    if not any("tensorflow" in image for image in arguments):
        # Make the toolkit's import of TensorFlow fail, as in images without TensorFlow. The import takes seconds, and
        # the toolkit needs it only to name errors.
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    from sagemaker_training import logging_config, modules, trainer

    # Omit steps of the toolkit, see the head of this module for the reasons.
    modules.install = modules.install_requirements = _install_nothing
    logging_config.log_script_invocation = _log_command
    trainer.train()


def run_entry_point() -> None:
    """Run the user's entry point through the toolkit, as the modules of the images do."""
    from sagemaker_training import entry_point, environment, runner

    env = environment.Environment()
    entry_point.run(
        uri=env.module_dir,
        user_entry_point=env.user_entry_point,
        args=env.to_cmd_args(),
        env_vars=env.to_env_vars(),
        capture_error=True,
        runner_type=runner.ProcessRunnerType,
    )


def _log_command(command: Sequence[str], env_vars: Mapping[str, str], logger: logging.Logger = logger) -> None:
    logger.info("invoking the script: %s", " ".join(command))


def _install_nothing(path: str, capture_error: bool = False) -> None:
    logger.warning("a rehearsal does not install the requirements in %s, and uses your environment", path)


if __name__ == "__main__":
    main(sys.argv[1:])
