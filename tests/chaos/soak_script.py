"""Trains on nothing, goes on from its last checkpoint, and says exactly what it was fed: a digest chain per rank.

Data hosts need NumPy only, so a killed one is back within two seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

import hetero


class Noisy:
    """Samples that depend on their index and on the global generators."""

    def __init__(self, num_samples: int, sample_s: float, width: int) -> None:
        self.num_samples, self.sample_s, self.width = num_samples, sample_s, width

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.sample_s:
            time.sleep(self.sample_s)
        return {"index": index, "noise": np.random.random(self.width) + random.random() + index}


def together(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate without torch."""
    return {
        "index": np.array([sample["index"] for sample in samples], dtype=np.int64),
        "noise": np.stack([sample["noise"] for sample in samples]),
    }


@hetero.dataset(collate_fn=together, fingerprint=lambda data: f"noisy-{data.num_samples}-{data.width}")
def noisy(num_samples: int, sample_s: float = 0.0, width: int = 64) -> Noisy:
    """Return the data set."""
    return Noisy(num_samples, sample_s, width)


def write(path: Path, value: object) -> None:
    """Write JSON. A reader sees all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def main() -> None:
    """Do the remaining steps, or stop when the output has a file `enough`. Write the batches of all steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--num-samples", type=int, default=331)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()

    from hetero.torch import DataLoader

    rank = int(os.environ.get("RANK", "0"))
    checkpoint = args.output / f"checkpoint-{rank}.json"
    spec = noisy(num_samples=args.num_samples, sample_s=args.sample_s, width=args.width)
    shard = rank, int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(spec, batch_size=args.batch_size, shuffle=True, seed=17, shard=shard)
    chain, indices = "", []
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        loader.load_state_dict(saved["loader"])
        chain, indices = saved["chain"], saved["indices"]
    is_over = len(indices) >= args.steps
    while not is_over:
        for batch in loader:
            fed = hashlib.sha256(chain.encode())
            for name in sorted(batch):
                fed.update(name.encode() + np.asarray(batch[name]).tobytes())
            chain = fed.hexdigest()
            indices.append(np.asarray(batch["index"]).tolist())
            write(
                checkpoint,
                {"step": len(indices), "chain": chain, "indices": indices, "loader": loader.state_dict()},
            )
            if args.step_s:
                time.sleep(args.step_s)
            is_over = len(indices) >= args.steps or (args.output / "enough").exists()
            if is_over:
                break
    write(args.output / f"rank-{rank}.json", {"chain": chain, "indices": indices})


if __name__ == "__main__":
    main()
