"""A script with what used to train another model without a word. Writes what it met as JSON."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import hetero
from hetero.errors import ConfigError
from hetero.torch import DataLoader


class Photos(torch.utils.data.Dataset[Any]):
    """A thousand samples: their index, and an image in channels last."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index in self.broken:
            raise FileNotFoundError(f"no photo {index}")
        return index, torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last)


def stack(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices, and images that stay in channels last."""
    indices, images = zip(*samples, strict=True)
    return torch.tensor(indices), torch.cat(images)


@hetero.dataset(collate_fn=stack)
def split_alike(split: str) -> Any:
    """Split with torch's global generator."""
    train, val = torch.utils.data.random_split(Photos(), [0.8, 0.2])
    return train if split == "train" else val


@hetero.dataset(collate_fn=stack)
def split_anyhow(split: str) -> Any:
    """Split with a generator whose seed depends on the part that is wanted."""
    generator = torch.Generator().manual_seed({"train": 1, "val": 2}[split])
    train, val = torch.utils.data.random_split(Photos(), [0.8, 0.2], generator)
    return train if split == "train" else val


@hetero.dataset(collate_fn=stack)
def broken() -> Photos:
    """Samples. Two of them raise."""
    return Photos((9, 21))


def indices_of(loader: DataLoader[Any]) -> list[int]:
    """Return the indices of one pass."""
    return [index for indices, _ in loader for index in indices.tolist()]


def stubborn(loader: DataLoader[Any], states: list[Any]) -> list[Any]:
    """Return what a loop meets that logs exceptions and goes on, and append the state after each step."""
    met: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            images = next(iterator)[1]
            met.append([float(images.sum()), list(images.stride()), float(images.flatten().dot(images.flatten()))])
        except StopIteration:
            return met
        except FileNotFoundError as error:
            met.append(type(error).__mro__[1].__name__)
        states.append(loader.state_dict())


def main() -> None:
    """Meet every trap once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-workers", type=int, default=0)
    args = parser.parse_args()

    options: dict[str, Any] = {"batch_size": 100, "num_workers": args.num_workers}
    shared = {}
    for factory in (split_alike, split_anyhow):
        train, val = (indices_of(DataLoader(factory(split=split), **options)) for split in ("train", "val"))
        shared[factory.name] = len(set(train) & set(val))
    options = {"batch_size": 8, "num_workers": args.num_workers, "sampler": range(40)}
    loader = DataLoader(broken(), **options)
    try:
        loader.dataset.broken = ()
        refused = ""
    except ConfigError as error:
        refused = str(error)
    states: list[Any] = []
    met = stubborn(loader, states)
    resumed = DataLoader(broken(), **options)
    resumed.load_state_dict(states[1])
    found = {"shared": shared, "refused": refused, "met": met, "resumed": stubborn(resumed, [])}
    (args.output / f"traps-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
