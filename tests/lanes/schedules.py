"""Seeded fault schedules over lanes, mixtures and shards: is any sample lost, repeated or out of order?

    python -m tests.lanes.schedules --count 1000

A schedule has 1 to 8 data hosts and 1 to 8 ranks. At random steps, hosts are lost, come back empty, leave or join, and
the job goes on from its state with another number of ranks. Hosts answer in any order. Requests pass through the
wire format. Each host is another data set in this process. The order must be that of one process.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hetero import shards
from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.batches.lanes.pieces import LaneReport
from hetero.batches.request import BatchRequest
from hetero.loaders.lanes.options import LaneOptions
from hetero.loaders.lanes.passes import LanePasses, Lanes, _packed
from hetero.loaders.sampling import BuiltInOrder, PlannedBatch, Shard
from hetero.metrics.steps import Extent
from hetero.plans.mixtures import Mixture
from hetero.plans.sources import Sources
from hetero.plans.windows import WindowPlan
from hetero.spec import DatasetSpec
from hetero.wire.requests import from_proto, parse_request, serialize
from tests.support.shards import write_shards
from tests.support.streams import Numbers, Positioned, StatefulNumbers

_SPEC = DatasetSpec("schedule")
_KINDS = (("exactly-once", StatefulNumbers), ("exactly-once", Positioned), ("replay", Numbers))


def together(samples: list[Any]) -> list[Any]:
    """Return the samples as they are."""
    return list(samples)


class Hosts:
    """The data hosts of a job. Each one builds its data set when it is first asked.

    Args:
        chance: Decides what happens.
        make: Makes the data set.
    """

    def __init__(self, chance: random.Random, make: Any) -> None:
        self._chance = chance
        self._make = make
        self._built: list[BuiltDataset | None] = [None] * chance.randint(1, 8)

    def fetch(self, request: BatchRequest) -> Any:
        """Compute a batch on the host of its lane, or now and then on any host."""
        number = request.lane or 0
        if self._chance.random() < 0.05:
            number = self._chance.randrange(100)
        place = number % len(self._built)
        built = self._built[place]
        if built is None:
            built = self._built[place] = BuiltDataset.from_object(self._make(), collate_fn=together)
        return fetch(built, from_proto(parse_request(serialize(request))))

    def change(self) -> None:
        """Lose a host, let one leave, or let one join."""
        event = self._chance.choice(["lost", "lost", "leaves", "joins"])
        if event == "lost":
            self._built[self._chance.randrange(len(self._built))] = None
        elif event == "leaves" and len(self._built) > 1:
            self._built.pop(self._chance.randrange(len(self._built)))
        elif event == "joins" and len(self._built) < 8:
            self._built.append(None)


class Exchange:
    """The ranks of a job, which are in one process. All of them have received the batch of a step."""

    def __init__(self) -> None:
        self.ranks: list[Lanes] = []
        self.states: dict[int, str] = {}

    def agree(self, step: int, end: int | None) -> int | None:
        return min((rank.end_step for rank in self.ranks if rank.end_step is not None), default=None)

    def first(self, lane: int, digest: str) -> int:
        return lane

    def fail(self) -> None:
        raise AssertionError("no batch raises")

    def share(self, state: str) -> None:
        self.states[len(self.states)] = state

    def shared(self) -> list[str]:
        return list(self.states.values())


class _Rank:
    """One rank of a job of lanes, with its requests in flight."""

    def __init__(self, options: LaneOptions, exchange: Exchange, state: Any, step: int, batch: int, shard: Shard):
        passes = LanePasses(options, name="schedule", extent=Extent())
        passes.load(0, state)
        names = ("many", "few") if options.mixture else ()
        passes.begin(epoch=0, step=step, batch_size=batch, shard=shard, exchange=exchange, names=names)
        self.lanes = passes.of(0)
        ranks = range(shard.rank, shard.rank + 1)
        self.planned = self.lanes.plan(step, batch_size=batch, world_size=shard.world_size, ranks=ranks)
        self.flight: deque[list[Any]] = deque()

    def receive(self, hosts: Hosts, chance: random.Random) -> tuple[int, Any] | None:
        """Return the step and the samples of the next batch. Compute the batches in flight in a random order."""
        self.flight.extend([each, None] for each in itertools.islice(self.planned, chance.randint(1, 4)))
        if not self.flight:
            return None
        for entry in chance.sample(list(self.flight), len(self.flight)):
            if entry[1] is None and (entry is self.flight[0] or chance.random() < 0.5):
                entry[1] = hosts.fetch(_request(entry[0]))
        planned, (batch, content) = self.flight.popleft()
        report = LaneReport.from_array(content, planned.work.pieces)
        self.lanes.received(planned.work, report, step=planned.position)
        assert planned.work.delivered(report).num_samples == len(batch or ())
        return planned.position, batch or []


def _request(planned: PlannedBatch) -> BatchRequest:
    return BatchRequest(spec=_SPEC, work=planned.work, seed=3, epoch=0, position=planned.position, lane=planned.lane)


def lanes_schedule(seed: int) -> str:
    """Run a schedule over lanes. Return what it violated, or an empty text."""
    chance = random.Random(seed)
    guarantee, kind = chance.choice(_KINDS)
    mixture = chance.choice([None, None, Mixture(lambda step: {"few": 1 + step % 3, "many": 3})])
    end: Any = chance.choice(["stop", "rest"]) if mixture is None else "wrap"
    worlds = [world for world in (1, 2, 4, 8) if world <= chance.choice([2, 4, 8])]
    chunk = chance.choice([1, 2, 4])
    # In some schedules, two of the most ranks share a lane.
    num_chunks = max(1, max(worlds) // chance.choice([1, min(2, chunk)]))
    global_batch = chunk * num_chunks
    num_lanes = num_chunks * chance.choice([1, 2, 3])
    num_samples = num_lanes * chance.randint(chunk + 1, 6 * chunk)
    options = LaneOptions(
        guarantee=guarantee,  # type: ignore[arg-type]
        end=end,
        num_lanes=num_lanes,
        lanes_per_rank=1,
        chunk_samples=chunk,
        snapshot_every=chance.choice([1, 1, 3]),
        drops_rest=False,
        allow_version_change=False,
        mixture=mixture,
    )
    # Lanes that begin again have no end.
    last_step = chance.randint(10, 40) if mixture else 10**9

    def make() -> Any:
        return Sources(many=kind(num_samples), few=kind(num_lanes + 3)) if mixture else kind(num_samples)

    def run(chance: random.Random, worlds: list[int], *, disturb: bool) -> dict[int, list[list[Any]]]:
        hosts = Hosts(chance if disturb else random.Random(0), make)
        delivered: dict[int, list[list[Any]]] = {}
        step, state, is_over = 0, None, False
        while not is_over and step < last_step:
            world = chance.choice(worlds)
            exchange = Exchange()
            batch = global_batch // world
            ranks = [_Rank(options, exchange, state, step, batch, Shard(rank, world)) for rank in range(world)]
            exchange.ranks = [rank.lanes for rank in ranks]
            for _ in range(min(chance.randint(1, 12) if disturb else 10**9, last_step - step)):
                found = [rank.receive(hosts, chance) for rank in ranks]
                for rank in ranks:
                    rank.lanes.agree(step)
                is_over = all(each is None for each in found) or any(rank.lanes.is_over(step) for rank in ranks)
                if is_over:
                    break
                for each in found:
                    if each is not None:
                        delivered.setdefault(each[0], []).append(each[1])
                step += 1
                if disturb and chance.random() < 0.3:
                    hosts.change()
            for number, rank in enumerate(ranks):
                exchange.states[number] = _packed(rank.lanes._lanes)
            state = ranks[chance.randrange(world)].lanes.state(step * global_batch)
        return delivered

    expected = _flat(run(random.Random(0), [1], disturb=False))
    found = _flat(run(chance, worlds, disturb=True))
    if end == "rest" and sorted(sample[0] for sample in expected) != list(range(num_samples)):
        return f"lanes {seed}: one process delivers {len(expected)} of {num_samples} samples"
    return "" if found == expected else f"lanes {seed}: {_difference(expected, found)}"


def _flat(delivered: dict[int, list[list[Any]]]) -> list[Any]:
    return [tuple(sample) for step in sorted(delivered) for batch in delivered[step] for sample in batch]


def shards_schedule(seed: int, files: list[str]) -> str:
    """Run a schedule over rows of files in windows. Return what it violated, or an empty text."""
    chance = random.Random(seed)

    def make() -> Any:
        return shards.parquet(files, lanes=4, chunk_rows=8, window_bytes=2000).map(lambda row: row["id"])

    rows = make()
    plan = WindowPlan(rows.sources[0].layout)
    num_rows, global_batch = len(rows), 16

    def batches(world: int, start: int) -> Iterator[list[PlannedBatch]]:
        order = BuiltInOrder(num_samples=num_rows, batch_size=global_batch // world, seed=3, shuffle=True, plan=plan)
        return zip(*(order.batches(0, Shard(rank, world), start=start) for rank in range(world)), strict=True)  # type: ignore[return-value]

    hosts, step, found, is_over = Hosts(chance, make), 0, [], False
    while not is_over:
        world = chance.choice([1, 2, 4, 8])
        is_over = True
        for planned in itertools.islice(batches(world, step), chance.randint(1, 12)):
            is_over = False
            answers = {}
            for rank in chance.sample(range(world), world):
                answers[rank] = hosts.fetch(_request(planned[rank]))
            is_incomplete = (step + 1) * global_batch > num_rows
            parts: list[Any] = [answers[rank] for rank in range(world)]
            # The samples of the last, incomplete global batch are dealt out one by one.
            parts = list(zip(*parts, strict=True)) if is_incomplete else parts
            found += itertools.chain.from_iterable(parts)
            step += 1
            if chance.random() < 0.3:
                hosts.change()
    order = plan.order(seed=3, epoch=0, global_batch=global_batch)
    rows_in_order, _ = order.draw(np.arange(num_rows))
    expected = [rows[int(row)] for row in rows_in_order]
    return "" if found[:num_rows] == expected else f"shards {seed}: {_difference(expected, found)}"


def _difference(expected: list[Any], found: list[Any]) -> str:
    lost = len(set(map(repr, expected)) - set(map(repr, found)))
    repeated = len(found) - len(set(map(repr, found)))
    return f"{lost} lost, {repeated} repeated, {len(found)} of {len(expected)} samples"


def main() -> int:
    """Run the schedules, and print what was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_shards(Path(folder), "parquet", [197] * 4)
        violations = []
        for seed in range(args.first, args.first + args.count):
            violations += filter(None, [shards_schedule(seed, files) if seed % 4 == 0 else lanes_schedule(seed)])
    print(*violations, sep="\n")
    print(f"{args.count} schedules, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
