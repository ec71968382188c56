"""A whole multi-group job on one machine: the real launcher on every simulated host.

Every host gets a tree shaped like ``/opt/ml``, a name (``algo-1``, ...) and a
loopback address of its own. Nothing else differs from the platform: the
launchers read the cluster from their tree and meet over gRPC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.cluster import ClusterSpec, parse_cluster
from hetero.config import LaunchOptions, to_flags
from hetero.control import security
from hetero.errors import ClusterError, ConfigError, PortError
from hetero.launch.certificates import make_certificates
from hetero.launch.host import WORK_DIR_VARIABLE
from hetero.launch.launchers import Launchers, SimulatedHost
from hetero.launch.progress import INTERVAL_VARIABLE, StatusLine
from hetero.pricing import Catalogue
from hetero.workdir import private_folder

__all__ = ["SimulatedGroup", "parse_group", "simulate"]

logger = logging.getLogger(__name__)

PARENT_VARIABLE = "HETERO_PARENT_PID"
_MAX_HOSTS = 250
_CHANNEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # becomes a link in every host's tree


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroup:
    """One instance group of a simulated job."""

    name: str
    instance_type: str
    count: int


def parse_group(text: str) -> SimulatedGroup:
    """Read ``NAME=TYPE:COUNT``.

    Raises:
        ConfigError: If the text has another form or the count is out of range.
    """
    name, equals, rest = text.partition("=")
    instance_type, colon, count = rest.rpartition(":")
    if not (equals and colon and name and instance_type and count.isdigit()):
        raise ConfigError(
            f"--group {text!r} is not NAME=TYPE:COUNT; write for example --group data_group=ml.c5.9xlarge:2"
        )
    if not 1 <= int(count) <= _MAX_HOSTS:
        raise ConfigError(f"--group {text!r} has {count} hosts; a simulated group has 1 to {_MAX_HOSTS}")
    return SimulatedGroup(name=name, instance_type=instance_type, count=int(count))


def simulate(
    options: LaunchOptions,
    groups: Sequence[SimulatedGroup],
    *,
    output_dir: Path,
    channels: Mapping[str, Path],
    vcpus: Mapping[str, int],
    make_tls: bool = False,
) -> int:
    """Run the job on simulated hosts and return its exit code.

    Args:
        options: Handed on to every host's launcher.
        groups: The instance groups, in order.
        output_dir: Receives ``report.json``, ``report.md`` and ``hosts/<host>/``.
        channels: Input channels: name -> folder, seen by every host.
        vcpus: vCPU counts of instance types that the catalogue does not know.
        make_tls: Whether to make certificates and have the job use them.

    Raises:
        ConfigError: If the script does not exist, vCPUs are to be emulated and not known, or openssl is missing.
    """
    _check(options, groups, channels)
    if make_tls and options.tls_dir is not None:
        raise ConfigError("--tls makes certificates and --tls-dir has some; give one of them")
    cluster = _describe(groups, options)
    flags = {group.name: _flags(options, group, vcpus) for group in groups}
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, _lock_folder(output_dir))
        lock, network = _lock_block(options.port)
        stack.callback(lock.close)
        hosts = _make_hosts(cluster, network, output_dir)
        _write_trees(hosts, cluster, channels, output_dir=output_dir)
        work_dir = stack.enter_context(private_folder("hetero-simulate-"))
        hosts_file = work_dir / "hosts"
        hosts_file.write_text("".join(f"{host.address} {host.name}\n" for host in hosts), encoding="ascii")
        tls_flags = _make_certificates(work_dir, hosts) if make_tls else []
        descriptor, token_path = security.token_memfd(security.Token.generate())
        stack.callback(os.close, descriptor)
        job_id = f"{Path(options.script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        environment = {
            "HETERO_HOSTS_FILE": str(hosts_file),
            "HETERO_JOB_ID": job_id,
            "HETERO_SIMULATED": "1",
            WORK_DIR_VARIABLE: str(work_dir),
            security.TOKEN_FILE_VARIABLE: token_path,
            PARENT_VARIABLE: str(os.getpid()),
        }
        if StatusLine().is_live:
            environment[INTERVAL_VARIABLE] = "1"
        launchers = stack.enter_context(Launchers(hosts))
        for host in hosts:
            launchers.start(host, options, [*flags[host.group], *tls_flags], environment, channels)
        code = launchers.wait()
    _collect(hosts, output_dir)
    return code


def _check(options: LaunchOptions, groups: Sequence[SimulatedGroup], channels: Mapping[str, Path]) -> None:
    if not Path(options.script).is_file():
        raise ConfigError(f"the training script {options.script!r} does not exist in {Path.cwd()}; give its path")
    if not groups:
        raise ConfigError("no group given; write for example --group dnn_group=ml.p3.2xlarge:1")
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ConfigError(f"two groups of one name in {', '.join(names)}; group names are unique in a job")
    if sum(group.count for group in groups) > _MAX_HOSTS:
        raise ConfigError(f"{sum(group.count for group in groups)} hosts; a simulated job has at most {_MAX_HOSTS}")
    for name, path in channels.items():
        if not _CHANNEL_NAME.fullmatch(name):
            raise ConfigError(
                f"--channel {name!r:.80} is no name of a channel; expected at most 64 letters, digits and . _ -, "
                "with a letter, digit or _ first"
            )
        if not path.is_dir():
            raise ConfigError(f"--channel {name}={path}: no such folder")


def _lock_folder(path: Path) -> int:
    """Reserve the output folder for this run; leaves no file behind and goes with the process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another simulation writes to {path}; wait for it, or give another --output-dir") from None
    except OSError as error:  # a file system without locks, or NFS, which locks no folders
        logger.info("cannot lock %s (%s): that nobody else writes there is not checked", path, error)
    return descriptor


