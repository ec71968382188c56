"""Random damage to bytes."""

from __future__ import annotations

import random


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double, insert, or replace by a telling value."""
    mutable = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(mutable) + 1)
        action = rng.randrange(5)
        if action == 0 and at < len(mutable):
            mutable[at] ^= 1 << rng.randrange(8)
        elif action == 1 and at < len(mutable):
            mutable[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif action == 2:
            del mutable[at : at + rng.choice((1, 2, 8))]
        elif action == 3:
            mutable[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        else:
            mutable[at:at] = mutable[at : at + rng.choice((1, 4, 16))]
    return bytes(mutable)
