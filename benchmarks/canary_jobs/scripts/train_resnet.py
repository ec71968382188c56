"""A small ResNet on JPEG files of a folder, for two passes, with a validation after each."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import nn

import hetero
from hetero.torch import DataLoader


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features."""
        return nn.functional.relu(self.body(images) + self.shortcut(images))


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """JPEG files, whose label is the first letter of the name."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._paths[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((32, 32)), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1), int(self._paths[index].name[0])


@hetero.dataset
def pictures(folder: str) -> Pictures:
    """Return the data set."""
    return Pictures(folder)


def main() -> None:
    """Train for two passes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = DataLoader(pictures(args.data), batch_size=16, shuffle=True, seed=3, num_workers=1, name="train")
    valid = DataLoader(pictures(args.data), batch_size=16, num_workers=1, name="validation")
    for _ in range(args.passes):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            hits = sum((model(images).argmax(1) == labels).sum().item() for images, labels in valid)
    print(f"{hits} hits")


if __name__ == "__main__":
    main()
