"""Data sets with a cache: the same samples with and without it, and what is refused."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetero
from hetero.batches.fetch import describe, fetch
from hetero.batches.indexed import IndexedWork
from hetero.batches.purity.comparison import compare, freeze
from hetero.batches.request import BatchRequest
from hetero.cache.loads import COUNTS
from hetero.datasets import build, dataset
from hetero.errors import ConfigError, DatasetError
from hetero.spec import Cache, DatasetSpec
from hetero.system.scripts import SCRIPT_MODULE

torch = pytest.importorskip("torch")


class Photos:
    """Loads without draws, augments with all three generators."""

    size = 20

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.num_loads = 0

    def __len__(self) -> int:
        return self.size

    def load(self, index: int) -> dict[str, Any]:
        self.num_loads += 1
        pixels = np.random.default_rng(abs(int(index))).integers(0, 256, (8, 8, 3), np.uint8)
        return {"pixels": pixels, "label": index * self.scale}

    def augment(self, sample: dict[str, Any]) -> Any:
        sample["pixels"] += np.uint8(random.getrandbits(4))  # writes to its argument
        return torch.from_numpy(sample["pixels"]) + torch.randint(9, (1,)), sample["label"] + np.random.rand()


class WithoutDraws(Photos):
    def augment(self, sample: dict[str, Any]) -> Any:
        return sample["label"]


def request(spec: DatasetSpec, indices: list[int], **options: Any) -> BatchRequest:
    work = IndexedWork(np.array(indices))
    return BatchRequest(spec=spec, work=work, **{"seed": 3, "epoch": 0, "position": 0, **options})


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def both(photos: type[Any] = Photos, cache: Any = "10 MB", **options: Any) -> tuple[Any, Any]:
    """Return the specs of two data sets, without and with a cache."""

    class Whole(photos):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return self.augment(self.load(index))

    plain = dataset(name="plain", **options)(lambda: Whole())
    kept = dataset(name="kept", cache=cache, **options)(lambda: photos())
    return plain(), kept()


@pytest.mark.parametrize("options", [{}, {"seeding": "batch"}], ids=str)
def test_batches_are_equal_with_and_without_a_cache(options: dict[str, Any]) -> None:
    plain, kept = both(**options)
    without, within = build(plain), build(kept)
    for epoch in range(3):
        for position, indices in enumerate([[0, 5, 5, 19], [7, 0, 2, 3]]):
            place = {"epoch": epoch, "position": position}
            expected = fetch(without, request(plain, indices, **place))
            assert compare(freeze(expected), fetch(within, request(kept, indices, **place))) is None
    assert COUNTS["num_loaded"] == 6  # of the distinct indices 0, 2, 3, 5, 7, 19
    assert COUNTS["num_kept"] == 3 * 8 - 6


def test_later_job_finds_what_an_earlier_one_kept_on_disk(tmp_path: Path) -> None:
    _, kept = both(cache=Cache(disk="10 MB", folder=str(tmp_path)))
    first = fetch(build(kept), request(kept, [1, 2, 3]))
    assert (COUNTS["num_kept"], COUNTS["num_loaded"]) == (0, 3)
    assert compare(freeze(first), fetch(build(kept), request(kept, [1, 2, 3]))) is None
    assert (COUNTS["num_kept"], COUNTS["num_loaded"]) == (3, 3)


def test_damaged_sample_is_loaded_again_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, kept = both(cache=Cache(disk="10 MB", folder=str(tmp_path)))
    first = freeze(fetch(build(kept), request(kept, [1, 2, 3])))
    (data,) = tmp_path.glob("hetero-cache-*/data-kept/*/data-0")
    data.write_bytes(bytes(data.stat().st_size))
    assert compare(first, fetch(build(kept), request(kept, [1, 2, 3]))) is None
    assert (COUNTS["num_damaged"], COUNTS["num_loaded"]) == (3, 6)
    told = [message for message in caplog.messages if "was damaged" in message]
    assert told == ["data set 'kept': a kept sample was damaged, and is loaded again"]


def test_folder_may_name_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    _, kept = both(cache=Cache(disk="10 MB", folder="$SCRATCH"))
    fetch(build(kept), request(kept, [1]))
    assert list(tmp_path.glob("hetero-cache-*/data-kept/*/data-0"))


def test_what_memory_cannot_take_goes_to_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Large(WithoutDraws):
        size = 200

        def load(self, index: int) -> dict[str, Any]:
            return {"pixels": np.full(10_000, index, np.uint8), "label": index}

    _, kept = both(Large, cache=Cache(memory="500 kB", disk="1 MB", folder=str(tmp_path)))
    for _ in range(2):
        assert fetch(build(kept), request(kept, list(range(200)))).tolist() == list(range(200))
    assert 90 < COUNTS["num_kept"] < 150
    (warning,) = {record.getMessage() for record in caplog.records if "the cache is full" in record.getMessage()}
    assert "memory/hetero-cache-" in warning
    assert "the bound of 500 kB is reached; " in warning
    assert "the bound of 1,000 kB is reached)" in warning


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1), lambda: np.random.seed(1)])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_load_that_draws_is_refused(draw: Any, policy: str) -> None:
    class Drawing(Photos):
        def load(self, index: int) -> dict[str, Any]:
            if index == 4:
                draw()
            return super().load(index)

    _, kept = both(Drawing)
    built = build(kept)
    fetch(built, request(kept, [1, 2], on_sample_error=policy))
    with pytest.raises(DatasetError, match=r"load\(4\) of data set 'kept' draws random numbers or seeds a generator"):
        fetch(built, request(kept, [1, 4], on_sample_error=policy))


def test_load_that_differs_each_time_is_refused() -> None:
    class Counting(WithoutDraws):
        def load(self, index: int) -> dict[str, Any]:
            return {**super().load(index), "label": self.num_loads}

    _, kept = both(Counting)
    with pytest.raises(DatasetError, match=r"load\(1\) of data set .kept. returns something else when it is called"):
        fetch(build(kept), request(kept, [1, 2]))


def test_load_that_draws_from_a_generator_of_its_own_is_refused() -> None:
    class Own(WithoutDraws):
        def on_seed(self, key: int) -> None:
            self.generator = np.random.default_rng(key)

        def load(self, index: int) -> dict[str, Any]:
            return {"label": int(self.generator.integers(1000))}

    _, kept = both(Own)
    with pytest.raises(DatasetError, match="returns something else when it is called again"):
        fetch(build(kept), request(kept, [1, 2]))


def test_data_set_with_a_generator_of_its_own_makes_the_same_batches() -> None:
    class Own(WithoutDraws):
        def on_seed(self, key: int) -> None:
            self.generator = np.random.default_rng(key)

        def augment(self, sample: dict[str, Any]) -> Any:
            return sample["label"] + int(self.generator.integers(1000))

    plain, kept = both(Own)
    without, within = build(plain), build(kept)
    for epoch in range(3):
        expected = fetch(without, request(plain, [3, 5], epoch=epoch))
        assert fetch(within, request(kept, [3, 5], epoch=epoch, verify=True)).tolist() == expected.tolist()


def test_changed_data_are_found_by_the_purity_check(tmp_path: Path) -> None:
    table = np.arange(20)

    class Rows(WithoutDraws):
        def load(self, index: int) -> dict[str, Any]:
            return {"label": int(np.load(tmp_path / "table.npy")[index])}

    np.save(tmp_path / "table.npy", table)
    _, kept = both(Rows, cache=Cache(disk="10 MB", folder=str(tmp_path)))
    assert fetch(build(kept), request(kept, [6])).tolist() == [6]
    table[6] = 60  # none of the samples that the fingerprint covers
    np.save(tmp_path / "table.npy", table)
    with pytest.raises(
        DatasetError, match="computed twice.* made with kept samples .* change @hetero.dataset.fingerprint"
    ):
        fetch(build(kept), request(kept, [6], verify=True))


def test_getitem_that_differs_is_refused() -> None:
    class Other(Photos):
        def __getitem__(self, index: int) -> Any:
            return 7

    _, kept = both(Other)
    built = build(kept)
    for index in (1, 2):
        with pytest.raises(
            DatasetError, match=r"augment\(load\(1\)\) is not what __getitem__ returns \(sample: .* against int"
        ):
            fetch(built, request(kept, [index]))


class TorchPhotos(WithoutDraws, torch.utils.data.Dataset[Any]):
    """Has torch's own ``__getitem__``, which only raises."""


