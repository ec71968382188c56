"""The pure function: purity, seeding, indices, collation, failures."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from subjects import Augmented, Batched, Keyless, Seeded, failure, request, same

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import describe, fetch
from hetero.batches.request import as_indices
from hetero.batches.samples import Cancelled
from hetero.batches.seeds import batch_key, preserved_generators, sample_key
from hetero.datasets import dataset
from hetero.errors import ConfigError, DatasetError

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


def test_fetch_in_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import random, sys
            import numpy as np
            import hetero.datasets
            from hetero.batches.build import BuiltDataset
            from hetero.batches.fetch import fetch
            from hetero.batches.request import BatchRequest, as_indices
            from hetero.datasets import dataset

            class Lazy:
                def __len__(self): return 20
                def __getitem__(self, index):
                    import torch  # only now: its generator must be seeded all the same
                    return torch.rand(2).tolist(), np.random.rand(), random.random()

            @dataset(collate_fn=list)
            def lazy(): return Lazy()

            if "early" in sys.argv:
                import torch
            assert ("torch" in sys.modules) == ("early" in sys.argv)
            built = BuiltDataset.build(lazy(), worker_index=len(sys.argv) - 1, num_workers=9)
            print(fetch(built, BatchRequest(spec=lazy(), indices=as_indices([5, 2]), seed=1, epoch=0, position=0)))
        """)
    )
    outputs = [
        subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=100, check=True
        ).stdout
        for arguments in ([], ["early"])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("[([0.")


@pytest.mark.parametrize("importer", ["factory", "worker_init_fn", "sample", "collate_fn"])
def test_torch_imported_by_the_users_code_is_seeded_as_if_it_had_been_there(importer: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import hetero.datasets
            from hetero.batches.build import BuiltDataset
            from hetero.batches.fetch import describe, fetch
            from hetero.batches.request import BatchRequest, as_indices
            from hetero.datasets import dataset

            importer, early = sys.argv[1:]
            drawn = []

            def draw(place):
                if place == importer or place == 1:
                    import torch, torch.utils.data
                    info = torch.utils.data.get_worker_info()
                    drawn.append([*torch.rand(2).tolist(), info and info.id])
                    return drawn[-1]

            class Samples:
                def __len__(self): return 1
                def __getitem__(self, index): return draw("sample")

            @dataset(collate_fn=lambda samples: (samples, draw("collate_fn")),
                     worker_init_fn=draw if importer == "worker_init_fn" else None)
            def lazy():
                draw("factory")
                return Samples()

            if early == "early":
                import torch
            assert ("torch" in sys.modules) == (early == "early")
            built = BuiltDataset.build(lazy(), worker_index=1, num_workers=2)
            batch = fetch(built, BatchRequest(spec=lazy(), indices=as_indices([0]), seed=1, epoch=0, position=0))
            print(drawn[-1], batch, describe(built).fingerprint)
        """)
    )
    outputs = [
        subprocess.run([sys.executable, script, importer, early], capture_output=True, text=True, timeout=100)
        for early in ("early", "late")
    ]
    assert [done.returncode for done in outputs] == [0, 0], outputs[1].stderr + outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout
    assert "[0." in outputs[0].stdout


def test_factory_that_imports_torch_is_run_again_only_if_it_drew_from_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            from hetero.batches.build import BuiltDataset
            from hetero.datasets import dataset

            @dataset
            def lazy(draws: bool):
                import torch
                print(torch.rand(1).item() if draws else "built")
                return [1]

            BuiltDataset.build(lazy(sys.argv[1:] == ["draws"]))
            import torch
            print(torch.rand(1).item())  # not of the key: torch is seeded at random when it is imported
        """)
    )
    plain, drawing, other = (
        subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=100, check=True
        ).stdout.split()
        for arguments in ([], ["draws"], ["draws"])
    )
    assert plain[:-1] == ["built"]
    assert len(set(drawing)) == 3
    assert drawing[1] == other[1]
    assert drawing[2] != other[2]


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
    with pytest.raises(DatasetError, match=r"in purity at sample 1: .*batch\[1\]: .*on_seed") as raised:
        fetch(built, request(verify=True), host="algo-1/0")
    assert failure(raised).host == "algo-1/0"