def _lock_block(port: int) -> tuple[socket.socket, str]:
    """Reserve a block of loopback addresses for this run.

    A datagram socket on the block's first address is the lock: it leaves no
    file behind and goes with the process.
    """
    for second in range(31, 255):
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind((f"127.{second}.0.1", port))
        except OSError:
            lock.close()
            continue
        return lock, f"127.{second}.0"
    raise PortError("no free block of loopback addresses from 127.31.0.0 on; end other simulations first")


def _describe(groups: Sequence[SimulatedGroup], options: LaunchOptions) -> ClusterSpec:
    """Return the cluster that the groups form; checks names and roles as the platform's description is checked."""
    names = iter(f"algo-{number}" for number in itertools.count(1))
    instance_groups = [
        {
            "instance_group_name": group.name,
            "instance_type": group.instance_type,
            "hosts": list(itertools.islice(names, group.count)),
        }
        for group in groups
    ]
    document = {
        "current_group_name": groups[0].name,
        "current_host": "algo-1",
        "current_instance_type": groups[0].instance_type,
        "hosts": [host for group in instance_groups for host in group["hosts"]],
        "instance_groups": instance_groups,
        "network_interface_name": "lo",
    }
    return parse_cluster(document, roles=options.roles, source="--group")


def _make_hosts(cluster: ClusterSpec, network: str, output_dir: Path) -> list[SimulatedHost]:
    return [
        SimulatedHost(
            name=host.name,
            group=host.group,
            role=host.role,
            address=f"{network}.{index + 2}",
            root=output_dir / "hosts" / host.name,
        )
        for index, host in enumerate(cluster.hosts)
    ]


def _check_is_below(path: Path, folder: Path) -> None:
    """Raise if links lead out of the folder: what is there is removed before a run."""
    if path.is_symlink() or folder.resolve() not in path.resolve().parents:
        raise ConfigError(f"{path} is a link that leads out of {folder}; remove it, or give another --output-dir")


def _make_certificates(work_dir: Path, hosts: Sequence[SimulatedHost]) -> list[str]:
    """Make the certificates of this run; return the flags that name them."""
    make_certificates(work_dir / "tls", [host.name for host in hosts])
    return [f"--tls-dir={work_dir / 'tls'}"]


def _write_trees(
    hosts: Sequence[SimulatedHost], cluster: ClusterSpec, channels: Mapping[str, Path], *, output_dir: Path
) -> None:
    for host in hosts:
        _check_is_below(host.root, output_dir)
        if host.root.exists():
            shutil.rmtree(host.root)
        config = host.base_dir / "input" / "config"
        config.mkdir(parents=True)
        here = dataclasses.replace(cluster, current_host=host.name)
        _write_json(config / "resourceconfig.json", here.to_resource_config())
        _write_json(config / "hyperparameters.json", {})
        channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        _write_json(config / "inputdataconfig.json", dict.fromkeys(channels, channel))
        data = host.base_dir / "input" / "data"
        for folder in (data, host.base_dir / "model", host.base_dir / "output" / "data", host.base_dir / "checkpoints"):
            folder.mkdir(parents=True)
        for name, path in channels.items():
            (data / name).symlink_to(path.resolve())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _flags(options: LaunchOptions, group: SimulatedGroup, vcpus: Mapping[str, int]) -> list[str]:
    """Return the launcher's flags on the hosts of ``group``, with its vCPUs if they are emulated."""
    flags = to_flags(dataclasses.replace(options, output_dir=None, emulate_vcpus=None))
    catalogue = Catalogue.load(profile=options.price_profile, region=options.region, price_file=options.price_file)
    if options.emulate_sample_s is None:
        if catalogue.find(group.instance_type) is None:
            logger.warning("group %s: %s", group.name, catalogue.explain(group.instance_type))
        return flags
    count = vcpus.get(group.instance_type)
    if count is None:
        known = catalogue.find(group.instance_type)
        count = known.vcpus if known is not None else None
    if count is None:
        raise ClusterError(
            f"the vCPU count of instance type {group.instance_type!r} is not known, and its vCPUs are to be emulated; "
            f"check the spelling or give --vcpus {group.instance_type}=N"
        )
    return [*flags, "--emulate-vcpus", str(count)]


def _collect(hosts: Sequence[SimulatedHost], output_dir: Path) -> None:
    """Copy the report that one trainer host wrote to the top of the output folder."""
    for name in ("report.json", "report.md"):
        (output_dir / name).unlink(missing_ok=True)
        for host in hosts:
            source = host.base_dir / "output" / "data" / host.name / name
            if source.is_file() and not source.is_symlink():
                shutil.copyfile(source, output_dir / name)
                break
