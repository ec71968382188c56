"""Rehearse the job of an estimator on simulated hosts of this machine.

SageMaker's own local mode does not support heterogeneous clusters. This module records the request that the SDK would
send and the code that it would upload. ``hetero simulate --request`` then runs the request in a separate process. When
``hetero simulate`` ends, all processes that it started end too.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hetero.config import stated_flags
from hetero.control.status import MAX_SUMMARY_CHARS
from hetero.errors import ConfigError
from hetero.report import Report, load_report
from hetero.sagemaker.checks.check import unprepared
from hetero.sagemaker.recording import MAX_CODE_BYTES, Recording, record
from hetero.sagemaker.rehearsal.local_job import plan_rehearsal
from hetero.simulate.simulate import locked_folder
from hetero.system.process import start_child
from hetero.system.scripts import python_path
from hetero.system.workdir import private_folder

__all__ = ["Rehearsal", "rehearse", "unpack"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal."""

    exit_code: int
    """Exit code of the job: 0 if it succeeded, else one of `hetero.errors.ExitCode`."""
    failure: str
    """The text that the service would show as FailureReason. Empty if the job succeeded."""
    output_dir: Path
    """Folder with ``report.json``, ``report.md`` and ``hosts/<host>/``.

    The folder of each host contains ``ml``, which is the host's ``/opt/ml``, and ``log.txt``.
    """

    @property
    def report(self) -> Report:
        """The job's report.

        Raises:
            ConfigError: If the job ended before it wrote a report.
        """
        if not (self.output_dir / "report.json").exists():
            raise ConfigError(
                f"the rehearsal has no report, because no launcher of hetero wrote one; exit code {self.exit_code}\n"
                f"  to do: read {self.output_dir / 'hosts'}/*/log.txt; prepare(estimator) makes the job start hetero"
            )
        return load_report(self.output_dir)


def rehearse(
    estimator: Any,
    inputs: Any = None,
    *,
    output_dir: str | os.PathLike[str] = "rehearsal",
    data: Mapping[str, str | os.PathLike[str]] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
    through: str | None = None,
    environment: Mapping[str, str] | None = None,
    **options: object,
) -> Rehearsal:
    """Run the job that ``estimator.fit(inputs)`` or ``trainer.train(inputs)`` would start, on this machine.

    Each simulated host has its own address, processes and tree like ``/opt/ml``. The instance types determine the
    prices in the report. They determine the speed only if the option ``emulate_sample_s`` gives the time of a sample.

    The output of all hosts goes to standard error. The call blocks until the job has ended. Ctrl-C requests a stop as
    the platform does, and a second Ctrl-C kills the job.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3. The call changes neither it nor its session.
        inputs: The inputs that its ``fit`` or ``train`` takes, with local folders as paths or ``file://`` URIs.
        output_dir: Folder for the job's output. An earlier rehearsal's report is replaced, and so are the folders of
            hosts with the same names.
        data: Local folders for channels whose inputs are in S3, by channel.
        source_dir: Local folder with the code, if the estimator's code is in S3.
        through: ``toolkit`` runs the entry point with SageMaker's training toolkit, and ``plain`` runs it directly. The
            default is the toolkit if it is installed. The choice does not affect SDK 3, whose own scripts run the code.
        environment: Variables to add to the environment of all hosts.
        options: Launch options by name, such as ``emulate_sample_s``, in addition to the job's own ``hetero_``
            hyperparameters.

    Raises:
        ConfigError: If the request cannot be recorded or rehearsed, an option is unknown, or an input is not local.
        ClusterError: If the roles of the groups are unclear.
    """
    recording = record(estimator, inputs)
    target = Path(output_dir)
    with private_folder("hetero-rehearsal-") as folder:
        # Write the request, the code and the channels as files, because the job runs in another process.
        request_file = folder / "request.json"
        request_file.write_text(json.dumps(recording.request.document), encoding="utf-8")
        code = Path(source_dir) if source_dir is not None else _stage_source(recording, folder)
        channels = _stage_channels(recording, data or {}, folder)
        command = [sys.executable, "-m", "hetero.cli", "simulate", "--request", str(request_file)]
        command += [f"--output-dir={target}", *stated_flags(options)]
        # Raise errors about the arguments now, and not in the other process.
        plan_rehearsal(
            recording.request,
            output_dir=target,
            data=channels,
            source_dir=code,
            through=through,
            stated={name: value for name, value in options.items() if value is not None},
        )
        command += [f"--channel={name}={path}" for name, path in channels.items()]
        command += [f"--source-dir={code}"] if code is not None else []
        command += [f"--through={through}"] if through is not None else []
        for finding in unprepared(estimator, recording.request):
            logger.warning("%s", finding)
        # Run the job without the results of an earlier rehearsal.
        _forget_earlier(target)
        exit_code = _run(command, environment or {})
    failure = _failure(target) if exit_code else ""
    return Rehearsal(exit_code=exit_code, failure=failure, output_dir=target)


