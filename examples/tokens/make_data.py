"""Write two sources of made-up text and a vocabulary: JSON Lines (gzip) and Parquet shards, and ``tokenizer.json``.

A row holds several short documents. The *stories* follow a simple grammar. The
*reports* are lines of figures. So a model learns to tell them apart within seconds::

    python examples/tokens/make_data.py --output data/tokens
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
DOCUMENTS_PER_ROW = 12
"""A row has at least 12 x 11 tokens, more than ``train.py`` cuts from it."""

ANIMALS = ["fox", "heron", "badger", "otter", "raven", "hedgehog"]
PLACES = ["river", "old mill", "harbour", "meadow", "bridge"]
VERBS = ["crossed", "left", "found", "watched", "remembered"]
STATIONS = ["north", "south", "east", "west"]


def make_story(generator: random.Random) -> str:
    """Return a sentence about two animals."""
    first, second = generator.sample(ANIMALS, 2)
    place = generator.choice(PLACES)
    return f"The {first} {generator.choice(VERBS)} the {place}, and the {second} {generator.choice(VERBS)} it too."


def make_report(generator: random.Random) -> str:
    """Return a line of three figures, the last of which is the sum of the others."""
    rain, snow = generator.randrange(50), generator.randrange(50)
    return f"station={generator.choice(STATIONS)} rain={rain} snow={snow} total={rain + snow}"


def make_rows(make: Callable[[random.Random], str], seed: str, count: int) -> Iterator[dict[str, list[str]]]:
    """Yield rows of several documents, the same ones for the same seed."""
    generator = random.Random(seed)
    for _ in range(count):
        yield {"documents": [make(generator) for _ in range(DOCUMENTS_PER_ROW)]}


def write_data(folder: Path, rows: int, shards: int) -> None:
    """Write ``shards`` files of each source, with ``rows`` rows of each source in all, and the vocabulary."""
    for source in ("stories", "reports"):  # one folder for each, because a folder has one index
        (folder / source).mkdir(parents=True, exist_ok=True)
    documents: list[str] = []
    for shard in range(shards):
        count = rows // shards
        stories = list(make_rows(make_story, f"stories {shard}", count))
        reports = list(make_rows(make_report, f"reports {shard}", count))
        with gzip.open(folder / "stories" / f"{shard:03}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in stories)
        pq.write_table(pa.Table.from_pylist(reports), folder / "reports" / f"{shard:03}.parquet")
        documents += [text for row in (*stories, *reports) for text in row["documents"]]
    train_tokenizer(documents).save(str(folder / "tokenizer.json"))


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with byte pairs of the documents, 512 tokens at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Write two sources of made-up text.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("data/tokens"), help="folder to write (%(default)s)")
    parser.add_argument("--rows", type=int, default=4000, help="rows of each source (%(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="files of each source (%(default)s)")
    args = parser.parse_args(argv)
    if args.shards < 1 or args.rows < args.shards:
        parser.error(f"--rows is {args.rows}, --shards {args.shards}: expected at least one row in each shard")
    write_data(args.output, args.rows, args.shards)
    size = sum(path.stat().st_size for path in args.output.glob("**/*.*"))
    print(f"wrote {2 * args.shards} shards and tokenizer.json to {args.output}, {size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
