"""Makes text from users, files and other processes safe to log, to print and to put into a report.

Such text may hold line ends and terminal escapes that forge a log line, Markdown that becomes a link or an image, or
megabytes. Each function prevents one of these:

==================  ====================================================================================
`escape_line`       control characters in a log line. All characters that a terminal shows stay
`printable`         all characters that Python does not print, in text inside messages and records
`one_line`          line ends. They become spaces
`shortened`         long text. It cuts the end off. `without_middle` and `last_bytes` do not
`code_span`         markup in Markdown. `markdown_text` does the same only for a text that may have markup
`html_text`         markup in HTML
==================  ====================================================================================

`counted` is for hetero's own texts. It returns a number with its noun. `listing` shows the first of many names.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

__all__ = [
    "MAX_NAME_CHARS",
    "MAX_TEXT_CHARS",
    "code_span",
    "counted",
    "escape_line",
    "html_text",
    "last_bytes",
    "listing",
    "markdown_text",
    "one_line",
    "printable",
    "shortened",
    "without_middle",
]

MAX_NAME_CHARS = 200
"""Limit of characters in a name that the script chooses: of a loader or a metric."""
MAX_TEXT_CHARS = 4096
"""Limit of characters in one text that comes from a file or from another process."""

# Control characters (C0, DEL, C1) except the tab, line separators, direction overrides, halves of surrogate pairs.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NO_MARKUP = re.compile(r"[^\W_][\w ,.;:()/%=$+'?-]*")
_EMPHASIS_OR_LINK = re.compile(r"(^|\W)_|_(\W|$)|://|www\.")
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_MAX_CODE_CHARS = 200


def escape_line(text: str) -> str:
    r"""Return the text on one line, with control characters as ``\xNN`` or ``\uNNNN``. Tabs stay."""
    return _CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def printable(text: str, *, keep: str = "", max_chars: int | None = None) -> str:
    r"""Return the text with ``\n``, ``\xNN`` or ``\uNNNN`` for each character that `str.isprintable` rejects.

    Args:
        text: Any text. It may hold halves of surrogate pairs.
        keep: Characters that are not replaced, for example ``"\n\t"``.
        max_chars: Limit of the length of the result. A longer result ends in three dots. None: no limit.
    """
    if max_chars is not None:
        # Do not escape megabytes for a short message. One more character than the limit shows that the text is longer.
        text = text[: max_chars + 1]
    # ascii() returns the escaped character between quotes.
    escaped = "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)
    return escaped if max_chars is None else shortened(escaped, max_chars)


def one_line(text: str, max_chars: int) -> str:
    """Return the first ``max_chars`` characters on one line. Each run of white space becomes one space."""
    # Escape halves of surrogate pairs before the cut. Otherwise a receiver with the same limit would cut again.
    return " ".join(text.encode("utf-8", "backslashreplace").decode()[:max_chars].split())


def shortened(text: str, max_chars: int) -> str:
    """Return the text, or its beginning and three dots if it has more than ``max_chars`` characters."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def without_middle(text: str, max_bytes: int, *, mark: str = " ... cut ... ") -> str:
    """Return the text in at most ``max_bytes`` bytes of UTF-8. ``mark`` replaces the middle of a longer text.

    A quarter of the bytes stays before the mark, and the rest stays after it, because the end of a traceback tells
    most. The limit must be larger than twice the mark, because text must stay on both sides. Halves of surrogate pairs
    are escaped.
    """
    data, mark_bytes = text.encode(errors="backslashreplace"), mark.encode()
    if len(data) <= max_bytes:
        return data.decode()
    num_first = max_bytes // 4
    num_last = max_bytes - num_first - len(mark_bytes)
    # A cut may divide a character. Its bytes on both sides of the mark are ignored.
    return (data[:num_first] + mark_bytes + data[-num_last:]).decode(errors="ignore")


def last_bytes(text: str, max_bytes: int) -> str:
    """Return the last ``max_bytes`` bytes of UTF-8. Halves of surrogate pairs are escaped."""
    return text.encode("utf-8", "backslashreplace")[-max_bytes:].decode("utf-8", "ignore")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: ``1 endpoint``, ``0 endpoints``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listing(names: Iterable[object]) -> str:
    """Return the first eight names as text, and how many more there are."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def code_span(text: str) -> str:
    """Return the text as one Markdown code span that is safe in a line and in a table cell, or ``-`` for no text.

    Line breaks, control characters and invisible characters become ``?``. A back-tick, which would end the span, and a
    bar, which would end the cell, become characters that look similar. Long text is cut.
    """
    visible = "".join("?" if unicodedata.category(char) in _INVISIBLE else char for char in text)
    visible = visible.replace("`", "'").replace("|", "\N{BROKEN BAR}").strip()
    if len(visible) > _MAX_CODE_CHARS:
        visible = visible[: _MAX_CODE_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return f"`{visible}`" if visible else "-"


def markdown_text(text: str) -> str:
    """Return a sentence unchanged if it contains no possible markup, otherwise as a code span."""
    if _NO_MARKUP.fullmatch(text) and not _EMPHASIS_OR_LINK.search(text):
        return text
    return code_span(text)


def html_text(text: str) -> str:
    """Return the text for an element or an attribute of HTML or XML. Escape invisible characters except line ends."""
    return html.escape(printable(text, keep="\n"))