def test_fetch_verified_with_impure_collate_names_no_sample() -> None:
    counter = iter(range(9))
    built = BuiltDataset.from_object(list(range(9)), collate_fn=lambda samples: next(counter))
    with pytest.raises(DatasetError, match=r"in purity: computed twice, batch: int"):
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

    with pytest.raises(DatasetError, match="in purity at sample 4: computed twice"):
        fetch(BuiltDataset.from_object(Reusing()), request(verify=True))


# -- seeding="batch" --------------------------------------------------------------------------------


def test_fetch_with_batch_seeding_uses_getitems_and_one_key() -> None:
    built = BuiltDataset.from_object(Batched(), seeding="batch")
    indices, draws, sizes = fetch(built, request())
    np.random.seed(batch_key(17, 2, 5, (3, 1, 4)) >> 32)
    assert draws.tolist() == np.random.rand(3).tolist()
    assert (indices.tolist(), sizes.tolist()) == ([3, 1, 4], [3, 3, 3])


def test_fetch_with_batch_seeding_and_nested_subset_maps_indices() -> None:
    inner = data.Subset(data.Subset(Batched(), [5, 6, 7, 8, 9]), [4, 3, 2, 1, 0])
    indices, _, sizes = fetch(BuiltDataset.from_object(inner, seeding="batch"), request())
    assert (indices.tolist(), sizes.tolist()) == ([6, 8, 5], [3, 3, 3])


def test_fetch_with_batch_seeding_and_subset_of_plain_names_outer_index() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            return 1 // (index - 8)

    inner = data.Subset(Broken(), [5, 6, 7, 8, 9])
    with pytest.raises(DatasetError, match="at sample 3: ZeroDivisionError"):
        fetch(BuiltDataset.from_object(inner, seeding="batch"), request((0, 3)))


def test_fetch_with_sample_seeding_and_subset_uses_outer_key() -> None:
    inner = data.Subset(Augmented(), [5, 6, 7, 8, 9])
    batch = fetch(BuiltDataset.from_object(inner), request((3, 1, 4)))
    assert batch["index"].tolist() == [8, 6, 9]
    assert torch.equal(batch["noise"], fetch(BuiltDataset.from_object(Augmented()), request((3, 1, 4)))["noise"])


def test_fetch_with_getitems_of_wrong_length_raises() -> None:
    class Short(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [0]

    with pytest.raises(DatasetError, match="returned 1 samples for 3 indices"):
        fetch(BuiltDataset.from_object(Short(), seeding="batch"), request())


def test_fetch_with_getitems_of_a_whole_batch_passes_it_to_collate() -> None:
    class Whole(Batched):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices)

    built = BuiltDataset.from_object(Whole(), seeding="batch", collate_fn=lambda batch: batch)
    assert fetch(built, request(verify=True)).tolist() == [3, 1, 4]


@pytest.mark.parametrize("returned", [lambda indices: {"index": torch.tensor(indices)}, lambda indices: 3, iter])
def test_describe_with_getitems_of_a_whole_batch_takes_any_object(returned: Any) -> None:
    class Whole(Batched):
        def __getitems__(self, indices: list[int]) -> Any:
            return returned(indices)

    built = BuiltDataset.from_object(Whole(), seeding="batch", collate_fn=lambda batch: batch)
    assert describe(built) == describe(built)


def test_describe_with_getitems_into_used_memory_sees_that_it_is_impure() -> None:
    generator = np.random.default_rng()

    class Reusing(Batched):
        buffer = np.zeros((1, 1))

        def __getitems__(self, indices: list[int]) -> Any:
            self.buffer[0] = generator.random()
            return self.buffer

    described = [describe(BuiltDataset.from_object(Reusing(), seeding="batch")) for _ in range(2)]
    assert described[0] == described[1]  # as for all impure samples; their sketches would differ


