"""What does the control plane cost in a large job?

Question: how do the control traffic and the CPU time of a launcher grow with the number of hosts, up to 256 data hosts
and 8 trainer hosts with 8 ranks each, and to 1,000 data hosts?

Method: one process plays one launcher at a time, with the hub, membership and messages of the product. It receives the
heartbeat of every peer and gets the answer to its own, once per interval, from statuses of the size that such hosts
send. The network is left out: what gRPC costs for a heartbeat is measured with two hubs over loopback and added. A
trainer host exchanges heartbeats with every host, a data host only with trainer hosts. The ranks of a host get the list
of endpoints once, whenever it changes.

    python benchmarks/bench_control_plane.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from harness import RESULTS, environment, save

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control import security
from hetero.control.hub import Hub
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.membership import Member, Membership
from hetero.control.status import HostState, HostStatus, RankReport, SessionOptions, status_to_proto
from hetero.documents.tables import markdown_table

NUM_DATA_HOSTS = (16, 64, 256, 1000)
NUM_TRAINER_HOSTS = 8
RANKS_PER_HOST = 8
ENDPOINTS_PER_HOST = 16
ROUNDS = 5
TOKEN = security.Token.generate()
_USAGE_BYTES = 900
_SUMMARY_BYTES = 1100
_GRPC_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each size, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=NUM_DATA_HOSTS, help="numbers of data hosts")
    args = parser.parse_args(argv)
    grpc_s = cost_of_heartbeat_s()
    rows = [measure(number, role, grpc_s) for number in args.sizes for role in (Role.TRAINER, Role.DATA)]
    text = render(rows, grpc_s)
    print(text)
    content = {"rows": rows, "grpc_s_per_heartbeat": grpc_s, "basis": "measured in one process", **environment()}
    is_full = tuple(args.sizes) == NUM_DATA_HOSTS
    save((RESULTS if is_full else RESULTS / "short") / "control_plane", content, text)
    return 0


def measure(num_data_hosts: int, role: Role, grpc_s: float) -> dict[str, Any]:
    """Return what a launcher of a role costs per second."""
    trainers = [f"dnn-{number}" for number in range(NUM_TRAINER_HOSTS)]
    data = [f"data-{number}" for number in range(num_data_hosts)]
    own = trainers[0] if role is Role.TRAINER else data[0]
    others = [host for host in (*trainers, *(data if role is Role.TRAINER else ())) if host != own]
    members = [Member(host=host, role=Role.TRAINER) for host in trainers]
    members += [Member(host=host, role=Role.DATA) for host in (data if role is Role.TRAINER else [own])]
    hub = make_hub(own, members)
    heartbeat_s = Timings().heartbeat_s
    sent = received = 0
    begin_s = 0.0
    for number in range(ROUNDS + 1):
        if number == 1:  # in the first round all hosts are new
            begin_s, sent, received = cpu_s(), 0, 0
        for host in others:
            message = status_to_proto(status_of(host, revision=number + 1))
            # The peer's heartbeat, and this host's answer.
            answer = hub._on_heartbeat(message, _NoContext())  # type: ignore[arg-type]
            received += message.ByteSize()
            sent += len(answer.SerializeToString())
            # This host's heartbeat, and the peer's answer.
            with hub.membership() as membership:
                sent += len(status_to_proto(membership.own).SerializeToString())
            received += message.ByteSize()
            with hub.membership() as membership:
                membership.delivered(host, membership.own)
    made_s = cost_of_messages_s(others)
    code_s = max(0.0, (cpu_s() - begin_s) / ROUNDS - made_s)
    update_bytes = len(hub._rank_update().SerializeToString())
    hub.stop()
    return {
        "role": role.value,
        "data_hosts": num_data_hosts,
        "peers": len(others),
        "kb_per_s": (sent + received) / ROUNDS / heartbeat_s / 1000,
        "code_percent": 100 * code_s / heartbeat_s,
        "grpc_percent": 100 * 2 * len(others) * grpc_s / heartbeat_s,
        "rank_update_kb": update_bytes / 1000,
    }


def make_hub(own: str, members: Sequence[Member]) -> Hub:
    """Return a hub without connections."""
    return Hub(
        Membership(members, status_of(own), timings=Timings(), clock=time.monotonic),
        address="127.0.0.1",
        port=0,
        resolve=lambda host: host,
        peers=(),
        token=TOKEN,
        job_id="bench",
        remote=True,
        session_options=SessionOptions(
            data_timeout_s=1,
            prepare_timeout_s=1,
            emulate_step_s=None,
            purity_checks=0,
            warmup_steps=0,
            max_batch_bytes=1,
        ),
        heartbeat_s=2.0,
    )


def status_of(host: str, revision: int = 1) -> HostStatus:
    """Return a status of the size that a host of its kind sends while it trains or serves."""
    is_trainer = host.startswith("dnn")
    plain = HostStatus(
        host=host,
        incarnation=f"{host}-1",
        version="1",
        script_digest="0" * 16,
        state=HostState.TRAINING if is_trainer else HostState.SERVING,
        usage_json=b"{" + b" " * _USAGE_BYTES + b"}",
        counters={f"a counter of the report {number}": 12345 for number in range(8)},
        revision=revision,
        ticks=revision,
        options={f"option {number}": "value" for number in range(8)},
    )
    if not is_trainer:
        records = (
            EndpointRecord(
                endpoint_id=f"{host}/{number}",
                host=host,
                address=f"10.0.100.100:{40000 + number}",
                incarnation="0123456789abcdef-0123456789abcdef",
            )
            for number in range(ENDPOINTS_PER_HOST)
        )
        return dataclasses.replace(plain, endpoints=tuple(records))
    reports = (
        RankReport(
            rank=number,
            steps_started={"photos/train": 1000 * revision},
            loader="photos/train",
            summaries_json=(json.dumps({"x": "x" * _SUMMARY_BYTES}).encode(),),
            counters={f"a counter of a rank {number}": 12345 for number in range(8)},
        )
        for number in range(RANKS_PER_HOST)
    )
    return dataclasses.replace(plain, ranks=tuple(reports))


def cost_of_messages_s(hosts: Sequence[str]) -> float:
    """Return the CPU seconds of making the peers' heartbeats once, which the measured host does not do."""
    begin_s = cpu_s()
    for host in hosts:
        status_to_proto(status_of(host, revision=7)).ByteSize()
    return cpu_s() - begin_s


