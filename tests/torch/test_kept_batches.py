"""The batches that a profile run repeats."""

from __future__ import annotations

import torch

from hetero.loaders.kept_batches import MAX_KEPT
from hetero.torch.kept_batches import KeptBatches, batch_nbytes


def keep(*batches: object, max_bytes: int = 2**30) -> KeptBatches:
    kept = KeptBatches(max_bytes)
    for batch in batches:
        kept.keep(batch)
    return kept


def test_kept_batches_come_in_turn() -> None:
    kept = keep(*(torch.tensor([number]) for number in range(3)))
    assert [kept.next().item() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_batches_are_kept_up_to_a_number_and_a_size() -> None:
    assert len(keep(*(torch.zeros(1) for _ in range(20)))) == MAX_KEPT
    assert len(keep(*(torch.zeros(100) for _ in range(20)), max_bytes=1000)) == 2
    assert len(keep(torch.zeros(1000), max_bytes=10)) == 1


def test_script_that_writes_to_a_batch_gets_it_unchanged_the_next_time() -> None:
    original = {"image": torch.ones(2**20), "label": [torch.tensor([7])]}
    kept = keep(original)
    original["image"].zero_()  # the script writes to the batch that was kept
    for _ in range(5):
        batch = kept.next()
        assert batch["image"][0] == 1
        batch["image"].mul_(3)
        batch["label"][0] += 1
        del batch["label"]


def test_size_of_a_batch_counts_all_its_tensors() -> None:
    assert batch_nbytes({"a": [torch.zeros(4), "text"], "b": (torch.zeros(2, dtype=torch.uint8), 3)}) == 18
