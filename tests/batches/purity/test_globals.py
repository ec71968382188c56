"""Globals that the code of a data set reads, compared between processes that imported the script."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero.batches.purity.globals import MAX_GLOBALS, GlobalsReader, check_globals
from hetero.batches.purity.reach import SCRIPT_NAMES
from hetero.datasets import get_factory
from hetero.errors import DatasetMismatchError, ExitCode
from hetero.system.scripts import SCRIPT_MODULE

torch = pytest.importorskip("torch")

Imported = Callable[..., Any]

HEAD = """
import argparse, functools, logging, os, re, sys, threading, time
import torch
import hetero
import globals_test_config as config
from globals_test_config import CFG
"""
TAIL = """
@hetero.dataset
def photos():
    return Photos()
"""
CONFIG = """
import sys
from types import SimpleNamespace
DEPTH = 4
itself = sys.modules[__name__]
CFG = {"size": 64, "model": {"width": 1}}
OPTIONS = SimpleNamespace(crop=3)
def merge(target, **values):
    target.update(values)
"""


@pytest.fixture
def imported(tmp_path: Path) -> Iterator[Imported]:
    """Return a function that imports a script, and a module beside it, as data hosts do."""
    names = [SCRIPT_MODULE, "globals_test_config"]

    def load(name: str, text: str) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def load_script(text: str, *, config: str = CONFIG) -> Any:
        load("globals_test_config", config)
        return load(SCRIPT_MODULE, f"{HEAD}\n{textwrap.dedent(text)}\n{TAIL}")

    yield load_script
    for name in names:
        sys.modules.pop(name, None)


def compare(reader: GlobalsReader, others: Mapping[str, str], *, dataset: str = "photos") -> None:
    """Compare the globals of a rank with those of an endpoint."""
    check_globals(reader, reader.read(), others, dataset=dataset, there="algo-2/0")


def compare_after_main(script: Any) -> None:
    """Compare the globals after the import with those after main() and a few samples."""
    factory = get_factory("photos")
    reader = GlobalsReader(factory)
    others = reader.digests()
    dataset = factory.function()
    dataset[0], dataset[1]
    script.main()
    compare(reader, others)


def test_script_names_are_those_of_all_processes() -> None:
    assert SCRIPT_MODULE in SCRIPT_NAMES


HALF = "global SCALE; SCALE = 0.5"
CHANGED = {
    "assigned": ("SCALE", "return SCALE", HALF),
    "added to": ("SCALE", "return SCALE", "global SCALE; SCALE += 1"),
    "through globals()": ("SCALE", "return SCALE", "globals()['SCALE'] = 0.5"),
    "of a helper": ("SCALE", "return helper()", HALF),
    "of a nested function": ("SCALE", "return (lambda: [SCALE for _ in range(2)])()", HALF),
    "of a cached function": ("SCALE", "return cached()", HALF),
    "of an object's class": ("SCALE", "return TRANSFORM(1)", HALF),
    "of a property": ("SCALE", "return self.scale", HALF),
    "of a base": ("SCALE", "return self.inherited()", HALF),
    "of a base through super": ("SCALE", "return self.overridden()", HALF),
    "by a function of main": (
        "SCALE",
        "return SCALE",
        "def inner():\n        global SCALE; SCALE = 0.5\n      inner()",
    ),
    "in another module": ("globals_test_config.DEPTH", "return config.DEPTH", "config.DEPTH = 5"),
    "imported in functions": (
        "globals_test_config.DEPTH",
        "import globals_test_config as c; return c.DEPTH",
        "import globals_test_config; globals_test_config.DEPTH = 5",
    ),
    "of a module imported in a function": (
        "globals_test_config.DEPTH",
        "from globals_test_config import itself as c; return c.DEPTH",
        "config.DEPTH = 5",
    ),
    "from-imported in a function": (
        "globals_test_config.DEPTH",
        "from globals_test_config import DEPTH; return DEPTH",
        "setattr(config, 'DEPTH', 5)",
    ),
    "an item": ("CFG", "return CFG['size']", "CFG['size'] = 32"),
    "a nested item": ("CFG", "return CFG['size']", "CFG['model']['width'] = 2"),
    "updated": ("CFG", "return CFG['size']", "CFG.update(size=32)"),
    "an attribute": (
        "globals_test_config.OPTIONS",
        "return config.OPTIONS.crop",
        "config.OPTIONS.crop = 5",
    ),
    "arguments": ("ARGS", "return ARGS", "global ARGS; ARGS = argparse.Namespace(size=1)"),
    "arguments filled in place": (
        "OPTIONS",
        "return OPTIONS",
        "p = argparse.ArgumentParser(); p.add_argument('--size', default=3); p.parse_args([], namespace=OPTIONS)",
    ),
    "a list": ("NAMES", "return NAMES", "NAMES.append('c')"),
    "an array": ("MEAN", "return MEAN", "MEAN[0] = 1"),
    "a class attribute": ("Photos.flip", "return self.flip", "Photos.flip = False"),
    "a transform instead of none": ("AUGMENT", "return AUGMENT and AUGMENT(1)", "global AUGMENT; AUGMENT = str"),
}
SCRIPT = """
    SCALE = 1.0
    ARGS = None
    AUGMENT = None
    OPTIONS = argparse.Namespace()
    NAMES = ["a", "b"]
    MEAN = torch.zeros(3)
    def helper():
        return SCALE
    @functools.lru_cache
    def cached():
        return helper()
    class Transform:
        def __call__(self, value):
            return value * SCALE
    TRANSFORM = Transform()
    class Base:
        def inherited(self):
            return SCALE
        def overridden(self):
            return SCALE
    class Photos(Base):
        flip = True
        @property
        def scale(self):
            return SCALE if {uses_scale} else 1
        def overridden(self):
            return super().overridden()
        def __len__(self):
            return 4
        def __getitem__(self, index):
            {read}
    def main():
      {change}
