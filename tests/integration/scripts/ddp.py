"""Trains a line with torch's DDP, and says which rank was where."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

import hetero
from hetero.torch import DataLoader


@hetero.dataset
def points(num_samples: int) -> torch.utils.data.Dataset:
    """Return points of a line."""
    x = torch.arange(num_samples, dtype=torch.float32).reshape(-1, 1) / num_samples
    return torch.utils.data.TensorDataset(x, 3 * x + 1)


def main() -> None:
    """Train an epoch and write one JSON file per rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for x, y in DataLoader(points(60), batch_size=5, shuffle=True, seed=17):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seen += len(x)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    result = {
        "host": Path(os.environ["SAGEMAKER_BASE_DIR"]).parent.name,
        "meet": os.environ["MASTER_ADDR"],
        "ranks": [rank, world_size, *(int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK"))],
        "seen": seen,
        "weights": [parameter.item() for parameter in model.parameters()],
    }
    (args.output / f"rank-{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
