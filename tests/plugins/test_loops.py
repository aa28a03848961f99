"""Translations that go round in circles, and how long one may get."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneway_plugins import _loops
from laneway_plugins._loops import LoopWatch, longest_translation, most_repeats, repeats_at_end


def until_loop(text: str, source: str = "Quelle") -> tuple[str, bool]:
    watch = LoopWatch(source)
    return watch.push(text), watch.looping


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("word " * 30, 30),
        ("Intro. " + "The letter is a letter to the landlord. " * 5, 5),
        ("a" * 48, 48),
        ("是的，" * 20, 20),
        ("one\n\ntwo\n\n" * 8, 8),
    ],
)
def test_a_repeated_end_is_counted(text: str, least: int) -> None:
    assert repeats_at_end(text) == least


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 47,
        "word " * 9,
        "The letter is a letter. " * 3,
        " ".join(f"{number}. step" for number in range(200)),
        "Never mind the rest, it is fine. " * 9 + "And that was all of it.",
        "The quick brown fox jumps over the lazy dog and runs home again before it rains.",
    ],
)
def test_what_is_no_loop(text: str) -> None:
    assert repeats_at_end(text) == 0


@given(st.text(alphabet="ab .", max_size=40), st.text(alphabet="abc", min_size=1, max_size=20), st.integers(1, 60))
def test_the_count_is_the_one_of_a_plain_search(before: str, unit: str, times: int) -> None:
    text = before + unit * times
    counts = [
        (same // length)
        for length in range(1, len(text) + 1)
        for same in [next((n for n in range(len(text), 0, -1) if text[-n:] == (text[-length:] * n)[-n:]), 0)]
        if same >= max(_loops.LEAST_CHARACTERS, _loops.LEAST_REPEATS * length)
    ]
    assert repeats_at_end(text) == max(counts, default=0)


@given(st.text(alphabet="ab", max_size=80))
@example("ab" * 40)
def test_the_repeats_of_a_source_are_those_of_a_plain_search(text: str) -> None:
    found = 1
    for start in range(len(text)):
        for length in range(1, (len(text) - start) // 2 + 1):
            unit, times = text[start : start + length], 1
            while text.startswith(unit, start + times * length):
                times += 1
            if length <= 64:
                found = max(found, times)
    assert most_repeats(text) == found


def test_a_translation_is_cut_soon_after_a_loop_has_begun() -> None:
    begin, unit = "Dear landlord, ", "I hope that you are well. "
    text, looping = until_loop(begin + unit * 1000)
    assert looping
    assert len(begin) + 4 * len(unit) <= len(text) <= len(begin) + 4 * len(unit) + _loops.STEP
    assert text == (begin + unit * 1000)[: len(text)]


def test_what_the_source_repeats_may_be_repeated() -> None:
    assert until_loop("ha " * 40, "ha" * 20) == ("ha " * 40, False)
    assert until_loop("ha " * 60, "ha" * 20)[1]
    dots = "Inhalt" + "." * 70 + "7"
    assert until_loop("Contents" + "." * 70 + "7", dots) == ("Contents" + "." * 70 + "7", False)


@given(st.lists(st.sampled_from(["ab", "c ", "ab ab ", "x", ". " * 9, "long enough to see "]), max_size=60), st.data())
def test_the_result_does_not_depend_on_how_the_text_came(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    watch = LoopWatch("s")
    shown = "".join(watch.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    assert (shown, watch.looping) == until_loop(text, "s")


def test_a_translation_may_be_long_enough_for_any_language() -> None:
    assert longest_translation(1) >= 64
    assert longest_translation(100) >= 15 * 100
    assert longest_translation(100) < 20 * 100
