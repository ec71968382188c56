"""Comparison between processes of the globals that a data set's code reads.

A data host imports the script and does not run ``main()``. If ``main()`` changes a global, the data host does not have
the new value, and the data set would silently make other samples. Every process therefore computes digests of the
globals that the data set's code reads and that hold plain values. The rank compares them with its own digests.

A difference is an error if the rank's value has changed since the data set was registered, because registration is
part of the import. Other differences are logged, because they may be right: a path from the environment may differ
between hosts. The files with the code are compared too, and a difference is logged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any

from hetero.batches.purity.changes import own_changes
from hetero.batches.purity.reach import (
    SCRIPT_NAMES,
    Place,
    module_places,
    reach,
    user_modules,
    value_places,
)
from hetero.batches.purity.values import plain_digest
from hetero.errors import DatasetMismatchError
from hetero.spec import DatasetFactory

__all__ = ["GlobalValue", "GlobalsReader", "check_globals", "note_globals"]

MAX_GLOBALS = 256
"""Limit on the number of globals of one data set that are compared."""

_MAX_NAMED = 5
_MAX_SHOWN_CHARS = 60
# Values with such names are not shown in messages. More people read logs and the platform's messages than the script.
_SECRET = re.compile(r"key|token|secret|passw|pwd|credential|auth", re.IGNORECASE)
_SOURCE = "source of "  # begins the label of a file. The label of a global cannot contain a space.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GlobalValue:
    """Value of one global in this process."""

    digest: str
    """Hexadecimal digest. Empty for a callable or a large value. Two such values count as equal, but None differs."""
    shown: str
    """Text for messages: the value, or its type if the value is long or looks like a secret."""
    is_global: bool = True
    """Whether this is a global or an attribute of a class, and not a value in a registered function."""
    attribute_digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the attributes of an object, by name. Empty for other values."""
    changed_from: str | None = None
    """Text of the value at the registration of the data set, if the value has changed since then. Empty if the value
    has not changed. None if this is not known."""


_noted: dict[str, dict[str, GlobalValue]] = {}
"""Values when data sets were registered, by data set and label. Values of globals are under an empty name."""


def note_globals(factory: DatasetFactory) -> None:
    """Record the plain values of the user's globals, and of the values in a factory's functions.

    Call this when the factory is registered. At this time the script is being imported, and ``main()`` has not changed
    anything yet. The code that the factory uses may not be defined yet, so the globals of all of the user's modules are
    recorded.
    """
    # Globals belong to no single data set, so they are under an empty name. Each registration records them again,
    # because the script has defined more of them by then.
    _noted[""] = _values_of(place for module in user_modules() for place in module_places(module))
    _noted[factory.name] = _values_of(value_places(factory))


class GlobalsReader:
    """Finds and reads the globals that the code of one data set reads.

    Args:
        roots: The registered factory, or the user's data set object and functions.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        # Name of the data set in `_noted`. Empty for an object that no factory made.
        self._name = next((root.name for root in roots if isinstance(root, DatasetFactory)), "")
        self._changed_here: set[str] = set()
        """Labels of the globals that the data set's code has changed when it ran here."""
        self.warned: set[str] = set()
        """Labels of the globals whose difference was logged."""

    def read(self) -> dict[str, GlobalValue]:
        """Return the plain values and callables in globals, by label. The files with the code have entries too.

        Globals that the data set's code changes are left out. These are caches and counters, which may differ.
        """
        try:
            return self._read()
        except Exception as error:  # noqa: BLE001 - the user's objects may raise when they are inspected
            logger.info("globals that data sets read are not compared: %s: %s", type(error).__name__, error)
            return {}

    def _read(self) -> dict[str, GlobalValue]:
        """Read as `read` does. May raise what the user's objects raise."""
        reached = reach(self._roots)
        found: dict[str, GlobalValue] = {}
        # Leave out globals that the data set's code assigns, or has changed here. They are caches and counters.
        changed_by_dataset = reached.stored | self._changed_here
        # `_noted` has the values of all globals under an empty name, and those in functions under the data set's name.
        noted = {**_noted.get("", {}), **_noted.get(self._name, {})}
        for label, value in _values_of(reached.places.values()).items():
            if label not in changed_by_dataset:
                changed_from = _changed_from(noted.get(label), value, reached.names)
                found[label] = dataclasses.replace(value, changed_from=changed_from)
        # Include the files with the code, because an endpoint that is started again may import an edited script. The
        # digest here is that of the file that this process has imported, so the file counts as unchanged.
        for name, namespace in reached.modules.items():
            label = _SOURCE + ("the script" if name in SCRIPT_NAMES else name)
            found[label] = GlobalValue(_source_digest(str(namespace.get("__file__"))), shown="a file", changed_from="")
        return found

    def digests(self) -> dict[str, str]:
        """Return the digests of plain values by label, for the first `MAX_GLOBALS` labels in sorted order."""
        found = {label: value.digest for label, value in self.read().items() if value.digest}
        # Sort the labels first, because all processes must leave out the same ones.
        return dict(sorted(found.items())[:MAX_GLOBALS])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for the data set's code. Globals that it changes are left out from then on, as caches."""
        before = self.digests()
        try:
            yield
        finally:
            after = self.digests()
            self._changed_here.update(label for label, digest in before.items() if after.get(label) != digest)

    @functools.cached_property
    def own_changes(self) -> set[str]:
        """Labels of the globals that the data set's source code may change. The source is read only once."""
        return own_changes(reach(self._roots))


