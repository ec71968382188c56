"""``hetero index``: count the rows of files and note where they are."""

from __future__ import annotations

import argparse
import functools
import os
import time
from typing import TYPE_CHECKING

from hetero.cli.arguments import Subparsers
from hetero.cli.output import complain, say

if TYPE_CHECKING:
    from hetero.shards.indexing import Progress

__all__ = ["add"]

_PROGRESS_S = 2.0


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "index",
        allow_abbrev=False,
        help="count the rows of shards, for hetero.shards",
        description="Read files of rows once, and write how many rows each has and where they are. hetero.shards needs "
        "this index for tar and JSON Lines files, and uses it for others. A second run reads only new and changed "
        "files, so a killed run continues.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help='a path, or a pattern such as "train-{000..146}.tar"')
    parser.add_argument("--output", help="path or URL of the index; default: hetero-index.npz in the files' folder")
    parser.add_argument("--format", help="jsonl, tar, parquet or arrow; default: by the ending of the first file")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one for each CPU")
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    # Imported here, because they import NumPy, which other commands do not need.
    from hetero.documents.text import counted
    from hetero.errors import ConfigError
    from hetero.shards.files import INDEX_NAME, base_of, expand
    from hetero.shards.formats import FORMATS, format_of
    from hetero.shards.indexing import index_shards

    if namespace.processes < 1:
        raise ConfigError(f"--processes is {namespace.processes}, expected at least 1")
    paths = expand(namespace.files)
    name = namespace.format or format_of(paths[0])
    if name not in FORMATS:
        raise ConfigError(f"--format is {name!r}, expected one of {', '.join(FORMATS)}")
    output = namespace.output or f"{base_of(paths)}/{INDEX_NAME}"
    shown_s = [time.monotonic()]
    done = index_shards(
        paths, output, name, num_processes=namespace.processes, on_progress=functools.partial(_show, shown_s)
    )
    shards = done.whole.shards
    num_rows, size = sum(shard.num_rows for shard in shards), sum(shard.size for shard in shards)
    say(
        f"{output}: {counted(len(shards), 'shard')}, {counted(num_rows, 'row')}, {size / 1e9:.3g} GB. "
        f"{counted(done.num_read, 'shard')} read now.\n"
    )
    return 0


def _show(shown_s: list[float], progress: Progress) -> None:
    """Write the progress to standard error, at most every two seconds."""
    now_s = time.monotonic()
    if now_s - shown_s[0] >= _PROGRESS_S:
        shown_s[0] = now_s
        gigabytes = f"{progress.bytes_done / 1e9:.3g} of {progress.num_bytes / 1e9:.3g} GB"
        complain(f"hetero: indexed {progress.num_done} of {progress.num_shards} shards, {gigabytes}\n")
