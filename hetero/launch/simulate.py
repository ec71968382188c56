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
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from hetero import logs
from hetero.cluster import ClusterSpec, Role, parse_cluster
from hetero.config import LaunchOptions, to_flags
from hetero.control import security
from hetero.errors import ClusterError, ConfigError, ExitCode, PortError
from hetero.launch.certificates import make_certificates
from hetero.launch.host import WORK_DIR_VARIABLE
from hetero.launch.progress import INTERVAL_VARIABLE, PROGRESS_MARK, StatusLine
from hetero.launch.relay import LineRelay
from hetero.launch.workdir import private_folder
from hetero.pricing import Catalogue
from hetero.process import adopt_descendants, describe_exit_status, end_descendants, reap_adopted, start_child

__all__ = ["SimulatedGroup", "parse_group", "simulate"]

logger = logging.getLogger(__name__)

PARENT_VARIABLE = "HETERO_PARENT_PID"
_MAX_HOSTS = 250
_CHANNEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # becomes a link in every host's tree
_TICK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroup:
    """One instance group of a simulated job."""

    name: str
    instance_type: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    name: str
    group: str
    role: Role
    address: str
    root: Path

    @property
    def base_dir(self) -> Path:
        """What ``/opt/ml`` is on the platform."""
        return self.root / "ml"


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
        run = stack.enter_context(_Run(hosts))
        for host in hosts:
            run.start(host, options, [*flags[host.group], *tls_flags], environment, channels)
        code = run.wait()
    _collect(hosts, output_dir)
    return code


class _Run:
    """The launchers of all simulated hosts."""

    def __init__(self, hosts: Sequence[_Host]) -> None:
        self._hosts = hosts
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, TextIO] = {}
        self._killed: set[str] = set()
        self._signals = 0
        self._status = StatusLine()
        self._relay = LineRelay(self._write)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Run:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
        adopt_descendants()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        end_descendants()  # what a launcher that was killed could not end
        self._relay.close()
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                log.close()
        self._stack.close()

    def start(
        self,
        host: _Host,
        options: LaunchOptions,
        flags: Sequence[str],
        environment: Mapping[str, str],
        channels: Mapping[str, Path],
    ) -> None:
        """Start the launcher of one host."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self._logs[host.name] = (host.root / "log.txt").open("w", encoding="utf-8", buffering=1)
        self._relay.add(host.name, read_end)
        # The options have been read from the environment; the launchers get them as flags.
        read = {f"HETERO_{field.name.upper()}" for field in dataclasses.fields(LaunchOptions)}
        inherited = {
            name: value for name, value in os.environ.items() if name not in read and not name.startswith("SM_")
        }
        self._processes[host.name] = start_child(
            [sys.executable, "-m", "hetero.cli", "launch", *flags, options.script, "--", *options.script_args],
            env={**inherited, **environment, **_platform_environment(host, channels)},
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,  # Ctrl-C is ours to hand on
        )
        os.close(write_end)

    def wait(self) -> int:
        """Wait for every host; return the job's exit code."""
        told_signals = 0
        while any(process.poll() is None for process in self._processes.values()):
            time.sleep(_TICK_S)  # nothing to wait on but children: a poll, not a synchronisation
            reap_adopted()
            self._status.draw()
            if self._signals > told_signals:
                told_signals = self._signals
                self._hand_on_signal()
        self._relay.close()
        self._status.clear()
        return self._exit_code()

    def _hand_on_signal(self) -> None:
        running = [name for name, process in self._processes.items() if process.poll() is None]
        if self._signals == 1:
            logger.warning("stopping; waiting for %s (again to kill them)", ", ".join(running))
            for name in running:
                self._processes[name].send_signal(signal.SIGTERM)
        else:
            logger.warning("killing %s", ", ".join(running))
            self._kill()

    def _kill(self) -> None:
        # Each launcher's children die with it (parent-death signal).
        for name, process in self._processes.items():
            if process.poll() is None:
                self._killed.add(name)
                process.kill()
        for process in self._processes.values():
            process.wait()

    def _exit_code(self) -> int:
        """Return what the trainer hosts say; a data host's status counts only if they are well."""
        statuses = [(host, self._processes[host.name].returncode) for host in self._hosts]
        for host, status in statuses:
            if host.name in self._killed:
                logger.error("%s (%s): killed on request", host.name, host.group)
            elif status != 0:
                logger.error("%s (%s): launcher %s", host.name, host.group, _describe_exit(status))
        causes = [_failure_line(host) for host, status in statuses if status != 0 and host.role is Role.TRAINER]
        if cause := next(filter(None, causes), ""):
            logger.error("the job failed: %s", cause)
        # A data host may be lost while the job goes well.
        bad = [status for host, status in statuses if status != 0 and host.role is Role.TRAINER]
        return 0 if not bad else bad[0] if bad[0] > 0 else 128 - bad[0]

    def _write(self, name: str, line: str) -> None:
        line = logs.escape_line(line)  # nearly always the launcher has, but its libraries may have written this
        with contextlib.suppress(OSError):  # a full disk loses lines and stops nothing
            self._logs[name].write(line + "\n")
        if self._status.is_live and PROGRESS_MARK in line:
            self._status.show(line.partition(PROGRESS_MARK)[2])
            return
        self._status.clear()
        logs.write_line(line)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _describe_exit(status: int) -> str:
    """Say what a launcher's exit status means; those of other programs, `describe_exit_status` knows."""
    try:
        return f"exited with {status}: {ExitCode(status).help_text}"
    except ValueError:
        return describe_exit_status(status)


def _failure_line(host: _Host) -> str:
    """Return the first line of a host's failure file, empty if there is none."""
    try:
        with (host.base_dir / "output" / "failure").open(encoding="utf-8", errors="replace") as file:
            return file.readline(2048).strip()
    except OSError:
        return ""


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
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"another simulation writes to {path}; wait for it, or give another --output-dir") from None
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


def _make_hosts(cluster: ClusterSpec, network: str, output_dir: Path) -> list[_Host]:
    return [
        _Host(
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


def _make_certificates(work_dir: Path, hosts: Sequence[_Host]) -> list[str]:
    """Make the certificates of this run; return the flags that name them."""
    make_certificates(work_dir / "tls", [host.name for host in hosts])
    return [f"--tls-dir={work_dir / 'tls'}"]


def _write_trees(
    hosts: Sequence[_Host], cluster: ClusterSpec, channels: Mapping[str, Path], *, output_dir: Path
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


def _platform_environment(host: _Host, channels: Mapping[str, Path]) -> dict[str, str]:
    """Return the variables that training scripts read on the platform."""
    base = host.base_dir
    found = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DATA_DIR": str(base / "output" / "data"),
        "SM_CURRENT_HOST": host.name,
    }
    for name in channels:
        found[f"SM_CHANNEL_{name.upper()}"] = str(base / "input" / "data" / name)
    return found


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


def _collect(hosts: Sequence[_Host], output_dir: Path) -> None:
    """Copy the report that one trainer host wrote to the top of the output folder."""
    for name in ("report.json", "report.md"):
        (output_dir / name).unlink(missing_ok=True)
        for host in hosts:
            source = host.base_dir / "output" / "data" / host.name / name
            if source.is_file() and not source.is_symlink():
                shutil.copyfile(source, output_dir / name)
                break
