"""Iterables in TensorFlow: elements, ends, states and Keras."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

import hetero  # noqa: E402
import hetero.tf  # noqa: E402
from hetero.control.rank import session as control  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from tests.support.torch.endpoints import imported_script  # noqa: E402
from tests.tf.conftest import StoppingJob  # noqa: E402

SCRIPT = """
    import hetero
    import numpy as np

    class Numbers:
        def __init__(self, num_samples, lane=0, num_lanes=1):
            self.num_samples, self.numbers = num_samples, range(lane, num_samples, num_lanes)

        def hetero_split(self, lane, num_lanes):
            return Numbers(self.num_samples, lane, num_lanes)

        def hetero_iterate(self, position):
            for number in self.numbers[position:]:
                yield np.float32([number / 1000, np.random.rand()]), np.float32([number % 3])

        def __iter__(self):
            return self.hetero_iterate(0)

    def together(samples):
        return np.stack([x for x, _ in samples]), np.stack([y for _, y in samples])

    class Unequal(Numbers):
        def hetero_split(self, lane, num_lanes):
            part = Numbers(0)
            part.numbers = range(100 * lane, 100 * lane + (7, 23, 4, 41)[lane])
            return part

    @hetero.dataset(collate_fn=together)
    def tf_lanes_numbers(num_samples):
        return Numbers(num_samples)

    @hetero.dataset(collate_fn=together)
    def tf_lanes_unequal():
        return Unequal(0)
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that makes a dataset of 103 numbers in 4 lanes, or of lanes of unequal length."""
    with imported_script(tmp_path_factory.mktemp("script"), "tf_lanes_script", SCRIPT) as script:

        def dataset(*, is_unequal: bool = False, **options: Any) -> Any:
            spec = script.tf_lanes_unequal() if is_unequal else script.tf_lanes_numbers(num_samples=103)
            chosen = {"batch_size": 5, "guarantee": "exactly-once", "lanes": 4, **options}
            return hetero.tf.from_dataset(spec, **chosen)

        job = StoppingJob(Path(script.__file__).parent, Path(script.__file__))
        job.start(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "_session", job)
            yield dataset
            job.stop()
        hetero.spec.set_describer(None)


def elements(data: Any) -> list[list[list[float]]]:
    return [x.numpy().tolist() for x, _ in data]


def test_elements_ends_and_epochs(make: Any, tmp_path: Path) -> None:
    data = make()
    assert int(data.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    first, second = elements(data), elements(data)
    assert [len(batch) for batch in first] == [5] * 20
    assert [[x for x, _ in batch] for batch in second] == [[x for x, _ in batch] for batch in first]
    assert second != first  # other draws
    rest = sorted(x for batch in elements(make(end="rest")) for x, _ in batch)
    assert rest == pytest.approx([number / 1000 for number in range(103)])


def test_state_resumes_within_an_epoch_and_after_it(make: Any) -> None:
    expected = elements(make())
    data, got = make(), []
    for number, (x, _) in enumerate(data):
        got.append(x.numpy().tolist())
        if number == 6:
            break
    state = json.loads(json.dumps(data.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert got + elements(resumed) == expected
    ended = resumed.state_dict()
    assert (ended["epoch"], ended["batches"], ended["completed"]) == (0, 20, True)
    skipping = make()
    skipping.load_state_dict(state)
    skipping.skip_batches(4)
    assert elements(skipping) == expected[11:]
    skipping.skip_batches(19)
    assert [len(elements(skipping)), skipping.state_dict()["epoch"]] == [1, 1]
    following = make()
    following.load_state_dict(ended)
    assert len(elements(following)) == 20
    assert following.state_dict()["epoch"] == 1


def test_rest_of_lanes_of_unequal_length_resumes_after_each_batch(make: Any) -> None:
    expected = elements(make(is_unequal=True, end="rest"))
    assert sum(map(len, expected)) == 7 + 23 + 4 + 41
    data = make(is_unequal=True, end="rest")
    states = [data.state_dict() for _ in data]
    # Steps whose lanes are over give no batch. At the end, only lane 3 has batches.
    assert [each["batches"] for each in states] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36]
    for number, state in enumerate(states[:-1], start=1):
        resumed = make(is_unequal=True, end="rest")
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert elements(resumed) == expected[number:]
        ended = resumed.state_dict()
        assert (ended["epoch"], ended["batches"], ended["completed"]) == (0, 36, True)
    following = make(is_unequal=True, end="rest")
    following.load_state_dict(ended)
    assert [len(elements(following)), following.state_dict()["epoch"]] == [17, 1]


def test_fit_takes_steps_of_lanes_that_begin_again(make: Any) -> None:
    data = make(end="wrap")
    assert int(data.cardinality()) == tf.data.INFINITE_CARDINALITY
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data, steps_per_epoch=15, epochs=2, shuffle=False, verbose=0, callbacks=[data.callback()])
    assert data.state_dict()["batches"] == 30


def test_stop_needs_one_rank(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.current(), "world_size", 2)
    with pytest.raises(ConfigError, match='end="wrap" and steps_per_epoch'):
        make()


def test_arguments_that_need_an_index_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="shuffle= needs an index"):
        make(shuffle=True)
    with pytest.raises(ConfigError, match="needs element_spec="):
        make(guarantee="at-most-once")
    with pytest.raises(ConfigError, match="is iterable, and has no index"):
        make(guarantee=None, lanes=None)
