"""Coverage-guided fuzzing of every parser that an unauthenticated peer's bytes reach.

Needs atheris, which the suite does not: ``make fuzz DURATION_S=600`` installs it into a separate environment.
Findings are written as ``crash-*`` by libFuzzer. Replay one with ``python -m tests.fuzz.fuzz_decoder FILE``. Inputs
that reached something new are worth keeping: ``--pack FOLDER`` puts the smallest set of them into ``corpus.zip``,
which the suite replays (tests/fuzz/test_corpus.py).
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.zip")
_MAX_FILES = 400
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path) -> None:
    """Keep the smallest inputs that the fuzzer has found, with the same bytes for the same inputs."""
    found = {path.read_bytes() for path in folder.iterdir() if not path.name.startswith("seed-")}
    contents = sorted(found, key=lambda data: (len(data), data))
    with zipfile.ZipFile(CORPUS, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, data in enumerate(contents[:_MAX_FILES]):
            archive.writestr(zipfile.ZipInfo(f"{number:04d}", _EPOCH), data, zipfile.ZIP_DEFLATED)


def unpack(folder: Path) -> None:
    """Put the corpus and valid frames of every kind into a folder."""
    from tests.support.fuzz.seeds import seeds

    for number, data in enumerate(seeds()):
        (folder / f"seed-{number:03d}").write_bytes(data)
    if CORPUS.exists():
        with zipfile.ZipFile(CORPUS) as archive:
            archive.extractall(folder)


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's own limits (``-max_total_time=600``) are reached."""
    if arguments[1:2] in (["--pack"], ["--unpack"]):
        (pack if arguments[1] == "--pack" else unpack)(Path(arguments[2]))
        return
    import atheris

    with atheris.instrument_imports(include=["hetero"]):
        import hetero.batches.structure.conversion
        import hetero.wire.framing  # noqa: F401
        from tests.support.fuzz.targets import run

    atheris.Setup(arguments, lambda data: run(bytes(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
