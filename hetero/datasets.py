"""Registry of data set factories. `dataset` registers a factory by name, and `build` builds a data set.

Calling a registered factory does not build the data set. It returns a `hetero.spec.DatasetSpec`,
which holds the name and JSON arguments. Every process that has imported the same script can build
the data set from the spec. Nothing else about a data set is sent over the network.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, overload

from hetero.errors import ConfigError
from hetero.spec import Cache, DatasetFactory, DatasetSpec, Seeding, set_builder
from hetero.system.scripts import is_in_main_block

if TYPE_CHECKING:
    from hetero.batches.build import BuiltDataset

__all__ = ["build", "dataset", "get_factory", "note_length", "prebuild", "registered"]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_factories: dict[str, DatasetFactory] = {}
_lengths: dict[tuple[DatasetFactory, DatasetSpec], int] = {}


@overload
def dataset(function: Callable[..., Any], /) -> DatasetFactory: ...


@overload
def dataset(
    *,
    name: str | None = None,
    seeding: Seeding | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    fingerprint: Callable[[Any], str] | str | None = None,
    cache: Cache | str | int | None = None,
    fork_built: bool = True,
) -> Callable[[Callable[..., Any]], DatasetFactory]: ...


def dataset(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    seeding: Seeding | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    fingerprint: Callable[[Any], str] | str | None = None,
    cache: Cache | str | int | None = None,
    fork_built: bool = True,
) -> DatasetFactory | Callable[[Callable[..., Any]], DatasetFactory]:
    """Register a function that builds a map-style data set.

    Use the decorator at the top level of the training script. Data hosts must register the
    data set too, and they import the script without running its ``main``.

    A sample may depend only on its index and on the global generators of `random`, NumPy and
    torch. Before each sample is computed, these generators are seeded with a key, an unsigned
    64-bit hash of seed, epoch, index, and how often the index came before in the epoch. A data
    set with another generator can seed it in a method ``on_seed(self, key)``.

    Args:
        function: The factory. Its arguments must be JSON values. Tuples arrive as lists.
        name: Registered name. The default is the function's name.
        seeding: ``"sample"`` seeds the global generators of `random`, NumPy and torch for
            every sample. ``"batch"`` seeds them once per batch. Use ``"batch"`` for samples that
            cost less than the seeding (7 us) and for data sets with torch's ``__getitems__``.
            None usually selects ``"sample"``. It selects ``"batch"`` for a data set with
            ``__getitems__`` that has no ``__getitem__``, or whose probed samples draw no random
            numbers.
        collate_fn: Same as torch's. None selects the attribute or method ``collate_fn`` of the data set that
            the factory returns, so its options may be arguments of the factory. A data set without one
            gets ``default_collate``.
        worker_init_fn: Same as torch's.
        fingerprint: A text that identifies the data on a host, or a function that gets the data set
            and returns this text. By default a few samples are computed and hashed.
        cache: Keeps what is the same in each epoch, for example decoded images. The data set then
            needs two methods. ``load(index)`` draws no random numbers, and its result is kept.
            ``augment(sample)`` makes the sample of it. A text such as ``"8 GB"`` is the memory on
            each host, see `hetero.spec.Cache`.
        fork_built: Whether a process may build the data set and then fork endpoints or torch's workers, which share its
            memory. With False, each of these processes builds the data set itself. A data set with a connection may
            need this, because each process then opens its own.

    Returns:
        The registered factory. Calling it returns a `DatasetSpec`.

    Raises:
        ConfigError: If the name is taken, or the function cannot be called with JSON arguments.
    """
    register = functools.partial(
        _register,
        name=name,
        seeding=seeding,
        cache=cache,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        fingerprint=fingerprint,
        fork_built=fork_built,
    )
    return register if function is None else register(function)


def get_factory(name: str) -> DatasetFactory:
    """Return the factory registered as ``name``.

    Raises:
        ConfigError: If no factory has this name. The message lists the known names.
    """
    factory = _factories.get(name)
    if factory is not None:
        return factory
    close = difflib.get_close_matches(name, _factories, n=1)
    known = ", ".join(registered()) or "none"
    raise ConfigError(
        f"no data set named {name[:60]!r} is registered"
        + (f"; did you mean {close[0]!r}?" if close else "")
        + f"\n  Registered: {known}.\n  Register it with @hetero.dataset at the top level of the training script."
    )


def registered() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_factories))


def _register(
    function: Callable[..., Any],
    *,
    name: str | None,
    seeding: Seeding | None,
    cache: Cache | str | int | None,
    **others: Any,
) -> DatasetFactory:
    """Check the function and add it to the registry."""
    # Imported here, because it imports NumPy, which launchers do not need.
    from hetero.batches.purity.globals import note_globals

    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"@hetero.dataset decorates a function that returns the data set, not {function!r:.80}\n"
            "  Write a function next to it: def photos(root: str): return PhotoDataset(root)"
        )
    if seeding not in (None, "sample", "batch"):
        raise ConfigError(f"seeding is {seeding!r}, expected 'sample' or 'batch'")
    # If decorators wrap the function, the place is that of the innermost function.
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{os.path.realpath(code.co_filename)}:{code.co_firstlineno}" if code else repr(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"data set factory at {place}: parameter {parameter} cannot be passed by name; make it a keyword"
            )
    factory = DatasetFactory(
        name=getattr(function, "__name__", "") if name is None else name,
        function=function,
        seeding=seeding,
        cache=cache if cache is None or isinstance(cache, Cache) else Cache(memory=cache),
        place=place,
        **others,
    )
    # The constructor checks the name.
    DatasetSpec(factory.name)
    with _lock:
        other = _factories.get(factory.name)
        # A file may be imported twice, as __main__ and by its name, and a notebook may run a cell again.
        is_notebook = not hasattr(sys.modules.get("__main__"), "__file__") and function.__module__ == "__main__"
        if other is not None and other.place != place and not is_notebook:
            raise ConfigError(
                f"two data sets are named {factory.name!r}\n"
                f"  First:  {other.place}\n  Second: {place}\n"
                "  Give one of them another name: @hetero.dataset(name=...)."
            )
        _factories[factory.name] = factory
    # Registration is a part of the import, so the globals now have the values that they have on data hosts too.
    note_globals(factory)
    # The last process to end must remove the kept samples from memory. Often this process is the rank, which never
    # opens the cache itself, because the workers of its loader do. So register the removal here, and not only where the
    # cache is opened.
    if factory.cache is not None and factory.cache.memory:
        # Imported here, because it imports NumPy, which launchers do not need.
        from hetero.cache.tiers import close_at_exit

        # Repeated calls with the id of a process do nothing. A forked child has another id, so its call counts.
        close_at_exit(os.getpid())
    if function.__module__ == "__main__":
        _warn_if_main_registers(factory.name)
    return factory


def _warn_if_main_registers(name: str) -> None:
    """Log a warning if the script registers a data set in its ``__main__`` block, which data hosts do not run."""
    # Find the frame that runs the top level of the script. Its present line is the one that registers the data set.
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    if frame is None:
        return
    if is_in_main_block(frame.f_code.co_filename, frame.f_lineno):
        logger.warning(
            'data set %r is registered by line %d, under if __name__ == "__main__". Data hosts do not run that block. '
            "Move the function with @hetero.dataset to the top level of the script",
            name,
            frame.f_lineno,
        )


def build(spec: DatasetSpec, *, host: str = "local", worker_index: int = 0, num_workers: int = 0) -> BuiltDataset:
    """Build a data set, and make this process a worker if ``num_workers`` is not 0. This may take minutes.

    The random generators are seeded before the factory runs, and restored afterwards. The seed
    is the same for every factory, on every host and for all arguments. A factory that draws
    random numbers (``random_split``) therefore makes the same split everywhere.

    Args:
        spec: Data set to build.
        host: Name of this host in error messages.
        worker_index: Index of this process in ``[0, num_workers)``.
        num_workers: Number of processes that serve this data set on this host. 0 in the trainer
            itself. There, as in torch, ``worker_init_fn`` is not called and ``get_worker_info()``
            is None.

    Raises:
        ConfigError: If no factory of that name is registered.
        DatasetError: If the factory or ``worker_init_fn`` raises, or the result is not a map-style data set.
    """
    built = prebuild(spec, host=host)
    if num_workers:
        built.become_worker(worker_index, num_workers, host=host)
    return built


def prebuild(spec: DatasetSpec, *, host: str = "local") -> BuiltDataset:
    """Build a data set without making this process a worker, for example before the process forks workers."""
    # Imported here, because it imports NumPy, which a script may not need.
    from hetero.batches.build import BuiltDataset

    factory = get_factory(spec.name)
    built = BuiltDataset.from_factory(factory, spec, host=host)
    if factory.cache is not None:
        # Imported here, because it imports NumPy too.
        from hetero.cache.loads import keep_loads

        keep_loads(built, factory, spec)
    return built


def note_length(spec: DatasetSpec, num_samples: int) -> None:
    """Record the length of a data set that this process has built. Then ``len(spec)`` does not build it again."""
    _lengths[get_factory(spec.name), spec] = num_samples


def _local_length(spec: DatasetSpec) -> int:
    """Return the length of the data set. Build the data set in this process if its length is not recorded yet."""
    # A notebook may register another factory under the same name, so the key has the factory besides the spec.
    known = _lengths.get((get_factory(spec.name), spec))
    if known is not None:
        return known
    from hetero.batches.failures import raising_user_types

    # Raise the user's type of error here, as next() does. len(), list() and tqdm once raised a plain DatasetError.
    with raising_user_types():
        built = prebuild(spec)
        built.log_warnings()
        note_length(spec, len(built))
        return len(built)


# hetero.spec lies below this module, and must not import it.
set_builder(_local_length)
