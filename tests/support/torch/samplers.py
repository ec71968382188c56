"""A sampler that keeps its own state."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler


class Endless(Sampler[int]):
    """Goes on where it was, for ever: 0 to 36, and again."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield (self.place - 1) % 37

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
