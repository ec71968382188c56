"""Generate ``hetero/wire/proto`` from ``protos/hetero/v1``: messages and their types, nothing else.

    make protos          # write
    make protos-check    # exit 1 and say what differs

Needs grpcio-tools 1.62.3 exactly, in an environment of its own. Its protobuf 4.25
code is the newest that carries no check of the runtime's version, so it runs
under protobuf 4, 5 and 6; the generator itself needs protobuf 4, which nothing else here uses.
Service stubs are not generated: they check grpcio's version from 1.63 on,
and handlers by name are a few lines (see ``hetero/wire/channels.py`` and its users).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import re
import sys
import tempfile
from pathlib import Path

GENERATOR = "1.62.3"
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos" / "hetero" / "v1"
OUTPUT = ROOT / "hetero" / "wire" / "proto"
PACKAGE = '"""Protobuf messages, generated from ``protos/`` by ``make protos``. Do not edit."""\n'


def generate() -> dict[str, str]:
    """Return file name to content of everything that belongs into the output folder.

    Raises:
        SystemExit: If the generator has another version or refuses a source.
    """
    try:
        found = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != GENERATOR:
        sys.exit(f"error: found grpcio-tools {found}, need {GENERATOR}; `make protos` makes an environment that has it")
    protoc = importlib.import_module("grpc_tools.protoc")

    protos = [str(path) for path in sorted(SOURCES.glob("*.proto"))]
    with tempfile.TemporaryDirectory() as folder:
        status = protoc.main(
            ["protoc", f"-I{ROOT / 'protos'}", f"--python_out={folder}", f"--pyi_out={folder}", *protos]
        )
        if status != 0:
            sys.exit(f"error: protoc ended with status {status}")
        generated = {path.name: relocate(path.read_text()) for path in sorted(Path(folder).rglob("*_pb2.py*"))}
    return {"__init__.py": PACKAGE, **generated}


def relocate(source: str) -> str:
    """Return generated code whose imports of one another name the output package.

    protoc derives them from the folders of the sources, ``hetero/v1``, where no Python package is.
    """
    return re.sub(r"^(from |import )hetero\.v1\b", r"\1hetero.wire.proto", source, flags=re.MULTILINE)


def differences(wanted: dict[str, str]) -> list[str]:
    """Return a unified diff, in lines, from what is in the output folder to what belongs there."""
    found = {path.name: path.read_text() for path in OUTPUT.glob("*.py*") if path.is_file()}
    return [
        line
        for name in sorted(found.keys() | wanted.keys())
        for line in difflib.unified_diff(
            found.get(name, "").splitlines(),
            wanted.get(name, "").splitlines(),
            f"found/{name}",
            f"generated/{name}",
            "",
            "",
            1,
            "",
        )
    ]


def main(argv: list[str] | None = None) -> int:
    """Write the generated code, or compare it with what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed code differs")
    check = parser.parse_args(argv).check
    wanted = generate()
    changed = differences(wanted)
    if check and changed:
        print("\n".join(line[:200] for line in changed[:60]))
        print("error: hetero/wire/proto does not match protos/; run `make protos` and commit the result")
        return 1
    if changed:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        for stale in OUTPUT.glob("*_pb2*.py*"):
            stale.unlink()
        for name, content in wanted.items():
            (OUTPUT / name).write_text(content)
    print(f"{'checked' if check else 'wrote'} {', '.join(sorted(wanted))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
