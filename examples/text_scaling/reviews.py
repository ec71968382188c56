"""Reviews with a sentiment: generated ones, or those of a CSV file in the format of amazon_polarity.

`load_split` chooses the reviews of a split, and `make_tokenizer` turns their words into numbers. Both give the same
result in every process, because data hosts and ranks each compute it for themselves. Nothing is downloaded.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import hashlib
import io
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

VALIDATION_EVERY = 10
"""One review in so many is for validation, as in the source: 90 % are for training."""
MAX_RECORD_BYTES = 1 << 20
"""Upper bound of one record of a CSV file. The longest review of amazon_polarity has about 1 KB."""
MAX_VOCABULARY_TEXTS = 50_000
"""The vocabulary comes from so many training texts at most, because each process that needs it counts their words."""
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The tokens of BERT that are not words, in the order of their numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Review:
    """One review."""

    text: str
    """The words."""
    label: int
    """1 if the review is positive, 0 if it is negative."""


class Reviews(Protocol):
    """Reviews by number. `GeneratedReviews` and `ReviewFile` are the two kinds."""

    def __getitem__(self, index: int) -> Review:
        """Return one review. The same index gives the same review in every process."""
        ...


class GeneratedReviews:
    """Reviews of invented words, any number of them.

    A review has two to five clauses, for example "the roda bemi was not very kusolu". The last word is one of
    `NUM_OPINIONS` opinions, and each of them is good or bad. A negation turns it round, "very" makes it stronger,
    "slightly" makes it weaker, and a clause after "but" counts twice. The review is positive if the sum of its clauses
    is. `MISTAKES` of the labels are wrong, as those of people are, so no model reaches an F1 of 1. The most common
    opinion occurs twenty times as often as the rarest, so a model goes on learning for many steps.

    Args:
        seed: Seed of the reviews. The vocabulary does not depend on it.
    """

    NUM_OPINIONS = 120
    NUM_SUBJECTS = 100
    NUM_FILLERS = 300
    MISTAKES = 0.03
    MOOD = 0.92
    """Share of the clauses that agree with the mood of their review."""
    NEGATED = 0.15
    """Share of the clauses with a negation."""
    CONTRASTED = 0.15
    """Share of the clauses, except the first, that follow a "but"."""
    NEGATIONS = ("not", "never", "hardly")
    STRENGTHS = (("", 2), ("very", 3), ("slightly", 1))

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        words = invented_words(self.NUM_OPINIONS + self.NUM_SUBJECTS + self.NUM_FILLERS)
        opinions = words[: self.NUM_OPINIONS]
        self.good, self.bad = opinions[::2], opinions[1::2]
        self.subjects = words[self.NUM_OPINIONS : self.NUM_OPINIONS + self.NUM_SUBJECTS]
        self.fillers = words[self.NUM_OPINIONS + self.NUM_SUBJECTS :]
        self.frequencies = {
            len(each): cumulated_frequencies(len(each)) for each in (self.good, self.subjects, self.fillers)
        }

    def __getitem__(self, index: int) -> Review:
        """Return review ``index``, which may be any integer >= 0."""
        generator = random.Random(f"review {self.seed} {index}")
        while True:
            words, score = self._clauses(generator)
            if score:  # a review without a sentiment is written again
                break
        mistaken = generator.random() < self.MISTAKES
        return Review(" ".join(words), int((score > 0) != mistaken))

    def _clauses(self, generator: random.Random) -> tuple[list[str], int]:
        mood = generator.random() < 0.5
        words: list[str] = []
        score = 0
        for number in range(generator.randint(2, 5)):
            weight = 1
            if number:
                contrasted = generator.random() < self.CONTRASTED
                words.append("but" if contrasted else "and")
                weight = 2 if contrasted else 1
            polarity = 1 if mood == (generator.random() < self.MOOD) else -1
            negated = generator.random() < self.NEGATED
            strength_word, strength = generator.choice(self.STRENGTHS)
            opinion = self._draw(generator, self.good if (polarity > 0) != negated else self.bad)
            negation = generator.choice(self.NEGATIONS) if negated else ""
            subject = [self._draw(generator, self.fillers), self._draw(generator, self.subjects)]
            words += ["the", *subject, "was", *filter(None, (negation, strength_word)), opinion]
            score += weight * strength * polarity
        return words, score

    def _draw(self, generator: random.Random, words: Sequence[str]) -> str:
        return generator.choices(words, cum_weights=self.frequencies[len(words)])[0]


def invented_words(count: int) -> list[str]:
    """Return ``count`` different words of two to four syllables. The same call returns the same words."""
    generator = random.Random("invented words")
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(generator.choice(syllables) for _ in range(generator.randint(2, 4)))] = None
    return list(words)


def cumulated_frequencies(count: int) -> list[float]:
    """Return the cumulated frequencies of words by rank, after Zipf and Mandelbrot: 1 / (rank + 3)."""
    return list(itertools.accumulate(1 / (rank + 3) for rank in range(count)))


class ReviewFile:
    """Reviews of a CSV file in the format of amazon_polarity. Only positions are in memory, not texts.

    A record is a label, a title and a text ("content"), quoted as CSV. Labels are 0 and 1 where the file has a header
    "label,title,content", and 1 and 2 in the original files, which have none. The source trains on the content alone,
    and this class does the same.

    Args:
        path: The file.
        count: How many records to read from the beginning, >= 1.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has fewer records, or something that is not such a record.
    """

    def __init__(self, path: str | os.PathLike[str], count: int) -> None:
        self.path = Path(path)
        starts, labels = self._scan(count)
        if len(labels) < count:
            raise ValueError(f"{self.path} has {len(labels):,} reviews, expected at least {count:,}: lower --samples")
        self._starts = np.array(starts, dtype=np.int64)
        found = set(labels)
        if found not in ({"0", "1"}, {"1", "2"}):
            raise ValueError(
                f"{self.path} has the labels {', '.join(sorted(found)[:5])} in its first {count:,} records, "
                "expected both 0 and 1, or both 1 and 2"
            )
        self._positive = max(found)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Review:
        """Return the review of record ``index``, the header not counted. Safe in threads and in forked processes."""
        start, end = self._starts[index : index + 2].tolist()
        with self.path.open("rb") as file:
            file.seek(start)
            record = file.read(end - start).removeprefix(codecs.BOM_UTF8)
        try:
            (row,) = csv.reader(io.StringIO(record.decode("utf-8"), newline=""), strict=True)
            label, _, content = row
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{self.path}, record {index + 1}: expected label, title, content ({error})") from None
        return Review(content, int(label.strip() == self._positive))

    def _scan(self, count: int) -> tuple[list[int], list[str]]:
        """Return where the first ``count`` records start, where the last of them ends, and their labels."""
        starts: list[int] = []
        labels: list[str] = []
        position = 0
        with self.path.open("rb") as file:
            for record in _records(file, self.path):
                label = record[:100].split(b",", 1)[0].strip(b'" \r\n\t\xef\xbb\xbf').decode("utf-8", "replace")
                if position or label.lower() != "label":
                    if len(labels) == count:
                        break
                    starts.append(position)
                    labels.append(label)
                position += len(record)
        return [*starts, position], labels


def _records(file: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield the records of a CSV file. A record goes on in the next line while a quotation is open."""
    parts: list[bytes] = []
    size = quotes = 0
    for line in file:
        parts.append(line)
        size += len(line)
        quotes += line.count(b'"')  # a quotation mark in a text is doubled, so it does not change the parity
        if size > MAX_RECORD_BYTES:
            raise ValueError(f"{path} has a record of more than {MAX_RECORD_BYTES:,} bytes: is a quotation not closed?")
        if quotes % 2 == 0:
            if line.strip():
                yield b"".join(parts)
            elif len(parts) == 1:
                raise ValueError(f"{path} has an empty line between its records")
            parts, size, quotes = [], 0, 0
    if parts:
        raise ValueError(f"{path} ends inside a quotation")


