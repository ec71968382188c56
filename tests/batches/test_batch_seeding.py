"""Seeding per batch, and data sets that give the samples of a batch together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled
from hetero.batches.fetch import describe, fetch
from hetero.batches.seeds import batch_key
from hetero.datasets import build, dataset
from hetero.errors import ConfigError, DatasetError
from tests.support.batches.subjects import Augmented, Batched, request, same

torch = pytest.importorskip("torch")
data = torch.utils.data


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
    assert described[0] == described[1]  # as for all impure samples, whose sketches would differ


def test_build_with_getitems_alone_needs_batch_seeding() -> None:
    class Together:
        def __len__(self) -> int:
            return 3

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    with pytest.raises(ConfigError, match=r"cannot be seeded for every sample: .*\(seeding=\"batch\"\)"):
        BuiltDataset.from_object(Together(), seeding="sample")
    with pytest.raises(DatasetError, match="while it was built: .*cannot be seeded for every sample"):
        build(dataset(name="each", seeding="sample")(lambda: Together())())
    for built in (
        build(dataset(name="together")(lambda: Together())()),
        BuiltDataset.from_object(Together()),
    ):
        assert built.seeding == "batch"
        assert fetch(built, request((2, 0))).tolist() == [2, 0]


class Table(torch.utils.data.Dataset[Any]):
    def __init__(self, *, draws: bool = False) -> None:
        self.draws = draws
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1) if self.draws else torch.zeros(1)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [self[index] for index in indices]


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "subset"])
@pytest.mark.parametrize("draws", [False, True], ids=["plain", "drawing"])
def test_build_uses_getitems_of_a_registered_set_if_its_samples_draw_nothing(draws: bool, wrapped: bool) -> None:
    def table() -> Any:
        made = Table(draws=draws)
        return torch.utils.data.Subset(made, range(50, 100)) if wrapped else made

    built = build(dataset(name=f"table-{draws}-{wrapped}")(table)())
    inner = built.dataset.dataset if wrapped else built.dataset
    assert inner.calls == []  # no sample is computed before workers are forked
    assert built.seeding == ("sample" if draws else "batch")
    inner.calls.clear()
    assert fetch(built, request((2, 0)))[0].tolist() == ([52, 50] if wrapped else [2, 0])
    assert built.seeding == ("sample" if draws else "batch")
    assert len(inner.calls) == (0 if draws else 1)
    assert sum("has __getitems__, and its samples draw" in text for text in built.warnings) == draws


@pytest.mark.parametrize("draws", [False, True], ids=["plain", "drawing"])
def test_build_of_an_object_uses_getitems_as_torchs_loader_does(draws: bool) -> None:
    table = Table(draws=draws)
    built = BuiltDataset.from_object(table)
    batches = [fetch(built, request((2, 0))) for _ in range(2)]
    assert table.calls == [[2, 0], [2, 0]]
    assert torch.equal(batches[0][1], batches[1][1])  # one seed for the batch


def test_build_that_states_seeding_per_sample_is_not_told_of_getitems() -> None:
    built = build(dataset(name="stated", seeding="sample")(lambda: Table(draws=True))())
    assert (built.seeding, built.warnings) == ("sample", ())


def test_fetch_with_batch_seeding_without_collation_takes_one_item() -> None:
    built = BuiltDataset.from_object(Batched(), seeding="batch")
    sample = fetch(built, request((3,), collate=False))
    assert sample["index"] == 3
    assert same(sample, fetch(built, request((3,), collate=False)))


def test_fetch_with_batch_seeding_cancelled_computes_no_sample() -> None:
    seen: list[int] = []

    class Recorded(Augmented):
        def __len__(self) -> int:
            return 1_000

        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return 1 // (index - 700)

    built = BuiltDataset.from_object(Recorded(), seeding="batch")
    with pytest.raises(Cancelled):
        fetch(built, request(range(640)), cancelled=lambda: True)
    assert seen == []
    with pytest.raises(DatasetError, match="at sample 700: ZeroDivisionError"):
        fetch(built, request(range(999, 359, -1)), cancelled=lambda: False)


def test_describe_tells_apart_hosts_that_probed_other_samples() -> None:
    marks = {describe(build(dataset(name=f"d{n}")(lambda: Table())())).fingerprint for n in range(2)}
    stated = build(dataset(name="stated", seeding="batch")(lambda: Table())())
    assert {mark.removesuffix("+getitems") for mark in marks} == {describe(stated).fingerprint}
    assert all(mark.endswith("+getitems") for mark in marks)
