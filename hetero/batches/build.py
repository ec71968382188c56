"""A data set built from its spec, with what is needed to fetch from it."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any

from hetero.batches.batched import choose_seeding, has_getitems
from hetero.batches.failures import dataset_error
from hetero.batches.imported import imported
from hetero.batches.keras import (
    EpochCopies,
    is_keras_dataset,
    keras_problem,
    num_batches,
    overridden_hooks,
    seed_tensorflow,
)
from hetero.batches.overlaps import Overlaps
from hetero.batches.seeds import (
    BUILD_KEY,
    preserved_generators,
    seed_generators,
    torch_generator_is_untouched,
)
from hetero.batches.structure import type_name
from hetero.errors import ConfigError
from hetero.spec import DatasetFactory, DatasetSpec, Seeding

__all__ = ["BuiltDataset"]

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()
_overlaps = Overlaps()


class BuiltDataset:
    """A map-style data set in this process, ready for `fetch`. One thread at a time may use it.

    Attributes:
        name: Registered name, or the class of an unregistered object.
        dataset: The user's object; a copy of it where it is a Keras data set that changes between epochs.
        makes_batches: Whether its items are batches: a Keras data set that a factory built.
        collate_fn: The user's, or None for torch's ``default_collate``.
        fingerprint: The factory's ``fingerprint=``.
        worker_index: What ``torch.utils.data.get_worker_info().id`` says inside the data set.
        num_workers: Of this host; 0 in the trainer itself, where there is no worker info.
        warnings: What the user should know of the data set, a sentence each.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        collate_fn: Callable[[Any], Any] | None = None,
        seeding: Seeding | None = None,
        fingerprint: Callable[[Any], str] | str | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        info_seed: int = 0,
        may_grow: bool = False,
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._stated_seeding = seeding
        self.fingerprint = fingerprint
        self.worker_index = 0
        self.num_workers = 0
        self.warnings: tuple[str, ...] = ()
        self._worker_init_fn = worker_init_fn
        # Equal on all hosts: a data set that uses get_worker_info().seed must not differ between them.
        self._info_seed = info_seed
        self._may_grow = may_grow
        self.makes_batches = not may_grow and is_keras_dataset(dataset)
        self._epochs = EpochCopies(dataset) if self.makes_batches and overridden_hooks(dataset) else None
        self._info: Any = None  # torch's record of this worker, made when it is first asked for
        self._on_seed = self._hooks()

    @classmethod
    def from_factory(cls, factory: DatasetFactory, spec: DatasetSpec, *, host: str = "local") -> BuiltDataset:
        """Run a factory with the arguments of its spec; see `hetero.datasets.build`.

        Raises:
            DatasetError: If the factory raises, or the result is no map-style data set.
        """
        arguments = spec.arguments
        with preserved_generators():
            try:
                dataset = _run_seeded(functools.partial(factory.function, **arguments), BUILD_KEY)
                problem = _not_map_style(dataset, factory.seeding) or keras_problem(dataset)
            except Exception as exc:
                raise dataset_error(exc, dataset=spec.name, host=host, stage="build") from exc
        if problem:
            raise dataset_error(
                f"ConfigError: the factory returned {problem}", dataset=spec.name, host=host, stage="build"
            )
        built = cls(
            dataset,
            name=spec.name,
            collate_fn=factory.collate_fn,
            seeding=factory.seeding,
            fingerprint=factory.fingerprint,
            worker_init_fn=factory.worker_init_fn,
            info_seed=BUILD_KEY >> 1,
        )
        built.warnings = _overlaps.add(spec, dataset)
        return built

    @classmethod
    def from_object(
        cls, dataset: Any, *, collate_fn: Callable[[Any], Any] | None = None, seeding: Seeding | None = None
    ) -> BuiltDataset:
        """Wrap a data set object that no factory built; it can be used in this process only.

        Without ``seeding`` there is one seed for a batch if the data set has ``__getitems__``, which is then called as
        torch's loader calls it, else one for each sample.

        Raises:
            ConfigError: If it is no map-style data set.
        """
        if seeding is None:
            seeding = "batch" if has_getitems(dataset) else "sample"
        if problem := _not_map_style(dataset, seeding):
            raise ConfigError(f"the data set is {problem}")
        hooks = overridden_hooks(dataset)
        if hooks and multiprocessing.parent_process() is None:  # not once more in each of torch's workers
            logger.warning(
                "%s of %s will not be called, as torch's loader calls neither: return the data set from a function "
                "decorated with @hetero.dataset, and each epoch has what they make of it",
                " and ".join(hooks),
                type(dataset).__name__,
            )
        return cls(dataset, name=type(dataset).__name__, collate_fn=collate_fn, seeding=seeding, may_grow=True)

    @functools.cached_property
    def seeding(self) -> Seeding:
        """How often to seed: ``"sample"`` or ``"batch"``.

        Where the factory does not state it, samples are probed: at the first use, in the process that fetches. Before
        workers are forked no sample must be computed, because they would share the files that it opens.
        """
        with preserved_generators():
            chosen, warning = choose_seeding(self.dataset, self._stated_seeding)
        if warning:
            self.warnings += (f"data set {self.name!r}: {warning}",)
        return chosen

    @property
    def seeding_was_probed(self) -> bool:
        """Whether `seeding` is ``"batch"`` because of what samples did here: other hosts have to find the same."""
        return self._stated_seeding is None and self.seeding == "batch"

    def log_warnings(self) -> None:
        """Log what the user should know of the data set, once: where no rank asks for a description."""
        warnings, self.warnings = self.warnings, ()
        for warning in warnings:
            logger.warning("%s", warning)

    def enter_epoch(self, seed: int, epoch: int, *, host: str = "local") -> None:
        """Make `dataset` what it is in an epoch; only Keras data sets change. May seed the global generators.

        Args:
            seed: The loader's.
            epoch: At least 0.
            host: Named in errors.

        Raises:
            DatasetError: If its ``on_epoch_begin`` or ``on_epoch_end`` raises, or it cannot be copied.
        """
        if self._epochs is None:
            return
        try:
            dataset = self._epochs.at(seed, epoch)
        except Exception as exc:
            note = f" (before epoch {epoch})"
            raise dataset_error(exc, dataset=self.name, host=host, stage="sample", note=note) from exc
        if dataset is not self.dataset:
            self.dataset, self._info = dataset, None
            self._on_seed = self._hooks()

    def become_worker(
        self,
        worker_index: int,
        num_workers: int,
        *,
        host: str = "local",
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> None:
        """Provide worker info from now on, and call ``worker_init_fn``; once per process.

        Args:
            worker_index: In ``[0, num_workers)``.
            num_workers: Processes that serve this data set on this host.
            host: Named in errors.
            worker_init_fn: Instead of the factory's.

        Raises:
            ConfigError: If ``worker_index`` is out of range.
            DatasetError: If ``worker_init_fn`` raises.
        """
        if not 0 <= worker_index < num_workers:
            raise ConfigError(f"worker index {worker_index} is out of range, expected 0 to {num_workers - 1}")
        self.worker_index, self.num_workers, self._info = worker_index, num_workers, None
        function = worker_init_fn or self._worker_init_fn
        if function is None:
            return
        # Here, not at its own import: worker info can be set, and torch's generator seeded, only if torch is there.
        with suppress(ImportError):
            import_module("torch.utils.data")
        with preserved_generators(), self.worker_info():
            try:
                seed_generators(self._info_seed)
                function(worker_index)
            except Exception as exc:
                raise dataset_error(
                    exc, dataset=self.name, host=host, stage="build", note=" (in worker_init_fn)"
                ) from exc

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            TypeError: If the data set has no length.
        """
        num_samples = self.num_samples
        if num_samples is None:
            raise TypeError(f"data set {self.name!r} has no len()")
        return num_samples

    @property
    def num_samples(self) -> int | None:
        """Length of the data set; None if it has none.

        Asked once of one that a factory built, since all hosts have agreed on it; of the user's own object each
        time, since that may grow between epochs.
        """
        return self._ask_length() if self._may_grow else self._fixed_length

    @functools.cached_property
    def _fixed_length(self) -> int | None:
        return self._ask_length()

    def _ask_length(self) -> int | None:
        if self.makes_batches:
            return num_batches(self.dataset)
        if not hasattr(type(self.dataset), "__len__"):
            return None
        try:
            return len(self.dataset)
        except NotImplementedError:
            return None

    def makes_new_memory(self, *, collate: bool) -> bool:
        """Tell whether nobody else holds the memory of a batch, whatever the user's code does.

        torch's collation makes it from samples that were computed one by one. What ``__getitems__`` returned it may
        pass on: a list of strings, or of arrays; so may functions that the user registered with it. A torch that
        keeps these functions elsewhere is taken for one that has such.

        Args:
            collate: As in the request.
        """
        is_torchs = collate and self.collate_fn is None
        if not is_torchs or (self.seeding == "batch" and hasattr(self.dataset, "__getitems__")):
            return False
        module = imported("torch.utils.data._utils.collate")
        functions = getattr(module, "default_collate_fn_map", None)
        return isinstance(functions, dict) and all(
            getattr(function, "__module__", "") == module.__name__ for function in functions.values()
        )

    @property
    def seed(self) -> Callable[[int], None]:
        """A function of a key: seeds the global generators, and those of the data set through its ``on_seed(key)``.

        Of a Keras data set TensorFlow's, too.
        """
        return self._seed_all if self._on_seed else seed_generators

    def _hooks(self) -> tuple[Callable[[int], object], ...]:
        """Return what is to be seeded beside the global generators."""
        of_keras = (seed_tensorflow,) if self.makes_batches and imported("tensorflow") is not None else ()
        return (*of_keras, *_find_hooks(self.dataset))

    def _seed_all(self, key: int) -> None:
        seed_generators(key)
        for hook in self._on_seed:
            hook(key)

    def worker_info(self) -> AbstractContextManager[None]:
        """Make ``torch.utils.data.get_worker_info()`` work for the code inside, as in torch's own workers.

        Not for collation: there ``default_collate`` takes worker info as the order to put
        tensors into shared memory. Inside torch's own worker that is right, and what was
        set there is back after this context.
        """
        torch_data = imported("torch.utils.data")
        if torch_data is None or not self.num_workers:
            return _NOTHING
        module = torch_data._utils.worker
        if self._info is None:
            self._info = module.WorkerInfo(
                id=self.worker_index, num_workers=self.num_workers, seed=self._info_seed, dataset=self.dataset
            )
        return _WorkerInfo(module, self._info)


class _WorkerInfo:
    """Sets torch's worker info inside, and puts back what was there.

    No generator and no new record: between two batches code has left the caches, and little of it takes 10 us
    where those took 35 to 40.
    """

    __slots__ = ("_before", "_info", "_module")

    def __init__(self, module: Any, info: Any) -> None:
        self._module = module
        self._info = info

    def __enter__(self) -> None:
        self._before = self._module._worker_info
        self._module._worker_info = self._info

    def __exit__(self, *_: object) -> None:
        self._module._worker_info = self._before


def _find_hooks(dataset: Any) -> Iterator[Callable[[int], object]]:
    """Yield the ``on_seed`` methods of a data set and of those that torch's wrappers hold."""
    hook = getattr(dataset, "on_seed", None)
    if callable(hook):
        yield hook
        return
    torch_data = imported("torch.utils.data")
    if torch_data is None:
        return
    if isinstance(dataset, torch_data.Subset):
        yield from _find_hooks(dataset.dataset)
    elif isinstance(dataset, torch_data.ConcatDataset | torch_data.StackDataset):
        inner = dataset.datasets
        for part in inner.values() if isinstance(inner, dict) else inner:
            yield from _find_hooks(part)


def _run_seeded(factory: Callable[[], Any], key: int) -> Any:
    """Return what the factory returns if all generators are seeded with the key."""
    had_torch = imported("torch") is not None
    seed_generators(key)
    dataset = factory()
    if had_torch or torch_generator_is_untouched():
        return dataset
    # It imported torch, whose generator had not been seeded for it, and drew from that.
    del dataset
    seed_generators(key)
    return factory()


def _not_map_style(dataset: object, seeding: Seeding | None) -> str:
    """Return what is wrong with the object as a map-style data set; empty if nothing is."""
    kind = type(dataset)
    name = type_name(kind)
    if dataset is None:
        return "None; return the data set from the decorated function"
    if isinstance(dataset, DatasetSpec):
        return f"a DatasetSpec; build {dataset.name!r} with get_factory({dataset.name!r}).function(...)"
    torch_data = imported("torch.utils.data")
    iterable = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
    if iterable or not (hasattr(kind, "__getitem__") or hasattr(kind, "__getitems__")):
        what = "an iterable data set" if iterable or hasattr(kind, "__iter__") else "not a data set"
        return (
            f"{what} ({name}); only map-style data sets are supported for now: "
            "give it __getitem__(index) and __len__(), so that any host can compute any batch"
        )
    if seeding == "sample" and not hasattr(kind, "__getitem__"):
        return (
            f"a {name}, which has __getitems__ but no __getitem__, so it cannot be seeded for every sample: "
            'register it with @hetero.dataset(seeding="batch")'
        )
    return ""