class Split(Sequence[Review]):
    """Some of the reviews.

    Args:
        reviews: Where they come from.
        indices: Which of them, in order.
    """

    def __init__(self, reviews: Reviews, indices: npt.NDArray[np.int64]) -> None:
        self.reviews = reviews
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Review:  # type: ignore[override]  # slices are not needed
        """Return one review of the split."""
        return self.reviews[int(self.indices[index])]


def load_split(
    split: str, *, samples: int, data: str | None = None, validation_samples: int | None = None, seed: int = 0
) -> Split:
    """Return the reviews of a split.

    Nine tenths of ``samples`` are for training. A file's last tenth is every tenth review. Generated reviews for
    validation are the same ones for every number of samples, so results of different sizes can be compared. A
    text that is also in the training split is left out of the validation split.

    Args:
        split: ``"train"`` or ``"validation"``.
        samples: Reviews for training and validation together, a multiple of ten.
        data: CSV file, or folder with a ``train.csv``. None generates reviews.
        validation_samples: How many reviews to validate with. None is a tenth of ``samples``, which is also the most
            that a file has.
        seed: Seed of generated reviews.

    Returns:
        The reviews.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If an argument is out of range, or the file is not as described in `ReviewFile`.
    """
    num_validation = check_sizes(samples, validation_samples, is_file=data is not None)
    indices = np.arange(samples, dtype=np.int64)
    is_held_out = indices % VALIDATION_EVERY == VALIDATION_EVERY - 1
    reviews: Reviews
    if data is None:
        reviews = GeneratedReviews(seed)
        held_out_indices = np.arange(num_validation, dtype=np.int64) + (1 << 40)  # no training set reaches them
    else:
        path = Path(data)
        reviews = ReviewFile(path / "train.csv" if path.is_dir() else path, samples)
        held_out_indices = indices[is_held_out][:num_validation]
    train = Split(reviews, indices[~is_held_out])
    if split == "train":
        return train
    if split != "validation":
        raise ValueError(f"split is {split!r}, expected train or validation")
    known = {_digest(review) for review in train}
    validation = Split(reviews, held_out_indices)
    unseen = [index for index, review in zip(held_out_indices, validation, strict=True) if _digest(review) not in known]
    return Split(reviews, np.array(unseen, dtype=np.int64))


