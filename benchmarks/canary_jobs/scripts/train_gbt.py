"""Gradient-boosted trees on CSV files: the source's third experiment in small (20 columns, 100 files)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor


def main() -> None:
    """Read all files, then fit."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--trees", type=int, default=200)
    args = parser.parse_args()
    table = pd.concat([pd.read_csv(path, header=None) for path in sorted(args.data.glob("*.csv"))]).to_numpy()
    model = HistGradientBoostingRegressor(max_iter=args.trees, early_stopping=False)
    model.fit(table[:, 1:], table[:, 0])
    print(f"{len(table)} rows, score {model.score(table[:1000, 1:], table[:1000, 0]):.3f}")


if __name__ == "__main__":
    main()
