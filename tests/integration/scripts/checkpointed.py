"""Trains on nothing, checkpoints, and goes on from its checkpoint: what each rank was fed, as a chain of digests."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch

import hetero
from hetero.torch import DataLoader


class Noisy(torch.utils.data.Dataset):
    """Samples that depend on their index and a draw."""

    def __init__(self, num_samples: int, sleep_s: float) -> None:
        self.num_samples = num_samples
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.sleep_s)
        return {"index": torch.tensor(index), "noise": torch.rand(4)}


@hetero.dataset
def noisy(num_samples: int, sleep_s: float = 0.0) -> torch.utils.data.Dataset:
    """Return the data set."""
    return Noisy(num_samples, sleep_s)


def make_loader(args: argparse.Namespace, shard: tuple[int, int] | None = None) -> DataLoader:
    """Return the loader of every form of this run."""
    return DataLoader(noisy(args.num_samples, args.sleep_s), batch_size=8, shuffle=True, seed=5, shard=shard)


def next_link(link: bytes, batch: dict[str, torch.Tensor]) -> bytes:
    """Return the digest of a chain and its next batch."""
    return hashlib.sha256(link + batch["index"].numpy().tobytes() + batch["noise"].numpy().tobytes()).digest()


def undisturbed(rank: int, args: argparse.Namespace) -> str:
    """Return the last link of one of two ranks, without a job."""
    loader, link = make_loader(args, (rank, 2)), bytes(32)
    for _ in range(args.epochs):
        for batch in loader:
            link = next_link(link, batch)
    return link.hex()


def gathered(link: bytes) -> list[str]:
    """Return what every rank passed in, as text."""
    own = torch.tensor(list(link), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, own)
    return [bytes(part.tolist()).hex() for part in parts]


def main() -> None:
    """Run the epochs from where the checkpoint is, and write one JSON file per rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--sleep-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int, nargs="*", default=[], help="one step per generation")
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="compute what both ranks of an undisturbed job are fed")
    ways = ["kill", "raise", "exit", "usage"]
    parser.add_argument("--how", choices=ways, nargs="*", default=["kill"], help="one per generation")
    args = parser.parse_args()
    if args.alone:
        links = [undisturbed(rank, args) for rank in range(2)]
        (args.output / "undisturbed.json").write_text(json.dumps(links))
        return
    rank, restarts = int(os.environ["RANK"]), int(os.environ["HETERO_RESTART_COUNT"])
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(restarts)
    torch.distributed.init_process_group("gloo")

    loader = make_loader(args)
    link, step, epoch = bytes(32), 0, 0
    checkpoint = args.output / "checkpoint.json"
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        loader.load_state_dict(saved["loader"])
        link, step, epoch = bytes.fromhex(saved["links"][rank]), saved["step"], saved["epoch"]
        print(f"rank {rank} goes on after step {step}", flush=True)
    fail_at = args.fail_at[restarts] if restarts < len(args.fail_at) else -1
    while epoch < args.epochs:
        for batch in loader:
            step += 1
            link = next_link(link, batch)
            links = gathered(link)
            print(f"rank {rank} step {step}", flush=True)
            if step % args.every == 0 and rank == 0:
                partial = checkpoint.with_suffix(".partial")
                state = {"loader": loader.state_dict(), "links": links, "step": step, "epoch": epoch}
                partial.write_text(json.dumps(state))
                partial.rename(checkpoint)
            if rank == args.fail_rank and step == fail_at:
                how = args.how[min(restarts, len(args.how) - 1)]
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "exit":
                    os._exit(3)
                if how == "usage":
                    raise hetero.ConfigError("batch_size is -1")
                raise RuntimeError("training fails on purpose")
        epoch += 1
    result = {"link": link.hex(), "step": step, "restarts": restarts}
    (args.output / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
