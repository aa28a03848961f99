"""Grammars made from seeds: what ends is an answer, every answer can be given, and no search is beyond its bound."""

from __future__ import annotations

import random

import pytest

from laneway.decoder import DecodeError, InvalidRequestError, Sampling
from laneway_native import Model
from laneway_native._decoder import check_beginning, tables_of
from laneway_native._ffi import lib
from laneway_native._grammar import MOST_BEGINNINGS, GrammarLimits
from tests.native.grammars import (
    Characters,
    Deriver,
    Grammar,
    Language,
    Maker,
    OneOf,
    Repeated,
    Rule,
    Text,
    TooDeep,
    written,
)
from tests.native.samplers import NativeSampler, native_sampler
from tests.tiny_model import EOS, FIRST_BYTE, IM_END, IM_START

SEEDS = range(150)
LIMITS = GrammarLimits(work=2_000_000, seconds=3600.0)
"""Work alone is bounded here, so that a slow machine finds what a fast one does."""


def made(seed: int, model: Model, *, names_ends: bool) -> tuple[random.Random, Grammar, str]:
    """A grammar, its text, and what made it, to go on with."""
    rng = random.Random(seed)
    named = (FIRST_BYTE + ord("h"), model.tokenize("the", bos=False)[0], IM_START, *([IM_END] if names_ends else []))
    grammar = Maker(rng, tokens=named).grammar()
    return rng, grammar, written(grammar)


def refusal(sampling: Sampling, model: Model) -> str | None:
    """Why a request with this grammar is refused; None if it is not."""
    assert sampling.grammar is not None
    try:
        check_beginning(model, sampling, tables_of(model, sampling.grammar), LIMITS)
    except InvalidRequestError as error:
        return error.reason
    return None


def picked(sampler: NativeSampler, row: list[float]) -> int:
    """The next token; -1 if the sequence ends alone, with an error that says so."""
    try:
        return sampler.pick(row)
    except DecodeError as error:
        if error.status in (lib.LANEWAY_NO_TOKEN, lib.LANEWAY_GRAMMAR_LIMIT):
            return -1
        raise


def test_what_ends_with_an_end_token_is_an_answer_of_the_grammar(tiny: Model) -> None:
    ended = 0
    for seed in SEEDS:
        rng, grammar, text = made(seed, tiny, names_ends=True)
        top_k, min_p = rng.choice((0, 40)), rng.choice((0.0, 0.05))
        sampling = Sampling(temperature=1.0, top_k=top_k, top_p=1.0, min_p=min_p, seed=seed, grammar=text)
        if refusal(sampling, tiny) is not None:
            continue
        language = Language(grammar, tiny)
        answer: list[int] = []
        with native_sampler(sampling, model=tiny, limits=LIMITS) as sampler:
            for number in range(24):
                # End tokens are likely, and become likelier: they come as soon as they may.
                row = [rng.gauss(0, 2) for _ in range(tiny.size)]
                for token in tiny.end_tokens:
                    row[token] = 4 + number / 3
                token = picked(sampler, row)
                # One look at the budget may come a whole list of places late.
                assert sampler.work <= LIMITS.work + MOST_BEGINNINGS
                if token in tiny.end_tokens:
                    assert language.has(answer, token), f"seed {seed}: {answer} is no answer of\n{text}"
                    ended += 1
                if token < 0 or token in tiny.end_tokens:
                    break
                answer.append(token)
    assert ended > len(SEEDS) / 2


def test_every_answer_of_the_grammar_can_be_given(tiny: Model) -> None:
    """Byte by byte, which is the longest way to give it."""
    given = 0
    for seed in SEEDS:
        rng, grammar, text = made(seed, tiny, names_ends=False)
        sampling = Sampling(temperature=0.0, grammar=text)
        refused = refusal(sampling, tiny)
        for _ in range(3):
            answer = derived(grammar, tiny, rng)
            if answer is None:
                continue
            assert refused is None, f"seed {seed}: {answer} is an answer of\n{text}\nbut it was refused: {refused}"
            with native_sampler(sampling, model=tiny, limits=LIMITS) as sampler:
                for token in (*answer, EOS):
                    row = [0.0] * tiny.size
                    row[token] = 9.0
                    assert picked(sampler, row) == token, f"seed {seed}: {answer} of\n{text}"
            given += 1
    assert given > len(SEEDS) / 2


