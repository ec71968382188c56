"""What a loop sees of an exception of the data set's: its own type, and the batches after it."""

from __future__ import annotations

import asyncio
import dataclasses
import email.message
import gc
import json
import pickle
import subprocess
import traceback
import urllib.error
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
import torch.utils.data

import hetero
from hetero.batches.failures import dataset_error, with_user_type
from hetero.control.rank import session as control
from hetero.errors import DatasetError
from hetero.spec import set_describer
from hetero.torch import DataLoader
from tests.support.torch.endpoints import ServedJob, imported_script

SCRIPT = """
    import hetero

    class Broken(OSError):
        def __init__(self, index, why):
            super().__init__(f"{index} is broken: {why}")

    class Photos:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            if index in (5, 6):
                raise FileNotFoundError(f"no file {index}")
            if index == 13:
                raise Broken(index, "cut off")
            if index == 100:
                raise SystemExit("no license")
            return index

    @hetero.dataset
    def exceptions_photos():
        return Photos()

    @hetero.dataset
    def exceptions_gone(root):
        raise FileNotFoundError(f"no folder {root}")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported_script(tmp_path_factory.mktemp("script"), "exceptions_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def job(script: Any) -> Iterator[ServedJob]:
    path = Path(script.__file__)
    served = ServedJob(path.parent, path)
    served.start(2)
    yield served
    served.stop()


Make = Callable[..., DataLoader[Any]]


@pytest.fixture(params=["here", "workers", "endpoints"])
def make(request: pytest.FixtureRequest, script: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    options = {"num_workers": 2} if request.param == "workers" else {}
    if request.param == "endpoints":
        monkeypatch.setattr(control, "_session", request.getfixturevalue("job"))
    yield lambda **more: DataLoader(script.exceptions_photos(), batch_size=2, **{**options, **more})
    set_describer(None)


def _taken(iterator: Iterator[Any]) -> list[Any]:
    """Return batches, and in place of those that raised their exceptions, as a loop that logs and goes on."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except Exception as error:  # noqa: BLE001 - whatever it is, the loop goes on
            found.append(error)


def test_pass_goes_on_after_batches_that_raised(make: Make) -> None:
    found = _taken(iter(make()))
    assert [None if isinstance(each, Exception) else each for each in found] == [
        [0, 1], [2, 3], None, None, [8, 9], [10, 11], None, [14, 15], [16, 17], [18, 19],
    ]  # fmt: skip


def test_sample_that_exits_ends_the_script_or_is_an_error_of_the_sample(
    make: Make, request: pytest.FixtureRequest
) -> None:
    indices = [0, 1, 100, 2]
    if request.node.callspec.params["make"] == "here":
        with pytest.raises(SystemExit, match="no license"):
            list(make(sampler=indices))
        return
    with pytest.raises(DatasetError, match="at sample 100: SystemExit: no license"):
        list(make(sampler=indices))
    batches = make(sampler=indices, on_sample_error="skip", max_skips=1)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 2]]


def test_exception_is_of_the_users_type_and_says_where(make: Make) -> None:
    found = _taken(iter(make()))
    first, last = found[2], found[6]
    assert isinstance(first, DatasetError)
    assert isinstance(first, FileNotFoundError)
    assert "exceptions_photos" in str(first)
    assert "FileNotFoundError: no file 5" in str(first)
    assert first.record.sample_index == "5"  # type: ignore[attr-defined]
    assert isinstance(last, DatasetError)
    assert isinstance(last, OSError)
    assert "13 is broken: cut off" in str(last)
    assert "__hetero_script__" not in str(last)


ASK = {"len(loader)": len, "list": list, "next": lambda loader: next(iter(loader)), "len(spec)": lambda x: len(x.of)}


