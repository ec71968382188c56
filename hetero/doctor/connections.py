"""Checks whether this host can bind its port, and which ports of the other hosts it can reach.

The examination tries two ports of every other host: the port of its launcher (``--port``), and one of the ephemeral
ports that endpoints and ranks get from the system. A security group that allows only the first port blocks all
batches. No process needs to listen, because a refused connection shows that the host was reached.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from hetero.cluster import resolve_address
from hetero.doctor.leftovers import find_processes
from hetero.doctor.parallel import gather
from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, error, ok, warning
from hetero.documents.text import listing
from hetero.system.waits import CALL_TIMEOUT_S
from hetero.wire.channels import find_owner, join_address

__all__ = ["examine_ports", "last_ephemeral_port"]

_CONNECT_S = CALL_TIMEOUT_S / 4
"""Time limit of one connection. The time limit of the subject is enough for a host's name and two connections to it."""
_ANSWERS, _REFUSES, _SILENT, _UNRESOLVED = "answers", "refuses", "silent", "unresolved"
_Outcome: TypeAlias = Diagnosis | dict[str, str]
_Matrix: TypeAlias = Mapping[str, Mapping[str, str]]


def examine_ports(snapshot: Snapshot) -> list[Diagnosis]:
    """Bind this host's port and connect to the ports of the other hosts, all in parallel."""
    hosts_file = snapshot.environ.get("HETERO_HOSTS_FILE")
    own_host = snapshot.own_host
    # Endpoints and ranks listen on ephemeral ports, so try one of these ports too.
    ports = (snapshot.options.port, last_ephemeral_port())
    other_hosts = [host for host in snapshot.hosts if host != own_host]
    # The key None stands for this host, which may have no name.
    tasks: dict[str | None, Callable[[], _Outcome]] = {None: functools.partial(_bind, own_host, ports[0], hosts_file)}
    tasks |= {host: functools.partial(_reach, host, ports, hosts_file) for host in other_hosts}
    outcomes = gather(tasks, timeout_s=CALL_TIMEOUT_S)
    # If this host's name does not resolve, the subject "names" reports the error.
    bound = outcomes.pop(None, None)
    diagnoses = [bound] if isinstance(bound, Diagnosis) else []
    if not other_hosts:
        return diagnoses
    matrix = {host: _row(outcomes.get(host), ports) for host in other_hosts}
    return [*diagnoses, *_judge(matrix, control=str(ports[0]), other=str(ports[1]))]


def last_ephemeral_port() -> int:
    """Return the last ephemeral port of this system, which other hosts most likely have, too."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[1])


def _bind(host: str | None, port: int, hosts_file: str | None) -> Diagnosis:
    """Bind the address and port that a launcher would bind on this host, and release them.

    Raises:
        ClusterError: If this host's name does not resolve.
    """
    # If no cluster is described, this host has no name, and only this machine is examined.
    address = "127.0.0.1" if host is None else resolve_address(host, hosts_file=hosts_file)
    target = join_address(address, port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Set the option that gRPC sets too, so a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as problem:
            return _refused(problem, target, find_owner(address, port))
    return ok(f"{target} is free for a launcher")


def _refused(problem: OSError, target: str, owner: str) -> Diagnosis:
    """Return why the launcher's port cannot be bound.

    Args:
        problem: The error of the system.
        target: Address and port, for messages.
        owner: Description of the process that listens on the port, empty if this user cannot see the process.
    """
    if problem.errno == errno.EADDRNOTAVAIL:
        to_do = "correct the name or the address; in a container use the host's network (docker run --network host)"
        return error(f"{target} is not an address of this machine, so a launcher cannot bind it (HET-23)", to_do)
    if problem.errno != errno.EADDRINUSE:
        return error(f"{target} cannot be bound: {os.strerror(problem.errno or 0)} (HET-23)", "choose another --port")
    launchers = [process.pid for process in find_processes() if process.kind == "launcher"]
    # `owner` begins with the id of the process. The launcher may belong to the job that is examined, because the
    # examination also works while a job runs.
    if any(owner.startswith(f"process {pid} ") for pid in launchers):
        to_do = "keep it if it is this job's launcher; otherwise end it, or give every host of the job another --port"
        return warning(f"{target} is taken: {owner} listens on it", to_do)
    holder = f"{owner} listens on it" if owner else "another process uses it, which this user cannot see"
    to_do = "end the process that uses the port, or give every host of the job another --port"
    return error(f"{target} is taken (HET-23): {holder}", to_do)


def _reach(host: str, ports: tuple[int, ...], hosts_file: str | None) -> dict[str, str]:
    """Return the result of a connection to each port of a host, see `_connect`.

    Raises:
        ClusterError: If the host's name does not resolve.
    """
    address = resolve_address(host, hosts_file=hosts_file)
    return {str(port): _connect(address, port) for port in ports}


def _connect(address: str, port: int) -> str:
    """Try a TCP connection. Return `_ANSWERS`, `_REFUSES`, `_SILENT`, or the error of the system in words."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S):
            return _ANSWERS
    # A refused connection shows that the host was reached. No launcher needs to listen yet.
    except ConnectionRefusedError:
        return _REFUSES
    except TimeoutError:
        return _SILENT
    except OSError as problem:
        return os.strerror(problem.errno) if problem.errno else str(problem)


