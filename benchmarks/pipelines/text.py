"""Language: split text into words, and words into pieces by longest match. Pad texts to the longest of the batch."""

from __future__ import annotations

import random
import re
from typing import Any

import torch

BATCH_SIZE = 64
HAS_FIXED_SHAPES = False
NUM_TEXTS = 1_000
MAX_TOKENS = 512
_WORDS = re.compile(r"\w+|[^\w\s]")
_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"


class Texts(torch.utils.data.Dataset):
    """Samples are lists of token ids, 40 to 512 of them, one in fifty masked."""

    def __init__(self, length: int) -> None:
        self._length = length
        generator = random.Random(0)
        words = [
            "".join(generator.choice(_CONSONANTS) + generator.choice(_VOWELS) for _ in range(count % 5 + 1))
            for count in range(5_000)
        ]
        weights = [1 / (rank + 10) for rank in range(len(words))]
        self._texts = [
            " ".join(generator.choices(words, weights, k=generator.randint(20, 250))) + "." for _ in range(NUM_TEXTS)
        ]
        pieces = [*_CONSONANTS, *_VOWELS, ".", *(c + v for c in _CONSONANTS for v in _VOWELS)]
        pieces += [word for word in dict.fromkeys(words) if len(word) in (4, 6)][:2_000]
        self._ids = {piece: number + 4 for number, piece in enumerate(dict.fromkeys(pieces))}
        self._longest = max(map(len, self._ids))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1]
        for word in _WORDS.findall(self._texts[index % NUM_TEXTS].lower()):
            ids += self._split(word)
        ids = [*ids[: MAX_TOKENS - 1], 2]
        return {"ids": [3 if random.random() < 0.02 else token for token in ids], "label": index % 2}

    def _split(self, word: str) -> list[int]:
        """Return the ids of the longest pieces, from the left."""
        ids, begin = [], 0
        while begin < len(word):
            for end in range(min(len(word), begin + self._longest), begin, -1):
                token = self._ids.get(word[begin:end])
                if token is not None:
                    ids.append(token)
                    break
            else:
                end = begin + 1
            begin = end
        return ids


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad to the longest. The lengths stay a list."""
    lengths = [len(sample["ids"]) for sample in samples]
    ids = torch.zeros(len(samples), max(lengths), dtype=torch.int64)
    for position, sample in enumerate(samples):
        ids[position, : lengths[position]] = torch.tensor(sample["ids"])
    return {
        "ids": ids,
        "mask": ids != 0,
        "lengths": lengths,
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def build(length: int, root: str) -> Any:
    """Return the data set. ``root`` is not used."""
    return Texts(length)
