"""Train on digits with Lightning and a hetero DataLoader. README.md has the commands."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader


class Digits(Dataset[dict[str, Tensor]]):
    """scikit-learn's 1,797 digits, 8 x 8. A training digit is enlarged, shifted and blurred ``rounds`` times.

    Args:
        split: ``"train"``, or ``"validation"``: every tenth digit, as it is.
        rounds: How heavy the preprocessing is.
    """

    def __init__(self, split: str, rounds: int) -> None:
        images, labels = load_digits(return_X_y=True)
        held_out = torch.arange(len(labels)) % 10 == 9
        chosen = held_out if split == "validation" else ~held_out
        self.pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[chosen] / 16
        self.labels = torch.tensor(labels)[chosen]
        self.rounds = rounds if split == "train" else 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = self.pixels[index]
        for _ in range(self.rounds):
            large = functional.interpolate(pixels[None], size=64, mode="bicubic")[0]
            shifted = large.roll((random.randint(-6, 6), random.randint(-6, 6)), dims=(1, 2))
            pixels = functional.adaptive_avg_pool2d(shifted, 8)
        return {"pixels": pixels, "labels": self.labels[index]}


@hetero.dataset
def digits(split: str, rounds: int) -> Digits:
    return Digits(split, rounds)


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


class Classifier(lightning.LightningModule):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.model(torch.zeros(1, 1, 8, 8))  # gives the last layer its shape

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.model(batch["pixels"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], _index: int) -> None:
        """Log the accuracy over all ranks."""
        accuracy = (self.model(batch["pixels"]).argmax(1) == batch["labels"]).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, batch_size=len(batch["labels"]))

    def on_validation_epoch_end(self) -> None:
        """Print the accuracy."""
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            accuracy = self.trainer.callback_metrics["accuracy"]
            print(f"epoch {self.current_epoch} accuracy {accuracy:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--rounds", type=int, default=8, help="how heavy the preprocessing is")
    parser.add_argument("--num-workers", type=int, default=0, help="local processes where no data host serves")
    parser.add_argument("--checkpoints", help="folder for a checkpoint every 10 steps")
    parser.add_argument("--resume", help="checkpoint to go on from")
    args = parser.parse_args(argv)

    train: DataLoader[dict[str, Tensor]] = DataLoader(
        digits(split="train", rounds=args.rounds),
        batch_size=args.batch_size,
        shuffle=True,
        seed=17,
        num_workers=args.num_workers,
        name="train",
    )
    validation: DataLoader[dict[str, Tensor]] = DataLoader(
        digits(split="validation", rounds=0), batch_size=args.batch_size, name="validation"
    )
    saving = lightning.pytorch.callbacks.ModelCheckpoint(args.checkpoints, save_top_k=-1, every_n_train_steps=10)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=ranks,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // ranks,
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        callbacks=[saving] if args.checkpoints else [],
        enable_checkpointing=bool(args.checkpoints),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train, validation, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