def check_globals(
    reader: GlobalsReader,
    own: Mapping[str, GlobalValue],
    others: Mapping[str, str],
    *,
    dataset: str,
    there: str,
) -> None:
    """Compare the globals of the rank with those of another process.

    If the script has not changed the rank's value since the import, the difference is logged once, as info. If it is
    not known whether the script has changed the value, the difference is logged once, as a warning. It is not known,
    for example, for a global that was made after the last data set was registered.

    Args:
        reader: Reader for the same data set, in this process.
        own: Globals of the rank.
        others: Digests from the other process.
        dataset: Name of the data set.
        there: Name of the other process in messages, for example ``algo-2/0``.

    Raises:
        DatasetMismatchError: If the rank's value differs, and the script has changed it since the import.
    """
    # A transform cannot be hashed, so its digest is empty and equals that of any other transform. But if main() sets a
    # transform, the global is still None on data hosts, and this difference counts.
    nothing = plain_digest(None)
    differing = [
        label
        for label, value in own.items()
        if label in others and others[label] != value.digest and (value.digest or others[label] == nothing)
    ]
    # Ignore caches and counters of the data set's code, because they differ where that code has run. For example, a
    # counter of errors stays 0 on an endpoint without errors. A correct job was refused because of such a counter.
    differing = [label for label in differing if label not in reader.own_changes]
    # Data hosts have the value of the import. If the script has changed the value since, the samples would differ.
    changed = [label for label in differing if own[label].changed_from]
    if changed:
        raise DatasetMismatchError(_complaint(changed, own, dataset=dataset, there=there))
    for label in differing:
        if label not in reader.warned:
            reader.warned.add(label)
            _log_difference(label, own[label], dataset=dataset, there=there)


def _log_difference(label: str, value: GlobalValue, *, dataset: str, there: str) -> None:
    """Log that a file or a global differs between processes. The script may be right, because hosts may differ.

    Log a warning if it is not known whether the script has changed the global since the import.
    """
    # The label of a file with code begins with `_SOURCE`, and other labels are names of globals.
    if label.startswith(_SOURCE):
        logger.warning(
            "the %s has other bytes on %s than in the rank, so data set %r may make other samples there. Give all "
            "hosts the same files.",
            label,
            there,
            dataset,
        )
        return
    logger.log(
        logging.WARNING if value.changed_from is None else logging.INFO,
        "%s%s has another value on %s than in the rank (%s), and data set %r reads it. It may depend on the host. If "
        "samples depend on it, make it an argument of the factory.",
        "global " if value.is_global else "",
        label,
        there,
        value.shown,
        dataset,
    )


