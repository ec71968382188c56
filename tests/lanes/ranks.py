"""Ranks of a process group that load from lanes, each in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed

from hetero.errors import HeteroError
from hetero.loaders.lanes.passes import _unpacked
from hetero.torch import DataLoader

GLOBAL_BATCH = 8


class Case(TypedDict, total=False):
    """A pass of a loader."""

    source: Any
    options: dict[str, Any]
    state: dict[str, Any]
    max_steps: int


class Passed(TypedDict):
    """What a rank got."""

    batches: list[list[Any]]
    state: dict[str, Any]
    snapshots: dict[str, int]
    """For each lane in the state, the place of its snapshot."""
    error: str


def run_pass(case: Case, world_size: int) -> Passed:
    """Run a pass on this rank."""
    loader: Any = DataLoader(
        case["source"],
        batch_size=GLOBAL_BATCH // world_size,
        collate_fn=list,
        **{"guarantee": "exactly-once", **case["options"]},
    )
    if "state" in case:
        loader.load_state_dict(case["state"])
    batches: list[list[Any]] = []
    error = ""
    try:
        for batch in loader:
            batches.append(batch)
            if len(batches) == case.get("max_steps"):
                break
    except HeteroError as raised:
        error = str(raised)
    if world_size > 1:
        torch.distributed.barrier()
    state = loader.state_dict()
    lanes = _unpacked(state["lanes"]["snapshots"])
    snapshots = {str(number): lane.snapshots[-1].place for number, lane in lanes.items() if lane.snapshots}
    return {"batches": batches, "state": state, "snapshots": snapshots, "error": error}


def _rank(rank: int, world_size: int, port: int, cases: list[Case], folder: str) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = [run_pass(case, world_size) for case in cases]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_ranks(world_size: int, cases: list[Case], folder: Path) -> list[list[Passed]]:
    """Run passes one after the other on several ranks. Return for each pass what each rank got."""
    folder.mkdir()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (world_size, store.port, cases, str(folder))
    torch.multiprocessing.spawn(_rank, arguments, nprocs=world_size)  # type: ignore[no-untyped-call]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return [[rank[number] for rank in ranks] for number in range(len(cases))]


def global_batches(ranks: list[Passed]) -> list[list[Any]]:
    """Return the samples of each step, in the order of the ranks."""
    num_steps = max(len(rank["batches"]) for rank in ranks)
    return [
        [tuple(sample) for rank in ranks for batch in rank["batches"][step : step + 1] for sample in batch]
        for step in range(num_steps)
    ]
