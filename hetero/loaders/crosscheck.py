"""Compares the globals and batches of endpoints with the globals and batches of this process.

Data hosts only import the script, so changes that ``main()`` makes are missing there. At the beginning of a pass, the
globals that the data set's code reads are compared (`hetero.batches.purity.globals`). If this process can build the
data set, it also computes and compares the batches of the purity check, which are the loader's first batches.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled
from hetero.batches.fetch import describe_environment, fetch
from hetero.batches.purity.comparison import compare
from hetero.batches.purity.globals import GlobalsReader, check_globals
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators, single_threaded
from hetero.batches.structure.conversion import flatten, unflatten
from hetero.datasets import get_factory, prebuild
from hetero.epochs import epoch_text
from hetero.errors import DatasetError, DatasetMismatchError
from hetero.reader.consistency import ServedDataset
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.spec import DatasetFactory, DatasetSpec
from hetero.system.process import thread_limits

__all__ = ["CheckedReader"]

MAX_COMPARE_S = 20.0
"""Seconds that training may wait for a comparison. If an endpoint needed longer to build the data set, ranks do not
build it."""
LATER_SHARE = 0.005
"""Share of the time that the comparison of later batches may take. Later batches are compared because a file or a
library's setting may change at any time (tests/torch/test_crosscheck.py)."""

logger = logging.getLogger(__name__)

_readers: dict[str, tuple[DatasetFactory, GlobalsReader]] = {}
_due_s: dict[DatasetSpec, float] = {}  # when a later batch is compared, on the clock of `time.monotonic`
_skipped: set[DatasetSpec] = set()  # specs whose batches are not compared, for a reason that was logged


