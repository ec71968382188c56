"""The pure function: purity, seeding per sample, indices, collation, failures."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled
from hetero.batches.fetch import fetch
from hetero.batches.seeds import batch_key, preserved_generators, sample_key
from hetero.errors import ConfigError, DatasetError
from tests.support.batches.subjects import Augmented, Batched, Keyless, Seeded, failure, request, same

torch = pytest.importorskip("torch")
data = torch.utils.data


# -- purity -----------------------------------------------------------------------------------------


def test_fetch_after_any_state_repeats_the_batch() -> None:
    built = BuiltDataset.from_object(Augmented())
    first = fetch(built, request())
    fetch(built, request((0, 1), epoch=9))
    random.seed(99)
    assert same(first, fetch(built, request()))
    assert first["index"].tolist() == [3, 1, 4]
    assert first["noise"].shape == (3, 3)


@pytest.mark.parametrize("change", [{"seed": 18}, {"epoch": 3}, {"occurrences": np.array([0, 1, 0], np.uint32)}])
def test_fetch_with_other_key_draws_otherwise(change: dict[str, Any]) -> None:
    built = BuiltDataset.from_object(Augmented())
    first, other = fetch(built, request()), fetch(built, request(**change))
    assert not torch.equal(first["noise"][1], other["noise"][1])
    assert torch.equal(first["noise"][0], other["noise"][0]) == ("occurrences" in change)


def test_fetch_regrouped_draws_the_same_per_sample() -> None:
    built = BuiltDataset.from_object(Augmented())
    together = fetch(built, request((3, 1, 4)))
    alone = fetch(built, request((1,), position=99))
    assert torch.equal(together["noise"][1], alone["noise"][0])


def test_fetch_with_random_collate_repeats_and_depends_on_position() -> None:
    built = BuiltDataset.from_object(list(range(9)), collate_fn=lambda samples: (samples, random.random()))
    assert fetch(built, request()) == fetch(built, request())
    assert fetch(built, request()) != fetch(built, request(position=6))


def test_fetch_inside_preserved_generators_leaves_the_trainers_alone() -> None:
    built = BuiltDataset.from_object(Augmented())
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]
    with preserved_generators():
        fetch(built, request())
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]


def test_fetch_calls_on_seed_with_every_key() -> None:
    inner = Seeded()
    for outer in (inner, data.Subset(inner, list(range(8))), data.ConcatDataset([data.Subset(inner, list(range(8)))])):
        inner.keys.clear()
        fetch(BuiltDataset.from_object(outer), request((3, 1)))
        expected = [sample_key(17, 2, 3, 0), sample_key(17, 2, 1, 0), batch_key(17, 2, 5, (3, 1))]
        assert inner.keys == expected


def test_fetch_verified_with_on_seed_passes() -> None:
    fetch(BuiltDataset.from_object(Seeded()), request(verify=True))


def test_fetch_verified_with_own_generator_names_sample_and_causes() -> None:
    generator = np.random.default_rng()

    class Impure(Augmented):
        def __getitem__(self, index: int) -> Any:
            return index, (generator.random() if index == 1 else 0.0)

    built = BuiltDataset.from_object(Impure())
    fetch(built, request())
    with pytest.raises(DatasetError, match=r"in the purity check at sample 1: .*batch\[1\]: .*on_seed") as raised:
        fetch(built, request(verify=True), host="algo-1/0")
    assert failure(raised).host == "algo-1/0"


def test_fetch_verified_with_impure_collate_names_no_sample() -> None:
    counter = iter(range(9))
    built = BuiltDataset.from_object(list(range(9)), collate_fn=lambda samples: next(counter))
    with pytest.raises(DatasetError, match=r"in the purity check: computed twice, batch: int"):
        fetch(built, request(verify=True))


def test_fetch_verified_sees_a_difference_in_memory_that_is_used_again() -> None:
    generator, buffer = np.random.default_rng(), np.zeros(1)

    def into_buffer(samples: Any) -> Any:
        buffer[0] = generator.random()
        return {"noise": buffer}

    class Reusing(Batched):
        def __getitems__(self, indices: list[int]) -> Any:
            return into_buffer(indices)["noise"]

    collated = BuiltDataset.from_object(list(range(9)), collate_fn=into_buffer)
    whole = BuiltDataset.from_object(Reusing(), seeding="batch", collate_fn=lambda batch: batch)
    for built in (collated, whole):
        with pytest.raises(DatasetError, match="computed twice"):
            fetch(built, request(verify=True))


def test_fetch_verified_names_the_sample_in_memory_that_is_used_again() -> None:
    generator = np.random.default_rng()

    class Reusing(Augmented):
        rows = np.zeros((20, 3))

        def __getitem__(self, index: int) -> Any:
            self.rows[index] = generator.random() if index == 4 else index
            return self.rows[index]

    with pytest.raises(DatasetError, match="in the purity check at sample 4: computed twice"):
        fetch(BuiltDataset.from_object(Reusing()), request(verify=True))


# -- indices ----------------------------------------------------------------------------------------


def test_fetch_with_keys_passes_them_through() -> None:
    class Keyed:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: Any) -> str:
            return repr(key)

    built = BuiltDataset.from_object(Keyed(), collate_fn=list)
    assert fetch(built, request(["a", (1, 2), 1])) == ["'a'", "(1, 2)", "1"]


@pytest.mark.parametrize("index", [20, -21, 2**63 - 1, -(2**63)])
def test_fetch_with_index_out_of_range_names_it_and_the_length(index: int) -> None:
    expected = f"IndexError: list .*index {index} is out of range: the data set has 20 samples"
    with pytest.raises(DatasetError, match=expected) as raised:
        fetch(BuiltDataset.from_object(list(range(20))), request((0, index)))
    assert (failure(raised).stage, failure(raised).sample_index) == ("sample", str(index))


def test_fetch_leaves_to_the_data_set_which_indices_it_takes() -> None:
    assert fetch(BuiltDataset.from_object(list(range(20))), request((-1, -20))).tolist() == [19, 0]
    keyed = BuiltDataset.from_object({7: "seven", -3: "minus three", 2.5: "a half", None: "none"}, collate_fn=list)
    assert fetch(keyed, request([7, -3, 2.5, None])) == ["seven", "minus three", "a half", "none"]
    with pytest.raises(DatasetError, match="KeyError: 5"):
        fetch(keyed, request((5,)))


def test_fetch_of_no_samples_checks_no_range() -> None:
    assert fetch(BuiltDataset.from_object([], collate_fn=list), request(())) == []


def test_fetch_without_length_checks_no_range() -> None:
    built = BuiltDataset.from_object(Keyless())
    assert fetch(built, request((-5, 10**12))).tolist() == [-5, 10**12]
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(built)


# -- collation --------------------------------------------------------------------------------------


def test_fetch_without_collation_gives_the_sample_as_torch_does() -> None:
    built = BuiltDataset.from_object([(np.arange(3), "a", 1)])
    array, text, number = fetch(built, request((0,), collate=False))
    assert torch.equal(array, torch.arange(3))
    assert (text, number) == ("a", 1)
    built = BuiltDataset.from_object([4], collate_fn=lambda sample: sample + 1)
    assert fetch(built, request((0,), collate=False)) == 5


def test_fetch_of_a_sample_as_it_is_makes_no_tensors() -> None:
    built = BuiltDataset.from_object([(np.arange(3), "a")])
    array, text = fetch(built, request((0,), collate=False, as_is=True))
    assert (type(array), array.tolist(), text) == (np.ndarray, [0, 1, 2], "a")
    built = BuiltDataset.from_object([4], collate_fn=lambda sample: sample + 1)
    assert fetch(built, request((0,), collate=False, as_is=True)) == 5


def test_fetch_with_collate_raising_shows_shapes() -> None:
    built = BuiltDataset.from_object([torch.zeros(2), torch.zeros(2), torch.zeros(3, dtype=torch.int8)])
    with pytest.raises(DatasetError, match=r"while samples were collated: .*equal size") as raised:
        fetch(built, request((1, 0, 2)))
    assert "(sample 1 is Tensor torch.float32[2]; sample 2 is Tensor torch.int8[3])" in failure(raised).exception


def test_fetch_without_torch_needs_a_collate_fn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.data", None)
    built = BuiltDataset.from_object(["a", "b"])
    with pytest.raises(ConfigError, match=r"torch is not installed"):
        fetch(built, request((1, 0)))
    assert fetch(built, request((1,), collate=False)) == "b"


# -- failures ---------------------------------------------------------------------------------------


def test_fetch_with_sample_raising_carries_index_host_and_user_frames() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise OSError(f"cannot read {index}\nhetero_metric step_time_ms=0 \x1b[31m \udcff")

    with pytest.raises(DatasetError) as raised:
        fetch(BuiltDataset.from_object(Broken()), request((7,)), host="algo-2/1")
    record = failure(raised)
    assert (record.dataset, record.host, record.stage, record.sample_index) == ("Broken", "algo-2/1", "sample", "7")
    assert record.exception == "OSError: cannot read 7"
    # The other lines of the message are indented, so they cannot forge a line of the log.
    assert "\n    hetero_metric step_time_ms=0 \\x1b[31m \\udcff" in str(record)
    assert "test_fetch.py" in record.traceback
    assert "fetch.py" not in record.traceback.replace("test_fetch.py", "")
    assert "\x1b" not in record.traceback
    assert isinstance(raised.value.__cause__, OSError)


class Raising(Augmented):
    """Raises for each sample."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> Any:
        raise self.error


