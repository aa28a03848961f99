"""Text for a terminal: nothing in it is obeyed, and nothing of it is lost."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneway.terminal import TerminalText, echo, for_stream, harmless

HOSTILE = st.text(st.sampled_from("a\x1b\r\n\t\x00\x07\x7f\x9b\u202e\u2067\ud800é你🙂]52;c;[2J\\")) | st.text()


DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\tand\nlines", "plain\tand\nlines"),
        ("\x1b]52;c;Z2l0\x07", "\\x1b]52;c;Z2l0\\x07"),
        ("\x1b[2J\x9b31m", "\\x1b[2J\\x9b31m"),
        ("over\rwritten\r\n", "over\\x0dwritten\n"),
        ("\x08\x7f\x00\x0b\x0c", "\\x08\\x7f\\x00\\x0b\\x0c"),
        ("\u202etxt.exe\u202c \u2066x\u2069", "\\u202etxt.exe\\u202c \\u2066x\\u2069"),
        ("name\udcff", "name\\udcff"),
        ("семь 七 🏴‍☠️ a\u200db \u200f\u0645", "семь 七 🏴‍☠️ a\u200db \u200f\u0645"),
        ("[red]no markup here[/red]", "[red]no markup here[/red]"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert harmless(text) == shown


@given(HOSTILE)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    for character in harmless(text):
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    assert not set("\n\t\r\u2028\u2029") & set(harmless(text, one_line=True))
    # Nothing is written that UTF-8 lacks.
    harmless(text).encode("utf-8")


@given(HOSTILE)
def test_what_was_made_harmless_stays_as_it_is(text: str) -> None:
    assert harmless(harmless(text)) == harmless(text)


@given(st.lists(HOSTILE))
@example(["\x1b", "]52;c;x\x07"])
@example(["\r", "\n", "\r", "\r", "\n", "\r"])
def test_it_does_not_matter_where_a_stream_was_cut(deltas: list[str]) -> None:
    growing = TerminalText()
    shown = "".join([*(growing.push(delta) for delta in deltas), growing.end()])
    assert shown == harmless("".join(deltas))


def test_only_terminals_get_less_than_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\x1b]0;owned\x07\r\n"
    pipe, terminal, errors = io.StringIO(), Terminal(), Terminal()
    assert for_stream(text, pipe) == for_stream(text, None) == text
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.setattr("sys.stderr", errors)
    echo(text, nl=False)
    echo(text, err=True)
    monkeypatch.setattr("sys.stdout", terminal)
    echo(text)
    echo()
    assert pipe.getvalue() == text
    assert terminal.getvalue() == "\\x1b]0;owned\\x07\n\n\n"
    assert errors.getvalue() == "\\x1b]0;owned\\x07\n\n"


def test_an_output_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OSError, match="No space left on device: 'standard output'"):
        echo("text")
    monkeypatch.setattr("sys.stderr", Full())
    echo("nobody can be told", err=True)