def _row(outcome: _Outcome | Exception | None, ports: tuple[int, ...]) -> dict[str, str]:
    """Return the result at each port of a host.

    Args:
        outcome: What `_reach` returned or raised. None if it did not end in time.
        ports: The ports.
    """
    if isinstance(outcome, dict):
        return outcome
    return dict.fromkeys(map(str, ports), _SILENT if outcome is None else _UNRESOLVED)


def _judge(matrix: _Matrix, control: str, other: str) -> list[Diagnosis]:
    """Return the diagnoses for the results of all hosts. Hosts with the same results share a diagnosis."""
    hosts_by_results: dict[tuple[str, str], list[str]] = {}
    for host, row in matrix.items():
        hosts_by_results.setdefault((row[control], row[other]), []).append(host)
    meanings = [_meaning(listing(hosts), control, other, *results) for results, hosts in hosts_by_results.items()]
    diagnoses = [meaning for meaning in meanings if meaning is not None]
    # A host that refuses a connection was reached too.
    num_reached = sum(set(row.values()) <= {_ANSWERS, _REFUSES} for row in matrix.values())
    found = f"reached {num_reached} of {len(matrix)} other hosts"
    if num_reached == len(matrix):
        return [ok(found, matrix=matrix), *diagnoses]
    return [warning(found, "see the lines about their names and ports", matrix=matrix), *diagnoses]


def _meaning(hosts: str, control: str, other: str, at_control: str, at_other: str) -> Diagnosis | None:
    """Return what the results of connections to two ports of some hosts mean.

    Args:
        hosts: Names of the hosts, which have the same results.
        control: The port of their launchers.
        other: One of the ports that endpoints and ranks may get.
        at_control: Result at the first port: `_ANSWERS`, `_REFUSES`, `_SILENT`, `_UNRESOLVED`, or an error in words.
        at_other: Result at the second port.

    Returns:
        The diagnosis, or None if the names of the hosts do not resolve, which the subject "names" reports.
    """
    if at_control == _UNRESOLVED:
        return None
    # A refused connection shows that the host was reached.
    is_control_open, is_other_open = (result in (_ANSWERS, _REFUSES) for result in (at_control, at_other))
    open_all_ports = (
        "let the hosts of the job reach all TCP ports of each other: in a security group, a rule that names itself"
    )
    if is_control_open and is_other_open:
        listens = "their launchers listen" if at_control == _ANSWERS else "no launcher listens yet, which is fine"
        return ok(f"{hosts}: reached on port {control} ({listens}) and on others")
    if is_control_open:
        found = f"{hosts}: reached on port {control}, but on port {other}: {at_other}; endpoints and ranks need any"
        return error(found, open_all_ports)
    if is_other_open:
        return error(f"{hosts}: on port {control}: {at_control}, although port {other} can be reached", open_all_ports)
    to_do = f"check that the host is up. If it is, {open_all_ports}"
    if at_control == _SILENT:
        return error(f"{hosts}: no answer on any of the ports that were tried, for {_CONNECT_S:g} s each", to_do)
    return error(f"{hosts}: not reached: {at_control}", to_do)
