"""Trains on nothing. Rank 0 has the store where the ranks meet, and begins late, ends early or fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed


def wait_until(folder: Path, rank: int, *, is_there: bool) -> None:
    """Wait until a rank has begun, or until its process has ended."""
    path = folder / f"pid-{rank}"
    while not path.exists() or (not is_there and Path("/proc", path.read_text()).exists()):
        time.sleep(0.01)


def main() -> None:
    """Do what the first argument says, with the folder of the second."""
    case, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    if case == "late" and rank == 0:
        wait_until(folder, 1, is_there=True)
        time.sleep(1.0)  # the other one waits for the store meanwhile
    partial = folder / f"partial-{rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"pid-{rank}")
    if case == "fails" and rank == 0:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        torch.distributed.TCPStore(address, port, 2, is_master=True)  # returns when the other one has connected
        os._exit(7)
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 2
    if rank == 1:
        wait_until(folder, 0, is_there=False)
    if case != "undestroyed":
        torch.distributed.destroy_process_group()
    print(f"rank {rank} has ended well", flush=True)


if __name__ == "__main__":
    main()