"""


@pytest.mark.parametrize("how", CHANGED)
def test_global_that_main_changes_is_an_error_that_names_it(how: str, imported: Imported) -> None:
    label, read, change = CHANGED[how]
    if label != "SCALE":
        read = read.replace("SCALE", "1.0")
    script = imported(SCRIPT.format(read=read, change=change, uses_scale="True"))
    with pytest.raises(DatasetMismatchError) as raised:
        compare_after_main(script)
    text = str(raised.value)
    first, second, *_ = text.splitlines()
    assert first == f"global {label} has another value on algo-2/0 than in the rank, and data set 'photos' reads it"
    assert len(first) <= 120
    assert second.startswith(f"  {label}: ")
    assert re.search(r": .* in the rank; .* after the import$", second)
    assert "argument of the factory" in text
    assert raised.value.exit_code is ExitCode.DISAGREEMENT


INNOCENT = {
    "not read": ("return 1", HALF),
    "an attribute of that name": ("return self.SCALE", HALF),
    "a local of that name": ("SCALE = 3; return SCALE", HALF),
    "assigned to the same": ("return SCALE", "global SCALE; SCALE = 2.0 / 2"),
    "a local of main": ("return SCALE", "SCALE = 0.5"),
    "arguments that only main reads": ("return 1", "global ARGS; ARGS = argparse.Namespace(size=1)"),
    "a logger": ("LOG.info('x'); return 1", "global LOG; LOG = logging.getLogger('other')"),
    "a logger that main makes": ("NO_LOG and NO_LOG.info('x')", "global NO_LOG; NO_LOG = logging.getLogger('other')"),
    "a device": ("return torch.zeros(1, device=DEVICE)", "pass"),
    "a pattern": ("return PATTERN.match('a')", "pass"),
    "a lock": ("\n            with LOCK: return 1", "pass"),
    "a type alias": ("x: Rows = {}; return x", "pass"),
    "a cache": ("CACHE[index] = 1; return CACHE", "CACHE.clear()"),
    "a cache that is assigned": ("\n            global COUNT; COUNT += 1; return COUNT", "global COUNT; COUNT = 7"),
    "a counter of rare events": (
        "\n            STATS['errors'] += index > 9; return STATS",
        "STATS['errors'] = 3",
    ),
    "a cache of the class": ("return self._seen.setdefault(index, 1)", "Photos._seen[3] = 1"),
    "a cached function": ("return cached()", "cached()"),
    "a cache with another name": ("seen = CACHE; seen[index] = 1; CACHE.update(seen)", "CACHE.clear()"),
    "constants": ("return MEAN, NAMES, SCALE, config.DEPTH, CFG", "pass"),
    "the environment": ("return os.environ", "os.environ['HETERO_TEST_X'] = '1'"),
    "a library's setting": ("return torch.get_num_threads()", "torch.some_setting = 1"),
    "overridden by a subclass": ("return self.base()", HALF),
}
INNOCENT_SCRIPT = """
    SCALE = 1.0
    ARGS = None
    LOG, NO_LOG = logging.getLogger("x"), None
    DEVICE = torch.device("cpu")
    PATTERN = re.compile("a")
    LOCK = threading.Lock()
    Rows = dict[int, torch.Tensor]
    CACHE = {}
    STATS = {"errors": 0}
    COUNT = 0
    NAMES = ["a", "b"]
    MEAN = torch.zeros(3)
    @functools.lru_cache
    def cached():
        return NAMES
    class Base:
        def base(self):
            return SCALE
    class Photos(Base):
        SCALE = 7
        _seen = {}
        def base(self):
            return 1
        def __len__(self):
            return 4
        def __getitem__(self, index):
            READ
    def main():
      CHANGE
