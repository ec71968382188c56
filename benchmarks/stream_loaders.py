"""Loaders of streams that `bench_stream_resume.py` stops and resumes. Each is imported only in its own environment."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SHARDS, ROWS = 8, 200


def write_files(folder: str) -> None:
    """Write the shards as JSON Lines and tar."""
    for shard in range(SHARDS):
        numbers = range(shard * ROWS, (shard + 1) * ROWS)
        text = "".join(json.dumps({"id": number}) + "\n" for number in numbers)
        Path(f"{folder}/{shard}.jsonl").write_text(text, encoding="utf-8")
        with tarfile.open(f"{folder}/{shard}.tar", "w") as tar:
            for number in numbers:
                entry = tarfile.TarInfo(f"{number:06d}.txt")
                entry.size = len(str(number))
                tar.addfile(entry, io.BytesIO(str(number).encode()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one process of one rank does."""

    folder: str
    seed: int
    world: int = 1
    rank: int = 0
    workers: int = 2
    batch: int = 10
    stop: int | None = None
    """After so many batches, take the state. None: run to the end."""
    kill: bool = False
    """Kill a worker there, and go on."""
    states: tuple[str, ...] = ()
    """Files with the states of the ranks of the job that was stopped."""


class Peer:
    """A loader. `batches` makes and resumes it."""

    modules: tuple[str, ...] = ()
    """Imported before the processes of the ranks are forked."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def prepare(cls, folder: str) -> None:
        """Write its data."""

    def batches(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples of the batches of an epoch."""
        self.loader = self.make()
        state = self.saved(0)
        if state is not None:
            self.loader.load_state_dict(state)
        for batch in self.loader:
            yield [int(number) for number in batch["id"]]

    def make(self) -> Any:
        """Return the loader."""

    def state(self) -> Any:
        """Return the state after the batch."""
        return self.loader.state_dict()

    def saved(self, rank: int) -> Any:
        """Return the state that a rank saved, or None."""
        import torch

        return torch.load(self.run.states[rank], weights_only=False) if rank < len(self.run.states) else None

    def files(self, ending: str) -> list[str]:
        return [f"{self.run.folder}/{shard}.{ending}" for shard in range(SHARDS)]


def _stream(peer: Peer, kind: str) -> Any:
    """Return a stream of Hugging Face's library: plain, filtered, or shuffled in a buffer of ten shards or one."""
    import datasets

    stream = datasets.load_dataset("json", data_files=peer.files("jsonl"), split="train", streaming=True)
    if kind == "filtered":
        return stream.map(lambda row: {"id": row["id"]}).filter(lambda row: row["id"] % 3 > 0)
    inputs = {"max_buffer_input_shards": 1} if kind == "shuffled-1" else {}
    return stream if kind == "plain" else stream.shuffle(seed=peer.run.seed, buffer_size=100, **inputs)


class Stateful(Peer):
    """torchdata's StatefulDataLoader over Hugging Face's streaming."""

    modules = ("torchdata.stateful_dataloader", "datasets.distributed")
    kind = "plain"

    def make(self) -> Any:
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        stream = _stream(self, self.kind)
        if self.run.world > 1:
            stream = split_dataset_by_node(stream, self.run.rank, self.run.world)
        return StatefulDataLoader(stream, batch_size=self.run.batch, num_workers=self.run.workers)

    def saved(self, rank: int) -> Any:
        return super().saved(self.run.rank)


class StatefulFiltered(Stateful):
    kind = "filtered"


class StatefulShuffled(Stateful):
    kind = "shuffled"


class StatefulShuffledByShard(Stateful):
    kind = "shuffled-1"


def _give(number: int) -> dict[str, int]:
    return {"id": number}


class LitData(Peer):
    modules = ("litdata",)

    @classmethod
    def prepare(cls, folder: str) -> None:
        import litdata

        litdata.optimize(_give, list(range(SHARDS * ROWS)), f"{folder}/litdata", chunk_size=ROWS, num_workers=1)

    def make(self) -> Any:
        import litdata

        rows = litdata.StreamingDataset(f"{self.run.folder}/litdata", shuffle=True, seed=self.run.seed, drop_last=False)
        # Its default depends on the number of ranks, and it refuses a state with another value.
        choice = {"batch_size": self.run.batch, "num_workers": self.run.workers, "drop_last": False}
        return litdata.StreamingDataLoader(rows, **choice)


class WebDataset(Peer):
    """A loader without a state. A careful user skips what was delivered, and seeds the shuffles."""

    modules = ("webdataset",)
    seeded = True

    def batches(self) -> Iterator[list[int]]:
        import webdataset as wds

        run = self.run
        seeds: dict[str, Any] = {"detshuffle": True, "seed": run.seed} if self.seeded else {}
        rows = wds.WebDataset(self.files("tar"), shardshuffle=SHARDS, nodesplitter=wds.split_by_node, **seeds)
        rows = rows.shuffle(100, **({"rng": random.Random(run.seed)} if self.seeded else {})).decode()
        rows = rows.to_tuple("txt").batched(run.batch)
        self.taken = self.saved(0) or 0
        skipped = self.taken // (run.batch * run.world)
        for place, (texts,) in enumerate(wds.WebLoader(rows, batch_size=None, num_workers=run.workers)):
            if place >= skipped:
                self.taken += len(texts) * run.world
                yield [int(text) for text in texts]

    def state(self) -> Any:
        return self.taken


