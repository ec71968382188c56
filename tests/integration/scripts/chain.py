"""Trains on nothing, but says exactly what it was fed: a SHA-256 chain per rank over every batch."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import torch

import hetero
from hetero.torch import DataLoader


class Augmented(torch.utils.data.Dataset):
    """Samples that depend on their index and on all three global generators."""

    def __init__(self, num_samples: int, faults: str) -> None:
        self.num_samples = num_samples
        self.faults = dict(part.split("=", 1) for part in faults.split(",") if part)
        self.descriptors: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, object]:
        if index >= len(self):
            raise IndexError("no such sample")
        if str(index) in self.faults.get("poison", "").split(";"):
            raise ValueError(f"sample {index} is poison, says {random.random():.2f}")
        if int(self.faults.get("raise_at", -1)) == index:
            raise ValueError(f"sample {index} is broken on purpose")
        if "descriptors" in self.faults:
            self.descriptors.append(os.open("/dev/null", os.O_RDONLY))  # and never closes it
        if "sleep_s" in self.faults:
            time.sleep(float(self.faults["sleep_s"]))
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        sample: dict[str, object] = {"index": index, "image": noise + index, "name": f"sample {index}"}
        if "unsupported" in self.faults:
            sample["path"] = Path("photo.jpg")
        return sample


def collate(samples: list[dict[str, object]]) -> dict[str, object]:
    """Collate what torch can, and leave paths as they are."""
    paths = [sample.pop("path", None) for sample in samples]
    batch: dict[str, object] = torch.utils.data.default_collate(samples)
    return batch if paths == [None] * len(paths) else {**batch, "path": paths}


@hetero.dataset(collate_fn=collate)
def augmented(num_samples: int, faults: str = "") -> torch.utils.data.Dataset:
    """Return the data set; ``faults`` says what is to go wrong."""
    if "factory" in faults:
        raise RuntimeError("the factory fails on purpose")
    if "descriptors" in faults:  # left for connections, and for the first samples
        limit = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 24
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    host_number = int(os.environ.get("SM_CURRENT_HOST", "algo-0").rpartition("-")[2])
    if "by_host" in faults:  # a data set that is not the same everywhere
        num_samples += host_number
    if "listing" in faults:
        return torch.utils.data.Subset(
            Augmented(num_samples, faults), np.roll(range(num_samples), host_number).tolist()
        )
    return Augmented(num_samples, faults)


def main() -> None:
    """Run the epochs and write one JSON file per rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=101)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--faults", default="")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--save-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--on-sample-error", default="raise")
    parser.add_argument("--max-skips", type=int, default=100)
    parser.add_argument("--gloo", action="store_true")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    if args.gloo:
        torch.distributed.init_process_group("gloo")

    spec = augmented(Path("100") if "not_json" in args.faults else args.num_samples, args.faults)
    order = {"sampler": [3, args.num_samples]} if "out_of_range" in args.faults else {"shuffle": True}
    order["shard"] = rank, int(os.environ.get("WORLD_SIZE", "1"))  # without --gloo there is no process group
    policy = {"on_sample_error": args.on_sample_error, "max_skips": args.max_skips}
    loader = DataLoader(spec, batch_size=args.batch_size, seed=17, num_workers=args.num_workers, **policy, **order)
    chain, indices, step = hashlib.sha256(), [], 0

    def save() -> None:
        stopped_at = args.output / f"stopped-{rank}"
        partial = stopped_at.with_suffix(".partial")
        partial.write_text(str(step))
        time.sleep(args.save_s)  # a large one
        partial.rename(stopped_at)  # whole or not at all

    hetero.on_stop(save)
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            step += 1
            chain.update(repr(sorted(batch)).encode())
            chain.update(batch["image"].numpy().tobytes())
            chain.update(repr(batch["name"]).encode())
            indices.append(batch["index"].tolist())
            print(f"rank {rank} epoch {epoch} step {step}", flush=True)
            if args.step_s:
                time.sleep(args.step_s)
            if args.gloo:
                torch.distributed.all_reduce(torch.ones(1))
            if rank == args.fail_rank and step == args.fail_at:
                (args.output / "failed-at").write_text(str(time.monotonic()))
                raise RuntimeError("training fails on purpose")
            if rank == args.fail_rank and step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    result = {"chain": chain.hexdigest(), "indices": indices, "len": len(loader), "steps": step}
    (args.output / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
