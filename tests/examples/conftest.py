"""The example scripts as modules, and a data set small enough to train on in a test."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_script(path: str) -> ModuleType:
    """Import ``examples/<path>`` under a name of its own, as a data host does."""
    name = "example_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Return a function that imports a script once per session."""
    loaded: dict[str, ModuleType] = {}

    def load(path: str) -> ModuleType:
        if path not in loaded:
            loaded[path] = load_script(path)
        return loaded[path]

    return load


@pytest.fixture(scope="session")
def photos_folder(tmp_path_factory: pytest.TempPathFactory, script: Callable[[str], ModuleType]) -> Path:
    """Make 120 tiny photographs: 108 to train on, 12 for validation."""
    make_data = script("photos/make_data.py")
    folder: Path = tmp_path_factory.mktemp("data") / "photos"
    make_data.make_photos(folder, make_data.Recipe(count=120, width=48, height=36, seed=0))
    return folder


@pytest.fixture(autouse=True)
def _own_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without a launcher's variables on one thread, and end without a process group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    if dist.is_initialized():
        dist.destroy_process_group()
