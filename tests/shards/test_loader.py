"""Rows of shards through a loader: in windows, from endpoints, and resumed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero import cli, shards
from hetero.batches.batched import choose_seeding
from hetero.errors import ConfigError
from tests.support.shards import write_shards

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from hetero.torch import DataLoader  # noqa: E402

NUM_ROWS = 400


@pytest.fixture
def rows(tmp_path: Path) -> shards.Rows:
    paths = write_shards(tmp_path, "jsonl", [100, 60, 140, 100])
    assert cli.main(["index", *paths, "--processes=1"]) == 0
    return shards.jsonl(paths, chunk_rows=8, lanes=3).map(lambda row: row["id"])


def ids(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader: Any) -> list[int]:
    return list(itertools.chain(*ids(loader)))


def test_windows_deliver_each_row_once_and_resume(rows: shards.Rows) -> None:
    batches = ids(DataLoader(rows, batch_size=8, shuffle="window", seed=3))
    assert sorted(itertools.chain(*batches)) == list(range(NUM_ROWS))
    loader = DataLoader(rows, batch_size=8, shuffle="window", seed=3)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(20)]
    state = loader.state_dict()
    assert state["order"] == "window"
    resumed = DataLoader(rows, batch_size=8, shuffle="window", seed=3)
    resumed.load_state_dict(state)
    assert first + ids(resumed) == batches
    # The next epoch has another order.
    assert ids(resumed) != batches
    with pytest.raises(ConfigError, match="order window, this loader has shuffled"):
        DataLoader(rows, batch_size=8, shuffle=True, seed=3).load_state_dict(state)


def test_windows_need_a_data_set_that_knows_what_lies_together(rows: shards.Rows) -> None:
    with pytest.raises(ConfigError, match="cannot be shuffled in windows"):
        next(iter(DataLoader(list(range(10)), shuffle="window")))
    with pytest.raises(ConfigError, match="shuffle is 'windows', expected True, False, 'window' or"):
        DataLoader(rows, shuffle="windows")  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", ["window", True, False])
def test_canary_uses_whole_files_and_the_begin_of_one(
    rows: shards.Rows, monkeypatch: pytest.MonkeyPatch, shuffle: bool | str
) -> None:
    monkeypatch.setenv("HETERO_SAMPLE_FRACTION", "0.3")
    used = flat(DataLoader(rows, batch_size=8, shuffle=shuffle, padding=False))
    files = [(0, 100), (100, 160), (160, 300), (300, 400)]
    counts = [sum(begin <= number < end for number in used) for begin, end in files]
    assert sum(counts) == len(used) == 0.3 * NUM_ROWS
    assert sorted(used) == [
        n for (begin, _), count in zip(files, counts, strict=True) for n in range(begin, begin + count)
    ]
    assert sum(0 < count < end - begin for (begin, end), count in zip(files, counts, strict=True)) <= 1


class Half:
    """Passes on the sources of the data set that it wraps, as a mistake."""

    def __init__(self, rows: shards.Rows) -> None:
        self._rows = rows

    @property
    def sources(self) -> Any:
        return self._rows.sources

    def __len__(self) -> int:
        return len(self._rows) // 2

    def __getitem__(self, index: int) -> Any:
        return self._rows[index] if index < len(self) else None


@pytest.mark.parametrize("shuffle", ["window", True])
def test_sources_of_another_data_set_are_refused(
    rows: shards.Rows, monkeypatch: pytest.MonkeyPatch, shuffle: bool | str
) -> None:
    monkeypatch.setenv("HETERO_SAMPLE_FRACTION", "0.9")
    with pytest.raises(ConfigError, match="data set Half has 200 samples, and its sources have 400"):
        flat(DataLoader(Half(rows), batch_size=8, shuffle=shuffle))


def test_data_set_of_shards_is_registered_and_described(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "parquet", [30, 30])

    @hetero.dataset(name="shards-described")
    def made(files: list[str]) -> shards.Rows:
        return shards.parquet(files)

    from hetero.batches.fetch import describe
    from hetero.datasets import build

    descriptions = [describe(build(made(files=files))) for files in (paths, paths, paths[:1], paths[::-1])]
    fingerprints = [description.fingerprint for description in descriptions]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3
    assert descriptions[0].sources[0].layout is not None
    assert descriptions[0].sources[0].layout.unit_rows.tolist() == [30, 30]


def test_mixture_of_shards_resumes_with_the_same_shares_only(tmp_path: Path) -> None:
    web = shards.parquet(write_shards(tmp_path / "web", "parquet", [300, 100]), lanes=2).map(lambda row: row["id"])
    data = hetero.Sources(web=web, code=range(10_000, 10_100))

    def loader(**shares: float) -> Any:
        return DataLoader(data, batch_size=10, shuffle=hetero.Mixture(shares, samples=200), seed=3)

    whole = ids(loader(web=0.7, code=0.3))
    assert [sum(number >= 10_000 for number in batch) for batch in whole] == [3] * 20
    first = loader(web=0.7, code=0.3)
    iterator = iter(first)
    begin = [next(iterator).tolist() for _ in range(7)]
    state = first.state_dict()
    resumed = loader(web=0.7, code=0.3)
    resumed.load_state_dict(state)
    assert begin + ids(resumed) == whole
    with pytest.raises(ConfigError, match="(?s)plan .* Pass the same Mixture"):
        loader(web=0.6, code=0.4).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"in windows: it has 2 sources\n  Pass shuffle=hetero.Mixture"):
        next(iter(DataLoader(data, shuffle="window")))


def test_rows_that_draw_are_seeded_singly_without_a_warning(rows: shards.Rows) -> None:
    assert choose_seeding(rows.map(lambda number: number + random.random()), None) == ("sample", "")
    assert choose_seeding(rows, None) == ("batch", "")
    # The layout of the rows says nothing about the positions in a subset.
    assert choose_seeding(torch.utils.data.Subset(rows, range(10)), None) == ("batch", "")
