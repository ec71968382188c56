"""One rank that hands loaders to accelerate and Lightning. test_rebuilt.py runs it."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torch.utils.data
from torch.utils.data import RandomSampler

import hetero
from hetero.errors import ConfigError
from hetero.loaders.sampling import epoch_permutation
from hetero.torch import DataLoader


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, num_samples: int = 23) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.rand(3) + float(np.random.rand())


@hetero.dataset
def noisy(num_samples: int) -> torch.utils.data.Dataset[Any]:
    return Noisy(num_samples)


def make(num_samples: int = 23, **options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(num_samples), **{"batch_size": 4, "shuffle": True, "seed": 5, **options})


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


class WithoutLength:
    """Yields batches of two samples."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([index, index + 1] for index in range(0, 22, 2))


def make_without_length() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_sampler=WithoutLength(), seed=5)


def two_epochs(loader: Any) -> list[Any]:
    return plain(loader) + plain(loader)


def check_plain_torch(world_size: int) -> None:
    seen = vars(make())  # as a tool sees it
    rebuilt = torch.utils.data.DataLoader(
        seen["dataset"], batch_sampler=seen["batch_sampler"], collate_fn=seen["collate_fn"], num_workers=1
    )
    if world_size == 1:
        assert two_epochs(rebuilt) == two_epochs(make())
        return
    alone = torch.utils.data.DataLoader(
        seen["dataset"], batch_sampler=seen["batch_sampler"], collate_fn=seen["collate_fn"]
    )
    try:
        list(alone)
    except ConfigError as error:
        assert "batch of rank" in str(error)  # noqa: PT017 - no pytest here
    else:
        raise AssertionError("batches of all ranks were delivered to one")


def check_accelerate(world_size: int) -> None:
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    for num_samples in (23, 24, 3, 20, 32):
        for options in ({}, {"num_workers": 1, "prefetch_factor": 1}, {"drop_last": True}, {"padding": False}):
            prepared = accelerator.prepare(make(num_samples, **options))
            expected = [as_torch(accelerator, num_samples, epoch, **options) for epoch in range(2)]
            for epoch in range(2):
                batches = plain(prepared)
                assert [batch[0] for batch in batches] == expected[epoch], (num_samples, options)
                assert_drawn_as_directly(num_samples, epoch, batches)
            assert len(prepared) == len(expected[0])
    check_metrics(accelerator)
    check_skipping(accelerator)
    check_users_samplers(accelerator)
    check_loaded_states(accelerator)
    prepared = accelerator.prepare(loader := make())
    num_samples = sum(len(batch[0]) for batch in plain(prepared))
    assert loader.step_timer.summary().num_samples == num_samples


def check_loaded_states(accelerator: Any) -> None:
    """A state loaded into the hetero loader holds for the loader rebuilt from it, which counts epochs from 0."""
    for epoch in range(2):
        loader = make()
        loader.set_epoch(epoch)
        next(iter(loader))
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        whole = accelerator.prepare(make())
        epochs = plain(whole), plain(whole)
        assert plain(accelerator.prepare(resumed)) == epochs[epoch][1:]
        try:
            resumed.state_dict()
        except ConfigError as error:
            assert "skip_first_batches" in str(error)  # noqa: PT017 - no pytest here
        else:
            raise AssertionError("a place that is not known was told")


def check_checkpoints(folder: str) -> None:
    """A loader that accelerate saves, and has not prepared, goes on within the epoch, with the draws of the model."""
    from accelerate import Accelerator

    def rest(batches: Any) -> list[Any]:
        return [(batch[0].tolist(), batch[1].tolist(), torch.rand(2).tolist()) for batch in batches]

    accelerator, loader = Accelerator(cpu=True), make()
    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    next(batches)
    accelerator.save_state(folder)
    expected = rest(batches)
    accelerator.wait_for_everyone()  # rank 0 saves the loader
    accelerator, resumed = Accelerator(cpu=True), make()
    accelerator.register_for_checkpointing(resumed)
    accelerator.load_state(folder)
    assert rest(resumed) == expected


def as_torch(accelerator: Any, num_samples: int, epoch: int, *, drop_last: bool = False, **_: Any) -> list[list[int]]:
    """Return the indices that accelerate deals out to this rank of torch's own loader in the same order."""
    order = epoch_permutation(num_samples, seed=5, epoch=epoch).tolist()
    loader = torch.utils.data.DataLoader(range(num_samples), batch_size=4, sampler=order, drop_last=drop_last)  # type: ignore[arg-type,var-annotated]
    return [batch.tolist() for batch in accelerator.prepare(loader)]


def assert_drawn_as_directly(num_samples: int, epoch: int, batches: list[Any]) -> None:
    direct = make(num_samples, shuffle=None, sampler=range(num_samples))
    direct.set_epoch(epoch)
    noise = {index: draws for batch in plain(direct) for index, draws in zip(*batch, strict=True)}
    again = set()
    for batch in batches:
        for index, draws in zip(*batch, strict=True):
            if draws != noise[index]:
                again.add(index)
    order = epoch_permutation(num_samples, seed=5, epoch=epoch).tolist()
    assert again <= set(order[:8]), "only what fills up the last batches is drawn anew"


