"""Records of exceptions in the user's data set code. They have limited size and can be sent between processes."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from hetero.documents.text import MAX_TEXT_CHARS, printable, without_middle
from hetero.errors import DatasetError, SampleFailure

__all__ = [
    "MAX_SKIP_CHARS",
    "MAX_TYPES",
    "ON_EVERY_HOST",
    "Cancelled",
    "check_not_exit",
    "dataset_error",
    "exception_line",
    "index_text",
    "printable_cause",
    "raising_user_types",
    "with_note",
    "with_user_type",
]

MAX_SKIP_CHARS = 160
"""Limit on the text of an index, and of an exception in a list of skipped samples. With
`hetero.batches.skips.MAX_LISTED` it bounds the growth of a batch's answer to 10 KB."""
MAX_TYPES = 16
"""Limit on the names of types in a failure. With `_MAX_TYPE_BYTES` for each, they take at most a tenth of the
64 KiB that a failure may have (`hetero.wire.limits.Limits.max_failure_bytes`)."""
_MAX_TYPE_BYTES = 400
_MAX_TRACEBACK_BYTES = 16 * 1024
"""Limit on the traceback of a failure, half of the detail that a control message may carry. The middle of a longer
traceback is cut out."""

ON_EVERY_HOST = (
    "Every data host opens the data at its own path, and a relative path in its own folder. Put the data there, or\n"
    "pass an absolute path. If hosts differ, use a variable that each host sets, such as $SM_CHANNEL_TRAINING, and\n"
    "call os.path.expandvars in the function with @hetero.dataset."
)
"""Advice for a data host that lacks files."""
_HERE = f"{Path(__file__).parent}{os.sep}"


class Cancelled(Exception):
    """The computation of a batch stopped between two samples because ``cancelled()`` was true."""


def dataset_error(
    error: BaseException | str,
    *,
    dataset: str,
    host: str,
    stage: str,
    sample_index: object = "",
    note: str = "",
    to_do: str = "",
) -> DatasetError:
    """Return the `DatasetError` for an exception or another fault of the user's code.

    Args:
        error: The exception, or a text that describes the fault. The first line of a text becomes the exception of the
            record, and its other lines become the traceback.
        dataset: Registered name.
        host: Host where the failure happened.
        stage: See `SampleFailure.stage`.
        sample_index: The sampler's index, if one sample caused the failure.
        note: Text that is appended to the exception's text.
        to_do: Advice to append to the traceback. If a data host lacks a file, advice about the file's path precedes it.

    Returns:
        The error. Its text is printable UTF-8 of limited size. Raise it ``from`` the exception.
    """
    types: tuple[str, ...] = ()
    if isinstance(error, str):
        text, _, trace = error.partition("\n")
    else:
        types = _type_names(type(error))
        text = _first_line(error)
        trace = _trace_of(error)
        if isinstance(error, OSError) and _number_of(error) == errno.EMFILE:
            # Add the limit, because the text of this error says neither how many files were open nor whose limit it is.
            note += f" (this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files)"
        # The advice is about data hosts, so the trainer itself does not get it.
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and host != "local":
            to_do = f"{ON_EVERY_HOST}\n{to_do}".rstrip()
        if to_do:
            trace = f"{trace.rstrip()}\nto do: {to_do}"
    record = SampleFailure(
        dataset=dataset,
        host=host,
        stage=stage,
        sample_index="" if sample_index == "" else index_text(sample_index),
        exception=_one_line(text + note),
        traceback=_printable(trace, _MAX_TRACEBACK_BYTES),
        types=types,
    )
    return DatasetError(record)


def with_note(error: DatasetError, note: str) -> DatasetError:
    """Return a copy of an error that `dataset_error` made, with a note appended to the exception's text."""
    return DatasetError(dataclasses.replace(error.record, exception=_one_line(error.record.exception + note)))


def with_user_type(error: DatasetError) -> DatasetError:
    """Return the error as an instance of the exception type that the user's code raised, if this process knows it.

    The names of the type and of its bases are looked up in the imported modules. The first one found is used. Nothing
    is imported.
    """
    # Imported here, because the module imports NumPy, which launchers do not need. This saves a launcher 0.13 s of CPU
    # time at its start.
    from hetero.batches.structure.conversion import find_type

    cause = error.__cause__
    if isinstance(cause, Exception):
        return error.typed(type(cause))
    # If the user's code has raised a `DatasetError` itself, its record may be any object, such as a text.
    for name in getattr(error.record, "types", ()):
        module, _, qualified_name = name.partition(":")
        kind = find_type(module, qualified_name)
        if kind is not None and issubclass(kind, Exception):
            return error.typed(kind)
    return error