def test_data_set_of_torch_needs_no_getitem() -> None:
    spec = dataset(name="torch_photos", cache="1 MB")(lambda: TorchPhotos())()
    assert fetch(build(spec), request(spec, [3, 4])).tolist() == [3, 4]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_sample_that_raises_affects_no_other(policy: str) -> None:
    class Broken(WithoutDraws):
        def load(self, index: int) -> dict[str, Any]:
            if index == 0:
                raise LookupError("no such file")
            return super().load(index)

    _, kept = both(Broken)
    built = build(kept)
    assert fetch(built, request(kept, [1, 2], on_sample_error=policy)).tolist() == [1, 2]
    if policy == "skip":
        assert fetch(built, request(kept, [0, 2], on_sample_error=policy)).tolist() == [2, 2]
    else:
        with pytest.raises(DatasetError, match="LookupError: no such file"):
            fetch(built, request(kept, [0, 2]))


def test_result_that_cannot_be_kept_is_loaded_again_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(WithoutDraws):
        def load(self, index: int) -> Any:
            return {**super().load(index), "odd": object()}

        def augment(self, sample: dict[str, Any]) -> Any:
            return sample["label"]

    _, kept = both(Odd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.cache.loads.compare", lambda first, second: None)  # two objects are not the same
        for _ in range(2):
            assert fetch(build(kept), request(kept, [1, 2])).tolist() == [1, 2]
    assert COUNTS["num_loaded"] == 4
    (warning,) = {record.getMessage() for record in caplog.records}
    assert warning.startswith("data set 'kept': what load(1) returned cannot be kept: batch['odd']: object cannot")


@pytest.mark.parametrize(
    ("missing", "text"),
    [("load", r"Partial without load\(\), which"), ("augment", r"Partial without augment\(\), which")],
)
def test_data_set_without_a_part_is_refused(missing: str, text: str) -> None:
    parts = {name: value for name, value in vars(Photos).items() if name not in (missing, "__dict__", "__weakref__")}
    partial = type("Partial", (), parts)
    spec = dataset(name="partial", cache="1 MB")(lambda: partial())()
    with pytest.raises(DatasetError, match=text):
        build(spec)


def test_subset_of_a_data_set_shares_its_samples() -> None:
    @dataset(cache="1 MB")
    def part(begin: int) -> Any:
        return torch.utils.data.Subset(WithoutDraws(), range(begin, 10))

    spec = part(4)
    built = build(spec)
    assert len(built) == 6
    assert fetch(built, request(spec, [0, 5])).tolist() == [4, 9]
    assert fetch(built, request(spec, [0, 5])).tolist() == [4, 9]
    assert (COUNTS["num_kept"], COUNTS["num_loaded"]) == (2, 2)


def test_description_does_not_fill_or_read_the_cache(memory: Path) -> None:
    plain, kept = both()
    assert describe(build(plain)).fingerprint == describe(build(kept)).fingerprint
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(
    "indices", [np.arange(3, 9), list(np.arange(3, 9)), torch.arange(3, 9)], ids=["array", "list", "tensor"]
)
def test_subset_with_integers_of_other_types_is_kept(indices: Any) -> None:
    spec = dataset(name="odd_part", cache="1 MB")(lambda: torch.utils.data.Subset(WithoutDraws(), indices))()
    built = build(spec)
    for _ in range(2):
        assert fetch(built, request(spec, [0, 5])).tolist() == [3, 8]
    assert (COUNTS["num_kept"], COUNTS["num_loaded"]) == (2, 2)


def test_data_set_that_is_built_again_opens_nothing_again() -> None:
    _, kept = both(WithoutDraws)
    first = build(kept)
    fetch(first, request(kept, [1]))
    before = num_open()
    for _ in range(20):
        fetch(build(kept), request(kept, [1]))
    assert num_open() <= before + 1  # the file that it has written, to read from it


def test_index_that_is_no_position_is_loaded() -> None:
    _, kept = both(WithoutDraws)
    built = build(kept)
    assert [built.dataset[-1], built.dataset[-1], built.dataset[True]] == [-1, -1, 1]
    assert (COUNTS["num_kept"], COUNTS["num_loaded"]) == (0, 3)


def keys(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.glob("hetero-cache-*/data-kept/*") if path.is_dir()}


def test_other_code_arguments_globals_or_data_are_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Cache(disk="10 MB", folder=str(tmp_path))

    def opened(source: str, module: str = "__main__", **arguments: Any) -> None:
        names: dict[str, Any] = {"__name__": module, "np": np}
        exec(source, names)
        monkeypatch.setattr("hetero.datasets._factories", {})
        monkeypatch.setattr("hetero.batches.structure.conversion._script_module", module)
        spec = dataset(name="kept", cache=place)(names["photos"])(**arguments)
        fetch(build(spec), request(spec, [1]))

    script = """
SCALE = 3
class Photos:
    def __init__(self, size=5):
        self.size, self.kind = size, Photos
    def __len__(self):
        return self.size
    def load(self, index):
        return helper(index) * SCALE
    def augment(self, sample):
        return sample + 1
def helper(index):
    return np.full(3, index)
def photos(size=5):
    return Photos(size)
"""
    opened(script)
    opened(script)
    assert len(keys(tmp_path)) == 1
    opened(script.replace("sample + 1", "sample + 2"))  # augment is not kept
    opened("\n\n\n" + script)  # nor do lines count
    opened(script, module=SCRIPT_MODULE)  # a data host uses what a rank has kept
    assert len(keys(tmp_path)) == 1
    for number, (old, new) in enumerate(
        [("SCALE = 3", "SCALE = 4"), ("np.full(3, index)", "np.full(4, index)"), ("* SCALE", "+ SCALE")], 2
    ):
        opened(script.replace(old, new))
        assert len(keys(tmp_path)) == number
    opened(script, size=6)
    assert len(keys(tmp_path)) == 5


HELD = """
import functools
class Slotted:
    __slots__ = ("value",)
    def __init__(self, value):
        self.value = value
def made(value):
    def inner():
        return value
    return inner
def with_default(value=VALUE):
    return value
def added(value, index):
    return value + index
CLOSURE, PARTIAL, SLOTTED = made(VALUE), functools.partial(added, VALUE), Slotted(VALUE)
LARGE = {number: number + VALUE for number in range(60_000)}
class Photos:
    def __init__(self):
        self.labels = [number + VALUE for number in range(20)]
    def __len__(self):
        return 20
    def load(self, index):
        if index != 6:  # none of the samples that are part of the key
            return 0
        return EXPRESSION
    def augment(self, sample):
        return sample
def photos():
    return Photos()
"""


@pytest.mark.parametrize(
    "expression",
    ["CLOSURE()", "PARTIAL(index)", "SLOTTED.value", "with_default()", "LARGE[index]", "self.labels[index]"],
)
def test_what_load_reads_elsewhere_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    found = []
    for value in (1, 1, 2):
        names: dict[str, Any] = {"__name__": "__main__", "np": np}
        exec(HELD.replace("VALUE", str(value)).replace("EXPRESSION", expression), names)
        monkeypatch.setattr("hetero.datasets._factories", {})
        spec = dataset(name="kept", cache=Cache(disk="1 MB", folder=str(tmp_path)))(names["photos"])()
        found.append(fetch(build(spec), request(spec, [6])).tolist()[0])
    assert found[0] == found[1] != found[2]
    assert COUNTS["num_kept"] == 1


def test_changed_data_are_another_key(tmp_path: Path) -> None:
    table = np.arange(10)

    class Rows(WithoutDraws):
        size = 10

        def load(self, index: int) -> dict[str, Any]:
            return {"label": int(table[index])}

    _, kept = both(Rows, cache=Cache(disk="10 MB", folder=str(tmp_path)))
    assert fetch(build(kept), request(kept, [9])).tolist() == [9]
    table[9] = 90  # one of the samples that the fingerprint covers
    assert fetch(build(kept), request(kept, [9])).tolist() == [90]


def test_built_data_set_travels_to_another_process() -> None:
    spec = dataset(name="torch_photos", cache="1 MB")(make_photos)()
    built = build(spec)
    assert fetch(built, request(spec, [1])).tolist() == [1]
    assert built.split is not None
    copied = pickle.loads(pickle.dumps(built.split.dataset))
    assert len(copied) == 20
    state = built.split.cache.__getstate__()
    assert state["_tiers"] is None
    assert state["_key"] != b""


def make_photos() -> TorchPhotos:
    return TorchPhotos()


class Iterable(torch.utils.data.IterableDataset[Any]):
    load = augment = __len__ = __iter__ = lambda self, *_: 1


class Batched(WithoutDraws):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices


@pytest.mark.parametrize(
    ("make", "text"), [(Iterable, "an iterable data set"), (Batched, "a data set with __getitems__")]
)
def test_data_set_of_another_kind_is_refused(make: Any, text: str) -> None:
    spec = dataset(name="other_kind", cache="1 MB")(lambda: make())()
    with pytest.raises(DatasetError, match=text):
        build(spec)


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        ("8 gigabytes", "memory of a cache is '8 gigabytes', expected bytes"),
        ("0 GB", "neither memory nor disk"),
        (-1, "memory of a cache is -1"),
        (True, "memory of a cache is True"),
        (1.5e9, "memory of a cache is 1500000000.0"),
        ({}, "memory of a cache is {}"),
    ],
)
def test_sizes_are_checked(cache: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        dataset(name="sized", cache=cache)(lambda: None)


@pytest.mark.parametrize("options", [{"disk": "1 GB"}, {"memory": "1 GB", "folder": "/tmp"}])
def test_disk_and_folder_belong_together(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="disk=.* and folder="):
        hetero.Cache(**options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8 GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5 TB", 1.5e12), ("7 kB", 7000), ("9 B", 9), (5, 5)],
)
def test_sizes_with_units(text: Any, expected: int) -> None:
    assert hetero.Cache(memory=text).memory == expected
