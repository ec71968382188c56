"""The registry of data set factories: `dataset` registers one by name, `build` runs it.

Calling a registered factory builds nothing. It returns a `hetero.spec.DatasetSpec`, a name
and JSON arguments, which any process that imported the same script can turn
into the data set. Nothing else about a data set ever crosses the wire.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from hetero.errors import ConfigError
from hetero.spec import DatasetFactory, DatasetSpec, Seeding, set_builder

if TYPE_CHECKING:
    from hetero.batches.build import BuiltDataset

__all__ = ["build", "dataset", "get_factory", "note_length", "prebuild", "registered"]

_lock = threading.Lock()
_factories: dict[str, DatasetFactory] = {}
_lengths: dict[tuple[DatasetFactory, DatasetSpec], int] = {}
_MAX_LENGTHS = 256


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
) -> DatasetFactory | Callable[[Callable[..., Any]], DatasetFactory]:
    """Register a function that builds a map-style data set.

    Use it at the top level of the training script, so that data hosts, which
    import the script without running its ``main``, register it too.

    A sample must be a function of its index and of the global generators of `random`, NumPy
    and torch, which are seeded from (seed, epoch, index, occurrence) before it is computed.
    A data set with a generator of its own gets the same key, an unsigned 64-bit integer,
    through a method ``on_seed(self, key)``, if it has one.

    Args:
        function: The factory. Its arguments must be JSON values; tuples arrive as lists.
        name: Registered name; the function's own by default.
        seeding: ``"sample"`` seeds `random`, NumPy's and torch's global generators for
            every sample; ``"batch"`` once per batch, for samples cheaper than that (7 us)
            and for data sets with torch's ``__getitems__``. None: ``"batch"`` if the data set
            has ``__getitems__`` and its samples draw nothing, which a few probes show, else ``"sample"``.
        collate_fn: As torch's; None is ``default_collate``.
        worker_init_fn: As torch's.
        fingerprint: A text, or a function of the data set, that identifies the data on
            a host. By default a few samples are fetched and hashed.

    Returns:
        The registered factory; calling it returns a `DatasetSpec`.

    Raises:
        ConfigError: If the name is taken, or the function cannot be called by JSON arguments.
    """
    if function is None:
        return functools.partial(
            _register,
            name=name,
            seeding=seeding,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            fingerprint=fingerprint,
        )
    return _register(function, name=name)


def get_factory(name: str) -> DatasetFactory:
    """Return the factory registered as ``name``.

    Raises:
        ConfigError: If there is none; the message lists the known names.
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
    name: str | None = None,
    seeding: Seeding | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    fingerprint: Callable[[Any], str] | str | None = None,
) -> DatasetFactory:
    """Check the function and put it into the registry."""
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"@hetero.dataset decorates a function that returns the data set, not {function!r:.80}\n"
            "  Write a function next to it: def photos(root: str): return PhotoDataset(root)"
        )
    if seeding not in (None, "sample", "batch"):
        raise ConfigError(f"seeding is {seeding!r}, expected 'sample' or 'batch'")
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
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        fingerprint=fingerprint,
        place=place,
    )
    DatasetSpec(factory.name)  # checks the name
    with _lock:
        other = _factories.get(factory.name)
        # One file may be imported twice, as __main__ and by its name; a notebook runs a cell again.
        interactive = not hasattr(sys.modules.get("__main__"), "__file__") and function.__module__ == "__main__"
        if other is not None and other.place != place and not interactive:
            raise ConfigError(
                f"two data sets are named {factory.name!r}\n"
                f"  First:  {other.place}\n  Second: {place}\n"
                "  Give one of them another name: @hetero.dataset(name=...)."
            )
        _factories[factory.name] = factory
    return factory


def build(spec: DatasetSpec, *, host: str = "local", worker_index: int = 0, num_workers: int = 0) -> BuiltDataset:
    """Run the factory and make this process a worker; may take minutes.

    The generators are seeded before, with the same seed for every factory, so that one that draws
    (``random_split``) splits alike everywhere and for all arguments. They are put back after.

    Args:
        spec: What to build.
        host: Named in errors.
        worker_index: In ``[0, num_workers)``.
        num_workers: Processes that serve this data set on this host; 0 for the trainer itself,
            where as in torch ``worker_init_fn`` is not called and ``get_worker_info()`` is None.

    Raises:
        ConfigError: If no factory of that name is registered.
        DatasetError: If the factory or ``worker_init_fn`` raises, or the result is no map-style data set.
    """
    built = prebuild(spec, host=host)
    if num_workers:
        built.become_worker(worker_index, num_workers, host=host)
    return built


def prebuild(spec: DatasetSpec, *, host: str = "local") -> BuiltDataset:
    """Run the factory only: for a process that forks the workers, see `BuiltDataset.become_worker`."""
    from hetero.batches.build import BuiltDataset  # NumPy comes with it, which a script may do without

    return BuiltDataset.from_factory(get_factory(spec.name), spec, host=host)


def note_length(spec: DatasetSpec, num_samples: int) -> None:
    """Note the length of a data set that this process has built: ``len(spec)`` need not build it once more."""
    if len(_lengths) >= _MAX_LENGTHS:
        _lengths.clear()
    _lengths[get_factory(spec.name), spec] = num_samples


def _local_length(spec: DatasetSpec) -> int:
    """Return the length of the data set; build it here, as every process that fetches from it does, if need be."""
    known = _lengths.get((get_factory(spec.name), spec))
    if known is not None:
        return known
    built = prebuild(spec)
    built.log_warnings()
    note_length(spec, len(built))
    return len(built)


set_builder(_local_length)
