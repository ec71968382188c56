"""Train a sentiment classifier with DistilBERT's architecture on any number of ranks. README.md has the commands.

The reviews are generated, unless ``--data`` names a file in amazon_polarity's format. The weights start at random,
unless ``--pretrained`` names a model's folder. Nothing is downloaded. Run it alone::

    python examples/text_scaling/train.py

The data set tokenises where batches are made, so in a job with data hosts they tokenise.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from reviews import Split, check_sizes, load_split, make_tokenizer, read_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader

SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab_size": 2_048, "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
    "full": {"vocab_size": 30_522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3_072},
}
"""DistilBERT's configuration by size. ``"full"`` is distilbert-base-uncased."""
SHORTEST = 3
"""Tokens of the shortest text: [CLS], one word, [SEP]."""
FULL_SIZE_PARAMETERS = 66_955_010
"""Parameters of distilbert-base-uncased with two classes, as the source states."""


class TokenisedReviews(Dataset[dict[str, Tensor]]):
    """Reviews as numbers of tokens, all of one length.

    Args:
        reviews: The reviews of the split.
        tokenizer: Cuts or pads every text to the same length.
    """

    def __init__(self, reviews: Split, tokenizer: Tokenizer) -> None:
        self.reviews = reviews
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.reviews)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        review = self.reviews[index]
        encoding = self.tokenizer.encode(review.text)
        return {
            "input_ids": torch.tensor(encoding.ids),
            "attention_mask": torch.tensor(encoding.attention_mask),
            "labels": torch.tensor(review.label),
        }


