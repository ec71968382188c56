"""Compares the globals and batches of endpoints with those of this process.

Data hosts only import the script, so changes that ``main()`` makes are missing there. Two things are compared at the
beginning of a pass. The first is the globals that the data set's code reads (`hetero.batches.globals`). The second is
the loader's first batches, those of its purity check, if this process can build the data set.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import describe_environment, fetch
from hetero.batches.globals import GlobalsReader, check_globals
from hetero.batches.purity import compare
from hetero.batches.request import BatchRequest
from hetero.batches.samples import Cancelled
from hetero.batches.seeds import preserved_generators, single_threaded
from hetero.batches.structure import flatten, unflatten
from hetero.dataplane.reader.consistency import Agreement
from hetero.dataplane.reader.fleet import Fleet
from hetero.dataplane.reader.reader import Reader
from hetero.datasets import get_factory, prebuild
from hetero.errors import DatasetError, DatasetMismatchError
from hetero.spec import DatasetFactory, DatasetSpec
from hetero.system.process import thread_limits

__all__ = ["CheckedReader"]

MAX_BUILD_S = 10.0
"""Longest build time on an endpoint, in seconds. A slower data set is not built in the rank, because training would
wait."""
MAX_COMPARE_S = 20.0
"""Seconds for the comparison of one loader's batches in a pass."""

logger = logging.getLogger(__name__)

_readers: dict[str, tuple[DatasetFactory, GlobalsReader]] = {}
_skipped: set[DatasetSpec] = set()  # specs whose batches are not compared, for a reason that was logged


class CheckedReader(Iterator[Any]):
    """A reader that compares the data set and its first batches with this process's own. For one consuming thread.

    Args:
        fleet: The endpoints.
        requests: The batches to fetch.
        open_reader: Makes the reader of these requests.
        compares_globals: Whether to compare the globals that the data set's code reads.
        compares_batches: Whether to compute the batches of the purity check in this process too. This uses the
            process's global generators, so it is unsafe while other threads draw from them.

    Raises:
        DatasetMismatchError: If a global that the data set's code reads has another value on an endpoint.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: Iterator[BatchRequest],
        open_reader: Callable[[Iterator[BatchRequest]], Reader],
        *,
        compares_globals: bool,
        compares_batches: bool,
    ) -> None:
        self._fleet = fleet
        self._compares_globals = compares_globals
        self._requests = _Requests(requests)
        self._twin = _Twin() if compares_batches else None
        self._num_delivered = 0
        self._reader = open_reader(iter(self._requests))
        self._compare_or_close()  # endpoints have described the data set already if its length was requested

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived.

        Raises:
            DatasetMismatchError: If the data set differs between this process and the endpoints.
            HeteroError: As in `Reader`.
        """
        number = self._num_delivered
        self._num_delivered += 1
        try:
            batch = next(self._reader)
        except DatasetError:
            self._requests.marked.pop(number, None)
            if not number:
                self._compare_or_close()  # a global that differs on data hosts may be the cause, for example a None
            raise
        request = self._requests.marked.pop(number, None)
        if number and request is None:
            return batch
        # Before delivery, check the globals at the first batch, and compare the batches of the purity check.
        try:
            if not number:
                self._check_globals()
            if request is not None and self._twin is not None:
                self._twin.compare(self._fleet, self._agreement(request.spec), request, batch)
        except BaseException:
            self.close()
            raise
        if not self._requests.marked:
            self._twin = self._twin and _Twin()  # releases the built data set
        return batch

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return self._reader.is_open

    def close(self) -> None:
        """Close the reader. Idempotent. Blocks like `Reader.close`."""
        self._twin = None
        self._reader.close()

    def __enter__(self) -> CheckedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare_or_close(self) -> None:
        try:
            self._check_globals()
        except BaseException:
            self.close()
            raise

    def _agreement(self, spec: DatasetSpec) -> Agreement:
        with self._fleet.lock:
            return self._fleet.want(spec)

    def _check_globals(self) -> None:
        """Compare the globals with every endpoint that has described the data set so far."""
        spec = self._requests.spec
        if spec is None or not self._compares_globals:
            return
        agreement = self._agreement(spec)
        with self._fleet.lock:
            descriptions = dict(agreement.descriptions)
        if not any(description.globals for description in descriptions.values()):
            return
        reader = _globals_reader(spec)
        own = reader.read()
        for endpoint, description in sorted(descriptions.items()):
            check_globals(reader, own, description.globals, dataset=spec.name, there=endpoint)


