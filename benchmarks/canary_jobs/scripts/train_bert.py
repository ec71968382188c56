"""A small BERT from its configuration, fine-tuned on generated token sequences: the source's second experiment."""

from __future__ import annotations

import argparse

import torch
import torch.utils.data
from transformers import BertConfig, BertForSequenceClassification

import hetero
from hetero.torch import DataLoader

NUM_TOKENS = 2000
LENGTH = 48


class Sentences(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Sequences of token ids. The label says whether a token of the first hundred is more frequent than usual."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(5, NUM_TOKENS, (LENGTH,), generator=generator)
        label = index % 2
        ids[: 8 * label] %= 100
        return ids, label


@hetero.dataset
def sentences(number: int) -> Sentences:
    """Return the data set."""
    return Sentences(number)


def main() -> None:
    """Train for some passes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--sentences", type=int, default=12_000)
    parser.add_argument("--passes", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=NUM_TOKENS, hidden_size=96, num_hidden_layers=2, num_attention_heads=2, intermediate_size=384
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(sentences(args.sentences), batch_size=16, shuffle=True, seed=1, name="train")
    for _ in range(args.passes):
        for ids, labels in loader:
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
