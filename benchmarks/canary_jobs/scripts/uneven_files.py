"""Work whose amount per file varies widely and does not show in the size of the file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np


def main() -> None:
    """Work through all files. The first number of a file says how much work it is."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    args = parser.parse_args()
    total = 0.0
    for path in sorted(args.data.glob("*.f32")):
        values = np.fromfile(path, dtype=np.float32)
        for _ in range(int(values[0])):
            total += float(np.sqrt(values * values + 1).sum())
    print(f"total {total:.1f}")


if __name__ == "__main__":
    main()
