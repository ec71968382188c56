"""A data set built from its spec, with everything that a fetch needs."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from hetero.batches.batched import choose_seeding, has_getitems
from hetero.batches.failures import dataset_error
from hetero.batches.imported import imported
from hetero.batches.indices import sources_of
from hetero.batches.keras import (
    EpochCopies,
    is_keras_dataset,
    keras_problem,
    num_batches,
    overridden_hooks,
    seed_tensorflow,
)
from hetero.batches.lanes.source import LaneSource, iterable_problem
from hetero.batches.purity.overlaps import Overlaps
from hetero.batches.seeds import (
    BUILD_KEY,
    preserved_generators,
    seed_generators,
    torch_generator_is_untouched,
)
from hetero.batches.split import SplitDataset, split_problem
from hetero.batches.structure.conversion import type_name
from hetero.errors import ConfigError
from hetero.plans.plan import Source
from hetero.spec import DatasetFactory, DatasetSpec, Seeding

__all__ = ["BuiltDataset", "is_iterable", "log_warnings"]

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()
_overlaps = Overlaps()
_SET_EPOCH_IS_NEVER_CALLED = (
    "data set {!r}: its set_epoch(){} is never called, because the script has only the name of the data set. What "
    "differs between epochs comes from the global random generators, or from on_seed(key)"
)


class BuiltDataset:
    """A map-style data set in this process, ready for `fetch`. Only one thread at a time may use it.

    Attributes:
        name: Registered name, or the class of an unregistered object.
        dataset: The user's object. For a Keras data set that changes between epochs, its copy for the current epoch.
            For a data set with a cache, its `SplitDataset`.
        split: The `SplitDataset` of a data set with a cache. None for data sets without a cache.
        lanes: The lanes of an iterable. None for a data set with an index.
        makes_batches: Whether each item is a batch. True for a Keras data set that a factory built.
        collate_fn: The factory's function, or else the attribute ``collate_fn`` of the data set that it built. None for
            torch's ``default_collate``.
        fingerprint: The factory's ``fingerprint=``.
        worker_index: Index of this worker on this host, which the data set reads in torch's ``get_worker_info().id``.
        num_workers: Number of workers on this host. 0 in the trainer itself, where worker info is missing.
        warnings: Facts about the data set that the user should know, one sentence each.
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
        is_from_factory: bool = True,
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
        # The seed in torch's worker info. A data set may draw with this seed, so it is the same on all hosts.
        self._info_seed = info_seed
        self._is_from_factory = is_from_factory
        self.split: SplitDataset | None = None
        self.lanes = LaneSource(dataset, name=name, info_seed=info_seed) if is_iterable(dataset) else None
        if self.lanes is not None:
            self._stated_seeding = "sample"
        # For an object that no factory built, hetero does what torch's loader does: it takes each item as one sample.
        self.makes_batches = is_from_factory and is_keras_dataset(dataset)
        # A Keras data set without ``on_epoch_begin`` and ``on_epoch_end`` never changes, so it needs no copies.
        self._epochs = EpochCopies(dataset) if self.makes_batches and overridden_hooks(dataset) else None
        # torch's record of this worker, made at the first use.
        self._worker_info_record: Any = None
        self._seeding_hooks = self._find_seeding_hooks()

    @classmethod
    def from_factory(cls, factory: DatasetFactory, spec: DatasetSpec, *, host: str = "local") -> BuiltDataset:
        """Run a factory with the arguments of its spec. See `hetero.datasets.build`.

        Raises:
            DatasetError: If the factory raises, or the result is not a map-style data set.
        """
        arguments = spec.arguments
        # The factory must not draw from the generators of the trainer, which may be this process.
        with preserved_generators():
            try:
                # Use one key for all factories. With a key made of name and arguments, random_split gave different
                # splits for training and validation: 166 of 200 validation samples were in the training set.
                dataset = _run_seeded(functools.partial(factory.function, **arguments), BUILD_KEY)
                if factory.cache is not None:
                    problem = split_problem(dataset)
                elif is_iterable(dataset):
                    problem = ""
                else:
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
            collate_fn=factory.collate_fn or getattr(dataset, "collate_fn", None),
            seeding=factory.seeding,
            fingerprint=factory.fingerprint,
            worker_init_fn=factory.worker_init_fn,
            # The key has 64 bits without a sign. torch's seeds are signed, so one bit less is left.
            info_seed=BUILD_KEY >> 1,
        )
        if factory.cache is not None:
            # The cache keeps the first part of a sample, so the samples have to be computed in two parts.
            built.split = built.dataset = SplitDataset(dataset)
        # Warn about other data sets of this process, such as validation data, that have some of the same samples.
        built.warnings = () if built.lanes is not None else _overlaps.add(spec, dataset)
        if built.lanes is None and callable(method := getattr(dataset, "set_epoch", None)):
            code = getattr(method, "__code__", None)
            place = f" in {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
            built.warnings += (_SET_EPOCH_IS_NEVER_CALLED.format(spec.name, place),)
        return built

    @classmethod
    def from_object(
        cls, dataset: Any, *, collate_fn: Callable[[Any], Any] | None = None, seeding: Seeding | None = None
    ) -> BuiltDataset:
        """Wrap a data set object that no factory built. The result can only be used in this process.

        Without ``seeding``, the generators are seeded once per batch if the data set has ``__getitems__``, because
        one call of it returns all samples of a batch. For other data sets they are seeded for every sample.

        Raises:
            ConfigError: If ``dataset`` is not a map-style data set.
        """
        if seeding is None:
            seeding = "batch" if has_getitems(dataset) else "sample"
        if not is_iterable(dataset) and (problem := _not_map_style(dataset, seeding)):
            raise ConfigError(f"the data set is {problem}")
        hooks = overridden_hooks(dataset)
        # Log this in the trainer only, because each of torch's workers would repeat the warning.
        if hooks and multiprocessing.parent_process() is None:
            logger.warning(
                "%s of %s will not be called, as torch's loader calls neither: return the data set from a function "
                "decorated with @hetero.dataset, and hetero calls them for each epoch",
                " and ".join(hooks),
                type(dataset).__name__,
            )
        return cls(dataset, name=type(dataset).__name__, collate_fn=collate_fn, seeding=seeding, is_from_factory=False)

    @functools.cached_property
    def seeding(self) -> Seeding:
        """How often to seed: ``"sample"`` or ``"batch"``.

        If the factory does not state this, a few samples are computed when this property is first read. Do not read
        this property before the process forks workers. The workers would share the files that these samples open.
        """
        with preserved_generators():
            chosen, warning = choose_seeding(self.dataset, self._stated_seeding)
        if warning:
            self.warnings += (f"data set {self.name!r}: {warning}",)
        return chosen

    @property
    def is_divisible(self) -> bool:
        """Whether the samples of one batch may be computed in different processes, because each has its own seed."""
        return not self.makes_batches and self.lanes is None and self.seeding == "sample"

    @property
    def user_dataset(self) -> Any:
        """The user's object, without what this package puts around it."""
        return self.dataset if self.split is None else self.split.dataset

    @property
    def seeding_was_probed(self) -> bool:
        """Whether hetero has chosen ``"batch"``, and not the factory. The fingerprint contains this, so hosts agree."""
        return self._stated_seeding is None and self.seeding == "batch"

    def log_warnings(self) -> None:
        """Log the warnings about the data set and clear them. Call this if no rank requests the `Description`."""
        warnings, self.warnings = self.warnings, ()
        log_warnings(warnings)

    def enter_epoch(self, seed: int, epoch: int, *, host: str = "local") -> None:
        """Set `dataset` to its copy for an epoch, if it is a Keras data set that changes between epochs.

        May seed the global generators.

        Args:
            seed: The loader's seed.
            epoch: At least 0.
            host: Name of this host in error messages.

        Raises:
            DatasetError: If ``on_epoch_begin`` or ``on_epoch_end`` of the data set raises, or it cannot be copied.
        """
        if self._epochs is None:
            return
        try:
            dataset = self._epochs.at(seed, epoch)
        except Exception as exc:
            note = f" (before epoch {epoch})"
            raise dataset_error(exc, dataset=self.name, host=host, stage="sample", note=note) from exc
        # The worker info and the hooks refer to the earlier copy, so make new ones.
        if dataset is not self.dataset:
            self.dataset, self._worker_info_record = dataset, None
            self._seeding_hooks = self._find_seeding_hooks()

    def become_worker(
        self,
        worker_index: int,
        num_workers: int,
        *,
        host: str = "local",
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> None:
        """Enable `worker_info` from now on, and call ``worker_init_fn``. Call this method once per process.

        Args:
            worker_index: Index of this process in ``[0, num_workers)``.
            num_workers: Number of processes that serve this data set on this host.
            host: Name of this host in error messages.
            worker_init_fn: Function to call instead of the factory's.

        Raises:
            ConfigError: If ``worker_index`` is out of range.
            DatasetError: If ``worker_init_fn`` raises.
        """
        if not 0 <= worker_index < num_workers:
            raise ConfigError(f"worker index {worker_index} is out of range, expected 0 to {num_workers - 1}")
        # Drop torch's record of this worker, because it would keep an earlier index. The next use makes a new one.
        self.worker_index, self.num_workers, self._worker_info_record = worker_index, num_workers, None
        function = worker_init_fn or self._worker_init_fn
        if function is None:
            return
        # Import torch now, because worker info can be set and torch's generator can be seeded only after its import.
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
            TypeError: If the data set lacks a length.
            ConfigError: If it is iterable.
        """
        num_samples = self.num_samples
        if self.lanes is not None:
            raise ConfigError(iterable_problem(f"data set {self.name!r}"))
        if num_samples is None:
            raise TypeError(f"data set {self.name!r} has no len()")
        return num_samples

    @property
    def sources(self) -> tuple[Source, ...]:
        """The parts of the data set that a plan may draw from. Empty if it does not state them in ``sources``."""
        return sources_of(self.user_dataset)

    @property
    def num_samples(self) -> int | None:
        """Length of the data set, or None if it lacks one.

        For a data set that a factory built, the first result is kept, because all hosts have agreed on it. For an
        object that the user built, the length is computed each time, because the object may grow between epochs.
        """
        return self._fixed_length if self._is_from_factory else self._ask_length()

    @functools.cached_property
    def _fixed_length(self) -> int | None:
        return self._ask_length()

    def _ask_length(self) -> int | None:
        """Return the present length of the data set. None if ``__len__`` is missing or not implemented."""
        if self.lanes is not None:
            return None
        if self.makes_batches:
            return num_batches(self.dataset)
        if not hasattr(type(self.dataset), "__len__"):
            return None
        try:
            return len(self.dataset)
        except NotImplementedError:
            return None

    def makes_new_memory(self, *, collate: bool) -> bool:
        """Return whether every batch is in new memory that no object of the user's code refers to.

        True if torch's collation makes the batch from samples that were computed one by one. False with
        ``__getitems__``, because the batch may then contain parts of the result of ``__getitems__``, for example a list
        of str or arrays. False also if the user registered functions with torch's collation, because these may return
        parts of samples. False also if this version of torch does not keep its collation functions in
        ``default_collate_fn_map``.

        Args:
            collate: Whether samples are collated, as in `BatchRequest.collate`.
        """
        uses_torch_collation = collate and self.collate_fn is None
        if not uses_torch_collation or (self.seeding == "batch" and hasattr(self.dataset, "__getitems__")):
            return False
        module = imported("torch.utils.data._utils.collate")
        functions = getattr(module, "default_collate_fn_map", None)
        # A version of torch without the dictionary gives False. Batches are then copied, which is safe and only takes
        # time.
        return isinstance(functions, dict) and all(
            getattr(function, "__module__", "") == module.__name__ for function in functions.values()
        )

    @property
    def seed(self) -> Callable[[int], None]:
        """Function that seeds the global generators with a key, and calls the data set's ``on_seed(key)``.

        For a Keras data set it also seeds TensorFlow's generator.
        """
        return self._seed_all if self._seeding_hooks else seed_generators

    def _find_seeding_hooks(self) -> tuple[Callable[[int], object], ...]:
        """Return the functions that seed generators other than those of `random`, NumPy and torch."""
        of_tensorflow = (seed_tensorflow,) if self.makes_batches and imported("tensorflow") is not None else ()
        return (*of_tensorflow, *_find_on_seed(self.dataset))

    def _seed_all(self, key: int) -> None:
        """Seed the generators of `random`, NumPy and torch with a key, and then all others."""
        seed_generators(key)
        for hook in self._seeding_hooks:
            hook(key)

    @contextmanager
    def loading_anew(self) -> Iterator[None]:
        """Return a context in which the cache returns no sample and keeps none, so all samples are loaded anew."""
        if self.split is None:
            yield
            return
        cache, self.split.cache = self.split.cache, None
        try:
            yield
        finally:
            self.split.cache = cache

    def worker_info(self) -> AbstractContextManager[None]:
        """Return a context that makes ``torch.utils.data.get_worker_info()`` work as in torch's own workers.

        Leave the context before collation, because ``default_collate`` puts tensors into shared memory if worker info
        is set. Only a worker of torch needs tensors in shared memory. It gets them, because leaving the context
        restores the worker info that torch itself has set in the worker.
        """
        torch_data = imported("torch.utils.data")
        # Without torch nothing can be set, and in the trainer itself there is no worker.
        if torch_data is None or not self.num_workers:
            return _NOTHING
        module = torch_data._utils.worker
        if self._worker_info_record is None:
            self._worker_info_record = module.WorkerInfo(
                id=self.worker_index,
                num_workers=self.num_workers,
                seed=self._info_seed,
                dataset=self.user_dataset,
            )
        return _WorkerInfo(module, self._worker_info_record)


class _WorkerInfo:
    """Context manager that sets torch's worker info, and restores the previous one on exit.

    Each use of this class takes 10 us. A generator function that made a new record each time took 35 to 40 us, because
    it runs more code, and the CPU caches lose this code between two batches.
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


def log_warnings(warnings: Iterable[str]) -> None:
    """Log facts about a data set that the user should know, wherever it was built."""
    for warning in warnings:
        logger.warning("%s", warning)


def _find_on_seed(dataset: Any) -> Iterator[Callable[[int], object]]:
    """Yield the ``on_seed`` methods of a data set, or of the data sets inside torch's wrappers."""
    hook = getattr(dataset, "on_seed", None)
    if callable(hook):
        yield hook
        return
    torch_data = imported("torch.utils.data")
    if torch_data is None:
        return
    if isinstance(dataset, torch_data.Subset):
        yield from _find_on_seed(dataset.dataset)
    elif isinstance(dataset, torch_data.ConcatDataset | torch_data.StackDataset):
        inner = dataset.datasets
        for part in inner.values() if isinstance(inner, dict) else inner:
            yield from _find_on_seed(part)


def _run_seeded(factory: Callable[[], Any], key: int) -> Any:
    """Seed all generators with the key, run the factory, and return its result."""
    had_torch = imported("torch") is not None
    seed_generators(key)
    dataset = factory()
    # Run the factory a second time only if needed, because it may take minutes or lock files. Importing torch before
    # each factory would avoid this, but would take 200 MB in endpoints that do not use torch.
    if had_torch or torch_generator_is_untouched():
        return dataset
    # The factory imported torch and drew from torch's generator, which was not seeded yet. Run the factory again. First
    # free the memory and close the files of the first data set.
    del dataset
    seed_generators(key)
    return factory()


def is_iterable(dataset: object) -> bool:
    """Return whether an object can be iterated, and lacks an index."""
    kind = type(dataset)
    torch_data = imported("torch.utils.data")
    # torch's IterableDataset has a ``__getitem__``, which only raises. Only the parts of a divided source are iterated.
    if hasattr(kind, "hetero_split") or (torch_data is not None and isinstance(dataset, torch_data.IterableDataset)):
        return True
    # An iterator could be read only once, and not in lanes.
    has_index = hasattr(kind, "__getitem__") or hasattr(kind, "__getitems__")
    return hasattr(kind, "__iter__") and not has_index and not hasattr(kind, "__next__")


def _not_map_style(dataset: object, seeding: Seeding | None) -> str:
    """Return why the object is not a map-style data set, or an empty string if it is one."""
    kind = type(dataset)
    name = type_name(kind)
    if dataset is None:
        return "None; return the data set from the decorated function"
    if isinstance(dataset, DatasetSpec):
        return f"a DatasetSpec; build {dataset.name!r} with get_factory({dataset.name!r}).function(...)"
    if not (hasattr(kind, "__getitem__") or hasattr(kind, "__getitems__")):
        if hasattr(kind, "__next__"):
            return (
                f"an iterator ({name}), which can be read only once; return an object whose __iter__ begins anew, "
                "or one with __getitem__(index) and __len__()"
            )
        return f"not a data set ({name}); it has neither __getitem__(index) and __len__() nor __iter__()"
    if seeding == "sample" and not hasattr(kind, "__getitem__"):
        return (
            f"a {name}, which has __getitems__ but no __getitem__, so it cannot be seeded for every sample: "
            'register it with @hetero.dataset(seeding="batch")'
        )
    return ""