@contextmanager
def raising_user_types() -> Iterator[None]:
    """Return a context that raises each `DatasetError` as `with_user_type` returns it."""
    try:
        yield
    except DatasetError as error:
        raise with_user_type(error) from printable_cause(error)


def printable_cause(error: BaseException) -> BaseException | None:
    """Return the cause of an error. None if Python cannot print the cause, because then it cannot print the error."""
    try:
        traceback.format_exception(error.__cause__)
    except Exception:  # noqa: BLE001 - as in `_text_of`
        return None
    return error.__cause__


def check_not_exit(error: BaseException, *, in_worker: bool) -> None:
    """Raise an exception again if it is not a failure of the user's code.

    In a process that only computes batches, every exception except KeyboardInterrupt is a failure of the user's code.
    For example, a sample that calls ``sys.exit()`` must not end the process. In a script's process, a signal handler
    may have raised a SystemExit, or a BaseException of the script's own, during the sample. Therefore, in a script's
    process, every `Exception` is a failure. Of the other exceptions, only the PanicException of code in Rust and the
    CancelledError of asyncio are failures.

    Args:
        error: The exception.
        in_worker: Whether this process only computes batches.
    """
    is_of_sample = isinstance(error, Exception) or type(error).__name__ in ("PanicException", "CancelledError")
    if isinstance(error, KeyboardInterrupt) or not (in_worker or is_of_sample):
        raise error


def _type_names(kind: type[BaseException]) -> tuple[str, ...]:
    """Return the names of a class and its bases up to `Exception`, for `SampleFailure.types`: 16 names at most."""
    # Imported here, because the module imports NumPy, which launchers do not need.
    from hetero.batches.structure.conversion import module_name

    bases = [base for base in kind.__mro__ if issubclass(base, Exception) and base is not Exception]
    return tuple(_printable(f"{module_name(base)}:{base.__qualname__}", _MAX_TYPE_BYTES) for base in bases[:MAX_TYPES])


def _without_script_module(text: str) -> str:
    # Imported here, because the module imports NumPy.
    from hetero.batches.structure.conversion import without_script_module

    return without_script_module(text)


def exception_line(error: BaseException) -> str:
    """Return the first line of an exception with its type, as printable text of at most 160 characters."""
    return printable(_first_line(error), max_chars=MAX_SKIP_CHARS)


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception with its type."""
    lines = _text_of(error).splitlines()
    # Skip indented lines, because the text of a SyntaxError begins with the file name and the code, both indented.
    return next((line for line in lines if line and not line[0].isspace()), type(error).__name__).rstrip()


def _number_of(error: OSError) -> int | None:
    """Return the ``errno`` of an error, or None if reading it raises."""
    try:
        return error.errno
    except Exception:  # noqa: BLE001 - raised by a property of the user's class
        return None


def _text_of(error: BaseException) -> str:
    """Return an exception's type and text. Only the type, if attributes or methods of the exception raise.

    Names of types lack the module of the user's script, because this module has another name on data hosts.
    """
    kind = type(error)
    try:
        text = "".join(traceback.format_exception_only(kind, error))
    except Exception as failure:  # noqa: BLE001 - raised by the user's class, for example by __notes__
        try:
            text = f"{kind.__module__}.{kind.__qualname__}: {error}"
        except Exception:  # noqa: BLE001 - raised by the user's __str__
            text = f"{kind.__module__}.{kind.__qualname__}, which cannot be printed: {type(failure).__name__}"
    return _without_script_module(text)


def _trace_of(error: BaseException) -> str:
    """Return the text of an exception with its traceback. Leave out the causes if they cannot be printed.

    The traceback begins with the first frame outside of this package.
    """
    frames = _user_frames(error.__traceback__)
    try:
        trace = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - as in `_text_of`
        trace = f"Traceback (most recent call last):\n{''.join(traceback.format_tb(frames))}{_text_of(error)}"
    return _without_script_module(trace)


def index_text(index: object) -> str:
    """Return an index as printable text of at most 160 characters."""
    return printable(repr(index), max_chars=MAX_SKIP_CHARS)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package at its start. If it has no others, return it unchanged."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_HERE):
        frame = frame.tb_next
    return trace if frame is None else frame


def _one_line(text: str) -> str:
    """Return a text of limited size on one line. Lines of a log have a prefix, which a second line could forge."""
    return _printable(text, MAX_TEXT_CHARS).replace("\n", "\\n")


def _printable(text: str, limit: int) -> str:
    """Escape control characters and lone surrogates, and cut out the middle of a long text."""
    return without_middle(printable(text, keep="\n\t"), limit, mark="\n  ... cut ...\n")