def derived(grammar: Grammar, model: Model, rng: random.Random) -> list[int] | None:
    """An answer of the grammar that is not too long; None if none was found."""
    try:
        answer = Deriver(grammar, model, FIRST_BYTE, rng).answer()
    except TooDeep:
        return None
    return None if len(answer) > 100 or model.end_tokens.intersection(answer) else answer


@pytest.mark.parametrize(
    ("grammar", "answer", "right"),
    [
        ({"root": OneOf(((Rule("root"), Text("a")), (Text("b"),)))}, "baa", True),
        ({"root": OneOf(((Rule("root"), Text("a")), (Text("b"),)))}, "aab", False),
        ({"root": OneOf(((), (Rule("root"), Rule("root")), (Text("ab"),)))}, "ababab", True),
        ({"root": OneOf(((), (Rule("root"), Rule("root")), (Text("ab"),)))}, "aba", False),
        ({"root": OneOf(((Repeated(Text("a"), 2, 3),),))}, "a", False),
        ({"root": OneOf(((Repeated(Text("a"), 2, 3),),))}, "aaa", True),
        ({"root": OneOf(((Repeated(Text("a"), 2, 3),),))}, "aaaa", False),
        ({"root": OneOf(((Repeated(Characters(((0x80, 0xFF),)), 1, None), Text("x")),))}, "éüx", True),
        ({"root": OneOf(((Repeated(Characters(((0x80, 0xFF),)), 1, None), Text("x")),))}, "é€x", False),
    ],
)
def test_the_matcher_of_these_tests_knows_an_answer(tiny: Model, grammar: Grammar, answer: str, right: bool) -> None:
    assert Language(grammar, tiny).has([FIRST_BYTE + byte for byte in answer.encode()], EOS) is right


@pytest.mark.parametrize(
    ("least", "most"), [(0, 1), (0, 32), (0, 33), (31, 65), (33, 33), (100, 100), (0, 97), (64, None), (5, 100_000)]
)
def test_a_repetition_has_just_the_lengths_that_it_says(tiny: Model, least: int, most: int | None) -> None:
    text = f'root ::= "a"{{{least},{"" if most is None else most}}}'
    row = [0.0] * tiny.size
    (a,) = tiny.tokenize("a", bos=False)
    row[a] = 5.0
    longest = 200 if most is None or most > 200 else most
    with native_sampler(Sampling(temperature=0.0, grammar=text), model=tiny) as sampler:
        for length in range(longest + 1):
            # Whether an end is possible here shows in what is picked where nothing is likelier than it.
            row[EOS] = 0.0
            if length < least:
                row[EOS] = 9.0
            token = sampler.pick(row)
            assert token == (a if length < longest or longest == 200 else EOS)
    for length in {least, (least + longest) // 2, longest}:
        with native_sampler(Sampling(temperature=0.0, grammar=text), model=tiny) as sampler:
            row[EOS] = 0.0
            assert {sampler.pick(row) for _ in range(length)} <= {a}
            row[EOS] = 9.0
            assert sampler.pick(row) == EOS


def test_a_schema_of_some_hundred_rules_passes_and_is_cheap(tiny: Model) -> None:
    """As clients make grammars of JSON schemas: objects in objects, optional members, strings with a largest length."""
    lines = [
        'space ::= | " " | "\\n"{1,2} [ \\t]{0,20}',
        r'char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})',
        'string ::= "\\"" char* "\\"" space',
        'integer ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) space',
    ]
    for number in range(300):
        members = " ".join(
            f'( "," space "\\"m{member}\\"" space ":" space {kind} )?'
            for member, kind in enumerate(("string", "integer", f'"\\"" char{{0,{100 + number}}} "\\"" space'))
        )
        below = f'"," space "\\"below\\"" space ":" space o{number + 1}' if number < 299 else ""
        lines.append(f'o{number} ::= "{{" space "\\"id\\"" space ":" space integer {members} {below} "}}" space')
    text = "\n".join(["root ::= o0", *lines])
    rng = random.Random(1)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, grammar=text)
    check_beginning(tiny, sampling, tables_of(tiny, text))
    with native_sampler(sampling, model=tiny) as sampler:
        for _ in range(300):
            assert sampler.pick([rng.gauss(0, 1) for _ in range(tiny.size)]) not in tiny.end_tokens
            # The whole vocabulary was held against it, if need be.
            assert sampler.work < 100 * tiny.size
