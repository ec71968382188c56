"""A model that learns a parabola, as a job whose cluster is to be chosen. See README.md."""

import os

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import hetero
from hetero.torch import DataLoader


@hetero.dataset
def parabola():
    x = torch.linspace(-1, 1, 320000).unsqueeze(1)
    return TensorDataset(x, x**2)


if __name__ == "__main__":
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(parabola(), batch_size=32 // num_ranks, shuffle=True, seed=17, num_workers=8)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    hetero.log_metric("loss", loss.item(), step=len(loader))