def check_metrics(accelerator: Any) -> None:
    for num_samples in (23, 24, 3, 1, 20, 17):
        for options in ({}, {"padding": False}, {"batch_size": 5}, {"batch_size": 1}):
            prepared = accelerator.prepare(make(num_samples, shuffle=False, **options))
            gathered = [accelerator.gather_for_metrics(batch[0]).tolist() for batch in prepared]
            assert list(itertools.chain(*gathered)) == list(range(num_samples)), (num_samples, options)


def check_skipping(accelerator: Any) -> None:
    from accelerate import skip_first_batches

    for rebuild in (accelerator.prepare, lambda loader: loader):
        whole = rebuild(make())
        epochs = plain(whole), plain(whole)
        skipped = skip_first_batches(rebuild(make()), 2)
        assert len(skipped) == len(epochs[0]) - 2
        assert plain(skipped) == epochs[0][2:]
    # As Hugging Face's Trainer resumes: the epoch is chosen after the loader was made.
    skipped = skip_first_batches(accelerator.prepare(make()), 2)
    skipped.set_epoch(1)
    expected = accelerator.prepare(make())
    plain(expected)
    assert plain(skipped) == plain(expected)[2:]


def check_users_samplers(accelerator: Any) -> None:
    """accelerate shards a user's sampler, and fills up the end, as it does with torch's loader."""
    for num_samples in (23, 20, 3):
        order = epoch_permutation(num_samples, seed=1, epoch=0).tolist()
        batches = list(torch.utils.data.BatchSampler(order, 4, drop_last=False))
        for dataset in (Noisy(num_samples), noisy(num_samples=num_samples)):
            for options in ({"batch_size": 4, "sampler": order}, {"batch_sampler": batches}):
                expected = accelerator.prepare(torch.utils.data.DataLoader(range(num_samples), **options))
                loader: Any = accelerator.prepare(DataLoader(dataset, **options))
                assert [batch[0].tolist() for batch in loader] == [batch.tolist() for batch in expected]
    # use_seedable_sampler puts another sampler in the place of torch's RandomSampler, and sets epochs on that.
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    seedable: Any = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    whole = seedable.prepare(make(shuffle=None, sampler=RandomSampler(range(23))))
    plain(whole)
    skipped = skip_first_batches(seedable.prepare(make(shuffle=None, sampler=RandomSampler(range(23)))), 1)
    skipped.set_epoch(1)
    assert plain(skipped) == plain(whole)[1:]


def check_lightning(world_size: int, folder: str) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self, *, reads_steps: bool = False) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.seen: list[Any] = []
            self.reads_steps = reads_steps

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            self.seen.append([part.tolist() for part in batch])
            return self.layer(batch[1]).sum()  # type: ignore[no-any-return]

        def predict_step(self, batch: Any, _index: int) -> Any:
            return batch[0].tolist()

        def configure_optimizers(self) -> Any:
            if self.reads_steps:  # which makes Lightning build its loaders before it restores the checkpoint
                assert self.trainer.estimated_stepping_batches
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

    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, filename="middle")
    trainer(max_steps=2, callbacks=[saving], enable_checkpointing=True).fit(Model(), make())
    for reads_steps in (False, True):
        model = Model(reads_steps=reads_steps)
        trainer(max_epochs=2).fit(model, make(), ckpt_path=f"{folder}/middle.ckpt", weights_only=False)
        assert model.seen == expected[2:]

    # Of a limited epoch, only Lightning knows where it ends. Without a length, it takes a batch ahead.
    own = {"use_distributed_sampler": False}
    for limits, make_loader in (({"limit_train_batches": 2}, make), (own, make_without_length)):
        whole, model = Model(), Model(reads_steps="limit_train_batches" in limits)
        saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, filename=make_loader.__name__)
        trainer(max_steps=3, callbacks=[saving], enable_checkpointing=True, **limits).fit(whole, make_loader())
        trainer(max_steps=3, **limits).fit(
            model, make_loader(), ckpt_path=f"{folder}/{make_loader.__name__}.ckpt", weights_only=False
        )
        assert model.seen == whole.seen[2:]
    with pytest.raises(ConfigError, match="takes a batch before it restores the checkpoint"):
        trainer(max_epochs=2, **own).fit(
            Model(reads_steps=True),
            make_without_length(),
            ckpt_path=f"{folder}/make_without_length.ckpt",
            weights_only=False,
        )


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
    for tool in sys.argv[4:]:
        if tool == "accelerate":
            check_accelerate(world_size)
            check_checkpoints(f"{store}-state")
        else:
            check_lightning(world_size, f"{store}-checkpoints")
            check_fabric(world_size)
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
