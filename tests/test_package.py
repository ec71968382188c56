"""What must hold for the package as a whole."""

from __future__ import annotations

import ast
import collections
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero

PACKAGE = Path(hetero.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "proto" not in path.relative_to(PACKAGE).parts)
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_bytes()) for path in FILES}

# Each may import from the lines above it and from itself.
LAYERS = (
    {"errors", "epochs", "__version__"},
    {"documents"},
    {"plans"},
    {"spec", "system"},
    {"pricing"},
    {"cluster"},
    {"config"},
    {"batches"},
    {"audit", "wire", "metrics"},
    {"cache"},
    {"datasets", "shards"},
    {"control"},
    {"endpoint"},
    {"reader", "pool"},
    {"sample_costs"},
    {"loaders"},
    {"torch", "tf", "report"},
    {"launch"},
    {"simulate"},
    {"decide"},
    {"doctor", "sagemaker", "script_check"},
    {"ray"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}

MAY_IMPORT = {
    "boto3": {"sagemaker", "pricing/price_service.py"},
    "grpc": {"wire", "control", "endpoint"},
    "ray": {"ray"},
    "sagemaker": {"sagemaker"},
    "sagemaker_training": {"sagemaker"},
    "tensorflow": {"tf", "pool/tf_server.py"},
}
# The products, and the only parts that import them.
IMPORTERS = {"decide": {"cli", "sagemaker"}, "ray": set(), "sagemaker": set()}
PLATFORM_NAMES = re.compile(r"\bSM_|TRAINING_JOB_NAME|SAGEMAKER_BASE_DIR|/opt/ml")
MAY_NAME_PLATFORMS = {
    "batches/failures.py": "$SM_CHANNEL_TRAINING",  # an example in advice, which is not read
    "sagemaker/rehearsal/toolkit.py": "SM_STUDIO_LOCAL_MODE",  # a switch of the toolkit, set for the toolkit alone
}


def part(path: Path) -> str:
    """Return the module or package of `hetero` that a file belongs to."""
    return path.parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of all imports, also those inside functions and in calls of ``import_module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_public_names_are_sorted_and_exist() -> None:
    assert hetero.__all__ == sorted(hetero.__all__)
    for name in hetero.__all__:
        assert getattr(hetero, name) is not None
    assert set(hetero.__all__) <= set(dir(hetero))


def test_modules_are_imported_when_they_are_used() -> None:
    code = "import hetero, sys; assert 'hetero.shards' not in sys.modules; print(hetero.shards.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "hetero.shards\n"


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'datasett'; it has .*DatasetSpec"):
        hetero.datasett  # noqa: B018


def test_names_of_a_package_are_sorted_and_exist() -> None:
    wrong = []
    for path in (path for path in TREES if path.name == "__init__.py"):
        if part(path) == "torch" and importlib.util.find_spec("torch") is None:
            continue
        module = importlib.import_module(".".join(("hetero", *path.parts[:-1])))
        names = getattr(module, "__all__", [])
        wrong += [f"{path}: {name} does not exist" for name in names if not hasattr(module, name)]
        if names != sorted(names):
            wrong.append(f"{path}: __all__ is not sorted")
    assert wrong == [], "\n".join(wrong)


def test_imports_point_one_way() -> None:
    wrong = []
    for path, tree in TREES.items():
        own = part(path)
        if own == "__init__":  # the public face names everything, lazily
            continue
        assert own in LAYER_OF, f"say in LAYERS where {own} belongs"
        for name in imported(tree):
            top, _, rest = name.partition(".")
            if top != "hetero" or (other := rest.partition(".")[0]) == own:
                continue
            if other not in LAYER_OF:
                wrong.append(f"{path} imports {name}: import from the module that has it")
            elif LAYER_OF[other] >= LAYER_OF[own]:
                wrong.append(f"{path} imports {name}, which is in no lower layer")
    assert wrong == [], "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Inside of folders too, and in imports that only a type checker makes."""
    modules = {_module(path) for path in TREES}
    needs = {
        _module(path): {_imported_module(name, modules) for name in imported(tree)} for path, tree in TREES.items()
    }
    needs.pop("hetero")  # the public face names everything, lazily
    # Whatever needs nothing that is left can be imported first. What stays in the end is a circle, or needs one.
    while free := [module for module, others in needs.items() if not (others - {module}) & needs.keys()]:
        for module in free:
            del needs[module]
    assert {module: sorted(others & needs.keys()) for module, others in needs.items()} == {}


def _module(path: Path) -> str:
    return ".".join(("hetero", *path.with_suffix("").parts)).removesuffix(".__init__")


def _imported_module(name: str, modules: set[str]) -> str:
    """Return the module that an imported name is, or belongs to."""
    return name if name in modules else name.rpartition(".")[0]


def test_what_runs_jobs_imports_no_product() -> None:
    """`hetero.system.extensions.find` finds a product by its name, and the command line calls what decides."""
    wrong = [
        f"{path} imports {name}"
        for path, tree in TREES.items()
        for name in imported(tree)
        for product, importers in IMPORTERS.items()
        if f"{name}.".startswith(f"hetero.{product}.") and part(path) not in {product, *importers, "__init__"}
    ]
    assert wrong == [], "\n".join(wrong)


def test_heavy_libraries_are_imported_only_where_they_belong() -> None:
    wrong = []
    for path, tree in TREES.items():
        for name in imported(tree):
            allowed = MAY_IMPORT.get(name.partition(".")[0])
            if allowed is not None and not allowed & {part(path), str(path)}:
                wrong.append(f"{path} imports {name}")
        at_module_level = {name.partition(".")[0] for node in tree.body for name in imported_here(node)}
        if "torch" in at_module_level and part(path) != "torch":
            wrong.append(f"{path} imports torch at module level")
    assert wrong == [], "\n".join(wrong)


def imported_here(node: ast.stmt) -> set[str]:
    return set(imported(node)) if isinstance(node, (ast.Import, ast.ImportFrom)) else set()


def test_names_of_platforms_are_only_in_their_modules() -> None:
    wrong = []
    for path, tree in TREES.items():
        if path.parts[:2] == ("cluster", "platforms"):
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        allowed = MAY_NAME_PLATFORMS.get(path.as_posix())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                text = node.value
                if PLATFORM_NAMES.search(text) and (allowed is None or allowed not in text):
                    wrong.append(f"{path}: {text!r}")
    advice = "ask `hetero.cluster.find_platform`; a platform's module alone knows its variables and folders"
    assert wrong == [], "\n".join((advice, *wrong))


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_no_folder_is_too_full() -> None:
    folders = collections.Counter(str(path.parent) for path in TREES)
    assert {name: number for name, number in folders.items() if number > 14} == {}, "a stranger must guess the file"


def test_import_is_light() -> None:
    code = (
        "import time, sys, json; start = time.perf_counter(); import hetero; took = time.perf_counter() - start\n"
        "print(json.dumps([took, sorted(name.partition('.')[0] for name in sys.modules)]))"
    )
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(5)]
    heavy = {"boto3", "grpc", "numpy", "sagemaker", "tensorflow", "torch"}
    assert heavy.intersection(runs[0][1]) == set()
    assert min(took for took, _ in runs) < 0.150


@pytest.mark.parametrize("program", ["hetero.launch.launcher", "hetero.launch.ranks.agent"])
def test_launcher_and_agent_need_no_numpy_and_no_framework(program: str) -> None:
    heavy = {"numpy", "torch", "tensorflow", "hetero.loaders", "hetero.tf"}
    code = f"import sys, {program}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n", "it delays the start of every job"


def test_rank_imports_no_code_of_the_servers() -> None:
    servers = ("hetero.endpoint", "hetero.pool")
    pytest.importorskip("torch")
    code = f"import sys, hetero.torch; print([name for name in sys.modules if name.startswith({servers})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n"
