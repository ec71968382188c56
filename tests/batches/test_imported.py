"""Modules that another thread is importing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from hetero.batches.imported import imported
from hetero.batches.seeds import preserved_generators, seed_generators

torch = pytest.importorskip("torch")


def test_imported_of_what_nobody_imported_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_imported.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert imported("never_imported") is None
    assert imported("torch") is torch


def test_imported_waits_for_another_threads_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowly_imported.py").write_text(
        "import sys\nevents = sys.modules['slow_events']\nevents.begun.set()\nevents.finish.wait(100)\nvalue = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    events = ModuleType("slow_events")
    events.begun, events.finish = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_events", events)
    thread = threading.Thread(target=__import__, args=("slowly_imported",))
    thread.start()
    try:
        assert events.begun.wait(100)
        assert not hasattr(sys.modules["slowly_imported"], "value")
        events.finish.set()
        assert imported("slowly_imported").value == 3
    finally:
        events.finish.set()
        thread.join()
        sys.modules.pop("slowly_imported", None)


def test_generators_of_a_torch_without_its_contents_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.default_generator
    with preserved_generators():
        # The entry of sys.modules until the import is done. The import statement then finds the whole module.
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
        monkeypatch.setattr("hetero.batches.seeds.import_module", lambda name: torch)
        seed_generators(7)
        assert whole.initial_seed() == 7
        monkeypatch.undo()
