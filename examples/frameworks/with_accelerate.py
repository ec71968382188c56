"""Train on digits with Hugging Face accelerate and a hetero DataLoader. README.md has the commands."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch
from accelerate import Accelerator
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--rounds", type=int, default=8, help="how heavy the preprocessing is")
    parser.add_argument("--num-workers", type=int, default=0, help="local processes where no data host serves")
    args = parser.parse_args(argv)

    accelerator = Accelerator()
    model = make_model()
    model(torch.zeros(1, 1, 8, 8))  # gives the last layer its shape
    train_loader: DataLoader[dict[str, Tensor]] = DataLoader(
        digits(split="train", rounds=args.rounds),
        batch_size=args.batch_size,
        shuffle=True,
        seed=17,
        num_workers=args.num_workers,
        name="train",
    )
    validation_loader: DataLoader[dict[str, Tensor]] = DataLoader(
        digits(split="validation", rounds=0), batch_size=args.batch_size, name="validation"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train_loader, validation_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            loss = functional.cross_entropy(model(batch["pixels"]), batch["labels"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        right = total = 0
        for batch in validation:
            with torch.no_grad():
                guesses = model(batch["pixels"]).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            right += int((guesses == labels).sum())
            total += len(labels)
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} accuracy {right}/{total}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
