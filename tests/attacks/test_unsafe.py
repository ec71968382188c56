"""No deserialiser that runs code, nowhere in the package, under whatever name it was imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero

pytestmark = pytest.mark.attack("A4")

PACKAGE = Path(hetero.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {"_pickle", "cloudpickle", "cPickle", "dill", "hickle", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
CALLS = {
    "__import__",
    "builtins.eval",
    "builtins.exec",
    "code.interact",
    "compile",
    "ctypes.pythonapi",
    "eval",
    "exec",
    "imp.load_source",
    "multiprocessing.connection.Client",
    "multiprocessing.connection.Listener",
    "multiprocessing.managers.BaseManager",
    "numpy.core.multiarray._reconstruct",
    "numpy.fromregex",
    "numpy.lib.format.read_array",
    "numpy.lib.npyio.NpzFile",
    "numpy.load",
    "os.popen",
    "os.system",
    "pandas.read_pickle",
    "pty.spawn",
    "runpy.run_module",
    "runpy.run_path",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "torch.hub.load",
    "torch.jit.load",
    "torch.load",
    "torch.package.PackageImporter",
    "torch.serialization.load",
    "xmlrpc.client.loads",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "google.protobuf.json_format.Parse",
    "google.protobuf.json_format.ParseDict",
}
NAMES = {"FullLoader", "UnsafeLoader", "allow_pickle", "exec_module"}
"""Of keywords and attributes."""
ALLOWANCE = re.compile(r"# allowed: \S")
ALLOWED = {
    ("ray/worker.py", "import_module"),
    ("__init__.py", "import_module"),
    ("batches/imported.py", "import_module"),
    ("endpoint/script.py", "loader.exec_module"),
    ("doctor/versions.py", "import_module"),
    ("launch/ranks/rank.py", "runpy.run_module"),
    ("launch/ranks/rank.py", "runpy.run_path"),
    ("sagemaker/study_executor.py", "import_module"),
    ("script_check/run.py", "loader.exec_module"),
    ("shards/formats/__init__.py", "import_module"),
    ("shards/formats/tables.py", "import_module"),
    ("shards/lengths.py", "import_module"),
    ("system/extensions.py", "import_module"),
    ("wire/compression.py", "import_module"),
}
"""Uses with a reason on their line, ``# allowed: the user's own script``."""


def uses(source: str) -> Iterator[tuple[str, int]]:
    """Yield what a module uses that is unsafe, with its line. Names are traced to where they were imported from."""
    tree = ast.parse(source)
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        for name, origin in imports(node):
            origins[name] = origin
            if origin.partition(".")[0] in MODULES or origin in CALLS or origin.rpartition(".")[2] in NAMES:
                yield origin, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            full = origins.get(first, first) + dot + rest
            if full in CALLS or full.rpartition(".")[2] in NAMES:
                yield full, node.lineno
        elif isinstance(node, ast.keyword) and node.arg in {"shell", *NAMES}:
            yield f"{node.arg}=", node.value.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            (name, *_) = node.args
            if not isinstance(name, ast.Constant) or str(name.value).partition(".")[0] in MODULES:
                yield "import_module", node.lineno


def imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import statement binds, and their meaning."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def test_package_uses_nothing_that_runs_what_it_reads() -> None:
    found = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        name = str(path.relative_to(PACKAGE))
        for use, line in uses(source):
            if not ((name, use) in ALLOWED and ALLOWANCE.search(lines[line - 1])):
                found.append(f"{name}:{line}: {use}")
    assert found == [], "\n".join(found)


def test_allowances_are_used() -> None:
    used = {
        (name, use) for name, use in ALLOWED for use_found, _ in uses((PACKAGE / name).read_text()) if use_found == use
    }
    assert used == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import _pickle as p",
        "import numpy as np\nnp.load('x')",
        "from numpy import load as take\ntake('x')",
        "import torch\nread = torch.load",
        "import torch.serialization as t\nt.load('x')",
        "import yaml\nyaml.load('x', Loader=yaml.SafeLoader)",
        "import yaml as y\ny.unsafe_load('x')",
        "from yaml import UnsafeLoader",
        "import os\nos.system('x')",
        "from os import system\nsystem('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "subprocess.Popen('x', shell=flag)",
        "eval('x')",
        "exec('x')",
        "run = eval",
        "import builtins\nbuiltins.exec('x')",
        "import importlib\nimportlib.import_module(name)",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('os')",
        "import numpy\nnumpy.fromfile('x', allow_pickle=True)",
        "from google.protobuf import json_format\njson_format.ParseDict(a, b)",
    ],
)
def test_scan_finds(source: str) -> None:
    assert set(uses(source))


def test_scan_leaves_alone_what_is_harmless() -> None:
    assert not set(uses("import yaml, json, torch\nyaml.safe_load(a)\njson.loads(b)\nself.load(c)\nre.compile(d)\n"))
