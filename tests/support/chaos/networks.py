"""Networks of simulated hosts that can be cut, slowed and taken down while a job runs: two kinds, one interface.

`ProxiedNetwork` needs no rights: every host has a loopback address, and every pair of hosts a proxy for each port
between them. `NamespaceNetwork` needs root: every host has a network namespace, and a bridge joins them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tests.support.chaos.proxy import Chaos, ChaosProxy, Faults, Way

PORT = 17802
"""Of every launcher."""
_LISTENS = "0A"  # in /proc/net/tcp
_MAPPED = "0000000000000000FFFF0000"
_WATCH_S = 0.05
_LOST_MAC = "02:00:00:00:00:99"


class Network(ABC):
    """The hosts' network, as a context manager.

    Attributes:
        hosts: Their names.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def address(self, host: str) -> str:
        """Return the address that a host binds."""

    @abstractmethod
    def command(self, host: str) -> list[str]:
        """Return what to write before a command that is to run on a host."""

    @abstractmethod
    def environment(self, host: str, folder: Path) -> dict[str, str]:
        """Return the variables that a host's processes need. Files go into the folder."""

    @abstractmethod
    def cut(self, host: str) -> None:
        """Drop everything from and to a host, silently."""

    @abstractmethod
    def cut_one_way(self, host: str) -> None:
        """Drop everything to a host, silently, and nothing from it."""

    @abstractmethod
    def slow(self, host: str, bytes_per_s: float) -> None:
        """Let a host send and receive at most so much."""

    @abstractmethod
    def down(self, host: str) -> None:
        """Take a host's link down: who wants to reach it, and itself, gets errors at once."""

    @abstractmethod
    def heal(self, host: str) -> None:
        """End the faults of a host's link. Idempotent."""

    @abstractmethod
    def listening(self) -> set[str]:
        """Return the ports that are open on addresses of the hosts."""

    @abstractmethod
    def close(self) -> None:
        """Take it all down."""


