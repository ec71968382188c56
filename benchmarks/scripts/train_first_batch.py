"""Takes the first batches of the jpeg pipeline, and prints how long the loop waited for them."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from pipelines import jpeg

import hetero

NUM_SAMPLES = 20_000
NUM_BATCHES = 3


@hetero.dataset
def first_batch_photos(root: str) -> Any:
    """Build the data set."""
    return jpeg.build(NUM_SAMPLES, root)


def main() -> None:
    """Make a loader and take batches."""
    kind, root = sys.argv[1:]
    begin_s = time.perf_counter()
    if kind == "hetero":
        from hetero.torch import DataLoader

        loader: Any = DataLoader(first_batch_photos(root), batch_size=jpeg.BATCH_SIZE, shuffle=True)
    else:
        data = jpeg.build(NUM_SAMPLES, root)
        loader = torch.utils.data.DataLoader(
            data, batch_size=jpeg.BATCH_SIZE, shuffle=True, num_workers=2, multiprocessing_context=kind
        )
    waited_s = [time.perf_counter() - begin_s for _ in itertools.islice(loader, NUM_BATCHES)]
    print("waited", json.dumps(waited_s), flush=True)


if __name__ == "__main__":
    main()