class CheckedReader(Iterator[Any]):
    """A reader that compares globals and first batches between endpoints and this process. For one consuming thread.

    Args:
        fleet: The endpoints.
        reader: Fetches the batches. It is closed with this object.
        compares_globals: Whether to compare the globals that the data set's code reads.
        compares_batches: Whether to compute the batches of the purity check in this process too. This uses the
            process's global generators, so it is unsafe while other threads draw from them.
        compares_later: Whether to compare a later batch from time to time too.

    Raises:
        DatasetMismatchError: If a global that the data set's code reads has another value on an endpoint.
    """

    may_be_kept = True
    """Whether the reader may stay open between two passes."""

    def __init__(
        self,
        fleet: Fleet,
        reader: Reader,
        *,
        compares_globals: bool,
        compares_batches: bool,
        compares_later: bool,
    ) -> None:
        self._fleet = fleet
        self._compares_globals = compares_globals
        # ``compares_later``: whether batches after the loader's first ones are compared too, from time to time.
        self._own_dataset = _OwnDataset(compares_later=compares_later) if compares_batches else None
        self._epoch: int | None = None  # of the last batch
        self._reader = reader
        # If the script has requested the length, endpoints have already described the data set, and the globals can be
        # compared now.
        self._compare_or_close()

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived.

        Raises:
            DatasetMismatchError: If the data set differs between this process and the endpoints.
            HeteroError: As in `Reader`.
        """
        try:
            batch = next(self._reader)
        except DatasetError:
            if self._is_first():
                # The cause may be a global that has another value on data hosts, for example None. Then report that.
                self._compare_or_close()
            raise
        request = self._reader.request
        assert request is not None
        is_first = self._is_first()
        is_compared = self._own_dataset is not None and (request.verify or self._own_dataset.is_due(request.spec))
        if not is_first and not is_compared:
            # All first batches of the loader have been compared. Free the data set that this process has built for it.
            if self._own_dataset is not None:
                self._own_dataset.release()
            return batch
        # Before delivery, check the globals at the first batch of an epoch, and compare this batch if its turn is now.
        try:
            if is_first:
                self._check_globals()
            if is_compared and self._own_dataset is not None:
                # Changes that the data set's own code makes to globals, such as a counter, do not count as differences.
                with _globals_reader(request.spec).running():
                    self._own_dataset.compare(self._fleet, self._dataset(request.spec), request, batch)
        except BaseException:
            self.close()
            raise
        return batch

    @property
    def request(self) -> BatchRequest | None:
        """Request of the batch that `next` returned or raised an exception for."""
        return self._reader.request

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return self._reader.is_open

    def close(self) -> None:
        """Close the reader. Idempotent. Blocks like `Reader.close`."""
        self._own_dataset = None
        self._reader.close()

    def _is_first(self) -> bool:
        """Return whether the last batch is the first one of its epoch. Remember its epoch for the next call."""
        request = self._reader.request
        epoch, self._epoch = self._epoch, None if request is None else request.epoch
        return self._epoch is None or epoch != self._epoch

    def _compare_or_close(self) -> None:
        """Compare the globals. If they differ, close the reader and raise."""
        try:
            self._check_globals()
        except BaseException:
            self.close()
            raise

    def _dataset(self, spec: DatasetSpec) -> ServedDataset:
        """Return what the fleet knows about the data set."""
        with self._fleet.lock:
            return self._fleet.prepare(spec)

    def _check_globals(self) -> None:
        """Compare the globals of this process with those of every endpoint that has described the data set so far."""
        spec = self._reader.spec
        if spec is None or not self._compares_globals:
            return
        dataset = self._dataset(spec)
        with self._fleet.lock:
            descriptions = dict(dataset.descriptions)
        # If no endpoint reported globals, the code of the data set need not be searched for them.
        if not any(description.globals for description in descriptions.values()):
            return
        reader = _globals_reader(spec)
        here = reader.read()
        for endpoint, description in sorted(descriptions.items()):
            check_globals(reader, here, description.globals, dataset=spec.name, there=endpoint)


class _OwnDataset:
    """A data set that this process builds itself, to compare a few batches."""

    def __init__(self, *, compares_later: bool) -> None:
        self._built: BuiltDataset | None = None
        self._spent_s = 0.0  # time that building the data set and computing batches of it took
        self._compares_later = compares_later

    def is_due(self, spec: DatasetSpec) -> bool:
        """Return whether a batch is to be compared now. Each comparison sets the time of the next one.

        This is for later batches. The comparison of the loader's first batches does not depend on the time.
        """
        return self._compares_later and time.monotonic() >= _due_s.get(spec, math.inf)

    def release(self) -> None:
        """Free the built data set. A later comparison builds it again."""
        self._built, self._spent_s = None, 0.0

    def compare(self, fleet: Fleet, dataset: ServedDataset, request: BatchRequest, batch: Any) -> None:
        """Compute a delivered batch in this process too, and compare both results.

        If this process cannot compute batches of the data set, log the reason once, and compare none from now on.

        Raises:
            DatasetMismatchError: If the two results differ, and only the script can be the cause.
        """
        spec = request.spec
        # With "skip", one host may skip samples that another host has.
        if spec in _skipped or request.on_sample_error != "raise":
            return
        # Compute the batch, unless there is a reason not to. An empty ``reason`` means that the batch was computed.
        begin_s = time.monotonic()
        try:
            # Leave the script's random numbers as they are, and compute with one thread, as endpoints do.
            with preserved_generators(), single_threaded():
                reason = self._build(dataset, spec)
                computed = None if reason else self._fetch(request, begin_s + MAX_COMPARE_S)
                environment = describe_environment()
            if not reason:
                # Encode and decode the batch, because a batch from an endpoint has the types that this gives.
                computed = unflatten(*flatten(computed, fleet.limits))
        except Cancelled:
            reason = f"computing one takes longer than {MAX_COMPARE_S:g} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, also on a host without the data
            reason = f"here: {error}".partition("\n")[0]
        end_s = time.monotonic()
        # ``_spent_s`` has the seconds of the last build of the data set and of the comparisons since then. The next
        # comparison builds the data set again. It is due after ``_spent_s`` / LATER_SHARE seconds, so comparisons and
        # builds together take about LATER_SHARE of the time, at most. When builds did not count, a loop with steps of
        # 10 ms waited 50 ms for a build that came only a second after two cheap batches (bench_epoch_ends.py).
        self._spent_s += end_s - begin_s
        _due_s[spec] = end_s + self._spent_s / LATER_SHARE
        if reason:
            _skipped.add(spec)
            logger.info(
                "first batches of data set %s are not compared with ones computed in the rank: %s", spec, reason
            )
            return
        difference = compare(batch, computed)
        # Ignore differences by rounding if NumPy's libraries may use several threads here, because sums then depend on
        # the number of threads. Without this rule, such jobs ended.
        if difference is None or (_computes_with_threads() and _is_rounding(batch, computed)):
            return
        where = f"epoch {epoch_text(request.epoch)}, position {request.position}: {difference}"
        # If something other than the script may have caused the difference, only log it.
        doubt = _find_doubt(dataset, spec, environment)
        if doubt:
            _skipped.add(spec)
            logger.warning(
                "data set %r makes different batches in the rank and on data hosts, at %s. The cause may be that %s.",
                spec.name,
                where,
                doubt,
            )
            return
        raise DatasetMismatchError(
            f"data set {spec.name!r} makes different batches in the rank and on data hosts\n"
            f"  At {where} (the data host's value first).\n"
            "  Data hosts only import the script. Typical causes: a global or class attribute that main() changed, "
            "files that differ between hosts, environment variables, a file that the script writes between epochs "
            "(pass requests_next_epoch=False to the loader).\n"
            "  Pass such a value as an argument of the factory. --purity-checks 0 switches this comparison off."
        )

    def _build(self, dataset: ServedDataset, spec: DatasetSpec) -> str:
        """Build the data set if it is not built yet. Return the reason if it cannot be built, else an empty text."""
        if self._built is not None:
            return ""
        if dataset.build_s > MAX_COMPARE_S:
            return f"building it took {dataset.build_s:.0f} s on a data host"
        built = prebuild(spec)
        if built.collate_fn is None and "torch" not in sys.modules:
            return "torch is not imported here, and its default_collate makes the batches"
        expected = dataset.reference
        if expected is not None and built.num_samples != expected.num_samples:
            return f"it has {built.num_samples} samples here and {expected.num_samples} there"
        # With a number above 0, samples get torch's worker info, as on endpoints. Do not call worker_init_fn, because
        # that function may change this process.
        built.num_workers = 1
        self._built = built
        return ""

    def _fetch(self, request: BatchRequest, deadline_s: float) -> Any:
        """Compute a batch in this process, without the cache. Stop at the deadline."""
        assert self._built is not None
        # Load all samples anew, because a sample from the cache would hide that its file differs here.
        with self._built.loading_anew():
            return fetch(
                self._built,
                # With verify, the batch would be computed twice, which is not needed here.
                dataclasses.replace(request, verify=False),
                cancelled=lambda: time.monotonic() > deadline_s,
            )


def _find_doubt(dataset: ServedDataset, spec: DatasetSpec, environment: dict[str, str]) -> str:
    """Return a reason why batches may differ although the script is right. Empty if no reason is found."""
    # A copy of the descriptions, because other threads add some meanwhile.
    for endpoint, description in sorted(dict(dataset.descriptions).items()):
        for name in sorted(environment.keys() & description.environment.keys()):
            here, there = environment[name], description.environment[name]
            if here != there:
                return f"{name} is {here} here and {there} on {endpoint}"
    if get_factory(spec.name).worker_init_fn is not None:
        return "worker_init_fn is called on data hosts only"
    return ""


def _computes_with_threads() -> bool:
    """Return whether NumPy's libraries may use several threads here. Endpoints use one, and sums depend on this."""
    return any(os.environ.get(name) != value for name, value in thread_limits().items())


def _is_rounding(one: Any, other: Any) -> bool:
    """Return whether two batches differ only by small rounding errors of floating point numbers."""
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
        # A small value may be the difference of two large ones, so the absolute tolerance grows with the largest value.
        scale = float(np.nanmax(np.abs(values), initial=0.0))
        if not np.allclose(values, others, rtol=1e-3, atol=1e-5 * scale, equal_nan=True):
            return False
    return True


def _globals_reader(spec: DatasetSpec) -> GlobalsReader:
    """Return a reader of the globals that the code of a registered data set reads."""
    factory = get_factory(spec.name)
    known_factory, reader = _readers.get(spec.name, (None, None))
    # In a notebook, another factory may be registered under the same name.
    if reader is None or known_factory is not factory:
        # Keep one reader for each factory, because searching the code of a small script takes 13 ms.
        reader = GlobalsReader(factory)
        _readers[spec.name] = factory, reader
    return reader
