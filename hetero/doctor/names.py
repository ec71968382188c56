"""Names of hosts: whether they resolve to different addresses, and this host's name to an address others can reach."""

from __future__ import annotations

import functools
import ipaddress

from hetero.cluster import resolve_address
from hetero.cluster.document import listing
from hetero.doctor.finding import Finding, error, ok, warning
from hetero.doctor.surroundings import Surroundings
from hetero.doctor.waiting import gather

__all__ = ["examine"]

_TIMEOUT_S = 4.0
_RETRY = "on a platform names may appear minutes after the start: run this again; else correct DNS or /etc/hosts"


def examine(surroundings: Surroundings) -> list[Finding]:
    """Resolve the names of all hosts at the same time."""
    hosts = surroundings.hosts
    if not hosts:
        return [ok("no cluster is described, so there is no name to resolve")]
    hosts_file = surroundings.environ.get("HETERO_HOSTS_FILE")
    tasks = {host: functools.partial(resolve_address, host, hosts_file=hosts_file) for host in hosts}
    outcomes = gather(tasks, timeout_s=_TIMEOUT_S)
    addresses = {host: outcome for host, outcome in outcomes.items() if isinstance(outcome, str)}
    problems = sorted({str(outcome) for outcome in outcomes.values() if isinstance(outcome, Exception)})
    findings = [error(problem, _RETRY) for problem in problems]
    if silent := [host for host in hosts if host not in outcomes]:
        found = f"no answer from the name service within {_TIMEOUT_S:.0f} s about {listing(silent)}"
        findings.append(error(found, "check the name servers in /etc/resolv.conf; every start of a job waits for them"))
    findings += _strange(addresses, surroundings)
    if addresses:
        found = f"resolved {len(addresses)} of {len(hosts)} hosts"
        findings.insert(0, ok(found, addresses={host: addresses[host] for host in hosts if host in addresses}))
    return findings


def _strange(addresses: dict[str, str], surroundings: Surroundings) -> list[Finding]:
    findings = []
    by_address: dict[str, list[str]] = {}
    for host, address in addresses.items():
        by_address.setdefault(address, []).append(host)
    for address, hosts in by_address.items():
        if len(hosts) > 1:
            found = f"{listing(sorted(hosts))} have one address, {address}"
            findings.append(error(found, "give every host an address of its own: they could not both have its port"))
    own = surroundings.own_host
    if own in addresses and len(addresses) > 1 and not surroundings.is_simulated:
        others = [address for host, address in addresses.items() if host != own]
        if _is_loopback(addresses[own]) and not all(map(_is_loopback, others)):
            found = f"this host's own name {own} is {addresses[own]} here, which no other host reaches"
            findings.append(
                error(found, f"remove {own} from the loopback lines of /etc/hosts, or give its real address")
            )
    if len({ipaddress.ip_address(address).version for address in addresses.values()}) > 1:
        findings.append(
            warning("some hosts have IPv4 addresses, some only IPv6", "make sure that each reaches every other one")
        )
    return findings


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