def _complaint(labels: Sequence[str], own: Mapping[str, GlobalValue], *, dataset: str, there: str) -> str:
    """Return the error message about globals that the script has changed since the import, with advice."""
    first = labels[0]
    kind = "global " if own[first].is_global else ""
    lines = [f"{kind}{first:.60} has another value on {there} than in the rank, and data set {dataset!r:.40} reads it"]
    lines += [
        f"{each}: {own[each].shown} in the rank; {own[each].changed_from} after the import"
        for each in labels[:_MAX_NAMED]
    ]
    if len(labels) > _MAX_NAMED:
        lines.append(f"and {len(labels) - _MAX_NAMED} more")
    lines.append(
        "Data hosts and loader processes only import the script. They do not run main(), so they keep the value of the "
        "import, and samples would differ."
    )
    argument = first.rpartition(".")[2].lower()
    # The advice below says to make the value an argument of the factory. For an option of a collate_fn, this is
    # possible only if the factory's data set has the collate_fn, because the factory can then pass the option on.
    if not own[first].is_global:
        lines.append(
            "The data set that a factory returns may have the collate_fn as an attribute or method, and its options."
        )
    lines.append(
        f"Make it an argument of the factory, {dataset:.40}(..., {argument}=...), or set it where the script is "
        "imported: at the top level, from an environment variable or the command line. --purity-checks 0 switches this "
        "comparison off. hetero check SCRIPT names the line that changes it."
    )
    return "\n  ".join(lines)


def _changed_from(noted: GlobalValue | None, value: GlobalValue, names: set[str]) -> str | None:
    """Return `GlobalValue.changed_from`: a text if the value has changed, empty if not, None if this is not known.

    Args:
        noted: The value when the data set was registered. None if the global was made later.
        value: The present value.
        names: The names in the data set's code.
    """
    if noted is None:
        return None
    if noted.digest == value.digest:
        return ""
    earlier, present = noted.attribute_digests, value.attribute_digests
    if earlier and present:
        changed = {name for name in {*earlier, *present} if earlier.get(name) != present.get(name)}
        # main() may store anything in the global arguments, such as args.rank, while the data set reads only args.root.
        # So only changed attributes whose names are in the data set's code count. Without such names, it is not known
        # whether the change matters.
        if not changed & names:
            return None
        return f"{noted.shown} with another {', '.join(sorted(changed & names)[:_MAX_NAMED])}"
    return noted.shown


def _values_of(places: Iterable[Place]) -> dict[str, GlobalValue]:
    """Return the plain values and callables at places, by label."""
    found: dict[str, GlobalValue] = {}
    for place in places:
        # Skip a global that no longer exists, and objects of the user that raise when they are inspected.
        with contextlib.suppress(Exception):
            value = place.value()
            digest = plain_digest(value)
            if digest is not None or callable(value):
                attributes = {} if callable(value) else getattr(value, "__dict__", {})
                found[place.label] = GlobalValue(
                    digest=digest or "",
                    shown=_show(place.label, value),
                    # Only values in registered functions have `Place.function_code`.
                    is_global=place.function_code is None,
                    attribute_digests={name: plain_digest(each) or "" for name, each in attributes.items()},
                )
    return found


@functools.cache
def _source_digest(file: str) -> str:
    """Return a digest of a file. It is computed at the first call, because a later edit does not change the import."""
    try:
        return blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def _show(name: str, value: Any) -> str:
    """Return a short plain value as text, or the type of any other value, because logs should not show its content."""
    kind = type(value).__name__
    if _SECRET.search(name):
        return f"a {kind} (not shown)"
    if isinstance(value, enum.Enum | PurePath):
        text = str(value)
    elif isinstance(value, str) and ("://" in value or _SECRET.search(value)):
        # An address may contain a password.
        text = ""
    elif value is None or type(value) in (bool, int, float, complex, str):
        # Python refuses to print very long integers.
        text = ascii(value) if not isinstance(value, int) or abs(value) < 10**_MAX_SHOWN_CHARS else ""
    elif isinstance(value, tuple) and all(type(item) in (bool, int, float) for item in value):
        text = repr(value)
    else:
        text = ""
    if text and len(text) <= _MAX_SHOWN_CHARS:
        return text
    # Most callables count as equal, whatever they hold (`GlobalValue.digest`). So state no length of a callable.
    return f"a {kind}" + (f" of {len(value)}" if hasattr(type(value), "__len__") and not callable(value) else "")
