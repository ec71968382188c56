"""torch's loader beside ours, and ours without and with endpoints: the same batches of the same arguments.

The order is the script's own in every case, because then only the seed could differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import hetero
from hetero.batches.structure import conversion as structure
from hetero.control.rank import session as control
from hetero.errors import DatasetError
from hetero.loaders import pipeline
from hetero.torch import DataLoader
from tests.support.torch.endpoints import ServedJob
from tests.support.waiting import wait_for
from tests.torch import differential_script
from tests.torch.differential_script import COLLATE, ERRORS, REGISTERED, compose

_MAX_STEPS = 60
"""More than any pass has: a trace ends where a loader raises without end."""

pytestmark = pytest.mark.timeout(1200)

Trace = list[tuple[str, Any]]
"""What passes did: ``("len", n)``, ``("batch", batch)``, ``("raise", exception)``, ``("end", None)``, and
``("generator", hash)``, the state of torch's global generator afterwards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One data set, and the arguments of a loader over it."""

    recipe: list[Any]
    length: int
    raises: dict[str, str]
    kind: str
    order: str
    indices: list[Any]
    batch_size: int | None
    drop_last: bool
    collate: str
    num_workers: int
    timeout: float
    prefetch_factor: int | None
    persistent_workers: bool

    def dataset(self) -> Any:
        return compose(self.recipe, self.length, self.raises, self.kind)

    def spec(self) -> Any:
        return REGISTERED[self.collate](recipe=self.recipe, length=self.length, raises=self.raises, kind=self.kind)

    def arguments(self) -> dict[str, Any]:
        """Return those of both loaders, the data set left out."""
        arguments: dict[str, Any] = {}
        if self.order == "batches":
            arguments["batch_sampler"] = self.indices
        else:
            arguments |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
            if self.order == "indices":
                arguments["sampler"] = self.indices
            elif self.order == "unsized":
                arguments["sampler"] = Unsized(self.indices)
        if self.num_workers:
            arguments |= {
                "num_workers": self.num_workers,
                "timeout": self.timeout,
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
            }
        return arguments


class Unsized(torch.utils.data.Sampler[Any]):
    """A sampler without a length."""

    def __init__(self, indices: list[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


# What samples are made of.

_SHAPES = st.lists(st.integers(0, 3), max_size=4)
_KINDS = ["int", "float", "bool", "str", "bytes", "none", "complex", "ragged"]
_ORDERS = st.sampled_from(["C", "F"])
_DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "int8", "bool", "complex64"]
_ARRAYS = st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "complex64", "datetime64[s]", "U3"])
_NAMES = st.sampled_from(["image", "label", "name", "größe"])


def _one(*options: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(*options).map(list)


def recipes(*, drawing: bool = False) -> st.SearchStrategy[list[Any]]:
    """Return samples of every kind. With ``drawing`` some hold random numbers."""
    layouts = st.sampled_from(["dense", "transposed", "channels_last"])
    leaves = st.one_of(
        _one(st.sampled_from(_KINDS + ["noise"] * 6 * drawing)),
        _one(st.just("tensor"), st.sampled_from(_DTYPES), _SHAPES, layouts),
        _one(
            st.just("array"),
            _ARRAYS,
            _SHAPES,
            _ORDERS,
        ),
        _one(st.just("scalar"), st.sampled_from(["float32", "int64", "uint8", "float64"])),
    )
    return st.recursive(
        leaves,
        lambda parts: st.one_of(
            _one(
                st.sampled_from(["dict", "ordered", "proxy"]),
                st.lists(_one(_NAMES, parts), min_size=1, max_size=3, unique_by=lambda pair: str(pair[0])),
            ),
            _one(st.sampled_from(["list", "tuple"]), st.lists(parts, min_size=1, max_size=3)),
            _one(st.just("point"), parts, parts),
        ),
        max_leaves=4,
    )


_DATASETS = ["plain"] * 4 + ["keyed", "bulk"]
_PLAIN_KEYS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.text(max_size=3),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
    st.booleans(),
    st.none(),
)
_KEYS = st.one_of(_PLAIN_KEYS, st.lists(_PLAIN_KEYS, max_size=3).map(tuple))


