"""Train on digits with Hugging Face's Trainer and a hetero DataLoader. README.md has the commands."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers
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


class Classifier(nn.Module):
    """A small CNN that returns its loss, as the Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.model(torch.zeros(1, 1, 8, 8))  # gives the last layer its shape

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.model(pixels)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Trainer(transformers.Trainer):
    """Takes its batches from hetero's loader."""

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data set."""
        return self.accelerator.prepare(
            DataLoader(
                self.train_dataset,
                batch_size=self.args.per_device_train_batch_size,
                shuffle=True,
                seed=self.args.seed,
                num_workers=self.args.dataloader_num_workers,
                name="train",
            )
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of a validation data set. Prepare it, because a prepared loader does not count padding."""
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):  # the Trainer has several, by name
            eval_dataset = self.eval_dataset[eval_dataset]
        return self.accelerator.prepare(
            DataLoader(
                eval_dataset,
                batch_size=self.args.per_device_eval_batch_size,
                name="validation",
            )
        )


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "samples": len(right)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--rounds", type=int, default=8, help="how heavy the preprocessing is")
    parser.add_argument("--num-workers", type=int, default=0, help="local processes where no data host serves")
    parser.add_argument("--output", default="runs/trainer-checkpoints", help="folder for checkpoints")
    parser.add_argument("--resume", help="checkpoint folder to go on from")
    args = parser.parse_args(argv)

    options = transformers.TrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        dataloader_num_workers=args.num_workers,
        learning_rate=1e-2,
        seed=17,
        logging_steps=10,
        save_steps=10,
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        Classifier(),
        options,
        train_dataset=digits(split="train", rounds=args.rounds),
        eval_dataset=digits(split="validation", rounds=0),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