@pytest.mark.parametrize("where", ["here", "workers", "endpoints"])
@pytest.mark.parametrize("how", ASK)
def test_exception_of_a_factory_is_of_the_users_type_wherever_it_is_raised(
    how: str, where: str, script: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "endpoints":
        monkeypatch.setattr(control, "_session", request.getfixturevalue("job"))
    spec = script.exceptions_gone(root=how)
    loader = DataLoader(spec, batch_size=2, num_workers=int(where == "workers"))
    loader.of = spec  # type: ignore[attr-defined]
    try:
        with pytest.raises(FileNotFoundError, match="no folder") as raised:
            ASK[how](loader)
    finally:
        set_describer(None)
    assert isinstance(raised.value, DatasetError)


def test_state_after_an_exception_resumes_after_the_batch_that_raised(make: Make) -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(FileNotFoundError):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["batches"] == 3
    resumed = make()
    resumed.load_state_dict(state)
    found = _taken(iter(resumed))
    assert isinstance(found[0], FileNotFoundError)  # of sample 6
    assert found[1:3] == [[8, 9], [10, 11]]


def test_pass_ends_with_how_many_batches_are_missing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    _taken(iter(make(name="lossy")))
    assert "loader lossy: batch 2 of epoch 0 raised" in caplog.text
    assert "loader lossy: epoch 0 ended without 3 batches" in caplog.text


def test_exception_of_the_sampler_is_raised_again_by_every_call(make: Make) -> None:
    def indices() -> Iterator[int]:
        yield from (0, 1, 2, 3)
        raise LookupError("the sampler is broken")

    class Sampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return indices()

    iterator = iter(make(sampler=Sampler()))
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
    for _ in range(3):
        with pytest.raises(LookupError, match="the sampler is broken"):
            next(iterator)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_factory_that_raises_is_raised_again_by_every_call(num_workers: int, tmp_path: Path) -> None:
    builds = tmp_path / "builds"

    def exceptions_unbuildable() -> Any:
        with builds.open("a") as file:
            file.write("x")
        raise PermissionError("not yours")

    spec = hetero.dataset(exceptions_unbuildable)()
    try:
        iterator = iter(DataLoader(spec, sampler=range(5), num_workers=num_workers))
        for _ in range(7):
            with pytest.raises(PermissionError, match="not yours"):
                next(iterator)
    finally:
        del hetero.datasets._factories["exceptions_unbuildable"]
    assert builds.read_text() == "x"


def test_length_that_raises_is_raised_again_by_every_call() -> None:
    class Grown(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            raise PermissionError("not yours")

        def __getitem__(self, index: int) -> int:
            return index

    iterator = iter(DataLoader(Grown()))
    for _ in range(2):
        with pytest.raises(PermissionError, match="not yours"):
            next(iterator)


def test_exception_that_ended_a_pass_holds_no_frames() -> None:
    class Held:
        pass

    def train() -> Any:
        held = Held()
        seen = weakref.ref(held)
        iterator = iter(DataLoader(list(range(4)), sampler=_broken_sampler()))
        with pytest.raises(LookupError):
            list(iterator)
        return seen, iterator

    gc.collect()
    gc.disable()
    try:
        seen, iterator = train()
        assert seen() is None
        with pytest.raises(LookupError):
            next(iterator)
    finally:
        gc.enable()


def _broken_sampler() -> Any:
    class Sampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise LookupError("the sampler is broken")

    return Sampler()


class Coded(Exception):
    def __init__(self, code: int, path: str) -> None:
        super().__init__(code, path)


class Stopped(StopIteration):
    pass


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), FileNotFoundError(2, "no such file"), Coded(1, "p"), json.JSONDecodeError("m", "d", 0), OSError()],
    ids=lambda error: type(error).__name__,
)
def test_typed_error_survives_pickling_with_both_types(error: Exception) -> None:
    plain = dataset_error(error, dataset="photos", host="algo-1/0", stage="sample", sample_index=3)
    typed = with_user_type(plain)
    again = pickle.loads(pickle.dumps(typed))
    for each in (typed, again):
        assert isinstance(each, type(error))
        assert isinstance(each, DatasetError)
        assert str(each) == str(plain)
    # Torch's workers send the class beside the error.
    assert pickle.loads(pickle.dumps(type(typed))) is type(typed)


class Particular(Exception):
    def __new__(cls, code: int, path: str) -> Particular:
        return super().__new__(cls, code, path)