def check_sizes(samples: int, validation_samples: int | None, *, is_file: bool) -> int:
    """Check the numbers of reviews, and return how many are for validation.

    Args:
        samples: Reviews for training and validation together.
        validation_samples: How many reviews to validate with. None is a tenth of ``samples``.
        is_file: Whether the reviews come from a file, which has no more than a tenth for validation.

    Raises:
        ValueError: If a number is out of range. The message begins with its name, as on the command line.
    """
    if samples < VALIDATION_EVERY or samples % VALIDATION_EVERY:
        raise ValueError(
            f"samples is {samples}, expected a multiple of {VALIDATION_EVERY}, at least {VALIDATION_EVERY}"
        )
    held_out = samples // VALIDATION_EVERY
    num_validation = held_out if validation_samples is None else validation_samples
    if num_validation < 1 or (is_file and num_validation > held_out):
        bound = f"1 to {held_out}, a tenth of {samples}" if is_file else "at least 1"
        raise ValueError(f"validation-samples is {num_validation}, expected {bound}")
    return num_validation


def _digest(review: Review) -> bytes:
    """Return 16 bytes that are equal for texts with the same words."""
    words = " ".join(review.text.lower().split())
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def make_tokenizer(texts: Iterable[str], *, vocabulary: int, max_length: int) -> Tokenizer:
    """Return a tokenizer whose vocabulary is the most frequent words of some texts, in lower case as in BERT.

    Args:
        texts: Training texts. The first `MAX_VOCABULARY_TEXTS` count.
        vocabulary: Size of the vocabulary with `SPECIAL_TOKENS`, > 5. The other words become ``[UNK]``.
        max_length: Tokens of every text: longer ones are cut, shorter ones are padded.

    Returns:
        The tokenizer. Equal texts give an equal tokenizer: of equally frequent words the alphabet's first is chosen.

    Raises:
        ValueError: If the vocabulary is too small.
    """
    if vocabulary <= len(SPECIAL_TOKENS):
        raise ValueError(f"vocabulary is {vocabulary}, expected more than {len(SPECIAL_TOKENS)}")
    normalizer = normalizers.BertNormalizer()
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in itertools.islice(texts, MAX_VOCABULARY_TEXTS):
        counts.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    words = [*SPECIAL_TOKENS, *(word for word in frequent if word not in SPECIAL_TOKENS)][:vocabulary]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return set_length(tokenizer, max_length)


def read_tokenizer(folder: str, *, max_length: int) -> Tokenizer:
    """Return the tokenizer of a pretrained model's folder, which has a ``tokenizer.json``.

    Raises:
        FileNotFoundError: If the file is not in the folder.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: expected a folder that save_pretrained() of a fast tokenizer wrote"
        )
    return set_length(Tokenizer.from_file(str(path)), max_length)


def set_length(tokenizer: Tokenizer, max_length: int) -> Tokenizer:
    """Make a tokenizer cut or pad every text to ``max_length`` tokens, and return it."""
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(length=max_length, pad_id=tokenizer.token_to_id("[PAD]") or 0, pad_token="[PAD]")
    return tokenizer
