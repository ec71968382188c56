"""One rank that hands loaders to accelerate and Lightning; run by test_rebuilt.py."""

from __future__ import annotations

import sys
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.utils.data
from torch.utils.data import RandomSampler

from hetero.errors import ConfigError
from hetero.torch import DataLoader


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, num_samples: int = 23) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.rand(3) + float(np.random.rand())


def make(num_samples: int = 23, **options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(num_samples), **{"batch_size": 4, "shuffle": True, "seed": 5, **options})


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


def two_epochs(loader: Any) -> list[Any]:
    return plain(loader) + plain(loader)


def check_plain_torch(world_size: int) -> None:
    loader = make()
    rebuilt = torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, num_workers=1
    )
    if world_size == 1:
        assert two_epochs(rebuilt) == two_epochs(make())
        return
    alone = torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    try:
        list(alone)
    except ConfigError as error:
        assert "batch of rank" in str(error)  # noqa: PT017 - no pytest here
    else:
        raise AssertionError("batches of all ranks were delivered to one")


def check_accelerate(rank: int, world_size: int) -> None:
    from accelerate import Accelerator, skip_first_batches

    accelerator: Any = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    for num_samples in (23, 24, 3, 32):
        for options in ({}, {"num_workers": 1, "prefetch_factor": 1}, {"drop_last": True}):
            expected = make(num_samples, **options)
            prepared = accelerator.prepare(make(num_samples, **options))
            assert len(prepared) == len(expected)
            assert two_epochs(prepared) == two_epochs(expected), (num_samples, options)
    whole = two_epochs(make())
    skipped = skip_first_batches(accelerator.prepare(make()), 2)
    assert plain(skipped) == plain(make())[2:]

    # A state loaded into the hetero loader holds for what was rebuilt from it, which counts epochs from 0.
    loader = make()
    loader.set_epoch(1)
    next(iter(loader))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    prepared = accelerator.prepare(resumed)
    assert plain(prepared) == whole[len(whole) // 2 + 1 :]
    try:
        resumed.state_dict()
    except ConfigError as error:
        assert "skip_first_batches" in str(error)  # noqa: PT017 - no pytest here
    else:
        raise AssertionError("a place that is not known was told")

    # accelerate shards the user's sampler, and fills up the end, as it does with torch's loader.
    batches = plain(accelerator.prepare(make(shuffle=None, sampler=RandomSampler(range(23)))))
    order = list(torch.utils.data.BatchSampler(_drawn(), 4, False))
    assert [batch[0] for batch in batches[:2]] == order[rank :: accelerator.num_processes][:2]
    assert {len(batch[0]) for batch in batches} <= {4, 3 if world_size == 1 else 4}

    timer = loader.step_timer.summary()
    assert timer.num_steps == 1
    prepared = accelerator.prepare(loader := make())
    plain(prepared)
    assert loader.step_timer.summary().num_samples == sum(len(batch[0]) for batch in plain(make()))


def _drawn() -> list[int]:
    loader: Any = make(batch_size=23, shuffle=None, sampler=RandomSampler(range(23)))
    return plain(loader)[0][0]  # type: ignore[no-any-return]


def check_lightning(world_size: int) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            self.seen.append([part.tolist() for part in batch])
            return self.layer(batch[1]).sum()  # type: ignore[no-any-return]

        def predict_step(self, batch: Any, _index: int) -> Any:
            return batch[0].tolist()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class ModelWithLoader(Model):
        def train_dataloader(self) -> Any:
            return make(num_workers=1)

    def trainer(**options: Any) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        place = {"accelerator": "cpu", "devices": world_size, "strategy": "ddp" if world_size > 1 else "auto"}
        return lightning.Trainer(**{"enable_checkpointing": False, **quiet, **place, **options})

    expected = two_epochs(make())
    model = Model()
    trainer(max_epochs=2).fit(model, make())
    assert model.seen == expected
    model = ModelWithLoader()
    trainer(max_epochs=2).fit(model)
    assert model.seen == expected

    predicted = trainer().predict(Model(), make(shuffle=False, drop_last=True))
    assert predicted == [batch[0] for batch in plain(make(shuffle=False))]

    if world_size == 1:
        with tempfile.TemporaryDirectory() as path:
            saving = ModelCheckpoint(dirpath=path, every_n_train_steps=2, filename="middle")
            trainer(max_steps=2, callbacks=[saving], enable_checkpointing=True).fit(Model(), make())
            model = Model()
            trainer(max_epochs=2).fit(model, make(), ckpt_path=f"{path}/middle.ckpt", weights_only=False)
            assert model.seen == expected[2:]


def check_fabric(world_size: int) -> None:
    import lightning

    fabric: Any = lightning.Fabric(accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    expected = two_epochs(make())
    assert two_epochs(fabric.setup_dataloaders(make())) == expected
    loader = make()
    next(iter(loader))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert two_epochs(fabric.setup_dataloaders(resumed)) == expected[1:]


def main() -> None:
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if world_size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    warnings.simplefilter("ignore")  # theirs
    check_plain_torch(world_size)
    check_lightning(world_size)
    check_fabric(world_size)
    check_accelerate(rank, world_size)
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
