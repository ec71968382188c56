"""Runs a whole multi-group job on one machine, with the real launcher on every simulated host.

Every host gets a tree shaped like ``/opt/ml``, a name (``algo-1``, ...) and its own loopback address. As on the
platform, the launchers read the cluster from their tree and connect to each other over gRPC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hetero.cluster import ClusterSpec, parse_cluster
from hetero.cluster.groups import StatedGroup, group_document, parse_stated_group
from hetero.cluster.platforms.sagemaker import folders_below, script_variables
from hetero.config import LaunchOptions, to_flags
from hetero.control import security
from hetero.errors import ClusterError, ConfigError, PortError
from hetero.launch.host import WORK_DIR_VARIABLE
from hetero.launch.reporting.profiling import TEXT_FILE_NAME
from hetero.launch.reporting.progress import INTERVAL_VARIABLE, StatusLine
from hetero.metrics.profile.profile import PROFILE_FILE_NAME
from hetero.simulate.launchers import HostCommand, Launchers, SimulatedHost
from hetero.simulate.opt_ml import CHANNEL_NAME, InputChannel, earlier_hosts, write_opt_ml
from hetero.system.process import PARENT_VARIABLE
from hetero.system.scripts import find_script, script_label
from hetero.system.workdir import private_folder
from hetero.wire.certificates import make_certificates

__all__ = [
    "check_num_hosts",
    "emulated_vcpus",
    "locked_folder",
    "parse_group",
    "run_hosts",
    "simulate",
]

logger = logging.getLogger(__name__)

_MAX_HOSTS = 250


def parse_group(text: str) -> StatedGroup:
    """Parse a ``NAME=TYPE:COUNT`` text with as many hosts as a simulated job can have.

    Raises:
        ConfigError: If the text has another form or the count is out of range.
    """
    return parse_stated_group(text, max_hosts=_MAX_HOSTS)


def simulate(
    options: LaunchOptions,
    groups: Sequence[StatedGroup],
    *,
    output_dir: Path,
    channels: Mapping[str, Path],
    vcpus: Mapping[str, int],
    make_tls: bool = False,
) -> int:
    """Run the job on simulated hosts and return its exit code.

    Args:
        options: Options for every host's launcher.
        groups: The instance groups, in order.
        output_dir: Folder for ``report.json``, ``report.md`` and ``hosts/<host>/``.
        channels: Folder of each input channel by its name. Every host has all channels.
        vcpus: vCPU counts by instance type, for types that are not in the catalogue.
        make_tls: Whether to make certificates for the job and use them.

    Raises:
        ClusterError: If vCPUs are to be emulated and their number is not known, or if a group's role is unclear.
        ConfigError: If the script does not exist, an argument is malformed, or cryptography is missing.
        PortError: If no block of loopback addresses is free.
    """
    _check(options, groups, channels)
    if make_tls and options.tls_dir is not None:
        raise ConfigError("--tls makes certificates, and --tls-dir names existing ones; give one of them")
    cluster = _describe(groups, options)
    types = [group.instance_type for group in groups]
    # Refuse a --vcpus that no group uses, because a type may be misspelled.
    if unused := next((name for name in vcpus if name not in types), None):
        raise ConfigError(
            f"--vcpus {unused}={vcpus[unused]}: no group has that type; expected one of {', '.join(types)}"
        )
    # Only the number of emulated vCPUs differs between groups.
    flags = to_flags(dataclasses.replace(options, emulate_vcpus=None))
    flags_of_group = {}
    for group in groups:
        num_vcpus = emulated_vcpus(options, group, vcpus)
        flags_of_group[group.name] = flags if num_vcpus is None else [*flags, "--emulate-vcpus", str(num_vcpus)]
    label = script_label(options.script, is_module=options.module)
    job_id = f"{label}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def set_up(host: SimulatedHost) -> HostCommand:
        """Write the tree of one host, and return the command of its launcher."""
        write_opt_ml(
            host.base_dir,
            resource_config=dataclasses.replace(cluster, current_host=host.name).to_resource_config(),
            hyperparameters={},
            channels=[InputChannel(name=name, path=path) for name, path in channels.items()],
        )
        launch = [sys.executable, "-m", "hetero.cli", "launch", *flags_of_group[host.group]]
        return HostCommand(
            arguments=[*launch, options.script, "--", *options.script_args],
            environment={"HETERO_JOB_ID": job_id, **script_variables(host.base_dir, host.name, list(channels))},
        )

    return run_hosts(cluster, set_up, output_dir=output_dir, port=options.port, make_tls=make_tls)


def run_hosts(
    cluster: ClusterSpec,
    set_up: Callable[[SimulatedHost], HostCommand],
    *,
    output_dir: Path,
    port: int,
    make_tls: bool = False,
    make_token: bool = True,
    kill_after_s: float | None = None,
) -> int:
    """Run a program on every host of a simulated cluster and return the job's exit code.

    Each host has its own loopback address and an empty folder below ``output_dir``. Its environment gives the addresses
    of all hosts and the job's token, and marks the host as simulated.

    Args:
        cluster: The hosts, with their roles.
        set_up: Fills a host's folder and returns the command to start there. It is called for every host before any
            host is started.
        output_dir: Folder for ``report.json``, ``report.md`` and ``hosts/<host>/``. It must exist.
        port: Port of every launcher.
        make_tls: Whether to make certificates for the job and use them.
        make_token: Whether to make a token for the job. False if the job brings its own token.
        kill_after_s: Seconds from a request to stop until launchers that still run are killed. With None, only a
            second request kills them.

    Raises:
        ConfigError: If another simulation writes to the folder, or cryptography is missing.
        PortError: If no block of addresses is free.
    """
    with contextlib.ExitStack() as stack:
        # Lock the folder, because two simulations with the same folder once deleted each other's trees.
        stack.enter_context(locked_folder(output_dir))
        lock, network = _lock_block(port)
        stack.callback(lock.close)
        # The block's first address is its lock, so the hosts begin at the second.
        hosts = [
            SimulatedHost(
                name=host.name,
                group=host.group,
                role=host.role,
                address=f"{network}.{index}",
                root=output_dir / "hosts" / host.name,
            )
            for index, host in enumerate(cluster.hosts, 2)
        ]
        if any(host.root.exists() for host in hosts):
            logger.info("replacing the hosts of an earlier run in %s; another --output-dir keeps them", output_dir)
        for host in hosts:
            _clear(host.root, output_dir)
        # Remove hosts of earlier runs that this run does not have.
        for path in earlier_hosts(output_dir):
            shutil.rmtree(path)
        commands = [set_up(host) for host in hosts]
        # Prepare what all hosts share: addresses, token and certificates.
        work_dir = stack.enter_context(private_folder("hetero-simulate-"))
        hosts_file = work_dir / "hosts"
        hosts_file.write_text("".join(f"{host.address} {host.name}\n" for host in hosts), encoding="ascii")
        environment = {
            "HETERO_HOSTS_FILE": str(hosts_file),
            "HETERO_SIMULATED": "1",
            # A launcher that is killed cannot remove its private folder, so this process removes it.
            WORK_DIR_VARIABLE: str(work_dir),
            PARENT_VARIABLE: str(os.getpid()),
        }
        if make_token:
            descriptor, environment[security.TOKEN_FILE_VARIABLE] = security.token_memfd(security.Token.generate())
            stack.callback(os.close, descriptor)
        if make_tls:
            make_certificates(work_dir / "tls", [host.name for host in hosts])
            environment["HETERO_TLS_DIR"] = str(work_dir / "tls")
        # A live status line shows the launchers' latest progress line. Let them write one each second, not each 10 s.
        if StatusLine().is_live:
            environment[INTERVAL_VARIABLE] = "1"
        # Start all hosts and wait for their end.
        launchers = stack.enter_context(Launchers(hosts, kill_after_s=kill_after_s))
        for host, command in zip(hosts, commands, strict=True):
            whole = dataclasses.replace(command, environment={**environment, **command.environment})
            launchers.start(host, whole)
        code = launchers.wait()
    _collect(hosts, output_dir)
    return code


def check_num_hosts(count: int) -> None:
    """Raise `ConfigError` if a simulated job cannot have so many hosts. Their addresses must fit into one block."""
    if count > _MAX_HOSTS:
        raise ConfigError(f"the job has {count} hosts; expected at most {_MAX_HOSTS} in a simulated job")


def _check(options: LaunchOptions, groups: Sequence[StatedGroup], channels: Mapping[str, Path]) -> None:
    """Check the arguments of a simulation.

    Raises:
        ConfigError: If the script does not exist, or a group or channel is wrong.
    """
    find_script(options.script, is_module=options.module)
    if not groups:
        is_after_script = any(text.partition("=")[0] == "--group" for text in options.script_args)
        hint = f"the --group after {options.script} is an argument of the script; " if is_after_script else ""
        raise ConfigError(
            f"no group is given\n  {hint}to do: give for example --group dnn_group=ml.p3.2xlarge:1 before the script"
        )
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ConfigError(f"two groups have the same name: {', '.join(names)}; expected distinct names")
    check_num_hosts(sum(group.count for group in groups))
    for name, path in channels.items():
        if not CHANNEL_NAME.fullmatch(name):
            raise ConfigError(
                f"--channel {name!r:.80}: expected a name of 1 to 64 letters, digits and . _ - that starts with a "
                "letter, a digit or _"
            )
        if not path.is_dir():
            raise ConfigError(f"--channel {name}={path}: expected an existing folder")


@contextlib.contextmanager
def locked_folder(path: Path, writer: str = "simulation") -> Iterator[None]:
    """Reserve an output folder. The lock leaves no file behind, and the kernel releases it when the process ends.

    Args:
        path: The folder, which must exist.
        writer: What writes to it, for messages.

    Raises:
        ConfigError: If another process writes to the folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another {writer} writes to {path}; wait for it, or give another --output-dir") from None
    # Some file systems lack locks, and NFS locks only files.
    except OSError as error:
        logger.info("cannot lock %s (%s); make sure that no other %s writes there", path, error, writer)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock_block(port: int) -> tuple[socket.socket, str]:
    """Reserve a block of loopback addresses, and return the lock and the block's prefix, for example ``127.31.0``.

    The lock is a datagram socket on the block's first address. It leaves no file behind, and the kernel closes it when
    the process ends.

    Raises:
        PortError: If no block is free.
    """
    # A block is 127.N.0.0/24. Programs of the machine may use addresses with a small N, such as 127.0.0.1.
    for number in range(31, 255):
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind((f"127.{number}.0.1", port))
        except OSError:
            # Another simulation has the block.
            lock.close()
            continue
        return lock, f"127.{number}.0"
    raise PortError("no free block of loopback addresses from 127.31.0.0 on; end other simulations first")


