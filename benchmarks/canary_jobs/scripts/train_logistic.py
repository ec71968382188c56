"""Logistic regression by mini-batches, many passes over arrays that are read from files first."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np


def main() -> None:
    """Read all files, then train."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--passes", type=int, default=30)
    args = parser.parse_args()
    arrays = [np.fromfile(path, dtype=np.float32).reshape(-1, 101) for path in sorted(args.data.glob("*.f32"))]
    table = np.concatenate(arrays)
    labels, features = (table[:, 0] > 0).astype(np.float32), np.ascontiguousarray(table[:, 1:])
    weights = np.zeros(features.shape[1], dtype=np.float32)
    random = np.random.default_rng(0)
    for number in range(args.passes):
        order = random.permutation(len(features))
        for begin in range(0, len(order), 100):
            rows = order[begin : begin + 100]
            part = features[rows]
            errors = 1 / (1 + np.exp(-part @ weights)) - labels[rows]
            weights -= 0.5 / (1 + number) * (part.T @ errors / len(rows) + 2.5e-6 * weights)
    print(f"accuracy {np.mean((features @ weights > 0) == (labels > 0)):.3f}")


if __name__ == "__main__":
    main()
