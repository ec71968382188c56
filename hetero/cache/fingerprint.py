"""A digest of everything that the result of a data set's ``load`` depends on.

The digest covers the registered name and its arguments, the code that ``load`` uses, the globals that this code reads,
the attributes of the data set, the versions of all installed packages, the kind of CPU, and a few loaded samples. If a
file changes under the same path, the digest stays the same, unless the file belongs to one of these samples. Then the
user has to change `DatasetFactory.fingerprint`, which is part of the digest too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
from hashlib import blake2b
from pathlib import Path

from hetero.batches.build import BuiltDataset
from hetero.batches.indices import probes
from hetero.batches.purity.comparison import digest
from hetero.batches.purity.reach import Reach, reach
from hetero.batches.purity.values import code_digest, value_digest
from hetero.batches.seeds import seed_generators
from hetero.batches.split import SplitDataset
from hetero.spec import DatasetFactory, DatasetSpec

__all__ = ["Fingerprint"]

_FORMAT = 4
"""Version of the digest. It changes whenever the digest covers other things."""


class Fingerprint:
    """The digest of one data set. The constructor computes all parts that need no sample, before endpoints are forked.

    Args:
        built: The built data set, with a `SplitDataset`.
        factory: The factory of the data set.
        spec: The spec of the data set.
    """

    def __init__(self, built: BuiltDataset, factory: DatasetFactory, spec: DatasetSpec) -> None:
        # A data set with a cache always has a `SplitDataset`.
        assert built.split is not None
        self._built = built
        self._split = built.split
        self._stated = factory.fingerprint
        inner = built.split.inner
        kind = type(inner)
        # Leave out `augment`. It runs after a kept sample is read, so kept samples stay right if its code changes.
        found = reach((factory.function, kind), without=[vars(each).get("augment") for each in kind.__mro__])
        facts = {
            "format": _FORMAT,
            "name": spec.name,
            "arguments": spec.arguments_json,
            "code": _code_digest(found),
            "globals": _globals_digests(found),
            "attributes": value_digest(inner).hex(),
            "packages": _packages(),
            "machine": [platform.python_version(), platform.machine(), _cpu()],
        }
        self._facts = json.dumps(facts, sort_keys=True).encode()

    def key(self) -> bytes:
        """Return the digest, 20 bytes. Loads a few samples, and seeds the global generators."""
        hasher = blake2b(self._facts, digest_size=20, person=b"hetero.loads")
        # The user's ``fingerprint=``: a text, a function that returns a text, or None.
        stated = self._stated
        if callable(stated):
            # Seed first, because the function may draw random numbers, and must draw the same ones in all processes.
            seed_generators(key=0)
            stated = stated(self._split.dataset)
        # As JSON, None differs from every text.
        hasher.update(json.dumps(None if stated is None else str(stated)).encode())
        num_samples = len(self._split.inner)
        hasher.update(str(num_samples).encode())
        # The user's ``load`` may read torch's worker info, as in a batch.
        with self._built.worker_info():
            for probe in probes(num_samples):
                hasher.update(_probe(self._split, probe))
        return hasher.digest()


def _probe(split: SplitDataset, index: int) -> bytes:
    """Return a digest of one loaded sample, or ``raised`` if ``load`` raises."""
    # Do not report the error here, because the batch that has this sample reports it. Skip an object that cannot be
    # inspected, so that the rest of its sample still counts.
    with contextlib.suppress(Exception):
        return digest(split.inner.load(index), skip_unreadable=True)
    return b"raised"


def _code_digest(found: Reach) -> str:
    """Return a digest of code. It does not depend on the file and the line where the code is."""
    return blake2b(b"".join(sorted(code_digest(code) for code in found.functions)), digest_size=16).hexdigest()


def _globals_digests(found: Reach) -> dict[str, str]:
    """Return digests of the globals that code reads.

    Leave out the globals that the code also assigns. These are caches and counters, which may differ.
    """
    digests: dict[str, str] = {}
    for label, place in found.places.items():
        # The method `augment` runs on kept samples after they are read, so it does not count.
        is_augment = place.name == "augment" and isinstance(place.owner, type)
        if label not in found.stored and not is_augment:
            with contextlib.suppress(KeyError):  # the global no longer exists
                digests[label] = value_digest(place.value()).hex()
    return digests


@functools.cache
def _packages() -> list[tuple[str, str]]:
    """Return the installed packages with their versions. Takes about 100 ms."""
    found = {(str(each.metadata["Name"]), each.version) for each in importlib.metadata.distributions()}
    return sorted(found)


@functools.cache
def _cpu() -> str:
    """Return the model of the CPU, because the bits of a sum may depend on it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