class WebDatasetUnseeded(WebDataset):
    """The shuffles as most scripts have them."""

    seeded = False


class Mosaic(Peer):
    modules = ("streaming",)

    @classmethod
    def prepare(cls, folder: str) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=f"{folder}/mds", columns={"id": "int"}, size_limit=2700) as writer:
            for number in range(SHARDS * ROWS):
                writer.write({"id": number})

    def make(self) -> Any:
        import streaming

        run = self.run
        rows = streaming.StreamingDataset(
            local=f"{run.folder}/mds", shuffle=True, shuffle_seed=run.seed, batch_size=run.batch
        )
        return streaming.StreamingDataLoader(rows, batch_size=run.batch, num_workers=run.workers)


class Energon(Peer):
    modules = ("megatron.energon",)

    @classmethod
    def prepare(cls, folder: str) -> None:
        words = ["--non-interactive", "--split-parts", "train:.*", "--sample-type", "TextSample", "--num-workers", "1"]
        tool = Path(sys.executable).with_name("energon")
        Path(f"{folder}/energon").mkdir()
        for shard in range(SHARDS):
            Path(f"{folder}/energon/{shard}.tar").write_bytes(Path(f"{folder}/{shard}.tar").read_bytes())
        command = [tool, "prepare", *words, "--field-map", '{"text": "txt"}', f"{folder}/energon"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def batches(self) -> Iterator[list[int]]:
        from megatron import energon

        run, states, workers, batch = self.run, self.run.states, self.run.workers, self.run.batch
        if run.world * batch == 20:
            workers, batch = 4 // run.world, 10
        if states and len(states) != run.world:
            folder = Path(states[0]).with_suffix(f".{run.world}ranks{run.rank}")
            tool = Path(sys.executable).with_name("energon")
            folder.mkdir()
            command = [tool, "checkpoint", "redist", "--new-world-size", str(run.world), *states, folder]
            subprocess.run(command, check=True)
            states = tuple(str(path) for path in sorted(folder.iterdir()))
        self.run = replace(run, states=states)
        rows = energon.get_train_dataset(
            f"{run.folder}/energon",
            worker_config=energon.WorkerConfig(
                rank=run.rank, world_size=run.world, num_workers=workers, seed_offset=run.seed
            ),
            batch_size=batch,
            shuffle_buffer_size=100,
            max_samples_per_sequence=100,
            repeat=False,
        )
        self.loader = energon.get_savable_loader(rows)
        self.loader.restore_state_rank(self.saved(run.rank))
        for found in self.loader:
            yield [int(text) for text in found.text]

    def state(self) -> Any:
        return self.loader.save_state_rank()


class Hetero(Peer):
    modules = ("hetero.torch", "datasets")
    kind, guarantee = "plain", "exactly-once"

    def make(self) -> Any:
        import hetero.torch

        run = self.run
        choice = {"lanes": 4, "guarantee": self.guarantee, "end": "rest"}
        return hetero.torch.DataLoader(
            _stream(self, self.kind), batch_size=run.batch, num_workers=run.workers, seed=run.seed, **choice
        )


class HeteroFiltered(Hetero):
    kind = "filtered"


class HeteroShuffled(Hetero):
    kind, guarantee = "shuffled", "replay"


class HeteroShards(Peer):
    modules = ("hetero.torch", "hetero.shards", "pyarrow.parquet")

    @classmethod
    def prepare(cls, folder: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for shard in range(SHARDS):
            numbers = list(range(shard * ROWS, (shard + 1) * ROWS))
            pq.write_table(pa.table({"id": numbers}), f"{folder}/{shard}.parquet", row_group_size=50)

    def make(self) -> Any:
        import hetero.torch
        from hetero import shards

        run, rows = self.run, shards.parquet(self.files("parquet"), chunk_rows=20)
        return hetero.torch.DataLoader(
            rows, batch_size=run.batch, num_workers=run.workers, seed=run.seed, shuffle="window"
        )


PEERS: dict[str, type[Peer]] = {
    "stateful-plain": Stateful,
    "stateful-filter": StatefulFiltered,
    "stateful-shuffle": StatefulShuffled,
    "stateful-shuffle-1": StatefulShuffledByShard,
    "litdata": LitData,
    "webdataset-seeded": WebDataset,
    "webdataset": WebDatasetUnseeded,
    "mosaic": Mosaic,
    "energon": Energon,
    "hetero-plain": Hetero,
    "hetero-filter": HeteroFiltered,
    "hetero-shuffle": HeteroShuffled,
    "hetero-shards": HeteroShards,
}
