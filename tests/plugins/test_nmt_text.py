"""What of a text is translated and what stays: the pure parts of nmt, and languages by their codes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway import InvalidRequestError
from laneway_plugins._languages import find_language, known_languages
from laneway_plugins._nmt_pieces import SentencePieces, Words, growing_text, join_sentence_pieces
from laneway_plugins._nmt_text import Assembly, Gap, Sentence, Verbatim, gap_between, split_pieces, split_text
from laneway_plugins._signs import peel


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
        ("a) 5", []),
        ("- 🙂", []),
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
    ("texts", "gap", "spaced", "shown"),
    [
        (("One.", "Two."), "", True, " "),
        (("One.", "Two."), " ", True, " "),
        (("One.", "Two."), "\u00a0", True, "\u00a0"),
        (("你好。", "再见。"), " ", False, ""),
        (("你好。", "再见。"), "", False, ""),
        (("你好。", "再见。"), "  ", False, "  "),
        (("你好。", "再见。"), "\u3000", False, "\u3000"),
        # Kept as they were, because the model knows nothing of them.
        (("你好。", "再见。"), "", True, ""),
        (("สวัสดี", "ลาก่อน"), "", True, ""),
        (("สวัสดี", "ลาก่อน"), " ", True, " "),
        (("One.", "Two."), " ", False, " "),
        (("你好。", "Two."), "", True, ""),
        (("你好！", "🙂"), " ", False, ""),
        (("안녕.", "잘 가."), "", True, " "),
    ],
)
def test_gaps_follow_the_script_of_the_target_language(
    texts: tuple[str, str], gap: str, spaced: bool, shown: str
) -> None:
    assert gap_between(texts[0][-1], gap, texts[1][0], spaced=spaced) == shown
    assembly = Assembly([Sentence("a"), Gap(gap), Sentence("b")], spaced=spaced)
    assembly.cut(0, [""])
    assembly.cut(1, [""])
    assembly.finish(0, 0, texts[0])
    # What the gap becomes depends on what comes, so it is not shown before.
    assert assembly.take() == texts[0]
    assembly.grow(1, 0, texts[1][:1])
    assert assembly.take() == shown + texts[1][:1]
    assembly.finish(1, 0, texts[1])
    assembly.take()
    assert assembly.text == texts[0] + shown + texts[1]


def test_a_gap_before_nothing_stays() -> None:
    assembly = Assembly([Sentence("a"), Gap(" "), Sentence("b"), Gap(" "), Sentence("c")], spaced=True)
    for sentence, text in enumerate(["One.", "", "Three."]):
        assembly.cut(sentence, [""])
        assembly.finish(sentence, 0, text)
    assert assembly.take() == "One.  Three."
    assert assembly.complete


# Signs at the edges.


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("- First item. Second.", ["First item.", "Second."]),
        ("* one", ["one"]),
        ("  + one", ["one"]),
        ("# Title", ["Title"]),
        ("###### Title", ["Title"]),
        ("> quoted", ["quoted"]),
        (">> > - [ ] to do", ["to do"]),
        ("- [x] done", ["done"]),
        ("• one", ["one"]),
        ("1. First. 2. Second.", ["First.", "Second."]),
        ("12) First", ["First"]),
        ("(3) First", ["First"]),
        ("a) first", ["first"]),
        ("① first", ["first"]),
        ("１．こんにちは", ["こんにちは"]),
        ("1、你好", ["你好"]),
        ("・こんにちは", ["こんにちは"]),
        ("— Hello", ["Hello"]),
        ("🙂 Hello", ["Hello"]),
        ("Hello 🙂🙂", ["Hello"]),
        ("Hello 👩‍👩‍👧‍👦❤️!", ["Hello"]),
        ("👍🏽Good", ["Good"]),
        ("🇩🇪 Berlin 🇩🇪", ["Berlin"]),
        ("1️⃣ First 2️⃣", ["First"]),
        ("→ see there ←", ["see there"]),
        ("\u200fمرحبا\u200f", ["مرحبا"]),
        ("\ufeffHello\u200b", ["Hello"]),
        ("\u00a0Hello\u00a0", ["Hello"]),
        ("\u3000你好\u3000", ["你好"]),
        # These are the model's own business.
        ('"Hello," she said', ['"Hello," she said']),
        ("«Bonjour»", ["«Bonjour»"]),
        ("（你好）", ["（你好）"]),
        ("(see there)", ["(see there)"]),
        ("¿Qué?", ["¿Qué?"]),
        ("well-known", ["well-known"]),
        ("-5 degrees", ["-5 degrees"]),
        ("C# is", ["C# is"]),
        ("#hashtag", ["#hashtag"]),
        ("*bold* word", ["*bold* word"]),
        ("A. Smith", ["A.", "Smith"]),
        ("½ cup of 5 m²", ["½ cup of 5 m²"]),
        ("I have 3", ["I have 3"]),
    ],
)
def test_signs_at_the_edges_are_not_translated(text: str, sentences: list[str]) -> None:
    parts = split_text(text, by_full_stop)
    assert joined(parts) == text
    assert [part.text for part in parts if isinstance(part, Sentence)] == sentences
    # With a model that translates into nothing but letters, every sign is still there.
    assembly = Assembly(parts, spaced=True)
    for number in range(len(sentences)):
        assembly.cut(number, [""])
        assembly.finish(number, 0, sentences[number])
    assert assembly.take() == text


SIGNS = "🙂👩🏽🇩🇪→•①\u200f\ufeff\u200d\ufe0f\u20e3"
EDGES = st.text(st.sampled_from('ab. -*#>1)[]x(（）。，！你好สé\u0301\u00a0\u3000\t\r\n"«»' + SIGNS), max_size=40)


@given(EDGES | st.text(max_size=40), st.booleans())
def test_the_parts_of_a_sentence_are_the_sentence(text: str, begins_line: bool) -> None:
    before, inner, after = peel(text, begins_line=begins_line)
    assert before + inner + after == text
    assert not any(map(str.isalpha, after))
    assert begins_line or not any(map(str.isalpha, before))


@given(EDGES | TEXTS | st.text(max_size=60), st.booleans())
def test_whatever_is_not_translated_comes_back_exactly(text: str, spaced: bool) -> None:
    """A model that gives back each sentence: what is between the sentences is the source's."""
    parts = split_text(text, by_full_stop)
    assert joined(parts) == text
    assert not [part for part in parts if isinstance(part, Sentence) and not any(map(str.isalpha, part.text))]
    sentences = [part.text for part in parts if isinstance(part, Sentence)]
    assembly = Assembly(parts, spaced=spaced)
    for number, sentence in enumerate(sentences):
        assembly.cut(number, [""])
        assembly.finish(number, 0, sentence)
    made = assembly.take()
    assert assembly.complete
    # But for the spaces between the sentences of a line.
    assert made.replace(" ", "") == text.replace(" ", "")
    if spaced and not [part for part in parts if isinstance(part, Gap) and not part.text]:
        assert made == text


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
    chinese = split_pieces(list("你好，我们明天见。再见"), 7, lambda piece: False, True)
    assert ["".join(chunk.pieces) for chunk in chinese] == ["你好，", "我们明天见。", "再见"]
    assert [chunk.joint for chunk in chinese] == ["", " ", " "]
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
    assert find_language("ja", "x").spaced is find_language("ja", "x").spaced_words is False
    # Words are not apart there, but sentences are.
    assert find_language("th", "x").spaced is True
    assert find_language("th", "x").spaced_words is False
    assert find_language("en", "x").spaced is True