@st.composite
def cases(draw: st.DrawFn, *, max_workers: int = 0, drawing: bool = False) -> Case:
    kind = draw(st.sampled_from(_DATASETS))
    length = 4 if kind == "keyed" else draw(st.integers(0, 9))
    some: st.SearchStrategy[Any] = st.integers(-length, length - 1) if length else st.nothing()
    order = draw(st.sampled_from(["own", "indices", "unsized", "batches"]))
    if kind == "keyed":
        some = _KEYS
    indices: list[Any] = []
    if length and order in ("indices", "unsized"):
        indices = draw(st.lists(some, max_size=12))
    elif length and order == "batches":
        indices = draw(st.lists(st.lists(some, min_size=1, max_size=4), max_size=4))
    batch_size = None if order == "batches" else draw(st.sampled_from([None, 1, 2, 3, 4, 20]))
    raises = {}
    if draw(st.integers(0, 3)) == 3:
        raises = {str(draw(st.integers(0, 8))): draw(st.sampled_from(sorted(ERRORS)))}
    recipe = draw(recipes(drawing=drawing))
    num_workers = draw(st.sampled_from([0] * 19 + [max_workers]))
    if "'proxy'" in str(recipe):
        num_workers = 0  # torch's workers cannot send one, and its loader waits for it without end
    return Case(
        recipe=recipe,
        length=length,
        raises=raises,
        kind=kind,
        order=order,
        indices=indices,
        batch_size=batch_size,
        drop_last=draw(st.booleans()) if batch_size is not None else False,
        collate=draw(st.sampled_from(["default", "default", "keep", "count", "refuse_odd"])),
        num_workers=num_workers,
        timeout=draw(st.sampled_from([0, 30])),
        prefetch_factor=draw(st.sampled_from([None, 1, 3])),
        persistent_workers=draw(st.booleans()),
    )


# What is compared.


_TENSOR_PARTS = ("dtype", "shape", "layout", "device", "requires_grad")
_ARRAY_PARTS = ("dtype", "shape")


def difference(expected: Any, actual: Any, path: str = "batch") -> str | None:
    """Return where two batches differ in a type, dtype, shape, stride or value, None if nowhere."""
    if type(expected).__name__ != type(actual).__name__:
        return f"{path}: {type(actual)}, expected {type(expected)}"
    if isinstance(expected, torch.Tensor | np.ndarray):
        return array_difference(expected, actual, path)
    parts: Iterable[tuple[Any, Any, Any]]
    if isinstance(expected, Mapping):
        if list(expected) != list(actual):
            return f"{path}: keys {list(actual)}, expected {list(expected)}"
        parts = ((key, expected[key], actual[key]) for key in expected)
    elif isinstance(expected, list | tuple):
        if len(expected) != len(actual):
            return f"{path}: length {len(actual)}, expected {len(expected)}"
        parts = zip(itertools.count(), expected, actual, strict=False)
    else:
        return None if expected == actual else f"{path}: {actual!r}, expected {expected!r}"
    found = (difference(one, other, f"{path}[{key!r}]") for key, one, other in parts)
    return next((text for text in found if text is not None), None)


def array_difference(expected: Any, actual: Any, path: str) -> str | None:
    """Return where two tensors or arrays differ, or None. Strides count unless they are empty."""
    is_tensor = isinstance(expected, torch.Tensor)
    for name in _TENSOR_PARTS if is_tensor else _ARRAY_PARTS:
        if getattr(expected, name) != getattr(actual, name):
            return f"{path}.{name}: {getattr(actual, name)}, expected {getattr(expected, name)}"
    strides = [value.stride() if is_tensor else value.strides for value in (expected, actual)]
    if 0 not in expected.shape and strides[0] != strides[1]:
        return f"{path}: strides {strides[1]}, expected {strides[0]}"
    is_same = torch.equal(expected, actual) if is_tensor else np.array_equal(expected, actual)
    return None if is_same else f"{path}: {actual}, expected {expected}"


def trace(loader: Any, *, stops: Sequence[int | None] = (None,)) -> Trace:
    """Iterate, and go on after exceptions as a loop may that logs them.

    Args:
        loader: What is iterated over.
        stops: For each pass, after how many batches and exceptions it is left, None to take them all.
    """
    done: Trace = []
    torch.manual_seed(1)
    for stop in stops:
        iterator = iter(loader)
        done += [("len", length_of(loader)), ("len", length_of(iterator))]
        for _ in range(_MAX_STEPS if stop is None else stop):
            try:
                done.append(("batch", next(iterator)))
            except StopIteration:
                done.append(("end", None))
                break
            except Exception as exc:  # noqa: BLE001 - of any type, which is compared
                done.append(("raise", exc))
        done.append(("generator", hash(bytes(torch.get_rng_state().tolist()))))
    return done