def test_build_with_getitems_alone_needs_batch_seeding() -> None:
    class Together:
        def __len__(self) -> int:
            return 3

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    with pytest.raises(ConfigError, match=r"cannot be seeded for every sample: .*\(seeding=\"batch\"\)"):
        BuiltDataset.from_object(Together())
    with pytest.raises(DatasetError, match="in build: .*cannot be seeded for every sample"):
        BuiltDataset.build(dataset(name="each")(lambda: Together())())
    built = BuiltDataset.build(dataset(name="together", seeding="batch")(lambda: Together())())
    assert fetch(built, request((2, 0))).tolist() == [2, 0]


def test_fetch_with_batch_seeding_without_collation_takes_one_item() -> None:
    built = BuiltDataset.from_object(Batched(), seeding="batch")
    sample = fetch(built, request((3,), collate=False))
    assert sample["index"] == 3
    assert same(sample, fetch(built, request((3,), collate=False)))


# -- indices ----------------------------------------------------------------------------------------


def test_fetch_with_keys_passes_them_through() -> None:
    class Keyed:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: Any) -> str:
            return repr(key)

    built = BuiltDataset.from_object(Keyed(), collate_fn=list)
    assert fetch(built, request(["a", (1, 2), 1])) == ["'a'", "(1, 2)", "1"]


@pytest.mark.parametrize("index", [-1, 20, 2**63 - 1, -(2**63)])
def test_fetch_with_index_out_of_range_names_it_and_the_length(index: int) -> None:
    with pytest.raises(
        DatasetError, match=f"IndexError: index {index} .*20 samples, expected 0 <= index < 20"
    ) as raised:
        fetch(BuiltDataset.from_object(Augmented()), request((0, index)))
    assert (failure(raised).stage, failure(raised).sample_index) == ("sample", str(index))


def test_fetch_with_keys_and_index_out_of_range_names_the_first_such() -> None:
    built = BuiltDataset.from_object(list(range(20)), collate_fn=list)
    with pytest.raises(DatasetError, match="IndexError: index 20 "):
        fetch(built, request(["a", 3, 20, -1]))


def test_fetch_of_no_samples_checks_no_range() -> None:
    assert fetch(BuiltDataset.from_object([], collate_fn=list), request(())) == []


def test_fetch_without_length_checks_no_range() -> None:
    built = BuiltDataset.from_object(Keyless())
    assert fetch(built, request((-5, 10**12))).tolist() == [-5, 10**12]
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(built)


def test_as_indices_of_samplers_yields_plain_forms() -> None:
    assert as_indices([1, np.int32(2), torch.tensor(3), True]).dtype == np.int64  # type: ignore[union-attr]
    assert as_indices(np.array([1, 2], np.int16)).tolist() == [1, 2]  # type: ignore[union-attr]
    assert as_indices(iter(["a", (np.int64(1), 2), 3])) == ("a", (1, 2), 3)
    assert len(as_indices([])) == 0


@pytest.mark.parametrize("index", [1.0, None, ("a",), torch.tensor([1, 2]), 2**63])
def test_as_indices_of_other_types_raises(index: Any) -> None:
    with pytest.raises(ConfigError, match="the sampler yielded"):
        as_indices([0, index])


def test_as_indices_of_array_is_a_copy() -> None:
    array = np.array([1, 2])
    indices = as_indices(array)
    array[:] = 7
    assert indices.tolist() == [1, 2]  # type: ignore[union-attr]


def test_as_indices_of_unsigned_array_beyond_64_bits_raises() -> None:
    assert as_indices(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]  # type: ignore[union-attr]
    assert len(as_indices(np.array([], np.uint64))) == 0
    with pytest.raises(ConfigError, match="beyond 64 bits: 9223372036854775808"):
        as_indices(np.array([0, 2**63], np.uint64))


