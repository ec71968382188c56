"""Runs a script as the rank of a job with data hosts, and records what would go wrong there.

`hetero.script_check.check` starts this module as ``python -m hetero.script_check.run OUTPUT SECONDS SCRIPT
ARGUMENTS...``. ``-m MODULE`` may replace SCRIPT.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from hetero import shards
from hetero.batches.failures import ON_EVERY_HOST
from hetero.control.rank import session as sessions
from hetero.documents.files import write_text
from hetero.endpoint.script import join_package
from hetero.errors import DatasetError, DatasetMismatchError, HeteroError
from hetero.script_check.findings import Finding
from hetero.script_check.session import CheckSession
from hetero.script_check.source import (
    call_line,
    change_line,
    impure_lines,
    is_user_file,
    method_line,
    nested_factory,
    static_findings,
)
from hetero.system.scripts import find_script

_PLACE = re.compile(r'File "([^"]+)", line (\d+)|line (\d+) of (\S+)|in (\S+\.py):(\d+)')
"""The three forms that tracebacks and messages of hetero use for a file and a line."""
_SAMPLER_NAME = re.compile(r"sampler (\w+) ")
_SHARDS = re.compile(r"\d+ of \d+ shards cannot be used")
_CHANGED_VALUE = re.compile(r"(?:global )?(\S+) has another value on ")
_HOW_TO_BE_PURE = (
    "A sample may depend on its index and on the global generators of random, NumPy and torch, which hetero seeds for "
    "each sample. Seed a generator of the data set's own in a method on_seed(self, key). Compute what changes from "
    "sample to sample, such as a counter or the place in a file, from the index."
)
_LOGGERS_OF_ERRORS = ("hetero.reader", "hetero.endpoint", "hetero.pool", "hetero.torch.passes")


class _FindingsFile:
    """The findings so far, which are written after each one, because the process may be ended at any time."""

    def __init__(self, output: Path, script: Path, data_host_folder: str) -> None:
        self._output = output
        self._data_host_folder = data_host_folder
        self.script = os.path.realpath(script)
        self.folder = os.path.dirname(self.script)  # noqa: PTH120
        self.findings: list[Finding] = []
        self.write()

    def add(self, finding: Finding) -> None:
        """Record a finding, unless another line has the same one already."""
        # A library may have searched a relative path, and raised its own error or found no file.
        text = f"{finding.what}\n{finding.to_do}"
        is_of_path = self._data_host_folder in text or "has no samples" in finding.what
        if is_of_path and ON_EVERY_HOST not in text:
            finding = dataclasses.replace(finding, to_do=f"{finding.to_do}\n{ON_EVERY_HOST}")
        if not any(each.what == finding.what for each in self.findings):
            self.findings.append(finding)
            self.write()

    def write(self, num_batches: int | None = None) -> None:
        """Write what was found. ``num_batches``: how many batches were compared, at the end of the check."""
        findings = [dataclasses.asdict(each) for each in self.findings]
        write_text(self._output, json.dumps({"findings": findings, "num_batches": num_batches}))

    def places(self, text: str, frames: Sequence[traceback.FrameSummary]) -> Iterator[tuple[str, int]]:
        """Yield file and line of places in the user's files: the places that a text names, then the stack frames.

        The last place in the text comes first, because it is nearest to the cause. For the same reason, the last frame
        comes before the other frames. There is at least one place.
        """
        for found in reversed(list(_PLACE.finditer(text))):
            # A place is `File "FILE", line N` (groups 1 and 2), `line N of FILE` (3 and 4) or `in FILE:N` (5 and 6).
            # The groups of the other two forms are None.
            file, line = found[1] or found[4] or found[5], found[2] or found[3] or found[6]
            # A message may name a file relative to the script's folder.
            path = file if os.path.isabs(file) else os.path.join(self.folder, file)  # noqa: PTH117, PTH118
            if is_user_file(path, self.folder):
                yield os.path.realpath(path), int(line)
        for frame in reversed(frames):
            if is_user_file(frame.filename, self.folder) and frame.lineno:
                yield os.path.realpath(frame.filename), frame.lineno
        # Without any place, the finding is about the script as a whole.
        yield self.script, 1

    def add_error(self, error: BaseException) -> None:
        """Record an exception that ended the script or its import."""
        frames = traceback.extract_tb(error.__traceback__)
        # The place of an exception of the script is its last frame in the user's files.
        if not isinstance(error, HeteroError):
            line = traceback.format_exception_only(type(error), error)[-1].strip()
            self.add(
                Finding(
                    *next(self.places(text="", frames=frames)),
                    f"the script raises {line}",
                    "What comes after it was not checked. Check with arguments that work on this machine.",
                )
            )
            return
        # The place of an error of hetero is the line of the script that causes it, if the source shows that line.
        first, _, rest = str(error).partition("\n")
        # Only a failure of the user's code on an endpoint has a record with a traceback and a stage.
        record = getattr(error, "record", None)
        trace, stage = getattr(record, "traceback", ""), getattr(record, "stage", "")
        place: tuple[str, int] | None = None
        if stage == "purity" or (isinstance(error, DatasetMismatchError) and "different batches" in first):
            # A sample or a batch differs when it is computed again. Each possible cause is a finding.
            causes = impure_lines(self.folder)
            for cause_place, why in causes:
                what = f"samples differ when they are computed again; a possible cause is {why}"
                self.add(Finding(*cause_place, what, _HOW_TO_BE_PURE))
            if causes:
                return
            # No cause is known, so point to the method that makes samples, and say what samples may depend on.
            place, rest = method_line("__getitem__", self.folder), rest or _HOW_TO_BE_PURE
        elif changed := _CHANGED_VALUE.match(first):
            # The script changes a global or an attribute after its import.
            place = change_line(changed[1], self.folder)
        elif "registers no data set" in first or "no data set named" in first:
            # The import registers no data set if the function with @hetero.dataset is inside another function.
            place = nested_factory(self.script, self.folder)
            rest += "\nMove the function with @hetero.dataset to the top level of the script." if place else ""
        elif not trace and isinstance(error, DatasetError):
            # hetero rejects the content of a batch. No exception names a line, so point to the code that made the
            # batch.
            place = method_line("collate_fn", self.folder) or method_line("__getitem__", self.folder)
        # If the source shows no place, take the place that the traceback, the message or the stack names.
        self.add(Finding(*(place or next(self.places(trace or str(error), frames))), first, rest))


class _Warnings(logging.Handler):
    """Records what hetero warns of, with the line of the script that was running."""

    def __init__(self, found: _FindingsFile) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Record a warning with the line that causes it, or else with the line that was running."""
        # Warnings of these loggers only announce an exception. `add_error` records an exception that ends the script.
        if record.name.startswith(_LOGGERS_OF_ERRORS):
            return
        text = record.getMessage()
        # The first sentence of a warning says what was found, and the others what to do.
        first, _, rest = text.partition(". ")
        place: tuple[str, int] | None = None
        if sampler := _SAMPLER_NAME.match(text):
            place = call_line(sampler[1], self._found.folder)
        elif _SHARDS.match(text):
            # An endpoint has found this, so the stack here has no line of the user.
            calls = (call_line(name, self._found.folder) for name in shards.__all__)
            place = next(filter(None, calls), None)
        elif changed := _CHANGED_VALUE.match(text):
            place = change_line(changed[1], self._found.folder)
        self._found.add(Finding(*(place or next(self._found.places(text, traceback.extract_stack()))), first, rest))