def length_of(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def check_same(expected: Trace, actual: Trace) -> None:
    for number, ((kind, one), (other_kind, other)) in enumerate(zip(expected, actual, strict=False)):
        assert other_kind == kind, f"step {number}: {other_kind} {other!r}, expected {kind} {one!r}"
        if kind == "raise":
            if type(one) is RuntimeError and str(one).startswith("Caught "):
                continue  # torch's workers make one of an exception that a message alone does not make
            assert isinstance(other, type(one)), f"step {number}: {other!r}, expected {one!r}"
            assert isinstance(other, DatasetError)
        elif kind == "batch":
            assert (text := difference(one, other)) is None, f"step {number}: {text}"
        else:
            assert other == one, f"step {number}: {kind} {other}, expected {one}"
    assert len(actual) == len(expected)


large_cases = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)


def of_torch(case: Case) -> Any:
    """Return torch's loader, or the exception that making it raises."""
    return torch.utils.data.DataLoader(case.dataset(), collate_fn=COLLATE[case.collate], **case.arguments())


@large_cases
@given(cases(max_workers=1), st.booleans(), st.integers(1, 4))
def test_loader_without_endpoints_delivers_what_torchs_delivers(case: Case, is_registered: bool, stop: int) -> None:
    expected = trace(of_torch(case), stops=(None, stop, None))
    event(f"raises: {any(kind == 'raise' for kind, _ in expected)}")
    arguments = case.arguments()
    # Of a registered data set samples are probed first: where one raises, none is known to draw nothing.
    if is_registered and not (case.kind == "bulk" and case.raises):
        ours: Any = DataLoader(case.spec(), **arguments)
    else:
        arguments |= {"dataset": case.dataset(), "collate_fn": COLLATE[case.collate]}
        ours = DataLoader(**arguments)
    for name, value in arguments.items():
        if value is not None:
            assert getattr(ours, name) is value
    check_same(expected, trace(ours, stops=(None, stop, None)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedJob]:
    """Two endpoints of the script."""
    threads = threading.active_count()
    job = ServedJob(tmp_path_factory.mktemp("served"), Path(differential_script.__file__), purity_checks=2)
    before = structure._script_module
    structure.set_script_module(differential_script.__name__)
    try:
        job.start(2)
        yield job
    finally:
        structure.set_script_module(before)
        job.stop()
        hetero.spec.set_describer(None)
        wait_for(lambda: threading.active_count() <= threads)


@contextmanager
def fetching_from(job: ServedJob | None) -> Iterator[None]:
    """Make loaders fetch from the endpoints of a job, or here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_session", job)
        patch.setattr(pipeline, "_num_verified", {})
        try:
            yield
        finally:
            hetero.spec.set_describer(None)


@pytest.mark.integration
@settings(large_cases, max_examples=settings.default.max_examples // 2)
@given(
    case=cases(drawing=True),
    shuffle=st.booleans(),
    seed=st.integers(-3, 3),
    taken=st.integers(0, 4),
    policy=st.sampled_from(["raise", "raise", "skip"]),
)
def test_loader_with_endpoints_delivers_and_resumes_what_it_delivers_without(
    served: ServedJob, case: Case, shuffle: bool, seed: int, taken: int, policy: str
) -> None:
    options = case.arguments() | {"seed": seed}
    if case.order == "own":
        options["shuffle"] = shuffle and case.length > 0  # of no samples it is an error, as with torch
    if policy == "skip" and options.get("batch_size", 1) is not None:
        options["on_sample_error"] = policy

    def run(job: ServedJob | None) -> tuple[Trace, Trace, str]:
        """Return two passes, the rest of a third that was resumed, and the state in its middle."""
        with fetching_from(job):
            whole = trace(DataLoader(case.spec(), **options), stops=(None, taken, None))
            loader: Any = DataLoader(case.spec(), **options)
            with contextlib.suppress(Exception):
                list(itertools.islice(loader, taken))
            state = json.dumps(loader.state_dict())
            resumed: Any = DataLoader(case.spec(), **options)
            resumed.load_state_dict(json.loads(state))
            return whole, trace(resumed), state

    here, there = run(None), run(served)
    check_same(here[0], there[0])
    check_same(here[1], there[1])
    assert there[2] == here[2]
