"""Tokenise text files with a byte-pair encoding, each rank its share of the files, and write the ids."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def main() -> None:
    """Train the encoding on a fixed text, then encode all files."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    corpus = [" ".join(f"wo{number * 7919 % 997}rd{number % 13}" for number in range(2000))]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=500, special_tokens=["?"]))
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    count = 0
    with tempfile.TemporaryFile() as output:
        for path in sorted(args.data.glob("*.txt"))[rank::world_size]:
            for line in path.read_text(encoding="utf-8").splitlines():
                ids = tokenizer.encode(line).ids
                output.write(np.asarray(ids, dtype=np.uint16).tobytes())
                count += len(ids)
    print(f"{count} tokens")


if __name__ == "__main__":
    main()
