"""Sums the samples of a data set from the same package, over local processes or data hosts."""

from __future__ import annotations

import json
import sys

import hetero
from hetero.torch import DataLoader

from .data import Squares  # noqa: TID252  what the test is about


@hetero.dataset
def squares() -> Squares:
    return Squares()


def main() -> None:
    loader = DataLoader(squares(), batch_size=4, num_workers=1)
    total = sum(int(batch.sum()) for batch in loader)
    spec = sys.modules["__main__"].__spec__
    facts = {"total": total, "name": spec and spec.name, "package": __package__, "arguments": sys.argv[1:]}
    print("FACTS", json.dumps(facts), flush=True)
    assert sys.argv[0] == __file__


if __name__ == "__main__":
    main()
