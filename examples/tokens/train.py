"""Pretrain a small language model on a mixture of JSON Lines and Parquet shards, tokenised on data hosts.

Make the data and their indices, then train::

    python examples/tokens/make_data.py
    hetero index "data/tokens/stories/*.jsonl.gz"
    hetero index "data/tokens/reports/*.parquet"
    python examples/tokens/train.py

README.md has the commands for a job with data hosts.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hetero
from hetero import shards
from hetero.torch import DataLoader

VOCABULARY = 512
"""At most as many tokens as ``make_data.py`` asks for."""


class Pack:
    """Makes a sample of a fixed length of the documents of a row, without state from other rows.

    Args:
        tokenizer: File that ``make_data.py`` wrote.
        length: Tokens of a sample.
    """

    def __init__(self, tokenizer: str, length: int) -> None:
        self.tokenizer = Tokenizer.from_file(tokenizer)
        self.end_of_text = self.tokenizer.token_to_id("<|endoftext|>")
        self.length = length

    def __call__(self, row: dict[str, Any]) -> Tensor:
        """Return ``length`` tokens from a random place in the documents, which end-of-text tokens join."""
        tokens: list[int] = []
        for document in row["documents"]:
            tokens += [*self.tokenizer.encode(document).ids, self.end_of_text]
        if len(tokens) < self.length:
            raise ValueError(f"a row has {len(tokens)} tokens, expected at least {self.length}: lower --length")
        start = random.randint(0, len(tokens) - self.length)  # hetero seeds the generator for each sample
        return torch.tensor(tokens[start : start + self.length])


@hetero.dataset
def pretraining(root: str, length: int) -> hetero.Sources:
    """Build the two sources wherever they are needed."""
    pack = Pack(f"{root}/tokenizer.json", length)
    return hetero.Sources(
        stories=shards.jsonl(f"{root}/stories/*.jsonl.gz").map(pack),
        reports=shards.parquet(f"{root}/reports/*.parquet").map(pack),
    )


class LanguageModel(nn.Module):
    """A transformer that predicts each next token."""

    def __init__(self, length: int, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.logits = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each of ``tokens``, ``(batch, length)``."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        features = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        logits: Tensor = self.logits(self.layers(features, mask=mask, is_causal=True))
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    """Train for some epochs, from the checkpoint if there is one."""
    args = parse_arguments(argv)
    device = join_process_group()
    rank = dist.get_rank()
    torch.set_num_threads(1)  # the network is too small for more, and their number may change a sum's last bits
    torch.manual_seed(args.seed)
    network = LanguageModel(args.length).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader: DataLoader[Any] = DataLoader(
        pretraining(root=str(Path(args.data).resolve()), length=args.length + 1),
        batch_size=args.batch_size,
        shuffle=hetero.Mixture({"stories": 0.7, "reports": 0.3}, samples=args.samples),
        seed=args.seed,
        num_workers=args.num_workers,
    )

    epoch = step = 0

    @hetero.on_stop
    def save_checkpoint() -> None:
        if args.checkpoint is None or rank != 0:
            return
        state = {
            "epoch": epoch,
            "step": step,
            "model": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        }
        partial = args.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(args.checkpoint)  # whole or not at all

    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        epoch, step = state["epoch"], state["step"]
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    while epoch < args.epochs:
        loader.set_epoch(epoch)
        for batch in loader:
            tokens = batch.to(device)
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        epoch += 1
        save_checkpoint()
    del model  # before the group: if it held the group's last reference, its end could wait for the group's for ever
    dist.destroy_process_group()


def join_process_group() -> torch.device:
    """Join the other ranks, or be the only one if no launcher started this script; return this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return device


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Pretrain a small language model.", allow_abbrev=False)
    parser.add_argument("--data", default="data/tokens", help="folder that make_data.py wrote (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens that the model sees (%(default)s)")
    parser.add_argument("--samples", type=int, default=4000, help="samples of an epoch over all ranks (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in all (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="loader processes per rank (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and to write")
    parser.add_argument("--log-every", type=int, default=25, help="steps between two lines (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and places (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
