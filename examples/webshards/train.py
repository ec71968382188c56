"""Classify pictures from tar shards in WebDataset's form. Data hosts decode and flip them.

Make the data and their indices, then train::

    python examples/webshards/make_data.py
    hetero index "data/webshards/train/*.tar"
    hetero index "data/webshards/validation/*.tar"
    python examples/webshards/train.py

README.md has the commands for a job with data hosts.
"""

from __future__ import annotations

import argparse
import io
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import hetero
from hetero import shards
from hetero.torch import DataLoader

NUM_CLASSES = 4
"""Shapes that ``make_data.py`` draws."""


def decode(row: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the picture of a row as a uint8 tensor of shape ``(3, height, width)``, and its class."""
    image = Image.open(io.BytesIO(row["png"])).convert("RGB")
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()), int(row["cls"])


def flip(sample: tuple[Tensor, int]) -> tuple[Tensor, int]:
    """Mirror half of the pictures. hetero seeds the generator for each sample."""
    image, label = sample
    return (image.flip(2) if random.random() < 0.5 else image), label


@hetero.dataset
def pictures(pattern: str, augment: bool) -> Dataset[tuple[Tensor, int]]:
    """Build the data set wherever it is needed."""
    decoded = shards.tar(pattern).map(decode)
    return decoded.map(flip) if augment else decoded


class ShapeNetwork(nn.Module):
    """Three convolutions and a linear layer that take uint8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.GroupNorm(8, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 4 * 64, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of uint8 images."""
        logits: Tensor = self.layers(images.float().sub(127.5).div(64.0))  # a byte is cheaper to send than a float
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    """Train and validate for some epochs, from the checkpoint if there is one."""
    args = parse_arguments(argv)
    device = join_process_group()
    rank = dist.get_rank()
    torch.set_num_threads(1)  # the network is too small for more, and their number may change a sum's last bits
    torch.manual_seed(args.seed)
    network = ShapeNetwork().to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    root = str(Path(args.data).resolve())
    options: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": args.num_workers}
    train_set = pictures(f"{root}/train/*.tar", augment=True)
    validation_set = pictures(f"{root}/validation/*.tar", augment=False)
    loader: DataLoader[Any] = DataLoader(
        train_set, shuffle="window", seed=args.seed, drop_last=True, name="train", **options
    )
    validation_loader: DataLoader[Any] = DataLoader(validation_set, padding=False, name="validation", **options)

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
        for images, labels in loader:
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % args.log_every == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        accuracy = evaluate(network, validation_loader, device)
        if rank == 0:
            print(f"epoch {epoch} step {step} validation accuracy {accuracy:.3f}", flush=True)
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
    parser = argparse.ArgumentParser(description="Classify pictures of shapes.", allow_abbrev=False)
    parser.add_argument("--data", default="data/webshards", help="folder that make_data.py wrote (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in all (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=50, help="pictures per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="loader processes per rank (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and to write")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and flips (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