def _describe(groups: Sequence[StatedGroup], options: LaunchOptions) -> ClusterSpec:
    """Return a cluster with these groups. Names and roles are checked as on the platform."""
    names = iter(f"algo-{number}" for number in itertools.count(1))
    document = {
        "current_host": "algo-1",
        "instance_groups": [
            group_document(group.name, group.instance_type, list(itertools.islice(names, group.count)))
            for group in groups
        ],
        "network_interface_name": "lo",
    }
    return parse_cluster(document, roles=options.roles, source="--group")


def _clear(path: Path, folder: Path) -> None:
    """Make an empty folder, or empty an existing one.

    Args:
        path: The folder to make.
        folder: The folder that must contain it.

    Raises:
        ConfigError: If links lead out of ``folder``, because files there must not be removed.
    """
    # A link in the output folder once led to the removal of the files behind it.
    if path.is_symlink() or folder.resolve() not in path.resolve().parents:
        raise ConfigError(f"{path} is a link that leads out of {folder}; remove it, or give another --output-dir")
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def emulated_vcpus(options: LaunchOptions, group: StatedGroup, vcpus: Mapping[str, int]) -> int | None:
    """Return how many vCPUs are emulated on each host of a group, None if they are not emulated.

    Log a warning if they are not emulated and the instance type is not in the catalogue.

    Args:
        options: Options of the job.
        group: The group.
        vcpus: vCPU counts by instance type, for types that are not in the catalogue.

    Raises:
        ClusterError: If vCPUs are to be emulated and their number is not known.
    """
    catalogue = options.catalogue()
    known = catalogue.find(group.instance_type)
    if options.emulate_sample_s is None:
        # Without emulation, the run does not need the number of vCPUs, and only its costs are missing.
        if known is None:
            logger.warning("group %s: %s", group.name, catalogue.explain(group.instance_type))
        return None
    count = vcpus.get(group.instance_type, known.vcpus if known is not None else None)
    if count is None:
        guess = catalogue.suggestion(group.instance_type)
        raise ClusterError(
            f"group {group.name}: the vCPUs of instance type {group.instance_type!r} are not known{guess}\n"
            "  --emulate-sample-seconds needs their number.\n"
            f"  to do: correct the type; or, if it is correct, give --vcpus {group.instance_type}=N, and "
            f"--price {group.instance_type}=USD for its costs"
        )
    return count


def _collect(hosts: Sequence[SimulatedHost], output_dir: Path) -> None:
    """Copy the report or the profile from the folder of the host that wrote it to the top of the output folder."""
    for name in ("report.json", "report.md", PROFILE_FILE_NAME, TEXT_FILE_NAME):
        # Remove the file of an earlier run. Otherwise a failed run would seem to have the result of the earlier run.
        (output_dir / name).unlink(missing_ok=True)
        for host in hosts:
            source = folders_below(host.base_dir).output / host.name / name
            # A script may have put a link there, which may lead to any file.
            if source.is_file() and not source.is_symlink():
                shutil.copyfile(source, output_dir / name)
                break
