"""Trains through the loop of a tool, and says by a digest what each rank was fed."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import hetero
from hetero.torch import DataLoader


class Noisy(torch.utils.data.Dataset):
    """Samples that depend on their index and a draw."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.rand(3)


@hetero.dataset
def noisy() -> torch.utils.data.Dataset:
    """Return the data set."""
    return Noisy()


def epochs_of_lightning(loader: DataLoader, take: Any) -> None:
    """Hand two epochs of batches to ``take`` from inside a Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            take(batch)
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=ranks, strategy="ddp", **quiet)
    trainer.fit(Module(), loader)


def main() -> None:
    """Run two epochs and write the digest of one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tool", choices=["none", "accelerate", "lightning"], required=True)
    args = parser.parse_args()
    digest = hashlib.sha256()

    def take(batch: Iterable[torch.Tensor]) -> None:
        for part in batch:
            digest.update(part.numpy().tobytes())

    loader: Any = DataLoader(noisy(), batch_size=4, shuffle=True, seed=3)
    if args.tool == "lightning":
        epochs_of_lightning(loader, take)
    else:
        if args.tool == "accelerate":
            from accelerate import Accelerator

            loader = Accelerator(cpu=True).prepare(loader)
        for _ in range(2):
            for batch in loader:
                take(batch)
    (args.output / f"{args.tool}-{os.environ['RANK']}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
