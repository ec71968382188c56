"""Loaders of iterables for tests, and what they deliver."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hetero.torch import DataLoader

NUM_SAMPLES, NUM_LANES, BATCH = 203, 4, 4


def loader(source: Any, guarantee: Any = "exactly-once", **options: Any) -> Any:
    return DataLoader(
        source, guarantee=guarantee, **{"batch_size": BATCH, "lanes": NUM_LANES, "collate_fn": list, **options}
    )


def with_states(source: Any, guarantee: str, num_batches: int | None = None, **options: Any) -> tuple[Any, list[str]]:
    """Return batches, and the state before each of them and at the end, as JSON."""
    made = loader(source, guarantee, **options)
    batches, states = [], [json.dumps(made.state_dict())]
    for batch in itertools.islice(made, num_batches):
        batches.append(batch)
        states.append(json.dumps(made.state_dict()))
    return batches, states


def resumed(source: Any, guarantee: str, state: str, **options: Any) -> Any:
    made = loader(source, guarantee, **options)
    made.load_state_dict(json.loads(state))
    return made


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number, _ in batch]
