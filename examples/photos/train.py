"""Train a small ResNet on photographs: decode, crop and flip on CPUs, learn on GPUs if there are any.

Make the data once, then train::

    python examples/photos/make_data.py
    python examples/photos/train.py  # or train_homogeneous.py

``train.py`` loads with hetero, so it runs as a job with data hosts too: README.md
has the commands. ``train_homogeneous.py`` is the same script with torch's own loader.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.distributed as dist
from cv2.typing import MatLike
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import hetero
from hetero.torch import DataLoader

NUM_CLASSES = 8
"""Four zones of two photographs. They are listed here because a trainer host need not have the data."""

cv2.setNumThreads(1)  # parallel over images, not within one


class PhotoDataset(Dataset[tuple[Tensor, int]]):
    """JPEGs in one folder per class, as RGB uint8 tensors of shape ``(3, image_size, image_size)``.

    Args:
        root: Folder that ``make_data.py`` wrote.
        split: ``"train"``, cropped and flipped at random, or ``"validation"``.
        image_size: Height and width of the tensors, in pixels.

    Raises:
        FileNotFoundError: If the folder has no image.
    """

    def __init__(self, root: str, split: str, image_size: int) -> None:
        self.paths = sorted(Path(root, split).glob("*/*.jpg"))
        if not self.paths:
            raise FileNotFoundError(f"no images in {Path(root, split)}: make them with make_data.py")
        self.classes = sorted(folder.name for folder in Path(root, split).iterdir())
        self.augment = split == "train"
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        pixels = cv2.imread(str(path))
        if pixels is None:
            raise ValueError(f"{path} is not an image")
        if self.augment:
            pixels = random_crop(pixels)
        pixels = cv2.resize(pixels, (self.image_size, self.image_size), interpolation=cv2.INTER_LINEAR)
        if self.augment and random.random() < 0.5:
            pixels = cv2.flip(pixels, 1)
        planes = np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1))
        return torch.from_numpy(planes), self.classes.index(path.parent.name)


def random_crop(pixels: MatLike) -> MatLike:
    """Cut out 25 to 100 % of the area, at an aspect ratio between 3:4 and 4:3."""
    height, width = pixels.shape[:2]
    area = random.uniform(0.25, 1.0) * height * width
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width = min(width, round(math.sqrt(area * ratio)))
    crop_height = min(height, round(math.sqrt(area / ratio)))
    left = random.randint(0, width - crop_width)
    top = random.randint(0, height - crop_height)
    return pixels[top : top + crop_height, left : left + crop_width]


@hetero.dataset
def photos(root: str, split: str, image_size: int) -> Dataset[tuple[Tensor, int]]:
    """Build the data set wherever it is needed."""
    return PhotoDataset(os.path.expandvars(root), split, image_size)  # $SM_CHANNEL_..., each host's own


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, num_outputs),
            nn.ReLU(),
            nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, num_outputs),
        )
        self.shortcut = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Halve or keep height and width, as ``stride`` says."""
        return functional.relu(self.body(features) + self.shortcut(features))


class ResNet(nn.Module):
    """A residual network of ten layers that takes uint8 images.

    Its norms keep no running statistics: a few dozen steps suffice for a
    meaningful validation, and ranks have no buffers to synchronise.
    """

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            ResidualBlock(width, width, stride=2),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
            ResidualBlock(4 * width, 8 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of uint8 images."""
        # Bytes become floats here, on the device: a quarter of the data to send and to copy.
        logits: Tensor = self.layers(images.float().sub(127.5).div(64.0))
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    """Train and validate for some epochs, from the checkpoint if there is one."""
    args = parse_arguments(argv)
    device = join_process_group()
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    network = ResNet(NUM_CLASSES).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_set = photos(args.data, "train", args.image_size)
    validation_set = photos(args.data, "validation", args.image_size)
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,
        "pin_memory": device.type == "cuda",
    }
    train_loader: DataLoader[Any] = DataLoader(train_set, shuffle=True, seed=args.seed, drop_last=True, **options)
    validation_loader: DataLoader[Any] = DataLoader(validation_set, padding=False, **options)

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
            "loader": train_loader.state_dict(),
        }
        partial = args.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(args.checkpoint)

    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        epoch, step = state["epoch"], state["step"]
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train_loader.load_state_dict(state["loader"])

    while epoch < args.epochs:
        train_loader.set_epoch(epoch)
        for images, labels in itertools.islice(train_loader, args.steps_per_epoch):
            logits = model(images.to(device, non_blocking=True))
            loss = functional.cross_entropy(logits, labels.to(device, non_blocking=True))
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
    parser = argparse.ArgumentParser(description="Train a small ResNet on photographs.", allow_abbrev=False)
    parser.add_argument("--data", default="data/photos", help="folder that make_data.py wrote (may name a $VARIABLE)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in all (%(default)s)")
    parser.add_argument("--steps-per-epoch", type=int, help="end every epoch early, after so many steps")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (%(default)s)")
    parser.add_argument("--image-size", type=int, default=96, help="height and width in pixels (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="loader processes per rank (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and to write")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
