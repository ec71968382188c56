"""Reads untrusted files, and writes files that other programs read.

The size of a file is checked before it is parsed. Other programs never see a file that is only partly written. If the
path of a new file is a symbolic link, the file replaces the link, and the target of the link stays unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetero.documents.text import MAX_TEXT_CHARS
from hetero.errors import ConfigError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "evict", "make_output_folder", "parse_yaml", "read_bounded", "write_text"]

MAX_BYTES = 1 << 20
"""Limit of a file with options or prices."""
_MAX_INT_BITS = 64
MAX_DEPTH = 32
"""Levels of lists and objects in a document, and in the arguments of a data set."""


def make_output_folder(folder: Path) -> None:
    """Make the folder that ``--output-dir`` names, unless it exists, and check that it can be written.

    Raises:
        ConfigError: If it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Try to write now. A job on a read-only file system once trained to its end, and then had no place for its
        # report.
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        problem = error.strerror or error
        raise ConfigError(f"cannot write to {folder}: {problem}; give another folder to --output-dir") from error


def read_bounded(path: Path, source: str, *, max_bytes: int = MAX_BYTES, to_do: str = "") -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        source: Description of the file with its path, for messages.
        max_bytes: Longest content to accept. At most one byte more is read.
        to_do: Advice for the message if the file cannot be read.

    Raises:
        ConfigError: If the file cannot be read, or is longer.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror or error}{to_do and f'; {to_do}'}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{source} is too large; expected at most {max_bytes} bytes")
    return content


def parse_yaml(content: bytes, source: str) -> object:
    """Return the content of a YAML document: texts, numbers, dates, and lists and objects of these.

    Args:
        content: Untrusted bytes.
        source: Origin of the content, for messages.

    Raises:
        ConfigError: If the content is longer than `MAX_BYTES`, is not YAML, holds Python objects, has a key twice, or
            uses aliases. A few lines of aliases expand to gigabytes when a value is printed.
    """
    import yaml

    if len(content) > MAX_BYTES:
        raise ConfigError(f"{source} is too large; expected at most {MAX_BYTES} bytes")
    # Tokens that begin and end a list or an object.
    opening = (
        yaml.FlowSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.BlockMappingStartToken,
    )
    closing = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    depth = 0
    try:
        text = content.decode("utf-8")
        # Check the tokens before the library builds the document from them.
        for token in yaml.scan(text):
            # The library checks every open bracket for every token, so a file full of brackets would take hours.
            depth += isinstance(token, opening) - isinstance(token, closing)
            if depth > MAX_DEPTH:
                raise ConfigError(f"{source} is not YAML that can be used: it nests deeper than {MAX_DEPTH} levels")
            if isinstance(token, yaml.AliasToken):
                raise ConfigError(f"{source} uses YAML aliases (*name); write the values out")
            # A number in base 60 that fills a file would take minutes to read.
            if isinstance(token, yaml.ScalarToken) and token.plain and len(token.value) > MAX_TEXT_CHARS:
                raise ConfigError(f"{source} has a value of {len(token.value)} characters; quote it if it is a text")
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            _check_keys(node, source)
            document: object = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    # A ConfigError is a ValueError, which the next clause would catch.
    except ConfigError:
        raise
    # For a malformed number or date, the library raises the error of int() or datetime().
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML that can be used: {str(error)[:300]}") from error
    _check_numbers(document, source)
    return document


def _check_keys(node: Any, source: str) -> None:
    """Reject a key that an object has twice. The library would ignore the first value.

    Args:
        node: Root of the document's tree of YAML nodes. None for an empty document.
        source: Origin of the document, for messages.
    """
    nodes_to_check = [] if node is None else [node]
    while nodes_to_check:
        node = nodes_to_check.pop()
        if node.id == "sequence":
            nodes_to_check += node.value
        elif node.id == "mapping":
            seen = set()
            for key, value in node.value:
                nodes_to_check += key, value
                # A key that is a list or an object cannot be compared here.
                if key.id != "scalar":
                    continue
                # A study with `metrics:` twice once ran without the first metrics.
                if (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{source} has the key {key.value!r:.80} twice, again in line {line}; remove one")
                seen.add((key.tag, key.value))


def _check_numbers(document: object, source: str) -> None:
    """Reject whole numbers of more than 64 bits, which no value of hetero needs.

    Python reads a number in base 16 of any length. But it raises ValueError if a message contains a number of more than
    4,300 decimal digits.
    """
    values_to_check = [document]
    while values_to_check:
        value = values_to_check.pop()
        if isinstance(value, dict):
            values_to_check += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            values_to_check += value
        elif isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise ConfigError(f"{source} holds a whole number of {value.bit_length()} bits, at most {_MAX_INT_BITS}")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, without changing line ends. Block until the name refers to the new content.

    Raises:
        OSError: If the file cannot be written, or the name is that of a folder, device or pipe. The old content is then
            unchanged.
    """
    # The new file would also replace a device. If this ran as root, it would replace even /dev/null for all programs.
    if not path.name or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        # Both names are in one folder, so this is atomic: a reader finds the old file or the whole new one.
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to drop files from its page cache. The next reader then reads them from storage.

    A job on a fresh machine reads its data from storage. Canaries must do so too, although they read the same files one
    after the other. Files that a process has mapped, and systems without this call, keep their pages.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Offset 0 and length 0 mean the whole file.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
