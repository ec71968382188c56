"""Makes the index of shards, in several processes, and finds it."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import glob
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from hetero.errors import ConfigError
from hetero.shards.files import INDEX_NAME, base_of, digest_of_ends
from hetero.shards.formats import make_format
from hetero.shards.index import Index, ShardRecord, Table, load_index, save_index
from hetero.shards.stores import exists, facts_of, is_url
from hetero.system.process import die_with_parent

__all__ = ["Indexed", "Progress", "index_of", "index_shards", "path_in_index", "scan_shards"]

logger = logging.getLogger(__name__)

_SAVE_S = 5.0
"""A kill loses at most the files of these seconds."""


class Progress(NamedTuple):
    """How far indexing has come."""

    num_done: int
    num_shards: int
    bytes_done: int
    num_bytes: int


class Indexed(NamedTuple):
    """What `index_shards` has done."""

    whole: Index
    """The index as it was written."""
    num_read: int
    """Shards that were read now. The index had the others already."""


def path_in_index(path: str, index: str) -> str:
    """Return the path of a file as an index has it: relative if the file lies below the folder of the index.

    Args:
        path: Absolute path, or URL.
        index: Path or URL of the index.
    """
    folder = (index if is_url(index) else os.path.abspath(index)).rpartition("/")[0] + "/"
    return path.removeprefix(folder)


def scan_shards(paths: Sequence[str], format_name: str) -> Index:
    """Return the index of shards whose format has a table of contents. Reads little of each file.

    Raises:
        ConfigError: If a file cannot be read. The message names it.
    """
    return Index.join(dict(_scan(path, path, format_name) for path in paths), format_name)


def index_of(
    paths: Sequence[str], format_name: str, *, given: str | os.PathLike[str] | None, patterns: Iterable[str] = ()
) -> Index:
    """Return the index of files, from its own file or from the files themselves.

    Args:
        paths: The files.
        format_name: One of `hetero.shards.formats.FORMATS`.
        given: Path or URL of the index. None for the folder that the files have in common.
        patterns: What the user has named them by. A warning is logged if the index has further files that match.

    Raises:
        ConfigError: If there is no index and the format needs one, or the index does not fit the files.
    """
    path = f"{base_of(paths)}/{INDEX_NAME}" if given is None else os.fspath(given)
    index = _fitting(path, paths, format_name) if given is None else None
    if given is None and index is None and not make_format(format_name).needs_scan:
        return scan_shards(paths, format_name)
    if given is None and index is None and not exists(path):
        # An index of files in several folders lies in the folder that they have in common.
        above = [] if is_url(path) else [str(each / INDEX_NAME) for each in Path(path).parents[1:]]
        whole = next((each for each in above if _fitting(each, paths, format_name)), None)
        command = f"Run hetero index once: hetero index {paths[0]}{' ...' if len(paths) > 1 else ''}"
        raise ConfigError(
            f"there is no index {path}. {format_name} files need one, because only reading them shows their rows\n"
            f"  {command if whole is None else f'An index of more files has them. Pass index={whole!r}'}"
        )
    index = index or load_index(path)
    if index.format != format_name:
        raise ConfigError(f"index {path} is for {index.format} files, expected {format_name}")
    wanted = [path_in_index(each, path) for each in paths]
    _warn_of_missing(index, path, set(wanted), patterns)
    return index.select(wanted, f"index {path}")


def _warn_of_missing(index: Index, path: str, wanted: set[str], patterns: Iterable[str]) -> None:
    """Log a warning if the index has files that match a pattern and do not exist any more."""
    names = {path_in_index(each, path) for each in patterns if glob.has_magic(each)}
    others = [shard.path for shard in index.shards if shard.path not in wanted] if names else []
    # A `*` of glob matches no slash.
    depths = {name: name.count("/") for name in names}
    missing = [
        each
        for each in others
        if any(each.count("/") == depth and fnmatch.fnmatchcase(each, name) for name, depth in depths.items())
    ]
    if missing:
        logger.warning(
            "index %s has files that match and do not exist: %d, the first is %s. Their rows are left out. If this is "
            "meant, remove the index and run hetero index again",
            path,
            len(missing),
            missing[0],
        )


def _fitting(path: str, paths: Sequence[str], format_name: str) -> Index | None:
    """Return the index at a path. None if there is none, or it does not have all these files."""
    if not exists(path):
        return None
    index = load_index(path)
    wanted = {path_in_index(each, path) for each in paths}
    return index if index.format == format_name and wanted <= {shard.path for shard in index.shards} else None


def index_shards(
    paths: Sequence[str],
    output: str,
    format_name: str,
    *,
    num_processes: int,
    on_progress: Callable[[Progress], object],
) -> Indexed:
    """Write the index of shards. Shards that the index has already, and that have not changed, are not read again.

    Args:
        paths: The files, each once.
        output: Path or URL of the index. It is written every few seconds, so a killed run continues where it was.
        format_name: One of `hetero.shards.formats.FORMATS`.
        num_processes: Processes that read files, at least 1.
        on_progress: Called after each file.

    Raises:
        ConfigError: If files cannot be read. The message names them, and the index has all others.
    """
    folder = os.path.dirname(os.path.abspath(output))
    if not is_url(output) and not os.path.isdir(folder):
        raise ConfigError(f"the folder {folder} of the index does not exist; make it, or name another --output")
    known = _known(output, format_name)
    names = {path_in_index(path, output): path for path in paths}
    facts = {name: facts_of(path) for name, path in names.items()}
    sizes = {name: each.size for name, each in facts.items()}
    kept = {name for name in names if name in known and facts[name] == (known[name][0].size, known[name][0].mark)}
    to_do = [name for name in names if name not in kept]
    done_bytes = sum(sizes[name] for name in kept)
    failures: dict[str, str] = {}

    def save() -> Index:
        # The order of the argument, then what the index had besides.
        order = [*(name for name in names if name in known), *(name for name in known if name not in names)]
        index = Index.join(dict(known[name] for name in order), format_name)
        save_index(output, index)
        return index

    saved_s = time.monotonic()
    scanned = _scan_all({name: names[name] for name in to_do}, format_name, num_processes)
    try:
        for number, (name, found) in enumerate(scanned, 1):
            if isinstance(found, str):
                known.pop(name, None)
                failures[name] = found
            else:
                known[name] = found
            done_bytes += sizes[name]
            on_progress(Progress(len(kept) + number, len(names), done_bytes, sum(sizes.values())))
            if time.monotonic() - saved_s > _SAVE_S:
                save()
                saved_s = time.monotonic()
    finally:
        scanned.close()
        index = save()
    if failures:
        listed = "\n  ".join(list(failures.values())[:10])
        raise ConfigError(f"{len(failures)} of {len(names)} files could not be indexed:\n  {listed}")
    return Indexed(index, len(to_do))


def _scan_all(
    paths: Mapping[str, str], format_name: str, num_processes: int
) -> Generator[tuple[str, tuple[ShardRecord, Table] | str], None, None]:
    """Yield each name and what the index gets for its file, or the reason why it cannot be read."""
    if min(num_processes, len(paths)) <= 1:
        for name, path in paths.items():
            try:
                yield name, _scan(path, name, format_name)
            except ConfigError as error:
                yield name, str(error)
        return
    # Processes that are spawned share no state of libraries with this one.
    with concurrent.futures.ProcessPoolExecutor(
        min(num_processes, len(paths)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    ) as pool:
        futures = {pool.submit(_scan, path, name, format_name): name for name, path in paths.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                name = futures[future]
                try:
                    yield name, future.result()
                except ConfigError as error:
                    yield name, str(error)
                except BrokenProcessPool:
                    yield name, f"{name}: its process was killed, perhaps for lack of memory"
        finally:
            # Without waiting, its thread may write to a closed pipe when the interpreter ends ("Bad file descriptor").
            pool.shutdown(cancel_futures=True)


def _known(output: str, format_name: str) -> dict[str, tuple[ShardRecord, Table]]:
    """Return what an index has already, by path."""
    if not exists(output):
        return {}
    before = load_index(output)
    if before.format != format_name:
        raise ConfigError(
            f"{output} is the index of {before.format} files, and these are {format_name}\n"
            "  Name another --output. Or remove the index, if it was written by mistake."
        )
    return {shard.path: (shard, table) for shard, table in before.parts()}


def _scan(path: str, name: str, format_name: str) -> tuple[ShardRecord, Table]:
    """Return what the index has of one file.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        facts = facts_of(path)
        table = Table.of(make_format(format_name).scan(path))
        record = ShardRecord(
            path=name,
            size=facts.size,
            digest=digest_of_ends(path),
            mark=facts.mark,
            num_rows=int(table.rows.sum()),
            num_blocks=len(table.rows),
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"shard {path} cannot be read: {type(error).__name__}: {error}") from error
    if not record.num_rows:
        raise ConfigError(f"shard {path} has no rows. Leave it out")
    return record, table
