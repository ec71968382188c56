"""What batches hold, with real endpoints: the same as from a loader without them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetero
from hetero.batches.purity.comparison import compare
from hetero.control.rank import session as control
from hetero.errors import ConfigError, DatasetError
from hetero.loaders import pipeline
from hetero.torch import DataLoader
from tests.support.batches import odd_tensors
from tests.support.torch.endpoints import ServedJob, imported_script

pytestmark = pytest.mark.integration

SCRIPT = f"""
    import sys
    import types

    import numpy as np
    import torch

    import hetero

    sys.path.insert(0, {str(Path(__file__).parents[2])!r})

    from tests.support.batches.odd_tensors import make
"""
SCRIPT += """

    class Layouts(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {
                "permuted": torch.rand(4, 5, 3).permute(2, 0, 1),
                "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
                "one channel": torch.rand(2, 1, 4, 5).to(memory_format=torch.channels_last),
                "transposed": torch.rand(4, 5).t(),
                "sliced": torch.rand(4, 6)[:, ::2],
                "expanded": torch.rand(3, 1).expand(3, 4),
                "fortran": np.asfortranarray(np.random.rand(3, 4)),
                "index": index,
            }

    def arrays(samples):
        parts = [sample["fortran"] for sample in samples]
        return [(part, part[::-1], part[:, ::2], part[:, None].transpose(2, 1, 0)) for part in parts]

    def channels_last(samples):
        batch = torch.utils.data.default_collate(samples)
        batch["permuted"] = batch["permuted"].contiguous().to(memory_format=torch.channels_last)
        batch["sliced"] = batch["sliced"][:, :, ::2]
        batch["fortran"] = batch["fortran"].permute(2, 0, 1)
        return batch

    def immutable(samples):
        proxy = types.MappingProxyType({"x": torch.tensor(samples), ("a", 1): frozenset(samples)})
        return proxy, {"set": {1, 2}, "complex": 1j, "wide": 2**100, None: [types.MappingProxyType({})]}

    @hetero.dataset(collate_fn=immutable)
    def values_test_immutable():
        return list(range(8))

    def measured(samples):
        return {
            "complex": torch.view_as_complex(torch.rand(len(samples), 2)).conj(),
            "float8": torch.rand(3).to(torch.float8_e4m3fn),
            "names": np.array([str(sample) for sample in samples] or [""]),
            "dates": np.array(["2026-01-01"], "M8[D]") + np.arange(len(samples)),
            "samples": samples,
        }

    @hetero.dataset(collate_fn=measured)
    def values_test_measured():
        return list(range(2**20 + 5))

    def count(samples):
        return torch.tensor([len(samples), sum(samples)])

    @hetero.dataset(collate_fn=count, seeding="batch")
    def values_test_counted(size):
        return range(size)

    def sent_by_none(samples):
        return {"samples": [Refused(samples)]}

    class Refused:
        def __init__(self, samples):
            self.samples = samples

    @hetero.dataset(collate_fn=sent_by_none)
    def values_test_refused():
        return range(8)

    class Keyed(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return repr(key), torch.rand(2)

    @hetero.dataset
    def values_test_keyed():
        return Keyed()

    class Bulk(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, indices):
            return torch.tensor(indices) + torch.rand(len(indices))

    @hetero.dataset
    def values_test_bulk():
        return Bulk()

    class Odd(torch.utils.data.Dataset):
        def __init__(self, kind):
            self.kind = kind

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return make(self.kind), torch.tensor(index), torch.rand(2)

    def plain(samples):
        return torch.stack([label + noise for _, label, noise in samples])

    @hetero.dataset(collate_fn=plain)
    def values_test_odd(kind):
        return Odd(kind)

    @hetero.dataset
    def values_test_layouts():
        return Layouts()

    @hetero.dataset(collate_fn=arrays)
    def values_test_arrays():
        return Layouts()

    @hetero.dataset(collate_fn=channels_last)
    def values_test_channels_last():
        return Layouts()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The script's data sets, in this process too."""
    with imported_script(tmp_path_factory.mktemp("script"), "remote_values_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def served(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedJob]:
    """Two endpoints, not used yet."""
    job = ServedJob(tmp_path_factory.mktemp("job"), Path(script.__file__), purity_checks=2)
    job.start(2)
    yield job
    job.stop()
    hetero.spec.set_describer(None)


@pytest.fixture
def connect(served: ServedJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make loaders fetch from the endpoints from now on. The next test may fork: no channel is left."""

    def call() -> None:
        monkeypatch.setattr(control, "_session", served)
        monkeypatch.setattr(pipeline, "_num_verified", {})

    yield call
    served.disconnect()


def strides(value: Any) -> Any:
    """Return the strides of everything in a batch."""
    if isinstance(value, dict):
        return {key: strides(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.stride()
    if isinstance(value, list | tuple):
        return [strides(item) for item in value]
    return value.strides if isinstance(value, np.ndarray) else None


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        ("values_test_layouts", 4),
        ("values_test_layouts", None),
        ("values_test_arrays", 3),
        ("values_test_channels_last", 4),
    ],
)
def test_strides_are_the_same_in_this_process_and_from_endpoints(
    script: Any, connect: Any, name: str, batch_size: Any
) -> None:
    loader = DataLoader(getattr(script, name)(), batch_size=batch_size, seed=5)
    local = list(loader)
    connect()
    remote = list(DataLoader(getattr(script, name)(), batch_size=batch_size, seed=5))
    assert [strides(batch) for batch in remote] == [strides(batch) for batch in local]
    assert compare(local, remote) is None
    if name == "values_test_channels_last":
        assert remote[0]["permuted"].is_contiguous(memory_format=torch.channels_last)
        assert not remote[0]["permuted"].is_contiguous()
    elif batch_size is None:
        assert remote[0]["permuted"].stride() == (1, 15, 3)
        assert remote[0]["channels last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", odd_tensors.ODD)
def test_batch_of_odd_samples_that_is_plain_comes_from_endpoints(script: Any, connect: Any, kind: str) -> None:
    local = list(DataLoader(script.values_test_odd(kind), batch_size=3))
    connect()
    assert compare(local, list(DataLoader(script.values_test_odd(kind), batch_size=3))) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_strides_of_stacked_samples_are_those_that_torch_makes_with_as_many_workers(
    script: Any, connect: Any, num_workers: int
) -> None:
    """Torch's workers stack into shared memory, in C order. Torch without workers keeps channels last."""
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 4}
    if num_workers:
        options["multiprocessing_context"] = "fork"
    name = "channels last"
    torchs = [batch[name].stride() for batch in torch.utils.data.DataLoader(script.Layouts(), **options)]
    local = [batch[name].stride() for batch in DataLoader(script.values_test_layouts(), **options)]
    connect()
    remote = [batch[name].stride() for batch in DataLoader(script.values_test_layouts(), **options)]
    assert torchs == local == remote
    assert (torchs[0][-1] == 1) == bool(num_workers)


KEYS = [None, 2.5, b"b", True, 2**70, -(2**63), "text", ("a", (1, None)), [1, 2], [1, [2.5, "x"]], float("inf")]


def test_keys_of_any_type_come_to_data_sets_as_they_are(script: Any, connect: Any) -> None:
    def load() -> list[Any]:
        return list(DataLoader(script.values_test_keyed(), batch_size=4, sampler=KEYS, seed=3))  # type: ignore[arg-type]

    local = load()
    assert [key for keys, _ in local for key in keys] == [repr(key) for key in KEYS]
    connect()
    assert compare(local, load()) is None


def test_bulk_loading_with_a_sampler_of_lists(script: Any, connect: Any) -> None:
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(10)), 4, drop_last=False)

    def load() -> list[Any]:
        return list(DataLoader(script.values_test_bulk(), batch_size=None, sampler=sampler, seed=3))

    local = load()
    assert [batch.int().tolist() for batch in local] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    connect()
    assert compare(local, load()) is None


def test_immutable_containers_and_odd_keys_are_delivered_as_they_are(script: Any, connect: Any) -> None:
    local = list(DataLoader(script.values_test_immutable(), batch_size=4))
    assert type(local[0][0]) is types.MappingProxyType
    connect()
    assert compare(local, list(DataLoader(script.values_test_immutable(), batch_size=4))) is None


def test_complex_text_dates_and_empty_batches_come_from_endpoints(script: Any, connect: Any) -> None:
    batches: Any = [[1, 2], [], [3]]
    local = list(DataLoader(script.values_test_measured(), batch_sampler=batches))
    assert [batch["samples"] for batch in local] == batches
    connect()
    remote = list(DataLoader(script.values_test_measured(), batch_sampler=batches))
    assert compare(local, remote) is None
    assert [strides(batch) for batch in remote] == [strides(batch) for batch in local]


def test_a_batch_of_a_million_samples_comes_from_endpoints(script: Any, connect: Any) -> None:
    size = 2**20
    connect()
    (batch,) = DataLoader(script.values_test_counted(size), batch_size=size)
    assert batch.tolist() == [size, size * (size - 1) // 2]


def test_batch_size_beyond_a_request_is_refused_with_endpoints_and_said_without(
    script: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    text = "a batch of 1048577 samples cannot come from a data host, at most 1048576 can"
    DataLoader(script.values_test_counted(8), batch_size=2**20 + 1)
    DataLoader(list(range(8)), batch_size=2**20 + 1)
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [text]
    connect()
    with pytest.raises(ConfigError, match=text):
        DataLoader(script.values_test_counted(8), batch_size=2**20 + 1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_that_no_data_host_could_send_is_said_once_in_the_same_words(
    script: Any, connect: Any, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    loader = DataLoader(
        script.values_test_refused(),
        batch_size=2,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    for _ in range(2):
        assert len(list(loader)) == 4
    text = "batch['samples'][0]: "
    said = [record.getMessage() for record in caplog.records if text in record.getMessage()]
    connect()
    with pytest.raises(DatasetError) as caught:
        list(DataLoader(script.values_test_refused(), batch_size=2))
    assert len(said) == 1
    for words in (said[0], str(caught.value)):
        assert "Refused cannot be sent; return tensors, arrays, numbers, str, bytes or None" in words.partition(text)[2]
