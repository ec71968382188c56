"""The formats of shards.

A module has one class, a `hetero.shards.formats.format.Format` by shape. It imports its library when it reads a file. A
new format is a module here, a line in `FORMATS`, and a function in `hetero.shards.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from hetero.errors import ConfigError
from hetero.shards.formats.format import Format

__all__ = ["FORMATS", "format_of", "make_format"]

FORMATS = {
    "parquet": ("hetero.shards.formats.parquet", "Parquet", (".parquet", ".pq")),
    "arrow": ("hetero.shards.formats.arrow", "Arrow", (".arrow", ".feather", ".ipc")),
    "jsonl": (
        "hetero.shards.formats.jsonl",
        "JsonLines",
        (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst", ".json.gz", ".json.zst"),
    ),
    "tar": ("hetero.shards.formats.tar", "Tar", (".tar",)),
    "array_record": ("hetero.shards.formats.array_record", "ArrayRecord", (".array_record", ".arrayrecord")),
    "chunks": ("hetero.shards.formats.chunks", "Chunks", (".mds", ".bin")),
}
"""Module, class and endings of file names for each format."""


def make_format(name: str, columns: Sequence[str] | None = None) -> Format:
    """Return a format by its name.

    Args:
        name: One of `FORMATS`.
        columns: Names of the columns to read. None for all.
    """
    module, kind, _ = FORMATS[name]
    made: Format = getattr(import_module(module), kind)(columns)  # allowed: a module of this package
    return made


def format_of(path: str) -> str:
    """Return the name of the format that the ending of a path stands for.

    Raises:
        ConfigError: If no format has this ending.
    """
    for name, (_, _, endings) in FORMATS.items():
        if path.lower().endswith(endings):
            return name
    known = ", ".join(ending for _, _, endings in FORMATS.values() for ending in endings)
    raise ConfigError(f"{path}: no format of hetero has this ending; known are {known}. State it with --format")
