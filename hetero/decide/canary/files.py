"""Chooses a fraction of a channel's files, and links them into a folder.

Files stay whole, because only the script knows their format. The choice is a systematic sample of the files in the
order of their folders and sizes. Therefore the sample has files of each folder (often a class) and of each size in
proportion. Several such samples are drawn. The sample whose bytes are closest to the fraction is chosen.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import random
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError

__all__ = [
    "MAX_FILES",
    "DataFile",
    "LinkedFolder",
    "choose_files",
    "data_files",
    "files_of",
    "link_files",
    "matches",
]

MAX_FILES = 5_000_000
_NUM_DRAWS = 40
_MAX_POOLS = 8


@dataclass(frozen=True, slots=True, order=True)
class DataFile:
    """A file or object of a channel."""

    name: str
    """Path relative to the channel, or an object's key relative to its prefix, with ``/`` between folders."""
    num_bytes: int

    @property
    def folder(self) -> str:
        """The part of the name before the last ``/``."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedFolder:
    """A folder with links to some files of another folder."""

    source: Path
    target: Path
    files: tuple[DataFile, ...]

    @property
    def paths(self) -> list[Path]:
        """The files that the links lead to."""
        return [self.source / file.name for file in self.files]


def data_files(folder: Path, *, keep: Sequence[str] = ()) -> tuple[list[DataFile], list[DataFile]]:
    """Return the files of a folder: first the files to choose from, then the files that every run gets, both sorted.

    Args:
        folder: The folder. Links to files and folders are followed.
        keep: Patterns of names of files that every run gets, such as ``labels.csv`` or ``*.json``. A pattern without
            ``/`` is compared with the last part of a name.

    Raises:
        ConfigError: If the folder lacks files to choose from, has more than `MAX_FILES`, or one cannot be read.
    """
    divided: list[DataFile] = []
    kept: list[DataFile] = []
    for file in files_of(folder):
        (kept if matches(file.name, keep) else divided).append(file)
    if not divided:
        raise ConfigError(f"{folder} contains no files to divide; give another --channel folder")
    return sorted(divided), sorted(kept)


def files_of(folder: Path) -> Iterator[DataFile]:
    """Yield the files of a folder and its subfolders.

    Links are followed, except for a link without a target, and a link to a folder that contains the link.

    Raises:
        ConfigError: If a file or folder cannot be read, or there are more than `MAX_FILES` files.
    """
    count = 0
    # Folders to visit: the name, and the identities (device and inode) of the folders that contain it.
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while pending:
        name, parents = pending.pop()
        path = folder / name
        try:
            here = path.stat()
            # Skip a link to a folder that contains the link. Such a link once gave the same files forty times, and a
            # link to itself ended the command.
            identity = (here.st_dev, here.st_ino)
            if identity in parents:
                continue
            for entry in sorted(path.iterdir()):
                relative = f"{name}/{entry.name}" if name else entry.name
                # The message of an error names the entry.
                path = entry
                try:
                    status = entry.stat()
                # Skip a link without a target.
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    pending.append((relative, parents | {identity}))
                    continue
                count += 1
                if count > MAX_FILES:
                    raise ConfigError(f"{folder} has more than {MAX_FILES:,} files; give a canary fewer, larger files")
                yield DataFile(relative, status.st_size)
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror or error}; expected files that a run can read"
            ) from error


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the name of a file has one of the patterns, see `data_files`."""
    last = name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(name if "/" in pattern else last, pattern) for pattern in patterns)


