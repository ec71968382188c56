"""Distances between all pairs of samples: the work grows with the square of the data."""

from __future__ import annotations

import argparse

import numpy as np


def main() -> None:
    """Compute the mean distance."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--samples", type=int, required=True)
    args = parser.parse_args()
    points = np.random.default_rng(0).random((args.samples, 64), dtype=np.float32)
    total = 0.0
    for begin in range(0, len(points), 16):
        gaps = points[begin : begin + 16, None, :] - points[None, :, :]
        total += float(np.sqrt((gaps * gaps).sum(axis=2)).sum())
    print(f"mean distance {total / len(points) ** 2:.4f}")


if __name__ == "__main__":
    main()