@pytest.mark.parametrize("error", [Stopped(), Particular(1, "p")], ids=lambda error: type(error).__name__)
def test_typed_error_of_types_that_cannot_be_combined_is_the_plain_one(error: Exception) -> None:
    plain = dataset_error(error, dataset="photos", host="algo-1/0", stage="sample")
    assert type(with_user_type(plain)) is DatasetError


def test_typed_error_of_a_type_that_this_process_lacks_is_of_the_nearest_base_it_has() -> None:
    missing = type("Missing", (ConnectionResetError,), {"__module__": "not_imported_here"})
    error = with_user_type(dataset_error(missing("gone"), dataset="photos", host="algo-1/0", stage="sample"))
    assert isinstance(error, ConnectionResetError)


class ByKeyword(Exception):
    def __init__(self, *, path: str) -> None:
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}-text"


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Closed(OSError):
    @property
    def errno(self) -> int:  # type: ignore[override]
        raise AttributeError("closed")


class Delegating(Exception):
    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __str__(self) -> str:
        return "delegating-text"


class Noted(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise ZeroDivisionError("notes")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str


class Falsy(Exception):
    def __bool__(self) -> bool:
        return False


class Unrepresentable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")


class OfRecord(Exception):
    record = property(lambda self: "its own")


class Final(KeyError):
    def __init_subclass__(cls, **more: Any) -> None:
        raise TypeError("final")


class Raising(torch.utils.data.Dataset[int]):
    """Raises an exception at sample 3."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error
        return index


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (urllib.error.HTTPError("http://host/file", 503, "busy-text", email.message.Message(), None), "busy-text"),
        (subprocess.CalledProcessError(7, ["the-command"]), "the-command"),
        (ByKeyword(path="keyword"), "keyword-text"),
        (Silent(), "Silent"),
        (Closed(5, "closed-text"), "closed-text"),
        (Delegating(ValueError()), "delegating-text"),
        (Delegating({}), "delegating-text"),
        (Noted("noted-text"), "noted-text"),
        (Frozen("frozen-text"), "Frozen"),
        (Falsy("falsy-text"), "falsy-text"),
        (Unrepresentable("odd-text"), "odd-text"),
        (OfRecord("record-text"), "record-text"),
        (Final("final-text"), "final-text"),
        (ET.ParseError("syntax-text"), "syntax-text"),
        (SyntaxError("source-text", ("file.py", 3, 4, "1 +", 3, 5)), "source-text"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_of_any_class_is_printed_with_text_index_and_place(error: Exception, text: str) -> None:
    with pytest.raises(DatasetError) as caught:
        list(DataLoader(Raising(error), batch_size=4))
    elsewhere = with_user_type(pickle.loads(pickle.dumps(DatasetError(caught.value.record))))
    for raised in (caught.value, elsewhere):
        shown = "".join(traceback.format_exception(raised))
        assert text in shown
        assert "data set 'Raising' failed in this process at sample 3" in shown
        assert "raise self.error" in shown


@pytest.mark.parametrize("error", [ET.ParseError("x"), SyntaxError("x"), Falsy("x"), Unrepresentable("x")])
def test_error_of_an_odd_class_that_can_be_printed_keeps_its_type(error: Exception) -> None:
    with pytest.raises(type(error)):
        list(DataLoader(Raising(error), batch_size=4))


class PanicException(BaseException):
    """As code in Rust raises."""


@pytest.mark.parametrize("error", [PanicException("went wrong"), asyncio.CancelledError("went wrong")])
def test_exception_that_is_none_for_python_is_an_error_of_its_sample(error: BaseException) -> None:
    with pytest.raises(DatasetError, match=r"in this process at sample 3: .*went wrong"):
        list(DataLoader(Raising(error), batch_size=4))
    (batch,) = DataLoader(Raising(error), batch_size=4, on_sample_error="skip")
    assert batch.tolist() == [0, 1, 2, 0]


def test_request_to_end_the_process_passes_through_a_sample() -> None:
    class Preempted(BaseException):
        """Raised by a signal handler of the script, as by those of pytest-timeout."""

    for error in (SystemExit(3), KeyboardInterrupt(), Preempted()):
        with pytest.raises(type(error)):
            list(DataLoader(Raising(error), batch_size=4))
