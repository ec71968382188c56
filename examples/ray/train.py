"""The image example of Ray Train's documentation. Seven lines are different, each marked with "hetero".

Lines marked with "resume" are new too. A run that Ray restarts, or that you start again, continues with the next batch.
"""

import os
import tempfile

import ray.train.torch
import torch
from images import squares  # hetero: the data set is in another file, which data hosts import
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.optim import Adam

import hetero.ray  # hetero
from hetero.torch import DataLoader  # hetero: instead of torch.utils.data

EPOCHS = int(os.environ.get("EPOCHS", "3"))


def train_func() -> None:
    """Train on one worker."""
    service.connect()  # hetero

    # Model, loss, optimizer.
    model = Sequential(Conv2d(1, 8, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(8 * 13 * 13, 4))
    model = ray.train.torch.prepare_model(model)
    criterion = CrossEntropyLoss()
    optimizer = Adam(model.parameters(), lr=0.001)

    # Data.
    train_data = squares(2048)  # hetero: the data set is described here, and built on the data hosts
    loader = DataLoader(train_data, batch_size=64, shuffle=True)
    train_loader = ray.train.torch.prepare_data_loader(loader)

    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():  # resume
        with checkpoint.as_directory() as folder:  # resume
            saved = torch.load(os.path.join(folder, "model.pt"))  # noqa: PTH118  # resume
        model.module.load_state_dict(saved["model"])  # resume
        optimizer.load_state_dict(saved["optimizer"])  # resume
        loader.load_state_dict(saved["loader"])  # resume
        first_epoch = saved["epoch"] + 1  # resume

    # Training.
    for epoch in range(first_epoch, EPOCHS):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)

        for images, labels in train_loader:
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        # Report metrics and checkpoint.
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            states["loader"] = loader.state_dict()  # resume
            torch.save(states, os.path.join(temp_checkpoint_dir, "model.pt"))  # noqa: PTH118
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(temp_checkpoint_dir))
        if ray.train.get_context().get_world_rank() == 0:
            print(metrics)


service = hetero.ray.DataService("images.py", num_hosts=2, cpus_per_host=1)  # hetero
trainer = ray.train.torch.TorchTrainer(
    train_func,
    scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
    run_config=ray.train.RunConfig(
        name=os.environ.get("RUN"),  # resume: the same name continues that run
        storage_path=os.environ.get("STORAGE"),
        failure_config=ray.train.FailureConfig(max_failures=1),  # resume
    ),
)
result = trainer.fit()
service.shutdown()  # hetero
print("result:", result.metrics)
