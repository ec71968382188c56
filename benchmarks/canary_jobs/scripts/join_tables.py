"""Build two tables, join them and aggregate: pandas, in memory."""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd


def main() -> None:
    """Join and aggregate in rounds."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    total = 0.0
    for number in range(args.rounds):
        random = np.random.default_rng(number)
        keys = random.integers(0, 5000, args.samples)
        left = pd.DataFrame({"key": keys, "value": random.random(args.samples), "name": keys.astype(str)})
        right = pd.DataFrame({"key": np.arange(5000), "weight": random.random(5000)})
        joined = left.merge(right, on="key")
        total += (joined["value"] * joined["weight"]).groupby(joined["name"]).mean().sum()
    print(f"total {total:.2f}")


if __name__ == "__main__":
    main()
