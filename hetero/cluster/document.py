"""Validation of an untrusted cluster description. An error in its content names the key path and what is expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from hetero.cluster.spec import natural_key
from hetero.documents.records import Mismatch, limits
from hetero.documents.records import decode as decode_record
from hetero.documents.text import listing, shortened
from hetero.errors import ClusterError, ConfigError

__all__ = ["EXAMPLE", "HOST_NAME", "Document", "Group", "close", "decode", "listing", "load"]

EXAMPLE = (
    'an object such as {"instance_groups": ['
    '{"instance_group_name": "data_group", "instance_type": "ml.c5.9xlarge", "hosts": ["node-1", "node-2"]}, '
    '{"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["node-7"]}]}'
)
"""Description of a cluster, for messages. README.md has the same one."""
MAX_FILE_BYTES = 1 << 20
MAX_GROUPS = 64
MAX_HOSTS = 4096
MAX_GROUP_NAME = 64
MAX_TEXT = 253  # the longest host name

HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}")


def _text_of(max_length: int) -> dict[str, Any]:
    expected = f"1 to {max_length} printable characters"
    return limits(max_length=max_length, accepts=lambda text: bool(text) and text.isprintable(), expected=expected)


_TEXT = _text_of(MAX_TEXT)
_HOSTS = limits(
    min_items=1,
    max_items=MAX_HOSTS,
    accepts=HOST_NAME.fullmatch,
    expected="a host name or address: at most 253 letters, digits and . _ : -",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One instance group of a description."""

    instance_group_name: str = field(metadata=_text_of(MAX_GROUP_NAME))
    hosts: tuple[str, ...] = field(metadata=_HOSTS)
    instance_type: str = field(default="", metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The keys of a description that hetero reads. Other keys are ignored."""

    hosts: tuple[str, ...] | None = field(default=None, metadata=_HOSTS)
    instance_groups: tuple[Group, ...] = field(default=(), metadata=limits(max_items=MAX_GROUPS))
    current_host: str | None = field(default=None, metadata=_TEXT)
    current_group_name: str = field(default="", metadata=_TEXT)
    current_instance_type: str = field(default="", metadata=_TEXT)
    network_interface_name: str = field(default="eth0", metadata=_TEXT)


class Document:
    """An untrusted description. `decode_record` checks its types and sizes. This class checks it for contradictions.

    Every error names the path of the key, the value that was found, and what is expected.

    Raises:
        ClusterError: If a key is missing, or if a value has the wrong type or size.
    """

    def __init__(self, document: Mapping[str, object], source: str) -> None:
        self.source = source
        self._keys = list(document)
        try:
            # The document is foreign: another program defines it, so unknown keys are ignored.
            self.content = decode_record(_Content, dict(document), is_foreign=True)
        except ConfigError as error:
            # An error of `decode_record` always has the record of a mismatch.
            mismatch = cast("Mismatch", error.record)
            if mismatch.problem == "missing":
                raise self._missing(mismatch.path, mismatch.expected, mismatch.guess) from None
            # The message of `malformed` has the word "found" already.
            found = mismatch.problem.removeprefix("found ")
            raise self.malformed(mismatch.path, found=found, expected=mismatch.expected) from None
        if self.content.hosts is not None:
            self._distinct("hosts", self.content.hosts)
        for index, group in enumerate(self.content.instance_groups):
            self._distinct(f"instance_groups[{index}].hosts", group.hosts)

    def malformed(self, path: str, *, found: str, expected: str, advice: str = "", guess: str = "") -> ClusterError:
        """Return the error for a wrong value.

        Args:
            path: Path of the key in the document.
            found: The value that was found.
            expected: What is expected instead.
            advice: What the user can do.
            guess: The known name that the value resembles.
        """
        lines = [f"the description of the cluster is wrong at {path[:60]}", f"in: {self.source}", f"found: {found}"]
        lines += [f"expected: {expected}", guess and f"did you mean {guess!r}?", advice and f"to do: {advice}"]
        return ClusterError("\n  ".join(line for line in lines if line))

    def missing(self, key: str, expected: str) -> ClusterError:
        """Return the error for a missing key at the top level. It names an unknown key with a similar spelling."""
        known = {part.name for part in fields(_Content)}
        return self._missing(key, expected, close(key, [name for name in self._keys if name not in known]))

    def _missing(self, path: str, expected: str, guess: str) -> ClusterError:
        """Return the error for a missing key. ``guess`` is an unknown key with a similar spelling, or empty."""
        key = path.rpartition(".")[2]
        advice = f"write {key!r} for {guess!r}" if guess else f"add {key!r}"
        return self.malformed(path, found="no such key", expected=expected, advice=advice)

    def _distinct(self, path: str, names: Sequence[str]) -> None:
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self.malformed(path, found=f"{twice!r} twice", expected="every host once")

    def consistent(self, groups: Sequence[Group], hosts: Sequence[str] | None) -> None:
        """Check that group names differ, every host is in one group, and the groups have exactly the listed hosts."""
        group_of: dict[str, str] = {}
        names = [group.instance_group_name for group in groups]
        for index, (name, group) in enumerate(zip(names, groups, strict=True)):
            if name in names[:index]:
                path = f"instance_groups[{index}].instance_group_name"
                raise self.malformed(path, found=f"{name!r} a second time", expected="distinct group names")
            for host in group.hosts:
                if host in group_of:
                    found = f"{host!r}, which group {group_of[host]!r} also has"
                    path = f"instance_groups[{index}].hosts"
                    raise self.malformed(path, found=found, expected="every host in one group")
                group_of[host] = name
        if hosts is not None and set(hosts) != set(group_of):
            in_one_list = sorted(set(hosts) ^ set(group_of), key=natural_key)
            found = f"{listing(in_one_list)} in only one of hosts and instance_groups"
            raise self.malformed("hosts", found=found, expected="the hosts of all groups together")

    def current_group_agrees(self, groups: Sequence[Group], current_host: str) -> None:
        """Check that the stated current group contains the current host."""
        stated = self.content.current_group_name
        # If no group has the current host, raise nothing here, because `parse_cluster` reports the host.
        actual = next((group.instance_group_name for group in groups if current_host in group.hosts), stated)
        if stated and stated != actual:
            names = [group.instance_group_name for group in groups]
            raise self.malformed(
                "current_group_name",
                found=f"{stated!r}, although {current_host!r} is a host of {actual!r}",
                expected=f"one of {listing(names)}, the one with the current host",
                guess=close(stated, names),
            )


def load(path: Path) -> dict[str, object]:
    """Read a JSON object from a file of at most `MAX_FILE_BYTES` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        problem = error.strerror or str(error)
        raise ClusterError(
            f"cannot read the description of the cluster: {problem}\n  in: {path}\n"
            "  to do: check the path and its permissions; --cluster-file FILE names another file"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ClusterError(f"the description of the cluster is over {MAX_FILE_BYTES} bytes\n  in: {path}")
    return decode(content, str(path))


def decode(content: str | bytes, source: str) -> dict[str, object]:
    """Decode a JSON object."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"the description of the cluster is not JSON\n  in: {source}\n  found: {str(error)[:200]}\n"
            f"  expected: {EXAMPLE}"
        ) from error
    if not isinstance(document, dict):
        found = f"{shortened(repr(document), 100)} ({type(document).__name__})"
        raise Document({}, source).malformed("its top", found=found, expected=EXAMPLE)
    return document


def close(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar, or an empty text if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")
