"""torch's own DataLoader on the trainer host: what every remote batch is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data

from peers import NUM_PROCESSES, PipelineCompetitor


class LocalTorch(PipelineCompetitor):
    """``torch.utils.data.DataLoader`` with two workers. ``context`` is their start method. The default is torch's."""

    def start(self) -> None:
        """Make the loader. Its workers start with the first batch."""
        self._loader = torch.utils.data.DataLoader(
            self.dataset(),
            batch_size=self.pipeline.batch_size,
            shuffle=True,
            num_workers=NUM_PROCESSES,
            collate_fn=self.pipeline.collate,
            worker_init_fn=limit_threads,
            multiprocessing_context=self.config.get("context"),
        )

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        yield from self._loader


def limit_threads(_worker: int) -> None:
    """Keep a worker at one thread."""
    torch.set_num_threads(1)
