"""The process that measures what samples cost on one host: ``python -m hetero.sample_costs.measuring FD``.

The process imports the user's script once, as a fork server does, and forks fetchers. First, one fetcher alone measures
single samples. Then 1, 2, 4, ... fetchers fetch at the same time in short bursts. The measurements take about 25 s. The
import of the script and the build of the data set come before them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from hetero.documents.records import decode, encode
from hetero.endpoint.endpoint import configure_process, exit_process
from hetero.endpoint.script import load_script
from hetero.errors import ChildFailedError, ConfigError, ExitCode, HeteroError, first_line
from hetero.metrics.figures import Figure
from hetero.metrics.profile.parts import Contents, HostPart
from hetero.metrics.profile.profile import ConcurrencyPoint, Spread, SupplyProfile
from hetero.pool.processes import why_not_fork
from hetero.sample_costs.fetcher import Fetcher
from hetero.sample_costs.options import Channel, CostOptions
from hetero.sample_costs.samples import CHUNK_S
from hetero.system.cgroups import free_memory
from hetero.system.memory import keep_freed_memory, prepare_to_fork
from hetero.system.open_files import open_files, reopen_files
from hetero.system.process import die_with_parent
from hetero.system.waits import CALL_TIMEOUT_S, END_TIMEOUT_S

__all__ = ["burst_sizes", "emulated_costs", "main", "measure_host", "most_processes", "with_wait"]

_BURSTS_S = 12.0
"""Limit of all bursts together, in seconds."""
_BUILD_S = 600.0
"""Limit for the import of the script, and for building the data set, in seconds."""
_ANSWER_S = 60.0
_LONG_BUILD_S = 10.0
"""Seconds. If one build takes longer, only one process is measured, because each process builds the data set."""
_MEMORY_SHARE = 0.7
"""Share of the free memory that the fetchers may use together."""
_MAX_PER_CPU = 4
_MAX_PROCESSES = 128
"""Largest number of fetchers. There is a limit because each fetcher builds the data set."""
_MAX_RECEIVED_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)


class _Fetchers:
    """The fetchers of this process, forked or new.

    Args:
        options: What to measure.
        before: What `open_files` returned before the script was imported.
    """

    def __init__(self, options: CostOptions, before: Mapping[int, str]) -> None:
        self._options = options
        # Forked fetchers would share the files and connections that the import of the script has opened.
        self._must_spawn = bool(why_not_fork(before))
        self._children: list[int] = []
        """Process ids of the fetchers."""
        self.channels: list[Channel] = []
        """A channel to each fetcher, in the order of their start."""
        if not self._must_spawn:
            prepare_to_fork()

    def start(self, count: int) -> None:
        """Start fetchers until there are ``count``. They have imported the script, but have not built the data set."""
        num_before = len(self.channels)
        start = self._spawn if self._must_spawn else self._fork
        for index in range(num_before, count):
            channel, theirs = Channel.pair(f"fetcher {index}")
            start(channel, theirs, index)
            self.channels.append(channel)
        # A spawned process imports the script itself, and reports the end of the import. Wait after the loop and not in
        # it, because the processes import the script at the same time.
        if self._must_spawn:
            for channel in self.channels[num_before:]:
                channel.receive(_BUILD_S)

    def ask(self, channels: Sequence[Channel], timeout_s: float, **command: Any) -> list[dict[str, Any]]:
        """Send one command to several fetchers at the same time and return their answers."""
        # Send all commands before waiting for the first answer, because the fetchers work at the same time.
        for channel in channels:
            channel.send(command)
        return [channel.receive(timeout_s) for channel in channels]

    def close(self) -> None:
        """End the fetchers."""
        for channel in self.channels:
            channel.close()
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _fork(self, channel: Channel, theirs: socket.socket, index: int) -> None:
        """Fork a fetcher. In the child, serve commands and end the process."""
        parent_pid = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._children.append(pid)
            return
        try:
            die_with_parent(parent_pid)
            # A fetcher must not read at a position that another fetcher has set in a shared file.
            reopen_files()
            # Close the inherited channels. A copy here would keep a channel open after the parent has closed it, and
            # the fetcher of that channel would not end.
            for other in (channel, *self.channels):
                other.close()
            Fetcher(Channel(theirs, "the process that measures"), self._options, index).serve()
        except BaseException:
            logger.exception("fetcher %d failed", index)
        finally:
            # Nobody reads the status. The parent notices that the channel is closed.
            exit_process(int(ExitCode.OK))

    def _spawn(self, channel: Channel, theirs: socket.socket, index: int) -> None:
        """Start a fetcher as a new process, and send it the options."""
        with theirs:
            command = [sys.executable, "-m", "hetero.sample_costs.fetcher", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._children.append(process.pid)
        channel.send({"parent_pid": os.getpid(), "index": index, "options": encode(self._options)})


def measure_host(options: CostOptions, progress: Callable[[str], object]) -> HostPart:
    """Measure on this host and return the figures. Blocks. A failure becomes a note in the result.

    Args:
        options: What to measure.
        progress: Called with the name of the next measurement.
    """
    notes: list[str] = []
    supply: SupplyProfile | None = None
    contents: Contents | None = None
    receive_cpu_s_per_gb: Figure | None = None
    if options.work is not None:
        # What samples cost, in processes like endpoints.
        progress(f"importing {options.script}")
        files_before_import = open_files()
        try:
            load_script(options.script, options.script_args, host=options.host, is_module=options.is_module)
            # Configure the process again, because the script may have set up logging or signals.
            configure_process("WARNING")
            supply, contents = _measure_costs(options, files_before_import, progress, notes)
        except (HeteroError, OSError) as error:
            logger.warning("samples were not measured on %s: %s", options.host, error)
            notes.append(f"Samples were not measured on {options.host}: {first_line(error)}")
    elif options.emulated_sample_s is not None:
        supply = emulated_costs(options)
    # Measure what receiving costs, with leaves of the sizes that were measured above.
    leaf_bytes = list(options.batch_bytes)
    if contents is not None and options.work is not None:
        leaf_bytes = [round(leaf.bytes_per_sample * options.work.batch_samples) for leaf in contents.leaves]
    if options.receives and any(leaf_bytes):
        progress("receiving")
        try:
            value = _receive(leaf_bytes, seconds=options.burst_s)
            receive_cpu_s_per_gb = _figure(value, "s/GB")
        except (HeteroError, OSError) as error:
            notes.append(f"The CPU time of receiving was not measured: {first_line(error)}")
    return HostPart(supply=supply, contents=contents, receive_cpu_s_per_gb=receive_cpu_s_per_gb, notes=tuple(notes))


def burst_sizes(num_processes: int) -> list[int]:
    """Return the numbers of processes of the bursts: 1, 2, 4, ... and the largest number."""
    # The number of binary digits of n - 1 is the number of powers of two below n.
    powers = [2**exponent for exponent in range((num_processes - 1).bit_length())]
    return [*powers, num_processes]


def most_processes(num_cpus: int, measured: SupplyProfile) -> int:
    """Return how many processes the largest burst has: one per CPU, or more if they wait for storage.

    While a process waits for storage, other processes can use its CPU. So a plan may propose more processes than CPUs,
    and the profile must contain a burst in which all CPUs are busy.
    """
    cpu_s = measured.sample_cpu_s.mean + measured.batch_cpu_s.mean
    # Without measured CPU time, it is not known how long a process waits for storage.
    if cpu_s <= 0:
        return num_cpus
    # For each second on the CPU, a process waits ``sample_wait_s / cpu_s`` seconds, in which others can use the CPU.
    per_cpu = min(_MAX_PER_CPU, 1 + measured.sample_wait_s.mean / cpu_s)
    return max(num_cpus, min(_MAX_PROCESSES, int(num_cpus * per_cpu)))


def emulated_costs(options: CostOptions) -> SupplyProfile:
    """Return the figures of the emulation: each vCPU makes a sample in the stated time, whatever other vCPUs do."""
    seconds = options.emulated_sample_s
    assert seconds is not None
    return SupplyProfile(
        instance_type=options.instance_type,
        vcpus=options.vcpus,
        sample_cpu_s=Spread.of([seconds], "s", "simulated"),
        sample_wait_s=Spread.of([0.0], "s", "simulated"),
        batch_cpu_s=Spread.of([0.0], "s", "simulated"),
        concurrency=tuple(
            ConcurrencyPoint(num_processes=size, samples_per_s=size / seconds, cpu_s_per_sample=seconds)
            for size in burst_sizes(options.vcpus)
        ),
    )


def _measure_costs(
    options: CostOptions, before: Mapping[int, str], progress: Callable[[str], object], notes: list[str]
) -> tuple[SupplyProfile, Contents]:
    """Measure what samples cost, with one fetcher and then with several. Add texts for the user to ``notes``.

    Args:
        options: What to measure.
        before: What `open_files` returned before the script was imported. It shows whether fetchers can be forked.
        progress: Called with the name of the next measurement.
        notes: Gets the texts.
    """
    is_emulated = options.emulated_sample_s is not None
    fetchers = _Fetchers(options, before)
    try:
        # One process alone: build time, samples, contents, memory.
        progress("building the data set")
        fetchers.start(1)
        build_s = fetchers.ask(fetchers.channels, _BUILD_S, do="build")[0]["seconds"]
        progress("samples")
        # With emulation, the times are not used. One fetch is enough for the contents of a batch.
        seconds = 0.0 if is_emulated else options.single_s
        (found,) = fetchers.ask(fetchers.channels, _ANSWER_S, do="measure", seconds=seconds)
        measured: SupplyProfile = decode(SupplyProfile, found["supply"])
        contents = decode(Contents, found["contents"])
        supply = emulated_costs(options) if is_emulated else measured
        # Several processes at the same time.
        if not is_emulated:
            points = _bursts(options, fetchers, measured, build_s, progress, notes)
            cold_s = found["cold_wait_s"]
            # A sample of a burst comes from memory. In a job, each process also waits for storage.
            supply = dataclasses.replace(measured, concurrency=tuple(with_wait(point, cold_s) for point in points))
        memory = fetchers.ask(fetchers.channels[:1], _ANSWER_S, do="memory")[0]
        supply = dataclasses.replace(
            supply,
            instance_type=options.instance_type,
            vcpus=options.vcpus,
            endpoint_private_bytes=_figure(memory["private"], "B"),
            endpoint_shared_bytes=_figure(memory["shared"], "B"),
            build_s=_figure(build_s, "s"),
            storage_bytes_per_sample=None if is_emulated else _figure(found["read_bytes_per_sample"], "B"),
        )
    finally:
        fetchers.close()
    return supply, contents


def _bursts(
    options: CostOptions,
    fetchers: _Fetchers,
    measured: SupplyProfile,
    build_s: float,
    progress: Callable[[str], object],
    notes: list[str],
) -> Iterator[ConcurrencyPoint]:
    """Yield the rates of 1, 2, 4, ... fetchers that fetch at the same time."""
    # Find the largest number of processes: as many as are useful, unless time or memory allow fewer.
    num_processes = most_processes(options.num_processes, measured)
    if build_s > _LONG_BUILD_S and num_processes > 1:
        notes.append(
            f"Only one process was measured on {options.host}, because each builds the data set for {build_s:.0f} s."
        )
        num_processes = 1
    num_that_fit = _num_within_memory(fetchers)
    if num_that_fit < num_processes:
        notes.append(f"Only {num_that_fit} of {num_processes} processes fit into the free memory of {options.host}.")
        num_processes = num_that_fit
    # All bursts together have a time limit, so with many bursts, each burst is shorter.
    sizes = burst_sizes(num_processes)
    seconds = min(options.burst_s, _BURSTS_S / len(sizes))
    sample_s = measured.sample_cpu_s.mean + measured.sample_wait_s.mean + measured.batch_cpu_s.mean
    # A burst ends only between two chunks, so a chunk takes a quarter of the burst at most.
    # 1e-9 avoids a division by 0.
    chunk = max(1, int(min(CHUNK_S, seconds / 4) / max(sample_s, 1e-9)))
    # A slow sample may take much longer than the mean one.
    timeout_s = _ANSWER_S + 100 * sample_s
    for size in sizes:
        progress(f"{size} of {num_processes} processes")
        first_new = len(fetchers.channels)
        fetchers.start(size)
        new = fetchers.channels[first_new:]
        fetchers.ask(new, _BUILD_S, do="build")
        # The first burst of a process is not measured, because it opens files and fills caches.
        fetchers.ask(new, timeout_s, do="burst", seconds=0.01, chunk=1)
        found = fetchers.ask(fetchers.channels[:size], timeout_s, do="burst", seconds=seconds, chunk=chunk)
        num_samples = sum(each["num_samples"] for each in found)
        if not num_samples:
            raise ConfigError(f"none of the samples that {size} processes tried in {seconds:g} s could be made")
        yield ConcurrencyPoint(
            num_processes=size,
            samples_per_s=sum(each["num_samples"] / each["wall_s"] for each in found),
            cpu_s_per_sample=sum(each["cpu_s"] for each in found) / num_samples,
        )


def with_wait(point: ConcurrencyPoint, wait_s: float) -> ConcurrencyPoint:
    """Return the rate of a burst whose processes wait for ``wait_s`` more seconds for each sample."""
    number = point.num_processes
    return dataclasses.replace(point, samples_per_s=number / (number / point.samples_per_s + wait_s))


def _num_within_memory(fetchers: _Fetchers) -> int:
    """Return how many fetchers fit into the free memory, if each takes as much private memory as the first one."""
    private_bytes = fetchers.ask(fetchers.channels[:1], _ANSWER_S, do="memory")[0]["private"]
    if not private_bytes:  # the system does not say, so nothing is known
        return sys.maxsize
    free_bytes = psutil.virtual_memory().available
    # In a container, psutil returns the free memory of the whole machine. The control group may have less.
    if (group_bytes := free_memory()) is not None:
        free_bytes = min(free_bytes, group_bytes)
    return max(1, int(_MEMORY_SHARE * free_bytes / private_bytes))


def _receive(leaf_bytes: Sequence[int], *, seconds: float) -> float:
    """Run `hetero.sample_costs.receiving` and return its CPU seconds per 10^9 bytes.

    Args:
        leaf_bytes: Bytes of each leaf of a batch. The leaves of a very large batch are made smaller in proportion.
        seconds: Duration of the measurement.
    """
    share = min(1.0, _MAX_RECEIVED_BYTES / sum(leaf_bytes))
    channel, theirs = Channel.pair("the process that receives")
    with theirs:
        command = [sys.executable, "-m", "hetero.sample_costs.receiving", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        sizes = [max(1, int(share * nbytes)) for nbytes in leaf_bytes if nbytes]
        channel.send({"parent_pid": os.getpid(), "leaf_bytes": sizes, "seconds": seconds})
        return float(channel.receive(_ANSWER_S)["cpu_s_per_gb"])
    finally:
        # The process ends when the channel is closed. If it does not, kill it.
        channel.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _figure(value: float | None, unit: str) -> Figure | None:
    return None if value is None else Figure(value=value, unit=unit, basis="measured")


def main() -> None:
    """Measure what the launcher wants, and send it the result."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), "the launcher")
    options = decode(CostOptions, channel.receive(CALL_TIMEOUT_S))
    die_with_parent(options.parent_pid)
    configure_process("WARNING")
    keep_freed_memory()
    try:
        part = measure_host(options, lambda text: channel.send({"progress": text}))
        channel.send({"part": part.to_json().decode()})
    except ChildFailedError as error:
        channel.send_error(error)
    exit_process(int(ExitCode.OK))


if __name__ == "__main__":
    main()
