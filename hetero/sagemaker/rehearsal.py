"""The local mode that heterogeneous clusters lack: the job of an estimator, on simulated hosts of this machine.

The request that the SDK would send is recorded, with the code that it would upload, and run by ``hetero simulate
--request`` in a process of its own, which ends with everything that it has started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hetero.config import stated_flags
from hetero.errors import ConfigError
from hetero.launch.failure import MAX_FAILURE_CHARS
from hetero.report import Report, load_report
from hetero.sagemaker.archive import unpack
from hetero.sagemaker.checks import unprepared
from hetero.sagemaker.containers import python_path
from hetero.sagemaker.hosts import check_rehearsal
from hetero.sagemaker.recording import Recording, record
from hetero.simulate.simulate import locked_folder
from hetero.system.process import start_child
from hetero.system.workdir import private_folder

__all__ = ["Rehearsal", "rehearse"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What became of a rehearsal."""

    exit_code: int
    """The job's: 0 if it went well; `hetero.errors.ExitCode` has the others."""
    failure: str
    """What the service would show as FailureReason; empty if the job went well."""
    output_dir: Path
    """Has ``report.json``, ``report.md`` and, per host, ``hosts/<host>/ml``, which is its /opt/ml, and ``log.txt``."""

    @property
    def report(self) -> Report:
        """The job's report.

        Raises:
            ConfigError: If the job ended before there was one.
        """
        if not (self.output_dir / "report.json").exists():
            raise ConfigError(
                f"the rehearsal left no report: no launcher of hetero has written one, exit code {self.exit_code}\n"
                f"  {self.output_dir / 'hosts'}/*/log.txt say what ran; prepare(estimator) has the job start hetero"
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
    **options: object,
) -> Rehearsal:
    """Run the job that ``estimator.fit(inputs)`` or ``trainer.train(inputs)`` would start, on this machine.

    Every host has an address, a tree as ``/opt/ml`` and processes of its own; the instance types give the prices of
    the report, not the speed, unless ``emulate_sample_s`` says what a sample costs. The lines of all hosts go to
    standard error. Blocks until the job has ended; Ctrl-C asks it to stop as the platform does, a second one kills it.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3; neither it nor its session is changed.
        inputs: What its ``fit`` or ``train`` takes, with local folders, as paths or ``file://`` URIs.
        output_dir: Receives what the job leaves, in place of an earlier rehearsal's report and hosts of the same names.
        data: Channel -> local folder, where the inputs are in S3.
        source_dir: The code, where the estimator's is in S3.
        through: ``toolkit`` has SageMaker's training toolkit run the entry point, ``plain`` runs it directly; the
            toolkit by default, if it is installed. SDK 3 has scripts of its own, which run in any case.
        options: Launch options by name, such as ``emulate_sample_s``, beside the job's own ``hetero_`` hyperparameters.

    Raises:
        ConfigError: If the request cannot be recorded or rehearsed, an option is unknown, or an input is not local.
        ClusterError: If the roles of its groups are not clear.
    """
    recording = record(estimator, inputs)
    target = Path(output_dir)
    with private_folder("hetero-rehearsal-") as folder:
        request_file = folder / "request.json"
        request_file.write_text(json.dumps(recording.request.document), encoding="utf-8")
        code = Path(source_dir) if source_dir is not None else _stage_source(recording, folder)
        channels = _stage_channels(recording, data or {}, folder)
        command = [sys.executable, "-m", "hetero.cli", "simulate", "--request", str(request_file)]
        command += [f"--output-dir={target}", *stated_flags(options)]
        check_rehearsal(
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
        _forget_earlier(target)
        exit_code = _run(command)
    failure = _failure(target) if exit_code else ""
    return Rehearsal(exit_code=exit_code, failure=failure, output_dir=target)


def _forget_earlier(output_dir: Path) -> None:
    """Remove what an earlier rehearsal said of its end."""
    if output_dir.is_dir():
        with locked_folder(output_dir):
            for path in (*map(output_dir.joinpath, ("report.json", "report.md")), *_failure_files(output_dir)):
                path.unlink(missing_ok=True)


def _stage_source(recording: Recording, folder: Path) -> Path | None:
    """Unpack the archive that the request names as the user's code, if the SDK made one."""
    value = recording.request.hyperparameters.get("sagemaker_submit_directory", "")
    content = recording.objects.get(value.strip('"'))
    if content is None:
        return None
    source_dir = folder / "source"
    source_dir.mkdir()
    unpack(content, source_dir)
    return source_dir


def _stage_channels(recording: Recording, data: Mapping[str, str | os.PathLike[str]], folder: Path) -> dict[str, Path]:
    """Return where the channels' data is: as the caller or the inputs say, or what the SDK would have uploaded."""
    found: dict[str, Path] = {}
    for channel in recording.request.channels:
        uri = channel.uri or ""
        uploads = {name: content for name, content in recording.objects.items() if name.startswith(f"{uri}/")}
        if uri in recording.local_data:
            found[channel.name] = recording.local_data[uri]
        elif uri and uploads:
            found[channel.name] = _stage(uploads, uri, folder / "channels" / str(len(found)))
    return {**found, **{name: Path(path) for name, path in data.items()}}


def _stage(uploads: Mapping[str, bytes], uri: str, folder: Path) -> Path:
    for name, content in uploads.items():
        parts = PurePosixPath(name.removeprefix(f"{uri}/"))
        if parts.is_absolute() or ".." in parts.parts:
            raise ConfigError(f"the SDK would upload {name!r:.200}; expected a path below {uri}")
        path = folder / parts
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # uploads have no mode, and the job's token is among them
        path.write_bytes(content)
    return folder


def _run(command: list[str]) -> int:
    """Run ``hetero simulate``, show what it writes, and return its exit code; Ctrl-C is handed on, once per press."""
    process = start_child(
        command,
        env={**os.environ, "PYTHONPATH": python_path(None), "HETERO_PARENT_PID": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is ours to hand on
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            while True:
                try:
                    for line in process.stdout:
                        sys.stderr.write(line.decode("utf-8", "replace"))  # a notebook shows this, not descriptor 2
                    break
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # its hosts die with it
        process.wait()
    return status if status >= 0 else 128 - status


def _failure_files(output_dir: Path) -> list[Path]:
    return sorted((output_dir / "hosts").glob("*/ml/output/failure"))


def _failure(output_dir: Path) -> str:
    """Return what the hosts say of the job's failure; all on which hetero ran say the same."""
    files = _failure_files(output_dir)
    texts = [path.read_text(encoding="utf-8", errors="replace")[:MAX_FAILURE_CHARS] for path in files]
    return next((text for text in texts if text.startswith("HET-")), texts[0] if texts else "")
