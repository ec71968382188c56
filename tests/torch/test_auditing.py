"""The loader's ledger: what is in it, the same wherever batches come from, and what it survives."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import hetero
from hetero.audit.commands import audit_paths
from hetero.audit.ledger import DIRECTORY_VARIABLE, close_current
from hetero.audit.reading import LedgerRecord, read_ledger
from hetero.batches.purity.comparison import digest
from hetero.control.rank import session as control
from hetero.torch import DataLoader
from tests.support.torch.endpoints import ServedJob
from tests.support.torch.loaders import be_rank
from tests.torch import drawing_script
from tests.torch.drawing_script import drawing


class Folder:
    """Directs this process's ledger to one folder after the other."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._base = base
        self._patch = monkeypatch

    def begin(self, name: str, *, rank: int = 0, world_size: int = 1) -> Path:
        """Be a new process, with its ledger in a folder of this name."""
        close_current()
        self._patch.setenv(DIRECTORY_VARIABLE, str(self._base / name))
        be_rank(self._patch, rank, world_size)
        return self._base / name

    def end(self) -> None:
        close_current()
        self._patch.delenv(DIRECTORY_VARIABLE, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    made = Folder(tmp_path / "ledgers", monkeypatch)
    yield made
    made.end()
    hetero.spec.set_describer(None)


def make(**options: Any) -> DataLoader[Any]:
    return DataLoader(drawing(), **{"batch_size": 4, "shuffle": True, "seed": 5, **options})


def read(path: Path, rank: int = 0) -> LedgerRecord:
    return read_ledger(path / f"ledger-rank-{rank}.jsonl")


def is_same(one: Path, other: Path) -> bool:
    close_current()
    return audit_paths(one, other)[0]


def test_without_a_folder_there_is_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    list(make())
    assert list(tmp_path.iterdir()) == []


def test_ledger_has_every_delivered_batch_and_what_its_loader_reads(folder: Folder) -> None:
    path = folder.begin("a", rank=1, world_size=2)
    loader = make(name="train")
    batches = list(loader)
    for _ in zip(range(2), loader, strict=False):
        pass
    folder.end()
    record = read(path, 1)
    (facts,) = record.loaders
    assert (facts.name, facts.dataset, facts.num_samples, facts.seed) == ("train", "drawing", 37, 5)
    assert (facts.global_batch, facts.order) == (8, "shuffled")
    assert facts.fingerprint
    places = list(zip(record.entries["epoch"].tolist(), record.entries["position"].tolist(), strict=True))
    assert places == [*((0, position) for position in range(5)), (1, 0), (1, 1)]
    assert [entry.tobytes() for entry in record.entries["content"][:5]] == [digest(batch) for batch in batches]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_ledgers_with_and_without_workers_are_the_same(folder: Folder, options: dict[str, Any]) -> None:
    paths = []
    for number, chosen in enumerate(({}, options)):
        paths.append(folder.begin(str(number)))
        loader = make(**chosen)
        list(loader)
        list(loader)
    assert is_same(*paths)


@pytest.mark.integration
def test_ledgers_with_and_without_endpoints_are_the_same(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything() -> None:
        train, rest = make(name="train"), make(batch_size=None, shuffle=False, name="validation")
        list(train)
        list(rest)
        for _ in zip(range(3), train, strict=False):
            pass
        list(make(sampler=torch.utils.data.WeightedRandomSampler([1.0] * 37, 20), shuffle=None, name="weighted"))
        seen = vars(make(name="rebuilt"))
        rebuilt: Any = torch.utils.data.DataLoader(
            seen["dataset"], batch_sampler=seen["batch_sampler"], collate_fn=seen["collate_fn"]
        )
        list(rebuilt)

    here = folder.begin("here")
    everything()
    close_current()
    job = ServedJob(tmp_path, Path(drawing_script.__file__))
    try:
        job.start(2)
        monkeypatch.setattr(control, "_session", job)
        there = folder.begin("there")
        everything()
        close_current()
    finally:
        job.stop()
    one, other = read(here), read(there)
    assert one.loaders == other.loaders
    assert [loader.name for loader in one.loaders] == ["train", "validation", "weighted", "rebuilt"]
    assert all(loader.fingerprint for loader in one.loaders)
    assert (one.entries == other.entries).all()
    assert is_same(here, there)


def test_ledgers_part_where_a_sample_differs(folder: Folder) -> None:
    paths = []
    for offset in (0, 1):
        paths.append(folder.begin(str(offset)))
        list(DataLoader(drawing(offset=offset), batch_size=4))
    close_current()
    same, text = audit_paths(*paths)
    assert not same
    assert "the first difference is at epoch 0, position 0: the indices are the same, the content differs" in text
    assert "loader drawing: fingerprint is" in text
    folder.begin("seed")
    list(make(seed=6, name="drawing"))
    folder.begin("shuffled")
    list(make(seed=5, name="drawing"))
    close_current()
    parent = paths[0].parent
    same, text = audit_paths(parent / "seed", parent / "shuffled")
    assert "the first difference is at epoch 0, position 0: the indices differ" in text


def test_ledger_of_a_resumed_run_continues_and_equals_the_uninterrupted_one(folder: Folder) -> None:
    whole = folder.begin("whole")
    loader = make()
    list(loader)
    list(loader)
    split = folder.begin("split")
    first = make()
    list(first)
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    next(iterator)  # trained, and lost with the process
    iterator.close()  # type: ignore[attr-defined]
    folder.begin("split")
    resumed = make()
    resumed.load_state_dict(state)
    list(resumed)
    folder.end()
    record = read(split)
    assert len(record.sections) == 2
    assert len(record.entries) == 21  # one of them twice
    assert is_same(whole, split)
    (line,) = [
        line
        for line in (split / "ledger-rank-0.jsonl").read_text().rpartition('{"ledger"')[2].splitlines()
        if line.startswith('{"loader"')
    ]
    assert '"epoch":1,"position":1' in line


def test_ledgers_of_other_world_sizes_are_compared_by_samples(folder: Folder) -> None:
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            path = folder.begin(str(world_size), rank=rank, world_size=world_size)
            loader = make(batch_size=4 // world_size)
            list(loader)
            list(loader)
    one = path.parent / "1"
    assert is_same(one, path.parent / "2")  # padding repeats a sample there
    assert is_same(one, path.parent / "4")
    folder.begin("other")
    list(make(seed=6))
    close_current()
    assert not audit_paths(path.parent / "other", path.parent / "2")[0]


def test_ledger_holds_batches_before_the_script_changes_them(folder: Folder) -> None:
    paths = []
    for number in range(2):
        paths.append(folder.begin(str(number)))
        for batch in make():
            if number:
                batch["noise"].zero_()
    assert is_same(*paths)


def test_ledger_is_not_the_business_of_the_order_of_epochs_and_states(folder: Folder) -> None:
    plain = make()
    expected = [[batch["noise"].tolist() for batch in plain], plain.state_dict()]
    folder.begin("a")
    audited = make()
    assert [[batch["noise"].tolist() for batch in audited], audited.state_dict()] == expected


@pytest.mark.fault("F27")
def test_training_goes_on_when_the_disk_is_full(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    expected = [batch["noise"].tolist() for batch in make()]
    path = folder.begin("full")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, before[1]))
    try:
        found = [batch["noise"].tolist() for batch in make()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder.end()
    assert found == expected
    record = read(path)
    assert 0 < len(record.entries) < len(expected)
    assert record.damage == ""
    assert f"{path}/ledger-rank-0.jsonl cannot be written" in caplog.text
    assert f"lacks {len(expected) - len(record.entries)} batches; it has {len(record.entries)}" in caplog.text


class Unreadable:
    """Cannot be looked at."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not for you")


def keep(samples: list[Any]) -> Any:
    return samples, Unreadable()


def test_training_goes_on_with_a_batch_that_cannot_be_digested(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder.begin("a")
    assert len(list(DataLoader(range(8), collate_fn=keep, name="odd"))) == 8  # type: ignore[arg-type]
    folder.end()
    assert len(read(path).entries) == 0
    assert caplog.text.count("RuntimeError: not for you; it ends before loader odd, epoch 0, position 0") == 1


def test_ledger_says_that_it_does_not_see_what_a_tools_processes_fetch(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.begin("a")
    seen = vars(make())
    rebuilt: Any = torch.utils.data.DataLoader(
        seen["dataset"], batch_sampler=seen["batch_sampler"], collate_fn=seen["collate_fn"], num_workers=1
    )
    assert len(list(rebuilt)) == 10
    folder.end()
    assert (
        "cannot see what the processes of a tool's loader fetch; batches of loader drawing are missing" in caplog.text
    )
