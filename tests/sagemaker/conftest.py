"""What tests with a SageMaker SDK need: it is imported once, here, for modules of others warn while they load."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sagemaker.guards import hide_account

_NO_BANNER = "SAGEMAKER_SUPPRESS_V2_WARNING"
"""Version 2 warns once that there is a version 3."""
os.environ[_NO_BANNER] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("sagemaker.pytorch", "sagemaker.tensorflow", "sagemaker.train.model_trainer"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let version 3 of the SDK leave folders with copies of code to the garbage collector, which warns of each."""
    for item in items:
        if "sagemaker.train" in sys.modules and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory"))
            item.add_marker(pytest.mark.usefixtures("_collect_garbage"))


@pytest.fixture
def _collect_garbage() -> Iterator[None]:
    """Collect it while those warnings are expected."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_account(
    _clean_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Run each test without an AWS account and without the SDK's banner."""
    monkeypatch.setenv(_NO_BANNER, "1")
    hide_account(monkeypatch, tmp_path_factory.mktemp("aws"))


@pytest.fixture
def source_dir(tmp_path: Path) -> Path:
    """Return a folder with an entry point."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "launcher.py").write_text("import hetero\n")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _read_models_once() -> Iterator[None]:
    """Have botocore parse each of its files once, and the SDK believe its defaults: most of their time otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ModuleNotFoundError):
            from botocore.loaders import JSONFileLoader

            patch.setattr(JSONFileLoader, "load_file", staticmethod(functools.cache(JSONFileLoader().load_file)))
        if "sagemaker.utils" in sys.modules:  # version 2 validates all of them for each session and look-up
            for module in ("utils", "session"):
                patch.setattr(f"sagemaker.{module}.validate_sagemaker_config", lambda defaults: None)
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the hosts that anything has looked up since."""
    names: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> None:
        names.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "no network in a test")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return names