class _Requests:
    """The requests of one pass. It records the requests whose batches must be compared.

    This class is separate from `CheckedReader` because the reader holds it, and must not hold its own owner.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self._num_taken = 0
        self.spec: DatasetSpec | None = None
        """Spec of the first request."""
        self.marked: dict[int, BatchRequest] = {}
        """Undelivered requests of the purity check, by number in the pass."""

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self._requests:
            if self.spec is None:  # not `or`, which would request the spec's length
                self.spec = request.spec
            if request.verify:
                self.marked[self._num_taken] = request
            self._num_taken += 1
            yield request


class _Twin:
    """This process's own copy of a data set, for a few batches."""

    def __init__(self) -> None:
        self._built: BuiltDataset | None = None
        self._left_s = MAX_COMPARE_S

    def compare(self, fleet: Fleet, agreement: Agreement, request: BatchRequest, batch: Any) -> None:
        """Compute a batch in this process too, and compare it with the delivered one.

        Raises:
            DatasetMismatchError: If it differs from the batch that an endpoint delivered.
        """
        spec = request.spec
        if spec in _skipped or request.on_sample_error != "raise":  # samples may be missing on one host only
            return
        # Compute the batch, unless there is a reason against it.
        begin_s = time.monotonic()
        try:
            with preserved_generators(), single_threaded():
                reason = self._build(agreement, spec)
                own = None if reason else self._fetch(request, begin_s + self._left_s)
                environment = describe_environment()
            if not reason:
                own = unflatten(*flatten(own, fleet.limits))  # with the types that a batch from an endpoint has
        except Cancelled:
            reason = f"computing them takes longer than {MAX_COMPARE_S:g} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, also on a host without the data
            reason = f"here: {error}".partition("\n")[0]
        self._left_s -= time.monotonic() - begin_s
        if reason:
            _skipped.add(spec)
            logger.info(
                "first batches of data set %s are not compared with ones computed in the rank: %s", spec, reason
            )
            return
        # Compare. A difference with another possible cause than the script is only logged.
        difference = compare(batch, own)
        if difference is None or (_computes_with_threads() and _is_rounding(batch, own)):
            return
        where = f"epoch {request.epoch}, position {request.position}: {difference}"
        doubt = _find_doubt(agreement, spec, environment)
        if doubt:
            _skipped.add(spec)
            logger.warning(
                "data set %r makes another batch in the rank than on data hosts, at %s. That may be because %s.",
                spec.name,
                where,
                doubt,
            )
            return
        raise DatasetMismatchError(
            f"data set {spec.name!r} makes another batch in the rank than on data hosts\n"
            f"  At {where} (the data host's against the rank's).\n"
            "  Data hosts only import the script. Typical causes: a global or class attribute that main() changed, "
            "files that differ between hosts, environment variables.\n"
            "  Make it an argument of the factory. --purity-checks 0 switches this comparison off."
        )

    def _build(self, agreement: Agreement, spec: DatasetSpec) -> str:
        """Build the data set if it is not built yet. Return the reason if it cannot be built, else an empty text."""
        if self._built is not None:
            return ""
        if agreement.build_s > MAX_BUILD_S:
            return f"building it took {agreement.build_s:.0f} s on a data host"
        if get_factory(spec.name).collate_fn is None and "torch" not in sys.modules:
            return "torch, whose default_collate makes them, is not imported here"
        built = prebuild(spec)
        expected = agreement.reference
        if expected is not None and built.num_samples != expected.num_samples:
            return f"it has {built.num_samples} samples here and {expected.num_samples} there"
        # Worker info is set as on endpoints. worker_init_fn is not called because it may change this process.
        built.num_workers = 1
        self._built = built
        return ""

    def _fetch(self, request: BatchRequest, deadline_s: float) -> Any:
        assert self._built is not None
        return fetch(
            self._built,
            dataclasses.replace(request, verify=False),
            cancelled=lambda: time.monotonic() > deadline_s,
        )


def _find_doubt(agreement: Agreement, spec: DatasetSpec, environment: dict[str, str]) -> str:
    """Return why a difference may have another cause than the script. Return an empty text without such a reason."""
    for endpoint, description in sorted(dict(agreement.descriptions).items()):
        for name in sorted(environment.keys() & description.environment.keys()):
            here, there = environment[name], description.environment[name]
            if here != there:
                return f"{name} is {here} here and {there} on {endpoint}"
    if get_factory(spec.name).worker_init_fn is not None:
        return "worker_init_fn is called on data hosts only"
    return ""


def _computes_with_threads() -> bool:
    """Return whether NumPy's libraries may use several threads here.

    Endpoints use one, and sums depend on the number.
    """
    return any(os.environ.get(name) != value for name, value in thread_limits().items())


def _is_rounding(one: Any, other: Any) -> bool:
    """Return whether two batches differ only in the last bits of floating point numbers."""
    tree, leaves = flatten(one)
    other_tree, other_leaves = flatten(other)
    if tree != other_tree or len(leaves) != len(other_leaves):
        return False
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        if (leaf.container, leaf.dtype, leaf.shape) != (other_leaf.container, other_leaf.dtype, other_leaf.shape):
            return False
        if leaf.dtype not in ("f32", "f64"):
            if leaf.data != other_leaf.data:
                return False
            continue
        kind = np.float32 if leaf.dtype == "f32" else np.float64
        values, others = (np.frombuffer(each.data, kind) for each in (leaf, other_leaf))
        scale = float(np.nanmax(np.abs(values), initial=0.0))
        if not np.allclose(values, others, rtol=1e-3, atol=1e-5 * scale, equal_nan=True):
            return False
    return True


def _globals_reader(spec: DatasetSpec) -> GlobalsReader:
    factory = get_factory(spec.name)
    known = _readers.get(spec.name)
    if known is None or known[0] is not factory:
        known = _readers[spec.name] = factory, GlobalsReader(factory)
    return known[1]