@pytest.mark.parametrize("seeding", ["sample", "batch"])
def test_fetch_with_sample_raising_says_how_to_go_on_without_it(seeding: Any) -> None:
    built = BuiltDataset.from_object(Raising(ValueError("broken")), seeding=seeding)
    with pytest.raises(DatasetError) as raised:
        fetch(built, request((7,)))
    assert str(raised.value).count('on_sample_error="skip"') == 1
    for other in (request((7,), on_sample_error="skip"), request((7,), collate=False)):  # it does, or cannot
        with pytest.raises(DatasetError) as raised:
            fetch(built, other)
        assert "on_sample_error" not in str(raised.value)


def test_file_that_a_data_host_lacks_says_that_paths_are_its_own() -> None:
    built = BuiltDataset.from_object(Raising(FileNotFoundError(2, "No such file", "/data/1.jpg")))
    with pytest.raises(DatasetError) as raised:
        fetch(built, request((7,), collate=False), host="algo-1/0")
    assert failure(raised).traceback.endswith("call os.path.expandvars in the function with @hetero.dataset.")
    assert failure(raised).exception.endswith("No such file: '/data/1.jpg'")
    with pytest.raises(DatasetError) as raised:
        fetch(built, request((7,), collate=False))  # in the trainer
    assert "expandvars" not in str(raised.value)


def test_fetch_with_long_traceback_bounds_it() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("é" * 100_000)

    with pytest.raises(DatasetError) as raised:
        fetch(BuiltDataset.from_object(Broken()), request((7,)))
    assert len(failure(raised).traceback.encode()) <= 16 * 1024
    assert len(failure(raised).exception.encode()) <= 4096 + 2


def test_fetch_cancelled_stops_between_samples() -> None:
    seen = []

    class Recorded(Augmented):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return index

    built = BuiltDataset.from_object(Recorded(), seeding="sample")
    with pytest.raises(Cancelled):
        fetch(built, request(), cancelled=lambda: len(seen) == 2)
    assert seen == [3, 1]


@pytest.mark.parametrize("change", [{"epoch": -1}, {"seed": 2**64}, {"position": -1}])
def test_fetch_out_of_range_raises_config_error(change: dict[str, Any]) -> None:
    for collate_fn in (None, list):
        with pytest.raises(ConfigError, match="no key for"):
            fetch(BuiltDataset.from_object([1, 2], collate_fn=collate_fn), request((0,), **change))
