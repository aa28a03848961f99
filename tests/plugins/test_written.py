"""Text that remembers what a template wrote: the same text, in which content is never taken for the template's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from laneway_plugins._written import (
    Traced,
    clipped,
    concat,
    formatted,
    is_written,
    join,
    plain,
    spans_of,
    traced,
    written,
)

CONTENT = "\ue000\ue001\ue002"
"""What only content has.  It is neither white space nor has it another case."""
TEMPLATE = "aBß <>|\n,%"


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Texts that are in part the template's: those parts have no character of :data:`CONTENT`, and all others do."""
    parts = draw(
        st.lists(
            st.one_of(st.text(TEMPLATE, min_size=1, max_size=6).map(written), st.text(CONTENT, min_size=1, max_size=4)),
            max_size=6,
        )
    )
    return concat(parts)


def check(result: Any, expected: Any, *, whole: bool) -> None:
    """The same text, and honest spans; ``whole``: all that the template wrote is still known to be."""
    assert result == expected
    assert type(result) in (str, Traced)
    spans = spans_of(result)
    assert all(0 <= first < last <= len(result) for first, last in spans)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(spans))
    inside = {place for first, last in spans for place in range(first, last)}
    assert not [place for place in inside if result[place] in CONTENT]
    if whole:
        assert inside == {place for place, character in enumerate(result) if character not in CONTENT}


small = st.integers(-3, 12)
separators = st.one_of(texts().filter(bool), st.sampled_from(["<", "a", "\n", " ", CONTENT[0]]))


@given(texts(), texts(), small, small)
def test_sums_products_and_slices_keep_what_was_written(one: str, two: str, start: int, stop: int) -> None:
    check(one + two, plain(one) + plain(two), whole=True)
    check(one * (stop // 3), plain(one) * (stop // 3), whole=True)
    check(one[start:stop], plain(one)[start:stop], whole=True)
    check(one[start:], plain(one)[start:], whole=True)
    check(one[::-1], plain(one)[::-1], whole=False)
    check(str(one), plain(one), whole=True)
    for place, character in enumerate(one):
        check(character, plain(one)[place], whole=True)
        check(one[place], plain(one)[place], whole=True)
    with pytest.raises(IndexError):
        one[len(one)]


@given(texts(), separators, st.integers(-1, 3))
def test_splitting_keeps_what_was_written(text: str, separator: str, most: int) -> None:
    for name in ("split", "rsplit"):
        for args in ((), (None, most), (separator,), (separator, most)):
            expected = getattr(plain(text), name)(*args)
            found = getattr(text, name)(*args)
            assert len(found) == len(expected)
            for piece, right in zip(found, expected, strict=True):
                check(piece, right, whole=True)
    for keep in (False, True):
        for line, right in zip(text.splitlines(keep), plain(text).splitlines(keep), strict=True):
            check(line, right, whole=True)
    for name in ("partition", "rpartition"):
        for piece, right in zip(getattr(text, name)(separator), getattr(plain(text), name)(separator), strict=True):
            check(piece, right, whole=True)


@given(texts(), st.sampled_from([None, " ", "<a", CONTENT[0] + "\n"]), separators)
def test_cutting_ends_off_keeps_what_was_written(text: str, characters: str | None, end: str) -> None:
    for name in ("strip", "lstrip", "rstrip"):
        check(getattr(text, name)(characters), getattr(plain(text), name)(characters), whole=True)
    for name in ("removeprefix", "removesuffix"):
        check(getattr(text, name)(end), getattr(plain(text), name)(end), whole=True)


@given(texts(), texts().filter(bool), texts(), st.integers(-1, 3))
def test_replacing_and_joining_keep_what_was_written(text: str, old: str, new: str, most: int) -> None:
    expected = plain(text).replace(plain(old), plain(new), most)
    # In what is content from end to end, what is put in counts as content as well.
    check(text.replace(old, new, most), expected, whole=isinstance(text, Traced))
    check(text.replace("", new), plain(text).replace("", plain(new)), whole=False)
    parts = [text, new, old, text]
    check(join(old, parts), plain(old).join(map(plain, parts)), whole=True)
    check(concat(parts), "".join(map(plain, parts)), whole=True)


@given(texts(), st.integers(0, 30))
def test_cases_and_padding_lose_at_most_what_was_written(text: str, width: int) -> None:
    for name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
        longer = len(getattr(plain(text), name)()) != len(text)
        check(getattr(text, name)(), getattr(plain(text), name)(), whole=not longer)
    for name in ("center", "ljust", "rjust"):
        # The filling is no one's, so it counts as content.
        padded = getattr(text, name)(width, CONTENT[1])
        check(padded, getattr(plain(text), name)(width, CONTENT[1]), whole=True)
        check(getattr(text, name)(width), getattr(plain(text), name)(width), whole=False)
    check(text.zfill(width), plain(text).zfill(width), whole=False)
    check(text.expandtabs(width), plain(text).expandtabs(width), whole=False)


@given(texts(), texts())
def test_formats_of_the_template_keep_what_was_written(one: str, two: str) -> None:
    check(written("<|%s|>%% %s") % (one, two), f"<|{plain(one)}|>% {plain(two)}", whole=True)
    check(written("a%s") % one, f"a{plain(one)}", whole=True)
    check(written("%5s|%s") % (one, two), f"{plain(one):>5}|{plain(two)}", whole=False)
    check(written("%(x)s") % {"x": one}, plain(one), whole=False)
    check(written("<{}>{{}}<{}>").format(one, two), f"<{plain(one)}>{{}}<{plain(two)}>", whole=True)
    check(written("<{1}{x}{1}>").format(one, two, x=one), f"<{plain(two)}{plain(one)}{plain(two)}>", whole=True)
    check(written("{:>5}").format(one), f"{plain(one):>5}", whole=False)
    check(formatted(written("{0!r}"), repr(plain(one)), (one,), {}), repr(plain(one)), whole=False)


def test_a_format_that_content_wrote_makes_content() -> None:
    assert spans_of(plain("x%s") % written("<a>")) == ()
    assert spans_of(concat(["%s", written("<a>")]) % "x") == ()
    assert spans_of(concat(["{}", written("<a>")]).format("x")) == ()


def test_what_is_made_from_text_alone_has_no_spans() -> None:
    assert spans_of(Traced("<a>")) == ()
    assert type(plain(written("<a>"))) is str
    assert type(traced("<a>", ())) is str
    assert type(written("")) is str
    assert is_written(written("<a>"))
    assert not is_written(concat(["<", written("a>")]))


def test_two_parts_that_touch_are_one_span_and_content_between_keeps_them_apart() -> None:
    assert spans_of(written("<|") + written("a") + written("|>")) == ((0, 5),)
    assert spans_of(written("<|") + "a" + written("|>")) == ((0, 2), (3, 5))
    assert clipped(((0, 2), (3, 5), (7, 9)), 1, 8) == ((0, 1), (2, 4), (6, 7))


def test_safe_html_joins_in_its_own_way() -> None:
    assert written("<a>") + Markup("<b>") == Markup("&lt;a&gt;<b>")
    assert Markup("<b>") + written("<a>") == Markup("<b>&lt;a&gt;")
    assert isinstance(written("<a>") + Markup("b"), Markup)


@pytest.mark.parametrize("other", [1, None, ["a"]])
def test_other_things_are_refused_as_by_any_text(other: Any) -> None:
    with pytest.raises(TypeError):
        written("a") + other
    with pytest.raises(TypeError):
        written("a").join([other])
