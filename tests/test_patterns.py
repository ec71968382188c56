"""The blocks of docs/patterns.md run: those before with torch's loader, those after with hetero's."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hetero

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler, random_split  # noqa: E402

from hetero.torch import DataLoader as HeteroLoader  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "patterns.md"
NUM_PHOTOS = 32


class Photos(Dataset):
    """Crops of one number each."""

    def __init__(self, root: str, crop: int = 8) -> None:
        self.root, self.crop = root, crop
        self.weights = read_weights(root)

    def __len__(self) -> int:
        return NUM_PHOTOS

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.crop,), index)


class Sentences(Dataset):
    """Index, as often as the sentence is long."""

    def __init__(self, root: str) -> None:
        self.lengths = read_lengths(root)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.lengths[index],), index)


class Buckets(Sampler):
    """Batches of sentences of about the same length."""

    def __init__(self, lengths: list[int], max_tokens: int) -> None:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[start : start + max_tokens // 8] for start in range(0, len(order), max_tokens // 8)]

    def __iter__(self) -> Any:
        return iter(random.sample(self.batches, len(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


def read_weights(_root: str) -> list[float]:
    return [1.0 + index for index in range(NUM_PHOTOS)]


def read_lengths(_root: str) -> list[int]:
    return [1 + index % 8 for index in range(40)]


def pad(samples: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def mix(samples: list[Any], *, alpha: float) -> Any:
    stacked = torch.stack(samples)
    return stacked + alpha * 0


def patterns() -> dict[str, list[str]]:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {text.partition("\n")[0]: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in sections}


def run(block: str, loader: Any, folder: Path) -> list[Any]:
    """Run a block, and return the batches of its steps."""
    seen: list[Any] = []
    np.arange(1000, dtype=np.uint16).tofile(folder / "tokens.bin")
    arguments = {"data": str(folder), "crop": 8, "epochs": 3, "seed": 1, "alpha": 0.2, "steps": 6}
    names = {
        **{each.__name__: each for each in (Photos, Sentences, Buckets, read_weights, read_lengths, pad, mix)},
        "torch": torch,
        "np": np,
        "hetero": hetero,
        "functools": __import__("functools"),
        "Dataset": Dataset,
        "random_split": random_split,
        "WeightedRandomSampler": WeightedRandomSampler,
        "DataLoader": loader,
        "args": SimpleNamespace(**arguments, checkpoint=folder / "state.pt"),
        "step": seen.append,
        "__name__": "patterns_test",
    }
    registered = dict(hetero.datasets._factories)
    try:
        exec(compile(block, str(PAGE), "exec"), names)  # the document's own block
    finally:
        hetero.datasets._factories.clear()
        hetero.datasets._factories.update(registered)
    return seen


WHOLE_EPOCHS = (
    "A loader",
    "A batch sampler, for buckets of similar lengths",
    "A collate_fn with options",
    "A loader made in each epoch",
    "State that the loop changes",
    "Checkpoints",
)


def parts(batches: list[Any]) -> list[Any]:
    return [part for batch in batches for part in (batch if isinstance(batch, tuple) else (batch,))]


@pytest.mark.parametrize("pattern", patterns())
def test_pattern_trains_on_the_same_before_and_after(pattern: str, tmp_path: Path) -> None:
    before, after = patterns()[pattern]
    expected, found = parts(run(before, DataLoader, tmp_path)), parts(run(after, HeteroLoader, tmp_path))
    if pattern == "Checkpoints":  # the block continues in the middle of the last epoch
        rest, found = found[12:], found[:12]
        assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in found[11:]]
    assert [len(batch) for batch in found] == [len(batch) for batch in expected]
    if pattern in WHOLE_EPOCHS:
        samples = [Counter(tuple(each) for batch in of for each in batch[:, :1].tolist()) for of in (found, expected)]
        assert samples[0] == samples[1]