"""


@pytest.mark.parametrize("what", INNOCENT)
def test_innocent_global_is_no_error_and_no_warning(
    what: str, imported: Imported, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "some_setting", 0, raising=False)
    read, change = INNOCENT[what]
    script = imported(INNOCENT_SCRIPT.replace("READ", read).replace("CHANGE", change))
    with caplog.at_level(logging.INFO):
        compare_after_main(script)
    assert [record for record in caplog.records if record.name.startswith("hetero")] == []


READS_ROOT = """
    class Photos:
        def __len__(self): return 1
        def __getitem__(self, index): return ROOT
"""


@pytest.mark.parametrize("value", ["0.5", "'/data/two'", "{'root': '/two'}"])
def test_global_that_the_import_makes_different_is_logged_once(
    value: str, imported: Imported, caplog: pytest.LogCaptureFixture
) -> None:
    script = imported(f"    ROOT = {value}\n{READS_ROOT}")
    reader = GlobalsReader(get_factory("photos"))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            compare(reader, {"ROOT": "00"})
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "global ROOT has another value on algo-2/0 than in the rank" in record.getMessage()
    script.ROOT = None  # now it is the script that makes it different
    with pytest.raises(DatasetMismatchError, match="ROOT: None in the rank"):
        compare(reader, {"ROOT": "00"})


def test_global_that_is_made_after_the_registration_is_a_warning(
    imported: Imported, caplog: pytest.LogCaptureFixture
) -> None:
    script = imported(READS_ROOT)
    script.ROOT = "/data/two"
    compare(GlobalsReader(get_factory("photos")), {"ROOT": "00"})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING


def test_other_source_is_a_warning_that_names_the_module(imported: Imported, caplog: pytest.LogCaptureFixture) -> None:
    imported("class Photos:\n  def __getitem__(self, index): return config.merge({})")
    reader = GlobalsReader(get_factory("photos"))
    others = reader.digests()
    compare(reader, others)
    assert caplog.records == []
    compare(reader, others | {"source of globals_test_config": "00"})
    (record,) = caplog.records
    assert "the source of globals_test_config has other bytes on algo-2/0" in record.getMessage()


def run_here(reader: GlobalsReader, collate_fn: Callable[[Any], Any]) -> None:
    """Collate in this process, as the comparison of batches does."""
    with reader.running():
        collate_fn([1])


HOLDERS = """
    class Mixup:
        def __init__(self, alpha):
            self.alpha, self.seen = alpha, 0
        def __call__(self, samples):
            self.seen += 1
            return [self.alpha * each for each in samples]
        def mix(self, samples):
            return self(samples)
        def switch_off(self):
            self.alpha = 0
    class Metered:
        def __init__(self):
            self.stats = Mixup(1)
        def __call__(self, samples):
            return self.stats(samples)
    METERED = Metered()
    MIX = Mixup(0.5)
    OPTIONS = {"alpha": 0.5}
    def plain(samples, alpha):
        return samples
    def with_default(samples, options=OPTIONS):
        return samples
    def enclosing(options):
        def inner(samples):
            return options, samples
        def rebind():
            nonlocal options
            options = 0
        inner.rebind = rebind
        return inner
    ENCLOSING, PARTIAL = enclosing(1), functools.partial(plain, alpha=1)
    class Photos:
        def __len__(self): return 4
        def __getitem__(self, index): return 1