def main(output: str, seconds: str, *words: str) -> int:
    """Check a script and write the findings to a file. Return 0, whatever was found.

    Args:
        output: The file.
        seconds: Longest time that the script may run.
        words: Path of the script and its arguments, or -m, the name of a module and its arguments.
    """
    is_module = words[0] == "-m"
    script, *arguments = words[1:] if is_module else words
    path = find_script(script, is_module=is_module)
    with tempfile.TemporaryDirectory() as folder:
        found = _FindingsFile(Path(output), path, os.path.realpath(folder))
        logging.getLogger("hetero").addHandler(_Warnings(found))
        try:
            session = CheckSession(
                script,
                tuple(arguments),
                is_module=is_module,
                folder=Path(folder),
                seconds=float(seconds),
                on_line=_show,
            )
        except HeteroError as error:
            found.add_error(error)
            # 0 batches were compared. None would mean that the process ended before it could write this.
            found.write(0)
            return 0
        # The script's loaders find this session, as they find that of a launcher in a job.
        sessions.use(session)
        # The script may run for hours, so another thread ends the check.
        timer = threading.Timer(float(seconds), _end, (found, session))
        timer.daemon = True
        timer.start()
        try:
            _run(path, script, arguments, is_module=is_module)
        except SystemExit as error:
            if error.code not in (None, 0):
                found.add_error(RuntimeError(f"SystemExit: {error.code}"))
        except BaseException as error:  # noqa: BLE001 - whatever the script raises
            traceback.print_exc()
            # Passes are short during the check. A loop that counts its steps may raise for this reason, which is not a
            # finding.
            if isinstance(error, HeteroError) or not session.may_have_shortened:
                found.add_error(error)
        # This ends the process, so it never returns.
        _end(found, session)
    return 0


def _end(found: _FindingsFile, session: CheckSession) -> None:
    """Record what the source shows, and end this process, because the script's threads may run on."""
    for finding in static_findings(found.folder):
        found.add(finding)
    found.write(session.num_batches)
    session.close()
    # Flush the streams here, because os._exit does not.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _show(name: str, line: str) -> None:
    sys.stderr.write(f"[{name}] {line}\n")


def _run(path: Path, script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run the script as ``__main__``. Its module stays there, because the source of its functions is searched later."""
    sys.argv = [str(path), *arguments]
    # Set the first search path as Python does for a script, and for -m.
    sys.path[0] = str(Path.cwd() if is_module else path.resolve().parent)
    loader = SourceFileLoader("__main__", str(path.resolve()))
    spec = spec_from_loader("__main__", loader, origin=str(path.resolve()))
    assert spec is not None
    module = module_from_spec(spec)
    # Remove the spec, because `__main__` has none if Python itself runs a script.
    module.__file__, module.__spec__ = str(path.resolve()), None
    sys.modules["__main__"] = module
    if is_module:
        join_package(module, script)
    loader.exec_module(module)  # allowed: the user's own script


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
