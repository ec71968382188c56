"""A mixture of iterables: resumed and divided over ranks, it gives the batches of one process."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

import hetero
from hetero.errors import ConfigError
from hetero.plans.sources import IterableSources
from tests.lanes.loaders import BATCH, loader
from tests.support.streams import Numbers, StatefulNumbers

NUM_BATCHES = 60
WEIGHTS = {"web": 0.7, "code": 0.25, "rows": 0.05}


class Rows:
    """A data set with an index."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return ("row", index)


def mixed(kind: Any = StatefulNumbers, guarantee: str = "exactly-once", **options: Any) -> Any:
    sources = hetero.Sources(web=kind(400), code=kind(50), rows=Rows())
    weights = options.pop("weights", WEIGHTS)
    return loader(sources, guarantee, shuffle=hetero.Mixture(weights), end="wrap", **options)


@pytest.mark.parametrize(("kind", "guarantee"), [(StatefulNumbers, "exactly-once"), (Numbers, "replay")])
def test_resume_at_any_batch(kind: Any, guarantee: str) -> None:
    whole = mixed(kind, guarantee)
    batches, states = [], [json.dumps(whole.state_dict())]
    for batch in itertools.islice(whole, NUM_BATCHES):
        batches.append(batch)
        states.append(json.dumps(whole.state_dict()))
    for at in (0, 1, 7, 30, NUM_BATCHES - 1):
        rest = mixed(kind, guarantee)
        rest.load_state_dict(json.loads(states[at]))
        assert list(itertools.islice(rest, NUM_BATCHES - at)) == batches[at:]


def test_ranks_share_the_batches_of_one() -> None:
    alone = list(itertools.islice(mixed(batch_size=2 * BATCH, chunk_samples=BATCH), NUM_BATCHES))
    ranks = [mixed(chunk_samples=BATCH, shard=(rank, 2)) for rank in range(2)]
    together = zip(*(itertools.islice(rank, NUM_BATCHES) for rank in ranks), strict=True)
    assert [[*first, *second] for first, second in together] == alone


def test_sources_begin_again_and_are_counted() -> None:
    whole = mixed()
    rows = [sample[1] for batch in itertools.islice(whole, 400) for sample in batch if sample[0] == "row"]
    assert set(Counter(rows).values()) == {3, 4}
    counts = whole._pipeline.extent.by_source
    assert counts["rows"] == len(rows)
    assert counts == pytest.approx({name: 400 * BATCH * share for name, share in WEIGHTS.items()}, abs=2)


def test_rows_with_an_index_are_divided_and_shuffled_anew_in_each_epoch() -> None:
    source = IterableSources({"rows": Rows()}).datasets[0]

    def orders(epoch: int) -> list[list[int]]:
        lanes = [source.hetero_split(lane, 4) for lane in range(4)]
        for lane in lanes:
            lane.set_epoch(epoch)
        return [[index for _, index in lane.hetero_iterate(0)] for lane in lanes]

    first = orders(0)
    assert sorted(itertools.chain(*first)) == list(range(len(Rows())))
    assert first == orders(0) != orders(1)


def test_seed_changes_the_order_of_rows_with_an_index() -> None:
    first, other = (
        [sample for batch in itertools.islice(mixed(seed=seed), 250) for sample in batch if sample[0] == "row"]
        for seed in (1, 2)
    )
    assert first[:23] != other[:23]
    assert set(first) == set(other)


class Plain(Numbers):
    """Numbers without noise."""

    def __iter__(self) -> Any:
        yield from (number for number, _ in super().__iter__())


def test_two_sources_may_have_the_same_samples() -> None:
    sources = hetero.Sources(a=Plain(99), b=Plain(99))
    made = loader(sources, "replay", shuffle=hetero.Mixture({"a": 1, "b": 1}), end="wrap")
    assert len(list(itertools.islice(made, 9))) == 9


def test_errors_name_the_source() -> None:
    sources = hetero.Sources(web=Numbers(99), few=Numbers(3))
    made = loader(sources, "replay", shuffle=hetero.Mixture({"web": 1, "few": 1}), end="wrap")
    with pytest.raises(hetero.DatasetError, match="source few, lane 3 of 4 yields nothing"):
        list(itertools.islice(made, 9))


def test_what_a_mixture_of_iterables_needs() -> None:
    with pytest.raises(ConfigError, match='needs end="wrap" and no samples='):
        loader(hetero.Sources(web=Numbers(9)), "replay", shuffle=hetero.Mixture({"web": 1}))
    with pytest.raises(hetero.DatasetError, match="has 3 iterables, and the loader has 1"):
        next(iter(loader(hetero.Sources(a=Numbers(9), b=Numbers(9), c=Numbers(9)), "replay")))
    with pytest.raises(ConfigError, match="the Mixture has the sources web, and the data set has web, code, rows"):
        next(iter(mixed(weights={"web": 1})))
    with pytest.raises(ConfigError, match="loader state has plan .*\n  Pass the same Mixture"):
        mixed().load_state_dict(mixed(weights={"web": 1, "code": 1, "rows": 1}).state_dict())
    with pytest.raises(ConfigError, match="source web is a int, expected a data set with"):
        hetero.Sources(web=3)
    assert isinstance(hetero.Sources(web=Numbers(9), rows=Rows()), IterableSources)


def test_problems_and_digests_are_those_of_all_sources() -> None:
    class Indexed(Rows):
        hetero_fingerprint = "digest"

        def hetero_problems(self) -> list[str]:
            return ["a shard is missing"]

    for other in (Rows(), Numbers(9)):
        sources = hetero.Sources(other=other, rows=Indexed())
        assert sources.hetero_problems() == ["a shard is missing"]
        assert sources.hetero_fingerprint == "other: rows:digest"