"""


@pytest.mark.parametrize(
    ("function", "change", "label"),
    [
        ("MIX", "switch_off", "collate_fn.alpha"),
        ("MIX.mix", "switch_off", "collate_fn.alpha"),
        ("functools.partial(MIX, 1)", "switch_off", "collate_fn.alpha"),
        ("functools.partial(plain, alpha=OPTIONS)", "options", "collate_fn.alpha"),
        ("with_default", "options", "collate_fn.options"),
        ("enclosing(OPTIONS)", "options", "collate_fn.options"),
        ("ENCLOSING", "rebind", "collate_fn.options"),
        ("PARTIAL", "keyword", "collate_fn.alpha"),
        ("MIX", "count", None),
        ("METERED", "measure", None),
    ],
)
def test_value_in_a_collate_fn_that_the_loop_changes_is_an_error_that_names_it(
    function: str, change: str, label: str | None, imported: Imported
) -> None:
    script = imported(f"{HOLDERS}\n    photos = hetero.dataset(name='mixed', collate_fn={function})(lambda: Photos())")
    reader = GlobalsReader(get_factory("mixed"))
    others = reader.digests()
    {
        "switch_off": script.MIX.switch_off,
        "options": lambda: script.OPTIONS.update(alpha=0),
        "rebind": lambda: script.ENCLOSING.rebind(),
        "keyword": lambda: script.PARTIAL.keywords.update(alpha=2),
        "count": lambda: script.MIX([1]),
        "measure": lambda: run_here(reader, script.METERED),
    }[change]()
    if label is None:
        compare(reader, others, dataset="mixed")
        return
    with pytest.raises(DatasetMismatchError) as raised:
        compare(reader, others, dataset="mixed")
    assert str(raised.value).startswith(f"{label} has another value on algo-2/0 than in the rank")


def test_secret_is_not_shown(imported: Imported) -> None:
    script = imported("""
        API_TOKEN = "one"
        class Photos:
            def __len__(self): return 4
            def __getitem__(self, index): return API_TOKEN
        def main():
            global API_TOKEN
            API_TOKEN = "hunter2"
    """)
    with pytest.raises(DatasetMismatchError, match="API_TOKEN: a str") as raised:
        compare_after_main(script)
    assert "hunter2" not in str(raised.value)


def test_globals_of_a_script_have_the_same_names_and_digests_under_every_name(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("NAMES = {'b', 'a', 'c'}\nTABLE = {'x': {1, 2, 'three'}, 'y': None}\n")
    text = """
        import dataclasses, enum, sys
        import settings, hetero
        from hetero.batches.purity.globals import GlobalsReader
        class Color(enum.Enum):
            RED = 1
        @dataclasses.dataclass
        class Options:
            color: Color = Color.RED
            names: frozenset = frozenset({"p", "q", "r"})
        OPTIONS = Options()
        SCALE = 1.5
        class Photos:
            def __len__(self): return 4
            def __getitem__(self, index): return settings.NAMES, settings.TABLE, OPTIONS, SCALE
        @hetero.dataset
        def photos():
            return Photos()
        print(__name__, GlobalsReader(photos).digests())
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    found = []
    for name, seed in (("__main__", "1"), ("__mp_main__", "2"), (SCRIPT_MODULE, "3")):
        code = (
            f"import importlib.util, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            f"spec = importlib.util.spec_from_file_location({name!r}, {str(tmp_path / 'train.py')!r})\n"
            f"module = sys.modules[{name!r}] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)"
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
        said, _, digests = output.partition(" ")
        assert said == name
        found.append(digests)
    assert found[0] == found[1] == found[2]
    for name in ("'OPTIONS'", "'SCALE'", "'settings.NAMES'", "'settings.TABLE'"):
        assert name in found[0]


def test_digests_are_bounded(imported: Imported) -> None:
    names = [f"VALUE_{number}" for number in range(400)]
    text = "\n".join(f"{name} = {number}" for number, name in enumerate(names))
    imported(f"{text}\nclass Photos:\n  def __getitem__(self, index): return {', '.join(names)}")
    assert len(GlobalsReader(get_factory("photos")).digests()) == MAX_GLOBALS


def test_reader_of_a_script_that_does_not_let_itself_be_looked_at_returns_nothing(
    monkeypatch: pytest.MonkeyPatch, imported: Imported
) -> None:
    imported("class Photos:\n  def __getitem__(self, index): return 1")

    def fail(roots: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("hetero.batches.purity.globals.reach", fail)
    assert GlobalsReader(get_factory("photos")).digests() == {}


@pytest.mark.parametrize(
    ("change", "is_error"), [("config.OPTIONS.rank = 1", False), ("config.OPTIONS.crop = 5", True)]
)
def test_changed_attribute_of_a_shared_object_is_an_error_only_if_the_data_set_may_read_it(
    change: str, is_error: bool, imported: Imported
) -> None:
    script = imported(INNOCENT_SCRIPT.replace("READ", "return config.OPTIONS.crop").replace("CHANGE", change))
    if not is_error:
        compare_after_main(script)
        return
    with pytest.raises(DatasetMismatchError, match="OPTIONS: .* with another crop after the import"):
        compare_after_main(script)


def test_text_that_may_hold_a_password_is_not_shown(imported: Imported) -> None:
    script = imported(
        INNOCENT_SCRIPT.replace("READ", "return DB").replace("CHANGE", "global DB; DB = 'postgres://me:hunter2@db/x'")
        + "\n    DB = ''"
    )
    with pytest.raises(DatasetMismatchError) as raised:
        compare_after_main(script)
    assert "hunter2" not in str(raised.value)
