"""Checks the platform, its description of the cluster, and the addresses of the hosts' names."""

from __future__ import annotations

import functools
import ipaddress

from hetero.cluster import resolve_address
from hetero.doctor.parallel import gather
from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, error, ok, warning
from hetero.documents.text import listing
from hetero.system.waits import CALL_TIMEOUT_S

__all__ = ["examine_description", "examine_names", "examine_platform"]

_RETRY = "run this again, because a platform may add names minutes after the start; otherwise correct DNS or /etc/hosts"


def examine_platform(snapshot: Snapshot) -> list[Diagnosis]:
    """Report the platform, and what is special about this job on it."""
    platform = snapshot.platform
    if not platform.is_here():
        return [ok("no job of a platform runs here")]
    found = platform.examine(snapshot.own_host, snapshot.options.port)
    return [ok(f"{platform.name}, which gives a job {platform.kill_after_s:.0f} s to stop"), *found]


def examine_description(snapshot: Snapshot) -> list[Diagnosis]:
    """Report the cluster as a launcher would read it."""
    cluster = snapshot.cluster
    if cluster is not None:
        # For example: data_group=ml.c5.xlarge:2 (data).
        groups = ", ".join(
            f"{group.name}={group.instance_type or 'unknown type'}:{len(group.hosts)} ({group.role.value})"
            for group in cluster.groups
        )
        return [ok(f"{cluster.current_host} of {groups}, from {cluster.source}")]
    if snapshot.hosts and snapshot.options.cluster_file is not None and snapshot.options.host is None:
        found = f"the description lists {len(snapshot.hosts)} hosts, and this machine is not one of them"
        return [warning(found, "on a host of the cluster, give --host NAME; elsewhere only names and ports matter")]
    if snapshot.cluster_problem:
        return [error(snapshot.cluster_problem, "correct the description; hetero launch would end with HET-10")]
    return [ok("no cluster is described here, so only this machine is examined")]


def examine_names(snapshot: Snapshot) -> list[Diagnosis]:
    """Resolve the names of all hosts in parallel, and report addresses that conflict."""
    hosts = snapshot.hosts
    if not hosts:
        return [ok("no cluster is described, so there is no name to resolve")]
    hosts_file = snapshot.environ.get("HETERO_HOSTS_FILE")
    tasks = {host: functools.partial(resolve_address, host, hosts_file=hosts_file) for host in hosts}
    outcomes = gather(tasks, timeout_s=CALL_TIMEOUT_S)
    addresses = {host: outcome for host, outcome in outcomes.items() if isinstance(outcome, str)}
    problems = sorted({str(outcome) for outcome in outcomes.values() if isinstance(outcome, Exception)})
    diagnoses = [error(problem, _RETRY) for problem in problems]
    if without_answer := [host for host in hosts if host not in outcomes]:
        found = f"the name service did not answer within {CALL_TIMEOUT_S:.0f} s for {listing(without_answer)}"
        diagnoses.append(error(found, "check the name servers in /etc/resolv.conf, because every job waits for them"))
    diagnoses += _conflicts(addresses, snapshot)
    if addresses:
        found = f"resolved {len(addresses)} of {len(hosts)} hosts"
        diagnoses.insert(0, ok(found, addresses={host: addresses[host] for host in hosts if host in addresses}))
    return diagnoses


def _conflicts(addresses: dict[str, str], snapshot: Snapshot) -> list[Diagnosis]:
    """Return errors about hosts that share an address, or whose name means this machine on every host."""
    diagnoses = []
    hosts_by_address: dict[str, list[str]] = {}
    for host, address in addresses.items():
        hosts_by_address.setdefault(address, []).append(host)
    for address, hosts in hosts_by_address.items():
        if len(hosts) > 1:
            found = f"{listing(sorted(hosts))} have the same address, {address}"
            diagnoses.append(error(found, "give every host its own address, because launchers cannot share a port"))
    parsed = {host: ipaddress.ip_address(address) for host, address in addresses.items()}
    loopback = {host: address for host, address in parsed.items() if address.is_loopback or address.is_unspecified}
    # If all names mean this machine, all hosts are on this machine, as in a test. If only some names do, every machine
    # takes itself for the hosts with these names, and does not find the real ones.
    if len(loopback) < len(addresses) and not snapshot.is_simulated:
        for host in loopback:
            found = f"the name {host} resolves to {addresses[host]} here, which means this machine on every host"
            to_do = f"remove {host} from the loopback lines of /etc/hosts, or add its real address"
            diagnoses.append(error(found, to_do))
    return diagnoses
