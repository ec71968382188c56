"""Text from users and other processes: what is escaped, and where long text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.documents import text as safe

ANY_TEXT = st.text(st.characters(), max_size=300)  # with halves of surrogate pairs


@pytest.mark.attack("A14")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\tb", "a\tb"),
        ("\x1b[31mred\r\n", r"\x1b[31mred\x0d\x0a"),
        ("a\x85b\u2028c\u202ed", r"a\x85b\u2028c\u202ed"),
        ("\udcff", r"\udcff"),
        ("grün", "grün"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    assert safe.escape_line(text) == expected


@pytest.mark.attack("A14")
@pytest.mark.parametrize(
    ("text", "keep", "expected"),
    [
        ("one\ntwo\t\x1b[2K", "", r"one\ntwo\t\x1b[2K"),
        ("one\ntwo\t\x1b[2K", "\n\t", "one\ntwo\t\\x1b[2K"),
        ("\u202e\u200b\xa0\udcff\x7f", "", r"\u202e\u200b\xa0\udcff\x7f"),
        ("grün 数 'a\\b'", "", "grün 数 'a\\b'"),
    ],
)
def test_printable_escapes_what_python_does_not_print(text: str, keep: str, expected: str) -> None:
    assert safe.printable(text, keep=keep) == expected


@pytest.mark.attack("A14")
@given(text=ANY_TEXT, limit=st.integers(4, 100))
def test_results_are_printable_and_within_their_limit(text: str, limit: int) -> None:
    assert safe.printable(text).isprintable()
    assert safe.printable(text, max_chars=limit).isprintable()
    assert len(safe.printable(text, max_chars=limit)) <= limit
    assert len(safe.one_line(text, limit)) <= limit
    assert len(safe.one_line(text, limit).splitlines()) <= 1
    assert len(safe.escape_line(text).splitlines()) <= 1
    assert len(safe.last_bytes(text, limit).encode()) <= limit
    assert len(safe.without_middle(text, 5 * limit).encode()) <= 5 * limit
    for line in (safe.code_span(text), safe.markdown_text(text)):
        assert len(line.splitlines()) == 1
        assert len(line) <= 202


@given(text=ANY_TEXT, limit=st.integers(4, 100))
def test_one_line_sent_is_not_cut_again_by_its_receiver(text: str, limit: int) -> None:
    sent = safe.one_line(text, limit)
    assert safe.one_line(sent, limit) == sent


def test_long_text_is_cut_at_its_end_its_middle_or_its_beginning() -> None:
    assert safe.shortened("abcdefgh", 8) == "abcdefgh"
    assert safe.shortened("abcdefghi", 8) == "abcde..."
    assert safe.printable("\x1b" * 500, max_chars=10) == r"\x1b\x1..."
    assert safe.without_middle("a" * 20 + "z" * 80, 40, mark=" - ") == "a" * 10 + " - " + "z" * 27
    assert safe.last_bytes("x" * 10 + "\N{EURO SIGN}end", 4) == "end"


@pytest.mark.attack("A14")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "`plain`"),
        ("a`b", "`a'b`"),
        ("a|b", "`a\N{BROKEN BAR}b`"),
        ("a\r\nb\t", "`a??b?`"),
        ("\x1b\u202e", "`??`"),
        ("  ", "-"),
        ("", "-"),
        ("\ud800", "`?`"),
        ("x" * 201, "`" + "x" * 199 + "\N{HORIZONTAL ELLIPSIS}`"),
    ],
)
def test_code_span_is_one_span(text: str, expected: str) -> None:
    assert safe.code_span(text) == expected


@pytest.mark.attack("A14")
@pytest.mark.parametrize(
    "text", ["[a](http://b)", "see www.a.example", "_a_", "# a", "<b>", "a|b", "![i](x)", "**a**", "a\nb", "http://a"]
)
def test_text_with_possible_markup_becomes_a_code_span(text: str) -> None:
    assert safe.markdown_text(text).startswith("`")
    assert safe.markdown_text("A plain sentence, with snake_case: 5 % (it is).").startswith("A plain")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<b a="1">\'&', "&lt;b a=&quot;1&quot;&gt;&#x27;&amp;"),
        ("a\nb\x00\u202e\ud800\uffff", "a\nb\\x00\\u202e\\ud800\\uffff"),
    ],
)
def test_text_for_html_has_no_markup_and_no_invisible_characters(text: str, expected: str) -> None:
    assert safe.html_text(text) == expected


@pytest.mark.parametrize(("number", "expected"), [(0, "0 endpoints"), (1, "1 endpoint"), (2, "2 endpoints")])
def test_number_has_its_noun_in_the_right_form(number: int, expected: str) -> None:
    assert safe.counted(number, "endpoint") == expected