def choose_files(
    files: Sequence[DataFile], fraction: float, *, seed: int, replicate: int = 0, min_files: int = 1
) -> list[DataFile]:
    """Return a fraction of the files, at least one.

    It is a sample with files of each folder and each size in proportion. Files differ in size, so a sample may have too
    many or too few bytes. Therefore `_NUM_DRAWS` samples are drawn, and the one whose bytes are the closest to the
    fraction is returned.

    Args:
        files: All files.
        fraction: Share of the bytes to choose, in (0, 1].
        seed: Seed of the choice.
        replicate: Number of this choice, from 0. Replicates get different files if there are enough.
        min_files: Fewest files, for example one for each host.
    """
    ordered = sorted(files, key=lambda file: (file.folder, file.num_bytes, file.name))
    num_chosen = min(len(ordered), max(min_files, round(fraction * len(ordered)), 1))
    if num_chosen == len(ordered):
        return sorted(ordered)
    wanted_bytes = fraction * sum(file.num_bytes for file in ordered)
    # With this number of pools, each pool still has enough files for a sample.
    pool = _pool(ordered, len(ordered) // num_chosen, seed=seed, replicate=replicate)
    # The pool is in the order of folders and sizes. A sample has one file of each of `num_chosen` equal sections of it.
    bounds = [len(pool) * i // num_chosen for i in range(num_chosen + 1)]
    # The seed is a text of all three numbers, because their sum would be equal for different runs.
    generator = random.Random(f"{seed}/{replicate}/{fraction}")
    samples = (
        [pool[generator.randrange(begin, end)] for begin, end in itertools.pairwise(bounds)] for _ in range(_NUM_DRAWS)
    )
    return sorted(min(samples, key=lambda sample: abs(sum(file.num_bytes for file in sample) - wanted_bytes)))


def _pool(ordered: Sequence[DataFile], num_pools: int, *, seed: int, replicate: int) -> list[DataFile]:
    """Return the files that a replicate may choose from.

    Each replicate has its own pool, so replicates have different files. Replicates share a pool if there are more of
    them than pools. Each pool has one file of each block of ``num_pools`` successive files. Therefore each pool has all
    folders and sizes.

    Args:
        ordered: All files in the order of folder and size.
        num_pools: Number of pools. At most `_MAX_POOLS` are made.
        seed: Seed of the division.
        replicate: Number of the replicate, from 0.
    """
    num_pools = max(1, min(_MAX_POOLS, num_pools))
    generator = random.Random(f"{seed}/pools")
    own_pool = replicate % num_pools
    pool = []
    for begin in range(0, len(ordered), num_pools):
        block = list(ordered[begin : begin + num_pools])
        generator.shuffle(block)
        # The last block may have fewer files than there are pools.
        if own_pool < len(block):
            pool.append(block[own_pool])
    return pool


def link_files(linked: LinkedFolder, *, within: Path) -> None:
    """Make a folder with links to files of another folder, in the same subfolders. An earlier folder is replaced.

    Args:
        linked: The folder.
        within: Folder of the study's own data. Nothing outside of it is changed.

    Raises:
        ConfigError: If the folder is not below ``within``, has other files than links, or cannot be made.
    """
    target = linked.target
    # Reject a target outside of the study's folder. With the channel name ../data, a folder of the user was once
    # deleted and replaced by links.
    if within.resolve() not in target.resolve().parents:
        raise ConfigError(f"cannot link files in {target}; expected a folder below {within}")
    try:
        if target.exists():
            _check_replaceable(target)
            shutil.rmtree(target)
        target.mkdir(parents=True)
        for file in linked.files:
            link = target / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            # Resolve the target, because a relative link would be read from the folder of the link.
            link.symlink_to((linked.source / file.name).resolve())
    except OSError as error:
        raise ConfigError(f"cannot make the folder {target}: {error.strerror or error}") from error


def _check_replaceable(folder: Path) -> None:
    """Raise `ConfigError` unless a folder has only links and folders, as `link_files` makes them."""
    for root, _, names in os.walk(folder):
        other = next((path for name in names if not (path := Path(root, name)).is_symlink()), None)
        if other is not None:
            raise ConfigError(
                f"{other} is no link of the study, so {folder} is not replaced\n"
                "  to do: move the file away if you need it, remove the folder, and start again"
            )
