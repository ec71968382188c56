"""A random forest, whose trees cost about n log n."""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.ensemble import RandomForestRegressor


def main() -> None:
    """Fit."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fraction", type=float, required=True)
    parser.add_argument("--whole-rows", type=int, default=150_000)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    features = random.normal(size=(round(args.fraction * args.whole_rows), 10)).astype(np.float32)
    target = features[:, 0] * features[:, 1] + random.normal(size=len(features))
    model = RandomForestRegressor(n_estimators=6, min_samples_leaf=5, random_state=0)
    model.fit(features, target)
    print(f"{len(features)} rows")


if __name__ == "__main__":
    main()
