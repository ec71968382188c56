"""Exceptions of the user's data set code as bounded records that can travel."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import TracebackType

from hetero.errors import DatasetError, SampleFailure

__all__ = ["MAX_TRACEBACK_BYTES", "dataset_error"]

MAX_TRACEBACK_BYTES = 16 * 1024
"""Bound on a failure's traceback; the middle of a longer one is left out."""

_MAX_EXCEPTION_BYTES = 2 * 1024
_HERE = f"{Path(__file__).parent}{os.sep}"


def dataset_error(
    error: BaseException | str, *, dataset: str, host: str, stage: str, sample_index: object = "", note: str = ""
) -> DatasetError:
    """Return the `DatasetError` for what the user's code raised, or did wrong.

    Args:
        error: What was raised; or a sentence, which then comes without a traceback.
        dataset: Registered name.
        host: Where it happened.
        stage: See `SampleFailure.stage`.
        sample_index: The sampler's index, if one sample is to blame.
        note: Appended to the exception's text.

    Returns:
        The error, with text that is printable UTF-8 and bounded. Raise it ``from`` the exception.
    """
    if isinstance(error, str):
        text, trace = error, ""
    else:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames = _user_frames(error.__traceback__)
        trace = "".join(traceback.format_exception(type(error), error, frames))
    record = SampleFailure(
        dataset=dataset,
        host=host,
        stage=stage,
        sample_index="" if sample_index == "" else _printable(repr(sample_index), 256),
        # One line: a log's lines are prefixed, and no message may forge one.
        exception=_printable(text + note, _MAX_EXCEPTION_BYTES).replace("\n", "\\n"),
        traceback=_printable(trace, MAX_TRACEBACK_BYTES),
    )
    return DatasetError(record)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame outside this package on; all of it if there is none."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_HERE):
        frame = frame.tb_next
    return trace if frame is None else frame


def _printable(text: str, limit: int) -> str:
    """Escape control characters and lone surrogates, and cut the middle out of a long text."""
    escaped = "".join(char if char in "\n\t" or char.isprintable() else ascii(char)[1:-1] for char in text)
    encoded = escaped.encode()
    if len(encoded) <= limit:
        return escaped
    gap = b"\n  ... cut ...\n"
    head, tail = limit // 4, limit - limit // 4 - len(gap)
    return (encoded[:head] + gap + encoded[-tail:]).decode(errors="ignore")
