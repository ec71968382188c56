"""Validation of an untrusted cluster description. An error in its content names the key path and what is expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from hetero.cluster.spec import natural_key
from hetero.errors import ClusterError

__all__ = ["Document", "Group", "close", "decode", "listing", "load", "show"]

MAX_FILE_BYTES = 1 << 20
MAX_GROUPS = 64
MAX_HOSTS = 4096
MAX_GROUP_NAME = 64
MAX_TEXT = 253  # the longest host name

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}")
_GROUP_KEYS = ("hosts", "instance_group_name", "instance_type")
_KEYS = (
    "current_group_name",
    "current_host",
    "current_instance_group",
    "current_instance_type",
    "hosts",
    "instance_groups",
    "network_interface_name",
    "topology",
)
Group: TypeAlias = tuple[str, str, list[str]]
"""Name, instance type (may be empty) and host names."""


class Document:
    """Typed access to an untrusted document. Every error names the key path, what was found and what is expected."""

    def __init__(self, document: Mapping[str, object], source: str) -> None:
        self.document = document
        self.source = source

    def malformed(self, path: str, *, found: str, expected: str, advice: str = "", guess: str = "") -> ClusterError:
        """Return the error for a wrong value."""
        lines = [f"the description of the cluster is wrong at {path[:60]}", f"in: {self.source}", f"found: {found}"]
        lines += [f"expected: {expected}", guess and f"did you mean {guess!r}?", advice and f"to do: {advice}"]
        return ClusterError("\n  ".join(line for line in lines if line))

    def missing(self, key: str, path: str, expected: str, where: Mapping[str, object]) -> ClusterError:
        """Return the error for a missing key. It points out an unknown key with a similar spelling."""
        known = _GROUP_KEYS if path else _KEYS
        strangers = [name for name in where if name not in known]
        guess = close(key, strangers)
        return self.malformed(
            path + key,
            found=f"no such key beside {listing(where)}",
            expected=expected,
            advice=f"write {key!r} for {guess!r}" if guess else f"add {key!r}",
        )

    def text(self, where: Mapping[str, object], key: str, path: str, *, default: str | None = None) -> str:
        """Return the text at a key, or the default if the key is missing or its value is null."""
        if where.get(key) is None:
            if default is not None:
                return default
            raise self.missing(key, path, "a text", where)
        value = where[key]
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
            raise self.malformed(path + key, found=show(value), expected=f"1 to {MAX_TEXT} printable characters")
        return value

    def host_names(self, where: Mapping[str, object], key: str, path: str) -> list[str]:
        """Return a list of distinct host names in the order of the document."""
        names = where.get(key)
        if key not in where:
            raise self.missing(key, path, "a list of host names", where)
        if not isinstance(names, list) or not 0 < len(names) <= MAX_HOSTS:
            expected = f"a list of 1 to {MAX_HOSTS} host names"
            raise self.malformed(path + key, found=show(names), expected=expected)
        for index, name in enumerate(names):
            if not isinstance(name, str) or not _HOST_NAME.fullmatch(name):
                expected = "a host name or address: at most 253 letters, digits and . _ : -"
                raise self.malformed(f"{path}{key}[{index}]", found=show(name), expected=expected)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self.malformed(path + key, found=f"{twice!r} twice", expected="every host once")
        return names

    def group_list(self) -> list[object]:
        """Return the items of ``instance_groups``, which `group` validates."""
        items = self.document["instance_groups"]
        if not isinstance(items, list) or len(items) > MAX_GROUPS:
            expected = f"a list of 1 to {MAX_GROUPS} instance groups"
            raise self.malformed("instance_groups", found=show(items), expected=expected)
        return items

    def group(self, item: object, index: int) -> Group:
        """Validate and return one instance group."""
        path = f"instance_groups[{index}]"
        if not isinstance(item, dict):
            raise self.malformed(path, found=show(item), expected=f"an object with {listing(_GROUP_KEYS)}")
        name = self.text(item, "instance_group_name", f"{path}.")
        if len(name) > MAX_GROUP_NAME:
            expected = f"at most {MAX_GROUP_NAME} characters"
            raise self.malformed(f"{path}.instance_group_name", found=f"{len(name)} characters", expected=expected)
        kind = self.text(item, "instance_type", f"{path}.", default="")
        return name, kind, self.host_names(item, "hosts", f"{path}.")

    def group_name(self) -> str:
        """Return the current group's name under either spelling of its key, empty if neither key is there."""
        spellings = ("current_group_name", "current_instance_group")
        names = [self.text(self.document, key, "", default="") for key in spellings]
        if all(names) and names[0] != names[1]:
            found = f"{names[0]!r}, but {names[1]!r} as {spellings[1]}"
            raise self.malformed(spellings[0], found=found, expected="the same group under both spellings")
        return names[0] or names[1]

    def consistent(self, groups: Sequence[Group], hosts: Sequence[str] | None) -> None:
        """Check that group names differ, every host is in one group, and the groups have exactly the listed hosts."""
        owner: dict[str, str] = {}
        names = [name for name, _, _ in groups]
        for index, (name, _, members) in enumerate(groups):
            if name in names[:index]:
                path = f"instance_groups[{index}].instance_group_name"
                raise self.malformed(path, found=f"{name!r} a second time", expected="group names that differ")
            for host in members:
                if host in owner:
                    found = f"{host!r}, which group {owner[host]!r} has too"
                    path = f"instance_groups[{index}].hosts"
                    raise self.malformed(path, found=found, expected="every host in one group")
                owner[host] = name
        if hosts is not None and set(hosts) != set(owner):
            odd = sorted(set(hosts) ^ set(owner), key=natural_key)
            found = f"{listing(odd)} in only one of hosts and instance_groups"
            raise self.malformed("hosts", found=found, expected="the hosts of all groups together")

    def current_group_agrees(self, groups: Sequence[Group], current_host: str) -> None:
        """Check that the stated current group contains the current host."""
        stated = self.group_name()
        actual = next((name for name, _, hosts in groups if current_host in hosts), stated)
        if stated and stated != actual:
            names = [name for name, _, _ in groups]
            raise self.malformed(
                "current_group_name" if self.document.get("current_group_name") else "current_instance_group",
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
            '  expected: an object such as {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"], ...}'
        ) from error
    if not isinstance(document, dict):
        raise Document({}, source).malformed("its top", found=show(document), expected="an object")
    return document


def close(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar, or an empty text if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


def show(value: object) -> str:
    """Return a short form of a value with its type."""
    text = repr(value)
    return f"{text if len(text) <= 100 else text[:97] + '...'} ({type(value).__name__})"


def listing(names: Iterable[object]) -> str:
    """Return the first eight names as text, and how many more there are."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
