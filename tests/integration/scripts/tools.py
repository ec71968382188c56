"""Trains through the loops of tools, whole and resumed in the middle of an epoch, and writes what each rank was fed."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import hetero
from hetero.torch import DataLoader

NUM_SAMPLES = 53
STEPS = 7
"""Of an epoch: two ranks with batches of 4."""
SKIPPED = 3
"""Of the second epoch, before the resumed run begins."""
Seen = list[dict[int, float]]
"""Per batch the draw of each sample."""


class Noisy(torch.utils.data.Dataset):
    """Samples that depend on their index and a draw."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(index), "noise": torch.rand(1)}


@hetero.dataset
def noisy() -> torch.utils.data.Dataset:
    """Return the data set."""
    return Noisy()


def make(*, shuffle: bool = True) -> DataLoader:
    """Return a loader of two ranks' batches."""
    return DataLoader(noisy(), batch_size=4, shuffle=shuffle, seed=3)


def seen(batch: dict[str, torch.Tensor]) -> dict[int, float]:
    """Return the draw of each sample."""
    return dict(zip(batch["index"].tolist(), batch["noise"].flatten().tolist(), strict=True))


class Model(torch.nn.Module):
    """Remembers the batches that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.dropout = torch.nn.Dropout(0.5)
        self.seen: Seen = []

    def forward(self, index: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, and which samples it is of."""
        if self.training:
            self.seen.append(seen({"index": index, "noise": noise}))
        return {"loss": self.layer(self.dropout(noise)).square().mean(), "logits": index[:, None]}


def by_hand(_folder: Path) -> dict[str, Any]:
    """Iterate over the loader itself. Resume from its state."""
    loader = make()
    whole: Seen = []
    for _ in range(2):
        for batch in loader:
            whole.append(seen(batch))
            if len(whole) == STEPS + SKIPPED:
                state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    return {"whole": whole, "resumed": [seen(batch) for batch in again]}


def by_accelerate(_folder: Path) -> dict[str, Any]:
    """Iterate over a prepared loader. Resume with skip_first_batches. Count with gather_for_metrics."""
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(make())
    whole = [seen(batch) for _ in range(2) for batch in prepared]
    again = skip_first_batches(accelerator.prepare(make()), SKIPPED)
    again.set_epoch(1)
    resumed = [seen(batch) for batch in again]
    gathered: list[int] = []
    for batch in accelerator.prepare(make(shuffle=False)):
        gathered += accelerator.gather_for_metrics(batch["index"]).tolist()
    return {"whole": whole, "resumed": resumed, "gathered": gathered}


def by_lightning(folder: Path) -> dict[str, Any]:
    """Fit with a checkpoint in the second epoch, and again from there."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # As recipes for schedulers do. It makes Lightning build its loaders before it restores the checkpoint.
            assert self.trainer.estimated_stepping_batches == 2 * STEPS
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(**options: Any) -> Seen:
        module = Module()
        saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=STEPS + SKIPPED, filename="middle")
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy="ddp",
            callbacks=[saving],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, make(), **options)
        return module.model.seen

    return {"whole": fit(), "resumed": fit(ckpt_path=folder / "middle.ckpt", weights_only=False)}


def by_transformers(folder: Path, *, prepare: bool) -> dict[str, Any]:
    """Train with Hugging Face's Trainer and checkpoints, and again from one in the second epoch. Then predict."""
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make()) if prepare else make()

        def get_test_dataloader(self, _dataset: Any) -> Any:
            return self.accelerator.prepare(make(shuffle=False))

    def train(**options: Any) -> tuple[Seen, list[Any], Trainer]:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=2,
            learning_rate=0.1,
            save_steps=STEPS + SKIPPED,
            logging_steps=1,
            per_device_eval_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            label_names=["index"],
        )
        trainer = Trainer(Model(), arguments)
        trainer.train(**options)
        return trainer.model.seen, [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer

    whole, losses, trainer = train()
    predicted = trainer.predict(noisy()).label_ids.tolist()
    resumed, again, _ = train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS + SKIPPED}"))
    return {"whole": whole, "resumed": resumed, "losses": [losses, again], "predicted": predicted}


def main() -> None:
    """Run every tool and write what it did on this rank."""
    tools = {
        "none": by_hand,
        "accelerate": by_accelerate,
        "lightning": by_lightning,
        "trainer": lambda folder: by_transformers(folder, prepare=False),
        "prepared-trainer": lambda folder: by_transformers(folder, prepare=True),
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tools", nargs="+", choices=tools, required=True)
    args = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    for name in args.tools:
        found = tools[name](args.output / f"{name}-files")
        (args.output / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
