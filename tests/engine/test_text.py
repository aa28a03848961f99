"""Rule S1: tokens' bytes become text that never has to be taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneway._text import TextAssembler

# Whole characters of one to four bytes, and bytes that begin, continue or spoil one.
FRAGMENTS = ["a", "é", "€", "\U0001f600", "�"]
WILD_BYTES = st.lists(
    st.sampled_from([text.encode() for text in FRAGMENTS])
    | st.sampled_from([b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80", b"\xff", b"\xed\xa0", b"\xc0", b"\xf4\x90"])
    | st.binary(max_size=3),
    max_size=8,
).map(b"".join)
# Over two letters words overlap, repeat and contain one another all the time.
STOPS = st.lists(st.text("ab", min_size=1, max_size=8), max_size=4)
WILD_STOPS = st.lists(st.text("".join(FRAGMENTS), min_size=1, max_size=3), max_size=3)


@st.composite
def pieces(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Some bytes, cut into pieces at any places; pieces may be empty, as those of special tokens are."""
    whole = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def reference(data: bytes, stops: list[str]) -> tuple[str, str | None]:
    """The rule, read aloud: up to the first place where a stop is complete, the longest one there."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def could_become_a_stop(text: str, stops: list[str]) -> int:
    """The length of the longest end of ``text`` that begins a stop without being one."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def assemble(parts: list[bytes], stops: list[str]) -> tuple[list[str], str | None]:
    assembler = TextAssembler(stops)
    out = [assembler.push(part) for part in parts]
    return [*out, assembler.finish()], assembler.stopped


@given(pieces(WILD_BYTES))
def test_S1_joined_text_is_that_of_all_bytes_at_once(parts: list[bytes]) -> None:
    out, stopped = assemble(parts, [])
    assert "".join(out) == b"".join(parts).decode("utf-8", "replace")
    assert stopped is None


# One letter too many falls back to a shorter beginning, and from there to one shorter still.
@example([b"aaaabaaa", b"b"], ["aabaaaa"])
@example([b"aabaaabaaaa"], ["aabaaaa"])
@given(pieces(st.text("ab", max_size=30).map(str.encode)), STOPS)
def test_S1_text_ends_before_the_first_stop_string(parts: list[bytes], stops: list[str]) -> None:
    out, stopped = assemble(parts, stops)
    assert ("".join(out), stopped) == reference(b"".join(parts), stops)
    assert not any(stop in "".join(out) for stop in stops)


@given(pieces(WILD_BYTES), WILD_STOPS)
def test_S1_stop_strings_of_any_characters_in_any_bytes(parts: list[bytes], stops: list[str]) -> None:
    out, stopped = assemble(parts, stops)
    assert ("".join(out), stopped) == reference(b"".join(parts), stops)


@example([b"aaaabaaa", b"b"], ["aabaaaa"])
@given(pieces(st.text("abc", max_size=30).map(str.encode)), STOPS)
def test_S1_only_what_may_become_a_stop_is_held_back(parts: list[bytes], stops: list[str]) -> None:
    assembler = TextAssembler(stops)
    given_out, so_far = "", b""
    for part in parts:
        given_out += assembler.push(part)
        so_far += part
        text, stopped = reference(so_far, stops)
        held = 0 if stopped else could_become_a_stop(text, stops)
        assert given_out == text[: len(text) - held]
        assert assembler.stopped == stopped


@pytest.mark.parametrize("char", FRAGMENTS)
def test_S1_a_character_split_over_tokens_comes_whole(char: str) -> None:
    assembler = TextAssembler()
    *first, last = [bytes([byte]) for byte in char.encode()]
    assert [assembler.push(byte) for byte in first] == [""] * len(first)
    assert assembler.push(last) == char
    assert assembler.finish() == ""


@pytest.mark.parametrize("half", [b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98"])
def test_S1_a_dangling_half_becomes_one_replacement_character(half: bytes) -> None:
    assembler = TextAssembler()
    assert assembler.push(b"ok" + half) == "ok"
    assert assembler.finish() == "�"
    assert assembler.finish() == ""


def test_S1_half_a_character_is_replaced_as_soon_as_it_cannot_go_on() -> None:
    assembler = TextAssembler()
    assert assembler.push(b"\xe2\x82") == ""
    assert assembler.push(b"a") == "�a"


def test_S1_what_was_held_back_is_flushed_at_the_end() -> None:
    assembler = TextAssembler(["END."])
    assert assembler.push(b"the END") == "the "
    assert assembler.finish() == "END"
    assert assembler.finish() == ""
    assert assembler.stopped is None


def test_S1_held_text_comes_out_once_it_cannot_become_a_stop() -> None:
    assembler = TextAssembler(["aab"])
    assert [assembler.push(byte) for byte in (b"a", b"a", b"a", b"c")] == ["", "", "a", "aac"]


def test_S1_a_stop_string_over_three_tokens() -> None:
    assembler = TextAssembler(["\n\nUser:"])
    assert [assembler.push(part) for part in (b"Yes.\n", b"\nUs", b"er: and")] == ["Yes.", "", ""]
    assert assembler.stopped == "\n\nUser:"
    assert assembler.push(b"more") == ""
    assert assembler.finish() == ""


def test_S1_of_stops_complete_at_one_place_the_longest_counts() -> None:
    assembler = TextAssembler(["c", "bc", "xbc"])
    assert assembler.push(b"abc") == "a"
    assert assembler.stopped == "bc"


@pytest.mark.parametrize("cut", range(5))
def test_S1_the_stop_that_is_complete_first_counts_however_tokens_cut_the_text(cut: int) -> None:
    # "abcd" begins earlier, but the answer has ended with "c" before its last letter comes.
    out, stopped = assemble([b"abcd"[:cut], b"abcd"[cut:]], ["abcd", "c"])
    assert "".join(out) == "ab"
    assert stopped == "c"


def test_S1_the_last_replacement_character_may_complete_a_stop() -> None:
    out, stopped = assemble([b"ab", b"\xe2"], ["b�"])
    assert "".join(out) == "a"
    assert stopped == "b�"


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="stop string must not be empty"):
        TextAssembler(stops)


def test_a_long_stop_string_costs_time_in_proportion_to_the_text_only() -> None:
    # A search that begins anew at every character would take n * n here: 10**10 comparisons.
    stop = "a" * 100_000 + "b"
    assembler = TextAssembler([stop])
    given_out = "".join(assembler.push(b"a" * 1000) for _ in range(200))
    assert given_out == "a" * 100_000
    assert assembler.push(b"b") == ""
    assert assembler.stopped == stop
