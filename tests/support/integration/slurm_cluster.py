"""A Slurm of this machine: a controller and a daemon per node, each node at a separate loopback address.

The daemons run in a mount namespace of their own, whose /etc/hosts has the names of the nodes. It needs root and the
packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["NODES", "SlurmCluster", "missing"]

NODES = {"gpu01": "127.0.16.1", "cpu01": "127.0.16.2", "cpu02": "127.0.16.3"}
"""Address of each node."""
NUM_GPUS = 2
"""GPUs of gpu01, as Slurm counts them."""
_DEVICES = ("/dev/null", "/dev/zero")
"""Files that Slurm takes for GPUs."""
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "sacct")
_START_S = 100.0
_PORT = 17900
_ADDRESS = "198.18.0.1/32"
"""An address of benchmarks, which is not a loopback address."""
_DONE = re.compile(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|DEADLINE|PREEMPTED)")


def missing() -> str:
    """Return why Slurm cannot run here, or an empty text."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "needs root"


class SlurmCluster:
    """A running Slurm.

    Args:
        folder: Folder for its files. It must not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[SlurmCluster]:
        """Run the daemons inside of the context."""
        self._write()
        has_address = _has_address()
        if not has_address:  # in a namespace with nothing but lo, where Slurm resolves no name and no address
            subprocess.run(["ip", "address", "add", _ADDRESS, "dev", "lo"], check=True)
        try:
            for command in self._commands():
                log = (self.folder / "log" / f"{len(self._processes)}.out").open("wb")
                with log:
                    self._processes.append(
                        subprocess.Popen(
                            [
                                "unshare",
                                "--mount",
                                "sh",
                                "-ec",
                                f'mount --bind {self.folder}/hosts /etc/hosts; exec "$@"',
                                "sh",
                                *command,
                            ],
                            env=self.environment,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
                time.sleep(0.3)
            self._wait_until_idle()
            yield self
        finally:
            for process in reversed(self._processes):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in reversed(self._processes):
                try:
                    process.wait(300)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if not has_address:
                subprocess.run(["ip", "address", "delete", _ADDRESS, "dev", "lo"], check=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for Slurm's programs."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def submit(self, script: str, cwd: Path, variables: Mapping[str, str] | None = None) -> int:
        """Submit a batch script and return the job's number."""
        path = cwd / "job.sh"
        path.write_text(script, encoding="utf-8")
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={cwd}/job.out", str(path)],
            cwd=cwd,
            env={**self.environment, **(variables or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def run(self, command: Sequence[str]) -> str:
        """Run one of Slurm's programs and return what it wrote."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def wait(self, job: int, timeout_s: float = 90.0) -> tuple[str, int, int]:
        """Return state, exit code and signal of a job that has ended."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            text = self.run(["scontrol", "show", "job", str(job)])
            state = _DONE.search(text)
            if state is not None:
                code = re.search(r" ExitCode=([0-9]+):([0-9]+)", text)
                assert code is not None, text
                return state[1], int(code[1]), int(code[2])
            time.sleep(0.2)
        raise AssertionError(f"job {job} has not ended after {timeout_s:.0f} s: {text}")

    def _wait_until_idle(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            states = self.run(["sinfo", "--noheader", "--format=%T", "--Node"]).split()
            if states.count("idle") >= len(NODES):
                return
            time.sleep(0.2)
        raise AssertionError(f"the nodes are not idle after {_START_S:.0f} s: {self.run(['sinfo'])}")

    def _commands(self) -> list[list[str]]:
        run = self.folder / "run"
        munge = ["munged", "--foreground", f"--socket={run}/munge.socket", f"--key-file={self.folder}/munge.key"]
        munge += [f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log"]
        munge += [f"--seed-file={run}/munged.seed", "--force"]
        return [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]

    def _write(self) -> None:
        for name in ("state", "spool", "log", "run"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = [f"{address} {node}" for node, address in NODES.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n", encoding="utf-8")
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr={address} Port={_PORT + 1 + number} CPUs=2 State=UNKNOWN"
            + (f" Gres=gpu:{NUM_GPUS}" if node.startswith("gpu") else "")
            for number, (node, address) in enumerate(NODES.items())
        ]
        devices = "\n".join(f"NodeName=gpu01 Name=gpu File={device}" for device in _DEVICES[:NUM_GPUS])
        (self.folder / "gres.conf").write_text(devices + "\n", encoding="utf-8")
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmctldPort": str(_PORT),
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.folder}/run/munge.socket",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{self.folder}/state",
            "SlurmdSpoolDir": f"{self.folder}/spool/%n",
            "SlurmctldPidFile": f"{self.folder}/run/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/run/slurmd-%n.pid",
            "SlurmctldLogFile": f"{self.folder}/log/slurmctld.log",
            "SlurmdLogFile": f"{self.folder}/log/slurmd-%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "SchedulerParameters": "bf_interval=1,sched_interval=1",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "ReturnToService": "2",
            "MpiDefault": "none",
            "GresTypes": "gpu",
            "KillWait": "30",
            "MinJobAge": "600",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [
            *nodes,
            "PartitionName=gpu Nodes=gpu01 State=UP",
            "PartitionName=cpu Nodes=cpu[01-02] Default=YES State=UP",
        ]
        self.conf.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _has_address() -> bool:
    """Return whether this machine has an address that is not a loopback address."""
    shown = subprocess.run(
        ["ip", "-oneline", "address", "show", "scope", "global"], capture_output=True, text=True, check=False
    )
    return bool(shown.stdout.strip())
