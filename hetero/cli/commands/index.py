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
    parser.add_argument("--format", help="jsonl, tar, parquet or arrow; default: by the ending of the files")
    parser.add_argument(
        "--lengths",
        metavar="MODULE:FUNCTION",
        help="also write the length of each row, which this function returns, as hetero-lengths.npy beside the index; "
        "for hetero.TokenBudget",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one for each CPU")
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    # Imported here, because they import NumPy, which other commands do not need.
    from hetero.documents.quantities import bytes_text
    from hetero.documents.text import counted
    from hetero.errors import ConfigError
    from hetero.shards.files import INDEX_NAME, base_of, expand
    from hetero.shards.formats import FORMATS, format_of
    from hetero.shards.indexing import index_shards
    from hetero.shards.lengths import function_of

    if namespace.processes < 1:
        raise ConfigError(f"--processes is {namespace.processes}, expected at least 1")
    paths = expand(namespace.files)
    formats = {format_of(path): path for path in paths} if namespace.format is None else {namespace.format: ""}
    if len(formats) > 1:
        one, other = list(formats.items())[:2]
        raise ConfigError(
            f"{one[1]} is a file of {one[0]}, and {other[1]} one of {other[0]}\n"
            "  An index has files of one format. Index each format alone, and put it into a folder of its own."
        )
    name = next(iter(formats))
    if name not in FORMATS:
        raise ConfigError(f"--format is {name!r}, expected one of {', '.join(FORMATS)}")
    if namespace.lengths is not None:
        function_of(namespace.lengths)  # before files are read for a long time
    output = namespace.output or f"{base_of(paths)}/{INDEX_NAME}"
    shown_s = [time.monotonic()]
    done = index_shards(
        paths, output, name, num_processes=namespace.processes, on_progress=functools.partial(_show, shown_s)
    )
    shards = done.whole.shards
    num_rows, size = sum(shard.num_rows for shard in shards), sum(shard.size for shard in shards)
    say(
        f"{output}: {counted(len(shards), 'shard')}, {counted(num_rows, 'row')}, {bytes_text(size)}. "
        f"{counted(done.num_read, 'shard')} read now.\n"
    )
    if namespace.lengths is not None:
        _write_lengths(namespace, paths, output, name)
    return 0


def _write_lengths(namespace: argparse.Namespace, paths: list[str], index: str, format_name: str) -> None:
    """Write the lengths of all rows, with progress."""
    from hetero.documents.text import counted
    from hetero.shards.lengths import write_lengths

    output = f"{index.rpartition('/')[0] or '.'}/hetero-lengths.npy"
    shown_s = [time.monotonic()]

    def show(number: int) -> None:
        if time.monotonic() - shown_s[0] >= _PROGRESS_S:
            shown_s[0] = time.monotonic()
            complain(f"hetero: lengths of {number} of {len(paths)} shards\n")

    count = write_lengths(
        paths,
        index,
        format_name,
        namespace.lengths,
        output,
        num_processes=namespace.processes,
        on_progress=show,
    )
    say(f"{output}: lengths of {counted(count, 'row')}.\n")


def _show(shown_s: list[float], progress: Progress) -> None:
    """Write the progress to standard error, at most every two seconds."""
    from hetero.documents.quantities import bytes_text

    now_s = time.monotonic()
    if now_s - shown_s[0] >= _PROGRESS_S:
        shown_s[0] = now_s
        sizes = f"{bytes_text(progress.bytes_done)} of {bytes_text(progress.num_bytes)}"
        complain(f"hetero: indexed {progress.num_done} of {progress.num_shards} shards, {sizes}\n")