def cost_of_heartbeat_s() -> float:
    """Return the CPU seconds that gRPC takes for one heartbeat and its answer, on one side."""
    members = [Member(host="dnn-0", role=Role.TRAINER), Member(host="data-0", role=Role.DATA)]
    hub = make_hub("dnn-0", members)
    hub.start()
    from hetero.wire import channels

    channel = channels.open_channel(f"127.0.0.1:{hub.port}", name="dnn-0", tls=None)
    call = channel.unary_unary("/hetero.v1.Control/Heartbeat", request_serializer=None, response_deserializer=None)
    metadata = security.call_metadata(TOKEN, "bench")
    data = status_to_proto(status_of("data-0")).SerializeToString()
    call(data, metadata=metadata, timeout=10)
    begin_s, end_s, number = cpu_s(), time.monotonic() + _GRPC_S, 0
    while time.monotonic() < end_s:
        call(data, metadata=metadata, timeout=10)
        number += 1
    both_s = (cpu_s() - begin_s) / number
    channel.close()
    hub.stop()
    return both_s / 2


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def render(rows: Sequence[dict[str, Any]], grpc_s: float) -> str:
    """Return the table as Markdown."""
    header = [
        "host",
        "data hosts",
        "peers",
        "KB/s, both ways",
        "CPU of the code",
        "CPU of gRPC",
        "list of endpoints, KB",
    ]
    cells = [
        [
            f"{row['role']} host",
            f"{row['data_hosts']:,}",
            f"{row['peers']:,}",
            f"{row['kb_per_s']:,.0f}",
            f"{row['code_percent']:.1f} %",
            f"{row['grpc_percent']:.1f} %",
            f"{row['rank_update_kb']:,.0f}" if row["role"] == "trainer" else "",
        ]
        for row in rows
    ]
    text = markdown_table(header, cells, right=range(1, len(header)))
    return (
        f"{NUM_TRAINER_HOSTS} trainer hosts with {RANKS_PER_HOST} ranks each, {ENDPOINTS_PER_HOST} endpoints per data "
        f"host, a heartbeat every {Timings().heartbeat_s:g} s in both directions. CPU in percent of one core. gRPC "
        f"takes {1e6 * grpc_s:.0f} microseconds per heartbeat on each side.\n\n{text}\n"
    )


class _NoContext:
    """A call that is not aborted."""

    def abort(self, code: object, details: str) -> None:
        """Fail."""
        raise AssertionError(details)


if __name__ == "__main__":
    threading.stack_size(256 * 1024)
    sys.exit(main())