@hetero.dataset
def sentiments(
    split: str,
    samples: int,
    validation_samples: int | None,
    vocabulary: int,
    max_length: int,
    data: str | None = None,
    pretrained: str | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Build a split and its tokenizer wherever batches are made. The vocabulary knows the training texts only."""
    folder = None if data is None else os.path.expandvars(data)  # $SM_CHANNEL_..., each host's own
    reviews = load_split(split, samples=samples, data=folder, validation_samples=validation_samples)
    if pretrained is not None:
        return TokenisedReviews(reviews, read_tokenizer(os.path.expandvars(pretrained), max_length=max_length))
    train = load_split("train", samples=samples, data=folder)
    tokenizer = make_tokenizer((review.text for review in train), vocabulary=vocabulary, max_length=max_length)
    return TokenisedReviews(reviews, tokenizer)


def make_model(size: str, pretrained: str | None = None) -> nn.Module:
    """Return DistilBERT with a head of two classes, from its configuration or from a folder."""
    # Here because data hosts do not need it, and it takes seconds.
    import transformers

    if pretrained is not None:
        folder = os.path.expandvars(pretrained)
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        return nn.Module.train(loaded)
    config = transformers.DistilBertConfig(**SIZES[size], num_labels=2)
    model = transformers.DistilBertForSequenceClassification(config)
    if size == "full" and count_parameters(model) != FULL_SIZE_PARAMETERS:
        raise RuntimeError(
            f"the model has {count_parameters(model):,} parameters, distilbert-base-uncased has "
            f"{FULL_SIZE_PARAMETERS:,}: this version of transformers ({transformers.__version__}) builds another model"
        )
    return nn.Module.train(model)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def learning_rate_factor(step: int, *, num_steps: int, warm_up_steps: int) -> float:
    """Return the learning rate of a step as a share of the highest: a linear rise, then a linear fall to 0.

    Args:
        step: Steps already made, >= 0.
        num_steps: Steps of the whole run.
        warm_up_steps: Steps of the rise. The first step has 1 / warm_up_steps of the rate.
    """
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    return max(0.0, (num_steps - step) / max(1, num_steps - warm_up_steps))


def main(argv: Sequence[str] | None = None) -> None:
    """Train for some epochs and validate several times."""
    args = parse_arguments(argv)
    device = join_process_group()
    is_first = dist.get_rank() == 0
    torch.manual_seed(args.seed)  # the same weights on every rank
    network = make_model(args.size, args.pretrained).to(device)
    torch.manual_seed(args.seed + 1_000_003 * (dist.get_rank() + 1))  # other dropout on every rank
    model = DistributedDataParallel(network)
    train_loader, validation_loader = make_loaders(args)
    steps_per_epoch = len(train_loader)
    num_steps = steps_per_epoch * args.epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    warm_up_steps = round(args.warm_up * num_steps)
    schedule = LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, num_steps=num_steps, warm_up_steps=warm_up_steps)
    )
    if is_first:
        print(
            f"{count_parameters(network):,} parameters, {args.epochs} epochs of {steps_per_epoch} steps, "
            f"global batch {args.batch_size * dist.get_world_size()}, {device.type}",
            flush=True,
        )

    validate_at = {math.ceil(num_steps * part / args.validations) for part in range(1, args.validations + 1)}
    for step, batch in enumerate(batches(train_loader, args.epochs), start=1):
        loss = model(**{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in validate_at:
            f1, accuracy = evaluate(network, validation_loader, device)
            if is_first:
                hetero.log_metric("f1", f1, step)
                hetero.log_metric("accuracy", accuracy, step)
                print(f"step {step} of {num_steps}: loss {loss.item():.6f}, f1={f1:.4f}", flush=True)
    del model  # before the group: if it held the group's last reference, its end could wait for the group's for ever
    leave_process_group()


def make_loaders(args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of the training and the validation split."""
    vocabulary = SIZES[args.size]["vocab_size"]
    common = (args.samples, args.validation_samples, vocabulary, args.max_length, args.data, args.pretrained)
    options: dict[str, Any] = {
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
    }
    train: DataLoader[Any] = DataLoader(
        sentiments("train", *common),
        batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
        name="train",
        **options,
    )
    validation: DataLoader[Any] = DataLoader(
        sentiments("validation", *common), batch_size=128, padding=False, name="validation", **options
    )
    return train, validation


def batches(loader: DataLoader[dict[str, Tensor]], epochs: int) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of all epochs."""
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        yield from loader


def join_process_group() -> torch.device:
    """Join the other ranks, or be the only one if no launcher started this script.

    Returns:
        This rank's own GPU, or the CPU if there are fewer GPUs than ranks on this host.
    """
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


def leave_process_group() -> None:
    """Leave the other ranks."""
    dist.destroy_process_group()
    # DDP keeps gloo's threads beyond the end of the group (torch 2.13). If Python ends while such a thread releases a
    # tensor, the thread aborts the process. torch has no event for it.
    time.sleep(0.2)


def evaluate(network: nn.Module, loader: Iterable[dict[str, Tensor]], device: torch.device) -> tuple[float, float]:
    """Return F1 of the positive class and accuracy, of the samples of all ranks together."""
    counts = torch.zeros(4, dtype=torch.int64, device=device)
    network.eval()
    # A pass of the loader draws from torch's global generator. Dropout must not depend on how often one validates.
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        for batch in loader:
            logits = network(
                input_ids=batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device)
            ).logits
            counts += confusion(logits.argmax(dim=1), batch["labels"].to(device))
    network.train()
    dist.all_reduce(counts)
    return scores(*counts.tolist())


def confusion(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return how many predictions of 1 are right and wrong, then how many of 0 are right and wrong."""
    return torch.stack(
        [
            ((predicted == 1) & (actual == 1)).sum(),
            ((predicted == 1) & (actual == 0)).sum(),
            ((predicted == 0) & (actual == 0)).sum(),
            ((predicted == 0) & (actual == 1)).sum(),
        ]
    )


def scores(true_positive: int, false_positive: int, true_negative: int, false_negative: int) -> tuple[float, float]:
    """Return F1 = 2 TP / (2 TP + FP + FN), 0 where nothing is positive, and the share of right predictions."""
    positives = 2 * true_positive + false_positive + false_negative
    total = true_positive + false_positive + true_negative + false_negative
    f1 = 2 * true_positive / positives if positives else 0.0
    return f1, (true_positive + true_negative) / max(1, total)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train DistilBERT to classify sentiments.", allow_abbrev=False)
    parser.add_argument("--data", help="CSV file as amazon_polarity's, or its folder (default: generated reviews)")
    parser.add_argument("--pretrained", help="folder of a model and its tokenizer (default: weights at random)")
    parser.add_argument("--size", choices=SIZES, default="small", help="DistilBERT's size (%(default)s)")
    parser.add_argument("--samples", type=int, default=3840, help="reviews, nine tenths to train on (%(default)s)")
    parser.add_argument("--validation-samples", type=int, help="reviews to validate with (default: a tenth of them)")
    parser.add_argument("--max-length", type=int, default=40, help="tokens of a review (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs in all (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="reviews per rank and step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="AdamW's highest (%(default)s)")
    parser.add_argument(
        "--warm-up", type=float, default=0.1, help="share of the steps with a rising rate (%(default)s)"
    )
    parser.add_argument("--validations", type=int, default=1, help="how often to validate, the last at the end")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes per rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout (%(default)s)")
    args = parser.parse_args(argv)
    lowest = {"epochs": 1, "batch_size": 1, "validations": 1, "max_length": SHORTEST, "num_workers": 0}
    for name, bound in lowest.items():
        if getattr(args, name) < bound:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least {bound}")
    try:
        check_sizes(args.samples, args.validation_samples, is_file=args.data is not None)
    except ValueError as error:
        parser.error(f"--{error}")
    if not 0 < args.learning_rate < math.inf:
        parser.error(f"--learning-rate is {args.learning_rate}, expected a finite number above 0")
    if not 0 <= args.warm_up <= 1:
        parser.error(f"--warm-up is {args.warm_up}, expected a share from 0 to 1")
    return args


if __name__ == "__main__":
    main()
