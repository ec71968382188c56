"""How this host joins a running job as a data host, or registers with the main host of its job."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hetero import __version__
from hetero.cluster import ClusterSpec, Platform, resolve_address
from hetero.cluster.platforms.joined import Joined
from hetero.cluster.platforms.platform import Registration
from hetero.config import LaunchOptions, Timings
from hetero.control.members.admission import Admission, JoinRequest, ask_to_join
from hetero.control.members.joined import JoinedHost
from hetero.control.members.registrar import Registrar
from hetero.control.security import token_from_environment
from hetero.errors import ClusterError
from hetero.launch.control_plane import script_digest, shared_options
from hetero.launch.job_token import staged_token
from hetero.system import logs
from hetero.system.waits import POLL_S, WaitLog
from hetero.wire.channels import join_address
from hetero.wire.tls import Tls

__all__ = ["join_job", "own_address", "register"]

_ANY_ADDRESS = "192.0.2.1"
"""An address that is reserved for documentation. The default route of every host leads to it. Nothing is sent to it."""


def join_job(
    options: LaunchOptions, platform: Platform, environ: Mapping[str, str]
) -> tuple[Platform, ClusterSpec] | None:
    """Join the job at ``options.join``. Return its platform and cluster, or None if the job is about to end.

    Wait until the launcher at that address answers, at most for the start timeout.

    Raises:
        AuthenticationError: If the launcher does not accept the token or the certificate of this host.
        ClusterError: If the launcher cannot be reached within the start timeout.
        ConfigError: If the job does not admit this host because of its name or group.
        DisagreementError: If this host and the job differ in version, script or options.
    """
    assert options.join is not None
    peer, _, port = options.join.rpartition(":")
    name = options.host or socket.gethostname()
    group, _, instance_type = (options.join_group or "").partition("=")
    joining = _JoiningHost(options, environ, name=name, group=group, instance_type=instance_type)
    # An IPv6 address before a port is in brackets.
    admission = joining.ask(peer.strip("[]"), int(port))
    if admission is None:
        return None
    joined = Joined(
        platform,
        admission.document,
        source=f"the launcher at {options.join}",
        roles=admission.roles,
        job=admission.job_id,
        own_address=joining.address,
    )
    return joined, joined.read_cluster()


def register(
    registration: Registration, options: LaunchOptions, platform: Platform, environ: Mapping[str, str]
) -> Platform:
    """Register this host with the main host of its job, or collect the other hosts if this is the main host.

    Returns:
        A platform that describes all hosts.

    Raises:
        AuthenticationError: If the main host does not accept the token or the certificate of this host.
        ClusterError: If hosts are missing after the start timeout.
        PortError: If the main host cannot bind the port of its launcher.
    """
    # Empty on the main host itself. The main host then uses the address of its default route.
    main = registration.main_address
    address = own_address(options.host or "", main or _ANY_ADDRESS, options.port, environ)
    name = options.host or address
    joining = _JoiningHost(
        options, environ, name=name, group=registration.group, instance_type=registration.instance_type
    )
    joining.address = address
    if main:
        admission = joining.ask(main, options.port)
        if admission is None:
            raise ClusterError(f"the job of the main host {main} is about to end")
        document = admission.document
    else:
        registrar = Registrar(
            joining.described(address),
            num_hosts=registration.num_hosts,
            groups=registration.groups,
            token=joining.token,
            tls=joining.tls,
            job_id=platform.job_name(),
        )
        document = registrar.collect(address, options.port, joining.timings.start_timeout_s, joining.log.show)
        # The registrar's description is the same for all hosts, so it lacks the current host.
        document |= {"current_host": name}
    return Joined(
        platform,
        document,
        source=f"the registrar on {main or address}",
        roles=options.roles,
        job=platform.job_name(),
        own_address=address,
    )


class _JoiningHost:
    """This host, which asks another one for the description of its job.

    Args:
        options: Options of this host.
        environ: Environment of this process.
        name: Name of this host.
        group: Group of this host. If it is empty, the job uses its first data group.
        instance_type: Instance type of this host. If it is empty, the job uses the type of the group.
    """

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str], *, name: str, group: str, instance_type: str
    ) -> None:
        logs.setup_logging(group=group or "joining", host=name, role="new", level=options.log_level)
        self.timings = Timings.from_options(options, environ)
        self.token = token_from_environment(environ) or staged_token(Path.cwd())
        self.tls = None if options.tls_dir is None else Tls(options.tls_dir, name)
        self.address = ""
        """Numeric address of this host, once it is known."""
        self._options = options
        self._environ = environ
        self._name = name
        self._group = group
        self._instance_type = instance_type
        self.log = WaitLog(self.timings.patience_s)

    def described(self, address: str) -> JoinedHost:
        """Return this host with a numeric address, as the other hosts of the job get to know it."""
        return JoinedHost(
            host=self._name,
            address=join_address(address, self._options.port),
            group=self._group,
            instance_type=self._instance_type,
        )

    def ask(self, peer: str, port: int) -> Admission | None:
        """Ask until the peer answers, at most for the start timeout. Return None if its job is about to end."""
        deadline_s = time.monotonic() + self.timings.start_timeout_s
        while True:
            try:
                # Resolved in each attempt, because the name may appear minutes after the start (F15).
                address = resolve_address(peer)
                address_of_this_host = self.address or own_address(self._name, address, port, self._environ)
                request = JoinRequest(
                    host=self.described(address_of_this_host),
                    version=__version__,
                    script_digest=script_digest(self._options),
                    # What runs on this host depends on the cluster, which this host does not know yet.
                    options=shared_options(self._options, placement=None),
                )
                found = ask_to_join(peer, join_address(address, port), request, token=self.token, tls=self.tls)
                # The peer has answered, so this is the address that the job knows.
                self.address = address_of_this_host
                return found
            except ClusterError as error:
                if time.monotonic() > deadline_s:
                    waited = f"{self.timings.start_timeout_s:.0f} s"
                    raise ClusterError(f"could not join the job at {peer} within {waited}: {error}") from error
                self.log.show(f"the job at {join_address(peer, port)}: {error}")
                time.sleep(POLL_S)


def own_address(name: str, peer: str, port: int, environ: Mapping[str, str] | None = None) -> str:
    """Return the numeric address of this host that a peer can reach.

    If ``name`` is an address, or if a file lists the hosts, this is the address of ``name``. Otherwise it is the
    address from which this host reaches the peer, because a machine's own name often means its loopback address.

    Args:
        name: Name of this host.
        peer: Numeric address of the peer.
        port: Any port of the peer. Nothing is sent.
        environ: Environment of this process, which may name a file that lists the hosts.

    Raises:
        ClusterError: If this host lacks a route to the peer.
    """
    is_listed = bool(name and (environ or {}).get("HETERO_HOSTS_FILE"))
    is_address = name.replace(".", "").isdigit() or ":" in name
    if is_listed or is_address:
        return resolve_address(name)
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # This call sends nothing, because the socket is a UDP socket. The kernel only chooses a route, and with it
            # the address of this host.
            probe.connect((peer, port))
        except OSError as error:
            raise ClusterError(f"this host has no route to {peer}: {error}") from error
        return str(probe.getsockname()[0])