class ProxiedNetwork(Network):
    """Host number n has 127.S.0.n. Host number m sees it at 127.S.(100 + m).n, which is a proxy for the pair."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__(hosts)
        self._second, self._lock_socket = _lock_block()
        self._numbers = {host: number for number, host in enumerate(hosts, 1)}
        self._lock = threading.Lock()  # of the fields below
        self._proxies: dict[tuple[str, str, int], ChaosProxy] = {}
        self._faults: dict[tuple[str, str], tuple[Faults, Faults]] = {}
        self._is_down: set[str] = set()
        self._closing = threading.Event()
        self._chaos = Chaos()
        self._chaos.__enter__()
        for source in hosts:
            for target in hosts:
                if source != target:
                    self._open(source, target, PORT)
        self._watcher = threading.Thread(target=self._watch, name="watch-ports", daemon=True)
        self._watcher.start()

    def address(self, host: str) -> str:
        return f"127.{self._second}.0.{self._numbers[host]}"

    def command(self, host: str) -> list[str]:
        return []

    def environment(self, host: str, folder: Path) -> dict[str, str]:
        seen = {other: self._seen(host, other) for other in self.hosts} | {host: self.address(host)}
        file = folder / f"hosts-of-{host}"
        file.write_text("".join(f"{address} {name}\n" for name, address in seen.items()))
        rule = f"link:via:network=127.{self._second}.{100 + self._numbers[host]}"
        return {"HETERO_HOSTS_FILE": str(file), "HETERO_FAULTS": rule}

    def cut(self, host: str) -> None:
        silent = Faults(blackhole=True)
        self._lay(host, silent, silent)

    def cut_one_way(self, host: str) -> None:
        self._lay(host, Faults(blackhole=True), Faults())

    def slow(self, host: str, bytes_per_s: float) -> None:
        slow = Faults(bytes_per_s=bytes_per_s, delay_s=0.01)
        self._lay(host, slow, slow)

    def down(self, host: str) -> None:
        with self._lock:
            self._is_down.add(host)
            for proxy in self._of(host):
                proxy.refuse()
                proxy.reset()

    def heal(self, host: str) -> None:
        with self._lock:
            self._is_down.discard(host)
            for pair in [pair for pair in self._faults if host in pair]:
                del self._faults[pair]
            for proxy in self._of(host):
                proxy.heal()

    def listening(self) -> set[str]:
        return {f"{ip}:{port}" for ip, port in _listening("self") if ip.startswith(f"127.{self._second}.0.")}

    def close(self) -> None:
        self._closing.set()
        self._watcher.join(100.0)
        self._chaos.__exit__()
        self._lock_socket.close()

    def _seen(self, source: str, target: str) -> str:
        return f"127.{self._second}.{100 + self._numbers[source]}.{self._numbers[target]}"

    def _of(self, host: str) -> list[ChaosProxy]:
        return [proxy for (source, target, _), proxy in self._proxies.items() if host in (source, target)]

    def _lay(self, host: str, inward: Faults, outward: Faults) -> None:
        """Set faults on all links of a host, in both directions."""
        with self._lock:
            for other in self.hosts:
                if other != host:
                    self._faults[other, host] = (inward, outward)
                    self._faults[host, other] = (outward, inward)
            for (source, target, _), proxy in self._proxies.items():
                if host in (source, target):
                    self._apply(source, target, proxy)

    def _apply(self, source: str, target: str, proxy: ChaosProxy) -> None:
        to_server, to_client = self._faults.get((source, target), (Faults(), Faults()))
        proxy.lay(to_server, Way.TO_SERVER)
        proxy.lay(to_client, Way.TO_CLIENT)

    def _open(self, source: str, target: str, port: int) -> None:
        proxy = self._chaos.proxy((self.address(target), port), address=self._seen(source, target), port=port)
        self._proxies[source, target, port] = proxy
        self._apply(source, target, proxy)
        if self._is_down & {source, target}:
            proxy.refuse()

    def _watch(self) -> None:
        """Make a proxy for every port of an endpoint."""
        names = {self.address(host): host for host in self.hosts}
        while not self._closing.wait(_WATCH_S):
            found = {(names[ip], port) for ip, port in _listening("self") if ip in names and port != PORT}
            with self._lock:
                known = {(target, port) for _, target, port in self._proxies if port != PORT}
                for target, port in found - known:
                    for source in self.hosts:
                        if source != target:
                            self._open(source, target, port)
                for target, port in known - found:
                    for source in self.hosts:
                        if source != target:
                            self._chaos.drop(self._proxies.pop((source, target, port)))


class NamespaceNetwork(Network):
    """Host number n has 10.77.0.n in a separate namespace."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__(hosts)
        self._numbers = {host: number for number, host in enumerate(hosts, 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def why_not() -> str:
        """Return why namespaces cannot be used here. Empty if they can."""
        if os.geteuid() != 0:
            return "needs root"
        missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
        if missing:
            return f"needs {', '.join(missing)}"
        probe = "ip link add probe0 type veth peer name probe1 && ip link add probe2 type bridge"
        found = subprocess.run(["unshare", "-n", "bash", "-c", probe], capture_output=True, text=True, check=False)
        return f"network namespaces do not work here: {found.stderr.strip()}" if found.returncode else ""

    def address(self, host: str) -> str:
        return f"10.77.0.{self._numbers[host]}"

    def command(self, host: str) -> list[str]:
        return ["nsenter", "-t", str(self._holders[host].pid), "-n", "--"]

    def environment(self, host: str, folder: Path) -> dict[str, str]:
        file = folder / "hosts"
        file.write_text("".join(f"{self.address(name)} {name}\n" for name in self.hosts))
        return {"HETERO_HOSTS_FILE": str(file)}

    def cut(self, host: str) -> None:
        self._run("", f"ip link set {self._port(host)} nomaster")

    def cut_one_way(self, host: str) -> None:
        for other in self.hosts:
            if other != host:
                line = f"ip neigh replace {self.address(host)} lladdr {_LOST_MAC} dev eth0 nud permanent"
                self._run(other, line)

    def slow(self, host: str, bytes_per_s: float) -> None:
        shape = f"root tbf rate {int(bytes_per_s * 8)}bit burst 16kb latency 400ms"
        self._run("", f"tc qdisc replace dev {self._port(host)} {shape}")
        self._run(host, f"tc qdisc replace dev eth0 {shape}")

    def down(self, host: str) -> None:
        self._run(host, "ip link set eth0 down")

    def heal(self, host: str) -> None:
        self._run("", f"ip link set {self._port(host)} master br0")
        self._run("", f"tc qdisc del dev {self._port(host)} root 2>/dev/null || true")
        self._run(host, "tc qdisc del dev eth0 root 2>/dev/null || true; ip link set eth0 up")
        for other in self.hosts:
            if other != host:
                self._run(other, f"ip neigh del {self.address(host)} dev eth0 2>/dev/null || true")

    def listening(self) -> set[str]:
        holders = [holder for name, holder in self._holders.items() if name]
        return {f"{ip}:{port}" for holder in holders for ip, port in _listening(str(holder.pid))}

    def close(self) -> None:
        for holder in self._holders.values():  # its namespace goes with it, and all links in that
            holder.kill()
            holder.wait()
            assert holder.stdin is not None
            holder.stdin.close()
        self._holders.clear()

    def _port(self, host: str) -> str:
        return f"port{self._numbers[host]}"

    def _build(self) -> None:
        for name in ("", *self.hosts):  # the first one is the switch
            # Ends with this process, whatever ends it, because its input is not written to.
            command = ["unshare", "-n", "bash", "-c", "echo ready; exec cat >/dev/null"]
            holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._holders[name] = holder
            assert holder.stdout is not None
            with holder.stdout:
                assert holder.stdout.readline() == b"ready\n"
        self._run("", "ip link add br0 type bridge; ip link set br0 up")
        for host in self.hosts:
            port, holder = self._port(host), self._holders[host]
            self._run("", f"ip link add name {port} type veth peer name eth0 netns {holder.pid}")
            self._run("", f"ip link set {port} master br0; ip link set {port} up")
            self._run(host, f"ip link set lo up; ip addr add {self.address(host)}/24 dev eth0; ip link set eth0 up")

    def _run(self, host: str, line: str) -> None:
        command = ["nsenter", "-t", str(self._holders[host].pid), "-n", "--", "bash", "-ec", line]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def _lock_block() -> tuple[int, socket.socket]:
    """Reserve 127.S.0.0/16. The lock ends with the process. Simulations lock from 31 on."""
    for second in range(200, 255):
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            lock.bind((f"127.{second}.0.1", PORT))
            return second, lock
        lock.close()
    raise RuntimeError("no free block of loopback addresses from 127.200.0.0 on")


def _listening(process: str) -> set[tuple[str, int]]:
    """Return the IPv4 addresses and ports that are open in a process's namespace."""
    found = set()
    for table in ("tcp", "tcp6"):  # gRPC's sockets are IPv6 ones with IPv4 addresses
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            ip, port = fields[1].split(":")
            if fields[3] == _LISTENS and (table == "tcp" or ip.startswith(_MAPPED)):
                found.add((socket.inet_ntoa(bytes.fromhex(ip[-8:])[::-1]), int(port, 16)))
    return found


def make_network(kind: str, hosts: Sequence[str]) -> Network:
    """Return a network of a kind: ``namespaces``, ``proxies``, or ``auto``, which is the first where that works."""
    if kind == "namespaces" or (kind == "auto" and not NamespaceNetwork.why_not()):
        return NamespaceNetwork(hosts)
    return ProxiedNetwork(hosts)
