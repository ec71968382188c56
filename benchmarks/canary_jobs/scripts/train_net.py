"""One network, bound by its input or by its compute, on any number of ranks.

``--sample-work`` is what a sample costs, ``--width`` what a step costs. Options turn it into a job that ends early, has
a fixed number of steps, or evaluates every so many steps.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.distributed
import torch.utils.data
from torch import nn

import hetero
from hetero.torch import DataLoader

SIDE = 32


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Generated images. Each is filtered ``work`` times."""

    def __init__(self, number: int, work: int) -> None:
        self._number, self._work = number, work

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = np.random.default_rng(index).random((3, SIDE, SIDE), dtype=np.float32)
        for _ in range(self._work):
            pixels = np.sqrt(pixels * pixels + 0.1 * np.roll(pixels, 1, axis=1))
        return torch.from_numpy(pixels), index % 10


@hetero.dataset
def images(number: int, work: int) -> Images:
    """Return the data set."""
    return Images(number, work)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--sample-work", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model: nn.Module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * SIDE * SIDE, args.width),
        nn.ReLU(),
        nn.Linear(args.width, args.width),
        nn.ReLU(),
        nn.Linear(args.width, 10),
    )
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = images(args.images, args.sample_work)
    loader = DataLoader(data, batch_size=16, shuffle=True, seed=5, num_workers=args.workers, name="train")
    generator = torch.Generator().manual_seed(7)
    held_out = torch.rand(256, 3, SIDE, SIDE, generator=generator)
    held_out_labels = torch.randint(10, (256,), generator=generator)
    step, best, num_bad = 0, float("inf"), 0
    while True:
        for number in range(args.passes):
            for pixels, labels in loader:
                loss = nn.functional.cross_entropy(model(pixels), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if args.evaluate_every and step % args.evaluate_every == 0:
                    with torch.no_grad():
                        for _ in range(40):
                            model(torch.rand(512, 3, SIDE, SIDE))
                if args.max_steps and step >= args.max_steps:
                    break
            with torch.no_grad():
                mean = nn.functional.cross_entropy(model(held_out), held_out_labels).item()
            num_bad = num_bad + 1 if mean > 0.999 * best else 0
            best = min(best, mean)
            if args.patience and num_bad >= args.patience:
                print(f"stopped early after {number + 1} passes")
                break
        if not args.max_steps or step >= args.max_steps:
            break
    print(f"{step} steps, loss {best:.3f}")
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
