"""Read files again and again, with little work per byte: the speed is that of the storage, then of the cache."""

from __future__ import annotations

import argparse
import os
import zlib
from pathlib import Path

CHUNK = 1 << 20


def main() -> None:
    """Read all files."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    total = 0
    for _ in range(args.passes):
        for path in sorted(args.data.glob("*.bin")):
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    total = zlib.adler32(chunk, total)
    print(f"checksum {total}")


if __name__ == "__main__":
    main()
