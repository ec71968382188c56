"""The program that runs SageMaker's toolkit on a simulated host."""

from __future__ import annotations

import sys

import pytest

from hetero.sagemaker.rehearsal import toolkit


@pytest.mark.parametrize(
    ("image", "is_hidden"), [("repository/pytorch-training:2.5", True), ("repository/tensorflow-training:2.19", False)]
)
def test_toolkit_sees_tensorflow_in_images_of_tensorflow_alone(
    monkeypatch: pytest.MonkeyPatch, image: str, is_hidden: bool
) -> None:
    pytest.importorskip("sagemaker_training")
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # here too its import would take seconds
    from sagemaker_training import logging_config, modules, trainer

    seen = []
    monkeypatch.setattr(trainer, "train", lambda: seen.append(sys.modules.get("tensorflow", "to be imported")))
    for name in ("install", "install_requirements"):
        monkeypatch.setattr(modules, name, getattr(modules, name))  # the program replaces it
    monkeypatch.setattr(logging_config, "log_script_invocation", logging_config.log_script_invocation)
    for name in ("HETERO_PARENT_PID", "SM_STUDIO_LOCAL_MODE", "SAGEMAKER_TRAINING_MODULE"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("HETERO_PARENT_PID")
    monkeypatch.delitem(sys.modules, "tensorflow")
    toolkit.main([image])
    assert seen == [None if is_hidden else "to be imported"]