def _forget_earlier(output_dir: Path) -> None:
    """Remove the report and the failure files of an earlier rehearsal."""
    if output_dir.is_dir():
        with locked_folder(output_dir):
            for path in (*map(output_dir.joinpath, ("report.json", "report.md")), *_failure_files(output_dir)):
                path.unlink(missing_ok=True)


def _stage_source(recording: Recording, folder: Path) -> Path | None:
    """If the SDK made an archive of the user's code, unpack it and return its folder."""
    content = recording.objects.get(str(recording.request.parameter("sagemaker_submit_directory")))
    if content is None:
        return None
    source_dir = folder / "source"
    source_dir.mkdir()
    unpack(content, source_dir)
    return source_dir


def _stage_channels(recording: Recording, data: Mapping[str, str | os.PathLike[str]], folder: Path) -> dict[str, Path]:
    """Return the local data of each channel: the caller's ``data``, a local input, or uploads of the SDK.

    The caller's ``data`` takes precedence. Uploads are written to a folder inside ``folder``.
    """
    paths: dict[str, Path] = {}
    for channel in recording.request.channels:
        uri = channel.uri
        uploads = {name: content for name, content in recording.objects.items() if name.startswith(f"{uri}/")}
        if uri in recording.local_data:
            paths[channel.name] = recording.local_data[uri]
        # A channel in a file system has no URI.
        elif uri and uploads:
            paths[channel.name] = _stage(uploads, uri, folder / "channels" / str(len(paths)))
    return {**paths, **{name: Path(path) for name, path in data.items()}}


def _stage(uploads: Mapping[str, bytes], uri: str, folder: Path) -> Path:
    """Write the objects that the SDK would upload below ``uri`` into a folder."""
    for name, content in uploads.items():
        parts = PurePosixPath(name.removeprefix(f"{uri}/"))
        if parts.is_absolute() or ".." in parts.parts:
            raise ConfigError(f"the SDK would upload {name!r:.200}; expected a path below {uri}")
        path = folder / parts
        path.parent.mkdir(parents=True, exist_ok=True)
        # Private, because one of the uploads is the job's token.
        path.touch(mode=0o600)
        path.write_bytes(content)
    return folder


def _run(command: list[str], environment: Mapping[str, str]) -> int:
    """Run ``hetero simulate``, show its output, and return its exit code. Forwards each Ctrl-C."""
    process = start_child(
        command,
        # With HETERO_PARENT_PID, the simulation ends if this process is killed.
        env={**os.environ, **environment, "PYTHONPATH": python_path(), "HETERO_PARENT_PID": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Start a new session, because Ctrl-C must reach only this process, which forwards it.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            while True:
                try:
                    for line in process.stdout:
                        # Notebooks show sys.stderr, not descriptor 2.
                        sys.stderr.write(line.decode("utf-8", "replace"))
                    break
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            # The simulated hosts die with `process`.
            process.kill()
        process.wait()
    # Popen has a negative status if a signal ended the process. A shell returns 128 + the number of the signal.
    return status if status >= 0 else 128 - status


def _failure_files(output_dir: Path) -> list[Path]:
    return sorted((output_dir / "hosts").glob("*/ml/output/failure"))


def _failure(output_dir: Path) -> str:
    """Return the failure text of the job. All hosts that ran hetero wrote the same text."""
    files = _failure_files(output_dir)
    texts = [path.read_text(encoding="utf-8", errors="replace")[:MAX_SUMMARY_CHARS] for path in files]
    # Other programs, such as the toolkit, write other texts.
    texts_of_hetero = [text for text in texts if text.startswith("HET-")]
    return next(iter(texts_of_hetero or texts), "")


def unpack(content: bytes, folder: Path, *, max_bytes: int = MAX_CODE_BYTES) -> None:
    """Unpack the regular files and folders of a ``.tar.gz``.

    Args:
        content: The archive.
        folder: Target folder, which must exist.
        max_bytes: Maximum size of all files together.

    Raises:
        ConfigError: If the content is not such an archive, exceeds ``max_bytes``, or contains a link, a device or a
            path outside the folder.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r|gz") as archive:
            _unpack(archive, folder, max_bytes)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"the source archive cannot be unpacked: {str(error)[:200]}; expected a .tar.gz") from error


def _unpack(archive: tarfile.TarFile, folder: Path, max_bytes: int) -> None:
    """Unpack an archive of source code. Reject links, paths outside of the folder, and too many bytes."""
    left_bytes = max_bytes
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"the source archive has the path {member.name!r:.100}; expected relative paths without '..'"
            )
        if member.size > left_bytes:
            raise ConfigError(
                f"the source archive unpacks to more than {max_bytes} bytes; expected a source_dir without data"
            )
        target = folder / path
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        source = archive.extractfile(member) if member.isreg() else None
        if source is None:
            raise ConfigError(
                f"the source archive has {member.name!r:.100}, which is a link or a device; "
                "expected files and folders: put a copy into the source_dir"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            shutil.copyfileobj(source, file)
        # Keep private files private, as the toolkit does.
        target.chmod(member.mode & 0o755 | 0o600)
        left_bytes -= member.size