def test_request_with_inconsistent_fields_raises() -> None:
    with pytest.raises(ConfigError, match="3 indices but 1 occurrences"):
        request(occurrences=np.zeros(1, np.uint32))
    with pytest.raises(ConfigError, match="3 indices, expected exactly 1"):
        request(collate=False)


# -- collation --------------------------------------------------------------------------------------


def test_fetch_without_collation_gives_the_sample_as_torch_does() -> None:
    built = BuiltDataset.from_object([(np.arange(3), "a", 1)])
    array, text, number = fetch(built, request((0,), collate=False))
    assert torch.equal(array, torch.arange(3))
    assert (text, number) == ("a", 1)
    built = BuiltDataset.from_object([4], collate_fn=lambda sample: sample + 1)
    assert fetch(built, request((0,), collate=False)) == 5


def test_fetch_with_collate_raising_shows_shapes() -> None:
    built = BuiltDataset.from_object([torch.zeros(2), torch.zeros(2), torch.zeros(3, dtype=torch.int8)])
    with pytest.raises(DatasetError, match=r"in collate: .*equal size") as raised:
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
    assert record.exception == r"OSError: cannot read 7\nhetero_metric step_time_ms=0 \x1b[31m \udcff"
    assert "test_fetch.py" in record.traceback
    assert "fetch.py" not in record.traceback.replace("test_fetch.py", "")
    assert "\x1b" not in record.traceback
    assert isinstance(raised.value.__cause__, OSError)


def test_fetch_with_long_traceback_bounds_it() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("é" * 100_000)

    with pytest.raises(DatasetError) as raised:
        fetch(BuiltDataset.from_object(Broken()), request((7,)))
    assert len(failure(raised).traceback.encode()) <= 16 * 1024
    assert len(failure(raised).exception.encode()) <= 2100


def test_fetch_cancelled_stops_between_samples() -> None:
    for seeding, seen in (("sample", []), ("batch", [])):

        class Recorded(Augmented):
            def __getitem__(self, index: int) -> Any:
                seen.append(index)  # noqa: B023
                return index

        built = BuiltDataset.from_object(Recorded(), seeding=seeding)  # type: ignore[arg-type]
        with pytest.raises(Cancelled):
            fetch(built, request(), cancelled=lambda: len(seen) == 2)  # noqa: B023
        assert seen == [3, 1]


def test_fetch_with_batch_seeding_cancelled_stops_within_a_64th() -> None:
    seen: list[int] = []

    class Recorded(Augmented):
        def __len__(self) -> int:
            return 1_000

        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return 1 // (index - 700)

    built = BuiltDataset.from_object(Recorded(), seeding="batch")
    with pytest.raises(Cancelled):
        fetch(built, request(range(640)), cancelled=lambda: len(seen) > 100)
    assert len(seen) == 110
    with pytest.raises(DatasetError, match="at sample 700: ZeroDivisionError"):
        fetch(built, request(range(999, 359, -1)), cancelled=lambda: False)


def test_fetch_with_batch_seeding_asks_at_most_64_times_whether_it_is_cancelled() -> None:
    for num_samples in (1, 64, 65, 127, 1_000):
        asked: list[None] = []
        built = BuiltDataset.from_object(range(num_samples), seeding="batch")
        fetch(built, request(range(num_samples)), cancelled=lambda: bool(asked.append(None)))  # noqa: B023
        assert num_samples // 2 < len(asked) <= 64 or num_samples > 128
        assert len(asked) <= 64


@pytest.mark.parametrize("change", [{"epoch": -1}, {"seed": 2**64}, {"position": -1}])
def test_fetch_out_of_range_raises_config_error(change: dict[str, Any]) -> None:
    for collate_fn in (None, list):
        with pytest.raises(ConfigError, match="no key for"):
            fetch(BuiltDataset.from_object([1, 2], collate_fn=collate_fn), request((0,), **change))
