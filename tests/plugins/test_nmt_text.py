"""What of a text is translated and what stays: the pure parts of nmt, and languages by their codes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway import InvalidRequestError
from laneway_plugins._languages import find_language, known_languages
from laneway_plugins._nmt_pieces import SentencePieces, Words, growing_text, join_sentence_pieces
from laneway_plugins._nmt_text import Assembly, Gap, Sentence, Verbatim, gap_for, split_pieces, split_text


def by_full_stop(line: str) -> list[str]:
    return re.findall(r"[^.]*\.\s*|[^.]+", line)


def joined(parts: list[Verbatim | Gap | Sentence]) -> str:
    return "".join(part.text for part in parts)


TEXTS = st.text(st.sampled_from("ab. \t\n\r\u2028\x85é😀9"), max_size=60)


@given(TEXTS)
def test_the_parts_of_a_text_are_the_text(text: str) -> None:
    parts = split_text(text, by_full_stop)
    assert joined(parts) == text
    for part in parts:
        if isinstance(part, Sentence):
            assert part.text == part.text.strip() != ""
            assert len(part.text.splitlines()) == 1
            assert any(map(str.isalpha, part.text))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("   ", []),
        ("\n\n", []),
        ("😀😀", []),
        ("123 456.", []),
        ("a. b.", ["a.", "b."]),
        ("  a.  b.\t\r\n\r\n c", ["a.", "b.", "c"]),
        ("a. 12. b.", ["a.", "b."]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    parts = split_text(text, by_full_stop)
    assert [part.text for part in parts if isinstance(part, Sentence)] == sentences


def test_a_splitter_that_changes_the_line_is_not_followed() -> None:
    assert split_text("a. b.", lambda line: ["a.", "b."]) == [Sentence("a. b.")]


@pytest.mark.parametrize(
    ("gap", "spaced", "shown"),
    [("", True, " "), ("", False, ""), (" ", True, " "), (" ", False, ""), ("  ", False, "  ")],
)
def test_gaps_follow_the_target_language(gap: str, spaced: bool, shown: str) -> None:
    assert gap_for(gap, spaced) == shown


# Chunks.


@given(
    st.lists(st.sampled_from(["▁a", "b", "▁c,", "d", "▁e.", "▁"]), max_size=80),
    st.integers(1, 20),
)
def test_no_piece_is_lost_and_no_chunk_is_too_long(pieces: list[str], longest: int) -> None:
    chunks = split_pieces(pieces, longest, lambda piece: piece.startswith("▁"), True)
    assert [piece for chunk in chunks for piece in chunk.pieces] == pieces
    assert all(len(chunk.pieces) <= longest for chunk in chunks)
    assert all(chunk.pieces for chunk in chunks) or not pieces
    assert chunks[0].joint == ""
    for chunk in chunks[1:]:
        assert chunk.joint == (" " if chunk.pieces[0].startswith("▁") else "")


def test_cuts_are_made_at_punctuation_then_between_words() -> None:
    def cut(text: str, longest: int) -> list[str]:
        return [" ".join(chunk.pieces) for chunk in split_pieces(text.split(), longest, lambda piece: True, True)]

    assert cut("a b c d, e f g h", 6) == ["a b c d,", "e f g h"]
    assert cut("a b c d e f g h", 6) == ["a b c d", "e f g h"]
    assert cut("a b", 6) == ["a b"]
    inside = split_pieces(["▁a", "b", "c", "d", "e", "f"], 3, lambda piece: piece.startswith("▁"), True)
    assert [(chunk.pieces, chunk.joint) for chunk in inside] == [(("▁a", "b", "c"), ""), (("d", "e", "f"), "")]


# Putting together.


@given(
    st.lists(
        st.one_of(st.builds(Verbatim, st.just("\n")), st.builds(Gap, st.just(" ")), st.just(Sentence("x"))), max_size=6
    ),
    st.data(),
)
def test_what_is_taken_is_the_final_text_whatever_order_it_comes_in(
    parts: list[Verbatim | Gap | Sentence], data: st.DataObject
) -> None:
    assembly = Assembly(parts, spaced=True)
    count = sum(isinstance(part, Sentence) for part in parts)
    chunks = {
        (sentence, chunk): data.draw(st.text("ab ", max_size=4)) for sentence in range(count) for chunk in range(2)
    }
    taken = [assembly.take()]
    for sentence in range(count):
        assembly.cut(sentence, ["", " "])
    for key in data.draw(st.permutations(sorted(chunks))):
        text = chunks[key]
        assembly.grow(*key, text[: len(text) // 2])
        taken.append(assembly.take())
        assembly.finish(*key, text)
        taken.append(assembly.take())
    assert assembly.complete
    expected, sentence = "", 0
    for part in parts:
        if isinstance(part, Sentence):
            first, second = chunks[sentence, 0], chunks[sentence, 1]
            expected += first + (" " + second if second else "")
            sentence += 1
        else:
            expected += part.text
    assert "".join(taken) == assembly.text == expected


# Pieces.


def test_pieces_of_bytes_become_characters() -> None:
    assert join_sentence_pieces(["▁a", "<0xE2>", "<0x82>", "<0xAC>", "b"]) == " a€b"
    assert join_sentence_pieces(["<0xE2>", "<0x82>"]) == "\ufffd"
    pieces = SentencePieces(None)
    assert growing_text(pieces, ["▁a", "<0xE2>"]) is None
    assert growing_text(pieces, ["▁a", "<unk>"]) is None
    assert growing_text(pieces, ["▁a", "▁b"]) == "a b"


@given(st.lists(st.sampled_from(["▁", "▁a", "b", "<0xC3>", "<0xA9>", "."]), max_size=12))
def test_a_growing_text_only_gets_longer(so_far: list[str]) -> None:
    pieces = SentencePieces(None)
    shown = ""
    for end in range(len(so_far) + 1):
        text = growing_text(pieces, so_far[:end])
        if text is not None:
            assert text.startswith(shown)
            shown = text
    assert pieces.text(so_far).startswith(shown)


def test_words_are_joined_by_spaces() -> None:
    assert Words().encode(" a  b ") == ["a", "b"]
    assert Words().text(["a", "b"]) == "a b"


# Languages.


@pytest.mark.parametrize(
    ("code", "short", "name"),
    [
        ("de", "de", "German"),
        ("deu", "de", "German"),
        ("DE", "de", "German"),
        ("yue", "yue", "Cantonese"),
        ("zh-Hant", "zh-Hant", "Chinese (Traditional)"),
        ("zho_Hans", "zh-Hans", "Chinese (Simplified)"),
        ("srp_Cyrl", "sr-Cyrl", "Serbian (Cyrillic)"),
        ("pt-br", "pt-BR", "Portuguese (Brazil)"),
        ("zh_Hant_HK", "zh-Hant-HK", "Chinese (Traditional, Hong Kong)"),
        ("es-419", "es-419", "Spanish (Latin America)"),
        ("iw", "he", "Hebrew"),
    ],
)
def test_languages_by_code(code: str, short: str, name: str) -> None:
    language = find_language(code, "target")
    assert (language.code, language.name) == (short, name)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("German", "'de' for German"),
        ("Germn", "did you mean 'de' for German"),
        ("xx", "no ISO 639-1 or 639-3 code"),
        ("", "no ISO 639-1 or 639-3 code"),
        ("zh-Abcd", "the script 'Abcd'"),
        ("de-", "no ISO 639-1 or 639-3 code"),
        (5, "a language is a code"),
        (None, "a language is a code"),
    ],
)
def test_unknown_languages(code: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        find_language(code, "target")
    assert caught.value.field == "target"


def test_the_table_of_languages() -> None:
    known = known_languages()
    assert sum(len(code) == 2 for code in known) >= 183
    assert all(find_language(code, "x").name == name for code, name in known.items())
    assert len({code for code in known if len(code) == 3}) >= 100
    assert find_language("ja", "x").spaced is False
    assert find_language("en", "x").spaced is True
