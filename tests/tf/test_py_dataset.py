"""Keras' own data sets over real endpoints: their batches, as a `tf.data.Dataset` and as torch's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.torch.endpoints import imported_script

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'tensorflow>=2.16'")

import hetero.tf  # noqa: E402
from hetero.batches.fetch import fetch  # noqa: E402
from hetero.batches.request import BatchRequest  # noqa: E402
from hetero.batches.seeds import preserved_generators  # noqa: E402
from hetero.control.rank import session as control  # noqa: E402
from hetero.datasets import build  # noqa: E402
from hetero.errors import ConfigError, DatasetError  # noqa: E402
from hetero.loaders.sampling import BuiltInOrder, Shard  # noqa: E402

pytestmark = pytest.mark.integration

SCRIPT = """
    import random
    import sys

    import keras
    import numpy as np
    import tensorflow as tf

    import hetero

    class Photos(keras.utils.PyDataset):
        def __init__(self, num_samples, kind):
            super().__init__(workers=4, use_multiprocessing=True)
            self.indexes = np.arange(num_samples)
            self.kind = kind

        def __len__(self):
            return -(-len(self.indexes) // 4)

        def __getitem__(self, number):
            chosen = self.indexes[4 * number : 4 * number + 4]
            if self.kind == "tensors":
                return tf.random.uniform((len(chosen), 3)), tf.constant(chosen)
            if self.kind == "torch":
                return np.array(["torch" in sys.modules])
            noise = np.random.rand(len(chosen), 2).astype(np.float32) + np.float32(random.random())
            return [noise + chosen[:, None].astype(np.float32), chosen[:, None]]

        def on_epoch_end(self):
            if self.kind == "shuffled":
                np.random.shuffle(self.indexes)

    @hetero.dataset
    def keras_photos(num_samples=18, kind="shuffled"):
        return Photos(num_samples, kind)
"""
OPTIONS: dict[str, Any] = {"batch_size": None, "shuffle": True, "seed": 11}
NUM_BATCHES = 5


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported_script(tmp_path_factory.mktemp("script"), "py_dataset_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def num_endpoints() -> int:
    """One: each imports Keras and TensorFlow."""
    return 1


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    """Let iterators of a test end before the endpoints do."""
    yield
    gc.collect()


def make(script: Any, kind: str = "shuffled", **options: Any) -> Any:
    return hetero.tf.from_dataset(script.keras_photos(kind=kind), **{**OPTIONS, **options})


def plain(batch: Any) -> Any:
    return tuple((str(array.dtype), array.shape, array.tobytes()) for array in map(np.asarray, batch))


def epoch_of(script: Any, epoch: int, shard: Shard | None = None) -> list[Any]:
    """Return the batches of an epoch on one rank, computed in this process by another data set."""
    spec = script.keras_photos()
    built = build(spec)
    order = BuiltInOrder(num_samples=len(built), batch_size=1, seed=11, shuffle=True)
    found = []
    for planned in order.batches(epoch, shard or Shard()):
        place: dict[str, Any] = {"seed": 11, "epoch": epoch, "position": planned.position}
        request = BatchRequest(spec=spec, work=planned.work, collate=False, as_is=True, **place)
        with preserved_generators():
            found.append(plain(fetch(built, request)))
    return found


def labels(batches: list[Any]) -> list[int]:
    return [int(label) for batch in batches for label in np.frombuffer(batch[1][2], np.int64)]


def test_passes_are_epochs_of_the_data_sets_own_batches(script: Any, job: Any) -> None:
    data = make(script)
    assert len(data) == NUM_BATCHES
    assert data.element_spec == (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, 1], tf.int64))
    wanted = [epoch_of(script, epoch) for epoch in range(3)]
    assert [[plain(batch) for batch in data] for _ in range(3)] == wanted
    assert all(sorted(labels(epoch)) == list(range(18)) for epoch in wanted)
    of_batches = [{frozenset(labels([batch])) for batch in epoch} for epoch in wanted]
    assert of_batches[0] != of_batches[1] != of_batches[2]  # on_epoch_end shuffled samples, not only the loader batches
    summary = data.step_timer.summary()
    assert (summary.num_steps, summary.num_samples) == (15, 3 * 18)


def test_ranks_share_the_batches_of_an_epoch(script: Any, job: Any) -> None:
    job.world_size = 2
    found = []
    for rank in range(2):
        job.rank = rank
        data = make(script)
        assert len(data) == 3
        found.append([plain(batch) for batch in data])
        assert found[rank] == epoch_of(script, 0, Shard(rank, 2))
    assert set(labels(found[0] + found[1])) == set(range(18))


def test_state_goes_on_in_the_middle_of_an_epoch_that_was_shuffled(script: Any, job: Any) -> None:
    data = make(script)
    data.set_epoch(2)
    iterator = iter(data)
    found = [plain(next(iterator)) for _ in range(2)]
    resumed = make(script)
    resumed.load_state_dict(data.state_dict())
    found += [plain(batch) for batch in resumed]
    assert found == epoch_of(script, 2)


def test_keras_3_calls_the_methods_in_this_order() -> None:
    calls: list[str] = []

    class Noting(tf.keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> Any:
            return np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)

        def on_epoch_begin(self) -> None:
            calls.append("begin")

        def on_epoch_end(self) -> None:
            calls.append("end")

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    model.fit(Noting(), epochs=2, verbose=0)
    assert calls[:4] == ["end", "begin", "end", "begin"]  # before both epochs, as here: the first is a reset


def test_fit_trains_on_them(script: Any, job: Any) -> None:
    data = make(script)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[data.callback()]).history
    assert len(history["loss"]) == 2
    state = data.state_dict()
    assert (state["epoch"], state["batches"]) == (1, NUM_BATCHES)


def test_tensors_of_tensorflow_come_as_such_and_their_draws_are_seeded(script: Any, job: Any) -> None:
    first, again = ([plain(batch) for batch in make(script, "tensors")] for _ in range(2))
    assert first == again
    assert len({batch[0] for batch in first}) == NUM_BATCHES
    assert sorted(labels(first)) == list(range(18))


def test_endpoint_imports_no_torch_for_them(script: Any, job: Any) -> None:
    assert [batch.numpy().tolist() for batch in make(script, "torch")] == [[False]] * NUM_BATCHES


def test_batch_size_is_refused_where_it_is_passed(script: Any, job: Any) -> None:
    with pytest.raises(DatasetError, match="the items of a Keras data set are batches already; pass batch_size=None"):
        make(script, batch_size=4)


def test_shape_that_varies_where_no_probe_showed_it_is_named(script: Any, job: Any) -> None:
    data = make(script, element_spec=(tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.int64)))
    with pytest.raises(ConfigError, match=r"batch\[0\] has shape \(\d, 2\), expected \(None, 3\)"):
        list(data)


@pytest.mark.parametrize("where", ["endpoints", "here"])
def test_torchs_loader_gives_the_same_batches_as_tensors(
    script: Any, job: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    torch_loaders = pytest.importorskip("hetero.torch", exc_type=ImportError)
    if where == "here":
        monkeypatch.setattr(control, "_session", None)
    loader = torch_loaders.DataLoader(script.keras_photos(), **OPTIONS)
    assert len(loader) == NUM_BATCHES
    for epoch in range(2):
        batches = list(loader)
        assert {type(part).__name__ for batch in batches for part in batch} == {"Tensor"}
        assert [plain(batch) for batch in batches] == epoch_of(script, epoch)
