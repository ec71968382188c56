"""The committed messages are what the generator makes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "hetero" / "wire" / "proto"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protos_generate", ROOT / "protos" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_generator() -> bool:
    try:
        return importlib.metadata.version("grpcio-tools") == generator().GENERATOR
    except importlib.metadata.PackageNotFoundError:
        return False


def test_generated_code_covers_every_source() -> None:
    sources = {path.stem for path in (ROOT / "protos" / "hetero" / "v1").glob("*.proto")}
    for suffix in ("py", "pyi"):
        assert {path.name for path in PROTO.glob(f"*_pb2.{suffix}")} == {f"{name}_pb2.{suffix}" for name in sources}


def test_generated_code_checks_no_runtime_version() -> None:
    for path in PROTO.glob("*_pb2.py"):
        assert "ValidateProtobufRuntimeVersion" not in path.read_text()
    assert not list(PROTO.glob("*_grpc.py"))


def test_generate_without_the_right_generator_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(SystemExit, match=r"found grpcio-tools 1\.0, need .*make protos"):
        generator().main(["--check"])


def test_differences_name_the_file_and_the_line() -> None:
    module = generator()
    committed = {path.name: path.read_text() for path in PROTO.glob("*.py*")}
    assert module.differences(committed) == []
    name = "data_pb2.pyi"
    changed = module.differences({**committed, name: committed[name] + "new = 1\n"})
    assert any(name in line for line in changed)
    assert "+new = 1" in changed
    assert module.differences({**committed, "other_pb2.py": "x = 1\n"})[-1] == "+x = 1"


def test_relocate_rewrites_imports_only() -> None:
    source = 'from hetero.v1 import data_pb2 as x\nimport hetero.v1.data_pb2\nname = "hetero.v1"\n'
    expected = 'from hetero.wire.proto import data_pb2 as x\nimport hetero.wire.proto.data_pb2\nname = "hetero.v1"\n'
    assert generator().relocate(source) == expected


@pytest.mark.skipif(
    not has_generator(), reason="grpcio-tools of another version or none here; `make protos-check` has it"
)
def test_generated_code_is_fresh() -> None:
    assert generator().main(["--check"]) == 0, sys.executable
