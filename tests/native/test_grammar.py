"""Grammars: what is allowed, what is refused, and that no grammar stops the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import Chunk, DecodeError, InvalidRequestError, Sampling, StepBatch
from laneway_native import Model
from laneway_native._decoder import check_beginning, tables_of
from laneway_native._ffi import lib
from laneway_native._grammar import MOST_BEGINNINGS, GrammarLimits, grammar_tables
from tests.native.driving import GREEDY, Driver, answer, decoder_of, prompts
from tests.native.samplers import native_sampler
from tests.tiny_model import EOS, FIRST_BYTE, IM_END, IM_START


def greedy(grammar: str, **fields: object) -> Sampling:
    return Sampling(temperature=0.0, grammar=grammar, **fields)  # type: ignore[arg-type]


def check(grammar: str) -> None:
    grammar_tables(grammar, vocabulary=100, tokenize=lambda text: [1] if text == "<one>" else [1, 2])


def row_of(model: Model, *likely: str) -> list[float]:
    """Logits with the given pieces on top, the first highest."""
    row = [0.0] * model.size
    for rank, piece in enumerate(likely):
        (token,) = model.tokenize(piece, bos=False)
        row[token] = 20.0 - rank
    return row


# What a grammar does.


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 0}])
def test_the_likeliest_token_that_is_allowed_is_taken(tiny: Model, fields: dict[str, float]) -> None:
    row = row_of(tiny, "x", "y", "b", "a")
    with native_sampler(Sampling(grammar='root ::= "a" | "b"', seed=1, min_p=0.5, **fields), model=tiny) as sampler:  # type: ignore[arg-type]
        assert tiny.piece(sampler.pick(row)) == b"b"


def test_what_is_allowed_is_not_changed(tiny: Model) -> None:
    """A grammar that allows what would have been drawn anyway draws the same."""
    row = row_of(tiny, "a", "b", "c", "d")
    sampling = {"temperature": 2.0, "seed": 5, "top_k": 4, "top_p": 0.99, "min_p": 0.0}
    with (
        native_sampler(Sampling(**sampling)) as free,  # type: ignore[arg-type]
        native_sampler(Sampling(**sampling, grammar="root ::= [a-d]*"), model=tiny) as bound,  # type: ignore[arg-type]
    ):
        picks = [free.pick(row) for _ in range(50)]
        assert [bound.pick(row) for _ in range(50)] == picks
    assert len(set(picks)) == 4


def test_draws_among_what_is_allowed_follow_the_distribution(tiny: Model) -> None:
    row = row_of(tiny, "x")
    for letter, weight in (("a", 0.25), ("b", 0.75)):
        row[tiny.tokenize(letter, bos=False)[0]] = 10 + math.log(weight)
    sampling = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "seed": 2}
    for top_k in (0, 2, 40):
        with native_sampler(Sampling(grammar="root ::= [ab]*", top_k=top_k, **sampling), model=tiny) as sampler:  # type: ignore[arg-type]
            pieces = [tiny.piece(sampler.pick(row)) for _ in range(2000)]
        assert set(pieces) <= {b"a", b"b", b""}
        share = pieces.count(b"b") / (pieces.count(b"a") + pieces.count(b"b"))
        assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 2000)


async def test_answers_are_of_the_grammar(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        for number, prompt in enumerate(prompts(tiny)):
            grammar = r'root ::= "{\"n\": " [1-9] [0-9]{0,2} ", \"ok\": " ("true" | "false") "}"'
            sampling = Sampling(temperature=1.0, seed=number, grammar=grammar)
            tokens = await answer(decoder, prompt, 40, sampling)
            end = next(index for index, token in enumerate(tokens) if token in tiny.end_tokens)
            text = b"".join(tiny.piece(token) for token in tokens[:end]).decode()
            head, _, rest = text.partition(", ")
            assert head.startswith('{"n": ')
            assert 1 <= int(head.removeprefix('{"n": ')) <= 999
            assert rest in ('"ok": true}', '"ok": false}')


def test_an_end_token_comes_when_the_grammar_is_done(tiny: Model) -> None:
    row = row_of(tiny, "x", "a")
    row[IM_END] = 1.0
    with native_sampler(greedy('root ::= "a"'), model=tiny) as sampler:
        assert tiny.piece(sampler.pick(row)) == b"a"
        assert sampler.pick(row) == IM_END
        # A step may pick more than is taken of it: what follows an end token is that token again.
        assert {sampler.pick(row) for _ in range(3)} == {IM_END}


def test_an_answer_never_ends_where_the_grammar_has_not(tiny: Model) -> None:
    """However likely the end tokens are, and although nothing else is left."""
    forbidden = [*tiny.tokenize("b", bos=False), FIRST_BYTE + ord("b")]
    row = row_of(tiny, "a")
    for token in tiny.end_tokens:
        row[token] = 50.0
    sampling = greedy('root ::= "ab"', logit_bias=dict.fromkeys(forbidden, -math.inf))
    with native_sampler(sampling, model=tiny) as sampler:
        assert tiny.piece(sampler.pick(row)) == b"a"
        for _ in range(2):
            with pytest.raises(DecodeError, match="no token may come next") as caught:
                sampler.pick(row)
            assert caught.value.status == lib.LANEWAY_NO_TOKEN


def test_a_complete_answer_whose_end_is_forbidden_is_an_error(tiny: Model) -> None:
    sampling = greedy('root ::= "a"', logit_bias=dict.fromkeys(tiny.end_tokens, -math.inf))
    with native_sampler(sampling, model=tiny) as sampler:
        assert tiny.piece(sampler.pick(row_of(tiny, "a"))) == b"a"
        with pytest.raises(DecodeError, match="no token may come next"):
            sampler.pick(row_of(tiny, "a"))


def test_half_a_character_is_no_end(tiny: Model) -> None:
    """A grammar that has accepted, and whose next character has begun, has not accepted."""
    row = [0.0] * tiny.size
    first, second = (FIRST_BYTE + byte for byte in "é".encode())
    row[first], row[EOS] = 9.0, 8.0
    with native_sampler(greedy('root ::= "é"*'), model=tiny) as sampler:
        assert sampler.pick(row) == first
        assert sampler.pick(row) == second
        row[EOS] = 10.0
        assert sampler.pick(row) == EOS


@pytest.mark.parametrize(
    ("grammar", "pieces"),
    [
        (r"root ::= [\u0800-\u0fff]", b"\xe0\xa0\x80"),
        (r"root ::= [\ud7ff\ue000]", b"\xed\x9f\xbf"),
        (r"root ::= [\U00010000-\U0010ffff]", b"\xf4\x8f\xbf\xbf"),
        ('root ::= "😀"', "😀".encode()),
        ("root ::= .", b"\xc2\x80"),
    ],
)
def test_characters_come_byte_by_byte_and_only_in_their_shortest_form(tiny: Model, grammar: str, pieces: bytes) -> None:
    with native_sampler(greedy(grammar), model=tiny) as sampler:
        for byte in pieces:
            # What would make an overlong form, a surrogate, or a character beyond Unicode is likelier, and refused.
            row = [0.0] * tiny.size
            for bad in (0xC0, 0xC1, 0xF5, 0xFF, 0x80 if byte == 0xA0 else 0xBF if byte == 0x9F else 0xC0):
                row[FIRST_BYTE + bad] = 20.0
            row[FIRST_BYTE + (0x90 if byte == 0x8F else 0xC0)] = 20.0
            row[FIRST_BYTE + byte] = 10.0
            assert sampler.pick(row) == FIRST_BYTE + byte
        assert sampler.pick([0.0] * tiny.size) in tiny.end_tokens


def test_control_tokens_are_no_text(tiny: Model) -> None:
    """Nothing of them is in the answer, so characters of the grammar cannot stand for theirs."""
    row = row_of(tiny, "x")
    row[IM_START] = 50.0
    for grammar in ("root ::= .*", 'root ::= [^"]*', 'root ::= "<|im_start|>"'):
        with native_sampler(greedy(grammar), model=tiny) as sampler:
            assert sampler.pick(row) != IM_START
    with native_sampler(greedy('root ::= "x" <|im_start|> "x"'), model=tiny) as sampler:
        picked = [sampler.pick(row) for _ in range(3)]
        assert [tiny.piece(token) for token in picked] == [b"x", b"", b"x"]
        assert picked[1] == IM_START
        assert sampler.pick(row) in tiny.end_tokens


def test_a_grammar_may_name_the_token_that_ends_it(tiny: Model) -> None:
    row = row_of(tiny, "a")
    row[EOS], row[IM_END] = 30.0, 29.0
    with native_sampler(greedy('root ::= "a" <|im_end|>'), model=tiny) as sampler:
        assert tiny.piece(sampler.pick(row)) == b"a"
        assert sampler.pick(row) == IM_END
    # An end token ends the answer, so it cannot come where more must follow, and "any other token" is none.
    for grammar in ('root ::= <|im_end|> "a" | "a"', "root ::= !<|im_start|>"):
        with native_sampler(greedy(grammar), model=tiny) as sampler:
            assert sampler.pick(row) not in tiny.end_tokens


# What following a grammar may cost.

AMBIGUOUS = 'root ::= s\ns ::= "a" (x | y) | "b"\nx ::= s "b"\ny ::= s "c"'


def test_ways_that_agree_are_followed_once(tiny: Model) -> None:
    """Each "a" doubles the ways that the rest may go; the work grows in proportion to the answer, if at all."""
    row = row_of(tiny, "a")
    with native_sampler(greedy(AMBIGUOUS), model=tiny) as sampler:
        work = []
        for _ in range(200):
            assert tiny.piece(sampler.pick(row)) == b"a"
            work.append(sampler.work)
        assert max(work[100:]) <= 2 * max(work[:100])
        # And the innermost of 200 open ones decides how each of them ends.
        assert tiny.piece(sampler.pick(row_of(tiny, "b"))) == b"b"
        for _ in range(200):
            assert tiny.piece(sampler.pick(row_of(tiny, "c", "b"))) == b"c"
        assert sampler.pick(row) in tiny.end_tokens


def test_two_hundred_and_fifty_five_optional_parts(tiny: Model) -> None:
    """The work of one token is in proportion to the parts and the characters, and "a" alone is no answer."""
    grammar = "root ::= " + '"a"? ' * 255 + '"b"'
    row = row_of(tiny, "a")
    for token in tiny.end_tokens:
        row[token] = 10.0
    with native_sampler(greedy(grammar), model=tiny) as sampler:
        for _ in range(255):
            assert tiny.piece(sampler.pick(row)) == b"a"
            assert sampler.work < 100 * 255
        assert tiny.piece(sampler.pick(row)) == b"b"
        assert sampler.pick(row) in tiny.end_tokens


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        (GrammarLimits(work=5000, seconds=3600.0), "more than 5000 steps"),
        (GrammarLimits(work=10**12, seconds=0.0), "more than 0.000000 s"),
    ],
)
def test_a_search_that_takes_too_long_is_cut(tiny: Model, limits: GrammarLimits, match: str) -> None:
    grammar = "root ::= " + "[a-z]? " * 2000 + '"!"'
    with native_sampler(greedy('root ::= "x"'), model=tiny, limits=limits) as sampler:
        assert tiny.piece(sampler.pick(row_of(tiny, "a"))) == b"x"
    with pytest.raises(DecodeError, match=match) as caught:
        with native_sampler(greedy(grammar), model=tiny, limits=limits) as sampler:
            for _ in range(100):
                sampler.pick(row_of(tiny, "a"))
    assert caught.value.status == lib.LANEWAY_GRAMMAR_LIMIT
    assert "write them so that the next character tells" in caught.value.reason


def test_what_is_too_dear_from_the_start_is_refused_before(tiny: Model) -> None:
    grammar = "root ::= " + "[a-z]? " * 2000 + '"!"'
    with pytest.raises(InvalidRequestError, match="takes too long to follow") as caught:
        check_beginning(tiny, greedy(grammar), tables_of(tiny, grammar), GrammarLimits(work=1000))
    assert caught.value.field == "grammar"


COSTLY = "root ::= " + "[a-z ]? " * 300 + '"!"'
"""Some thousand places for each character."""


@pytest.mark.parametrize("rounds", [1, 4])
async def test_C10_a_sequence_whose_grammar_costs_too_much_ends_alone(tiny: Model, rounds: int) -> None:
    async with decoder_of(tiny) as decoder:
        first, second = prompts(tiny, 2)
        expected = await answer(decoder, second, 20)
        driver = Driver(decoder)
        await driver.start(0, first, greedy(COSTLY))
        decoder.drop(0)
        # Enough for what comes first, and for nothing after that.
        with native_sampler(greedy(COSTLY), first, tiny) as sampler:
            sampler.pick([0.0] * tiny.size)
            decoder.grammar_limits = GrammarLimits(work=sampler.work // 2)
        decoder.open(0, greedy(COSTLY), first)
        result = await decoder.step(StepBatch((Chunk(0, 0, first, True),)))
        assert result.tokens == {}
        failure = result.failures[0]
        assert (failure.status, failure.sequences) == (lib.LANEWAY_GRAMMAR_LIMIT, 1)
        decoder.drop(0)
        # A grammar that runs into a wall after its first tokens, in the midst of a step of several rounds.
        wall = "root ::= [a-z]{3} " + '"\U0010ffff"'
        forbidden = dict.fromkeys((FIRST_BYTE + byte for byte in "\U0010ffff".encode()), -math.inf)
        decoder.grammar_limits = GrammarLimits()
        driver.tokens.clear()
        await driver.start(0, first, greedy(wall, logit_bias=forbidden))
        await driver.start(1, second)
        told: list[tuple[int, DecodeError]] = []
        while len(driver.tokens[1]) < len(second) + 20:
            slots = [slot for slot in driver.tokens if slot == 1 or not told]
            chunks = tuple(Chunk(slot, len(driver.tokens[slot]) - 1, driver.tokens[slot][-1:], True) for slot in slots)
            result = await decoder.step(StepBatch(chunks, rounds=rounds))
            for tokens in (result.tokens, *result.later):
                for slot, token in tokens.items():
                    driver.tokens[slot].append(token)
            told += result.failures.items()
        ((slot, failure),) = told
        assert (slot, failure.status, failure.sequences) == (0, lib.LANEWAY_NO_TOKEN, 1)
        assert driver.tokens[1][len(second) :][:20] == expected
        made = driver.tokens[0][len(first) :]
        assert len(b"".join(map(tiny.piece, made))) == 3
        # All of its tokens are in cells, as its user must know to share them.
        assert decoder.length(0) == len(first) + len(made)


async def test_a_step_of_costly_grammars_makes_fewer_rounds(tiny: Model) -> None:
    """No sequence waits for more than one dear round."""
    async with decoder_of(tiny) as decoder:
        prompt = prompts(tiny)[0]
        for grammar, done in ((None, 8), ("root ::= [a-z ]*", 8), ("root ::= " + "[a-z ]? " * 5000 + '"!"', 1)):
            driver = Driver(decoder)
            await driver.start(
                0, prompt, Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, grammar=grammar)
            )
            last = driver.tokens[0]
            result = await decoder.step(StepBatch((Chunk(0, len(last) - 1, last[-1:], True),), rounds=8))
            assert 1 + len(result.later) == done
            driver.drop(0)


async def test_a_grammar_moves_with_its_sequence(tiny: Model) -> None:
    prompt = prompts(tiny)[0]
    sampling = greedy('root ::= "abcdefghij"')
    async with decoder_of(tiny) as decoder:
        driver = Driver(decoder)
        await driver.start(3, prompt, sampling)
        await driver.decode()
        driver.moves.append((3, 0))
        for _ in range(8):
            await driver.decode()
        assert b"".join(tiny.piece(token) for token in driver.tokens[0][len(prompt) :]) == b"abcdefghij"


# What is refused.

BAD = {
    "": "has no rule 'root'",
    "  # nothing\n": "has no rule 'root'",
    'sentence ::= "a"': "has no rule 'root'",
    "root ::= (": "line 1, column 10: this parenthesis is never closed",
    'root ::= "a" )': "line 1, column 14: ')' begins nothing",
    'root ::= "abc': "line 1, column 10: the text has no closing quote",
    r'root ::= "\q"': "line 1, column 10",
    r'root ::= "\x4"': "line 1, column 10",
    "root ::= [abc": "line 1, column 10: the characters have no closing",
    "root = a": "'::=' must follow",
    "root": "'::=' must follow",
    "::= a": "a rule's name must stand here",
    'root ::= "a"\n  "b"': "line 2, column 3: a rule's name must stand here",
    "root ::= * a": "'*' repeats what stands before it",
    'root ::= "a"{': "a number of repetitions",
    'root ::= "a"{x}': "a number of repetitions",
    'root ::= "a"{1;2}': "a '}' must end",
    'root ::= "a"{3,2}': "from 3 to 2 is nothing",
    'root ::= "a"{99999999999999999999}': "a number of repetitions",
    "root ::= other": "rule 'other' is used and never defined",
    "root ::= <[100]>": "token 100 is not in the vocabulary",
    "root ::= <[99999999999999]>": "a token is written",
    "root ::= <[7>": "a token is written",
    "root ::= <one": "a token is written",
    "root ::= <two>": "<two> is not one token",
    'root ::= "a"{1,1000000000}': "a number of repetitions has at most nine digits",
    "root ::= [z-a]": "allows no answer at all",
    'root ::= "a" [z-a]': "allows no answer at all",
    r"root ::= [^\x00-\U0010ffff]": "allows no answer at all",
    r'root ::= "\uD800" | [\ud800-\udfff] | "\U00110000"': "allows no answer at all",
    "root ::= root": "allows no answer at all",
    'root ::= ("a"* "b"?)* "c" root': "allows no answer at all",
    'root ::= a | b\na ::= "a" b\nb ::= "b" a': "allows no answer at all",
    "root ::= " + "(" * 101 + '"a"' + ")" * 101: "more than 100 deep",
    "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000: "more than 100 deep",
    "root ::= " + '"a"? ' * 10_001: f"begin in 10,002 ways and {MOST_BEGINNINGS:,} are allowed",
    "root ::= "
    + "x{32} " * 4_000
    + '\nx ::= "a"': "has 128,001 items, repetitions written out, and 100,000 are allowed",
    'root ::= "a"' + " " * 140_000: "has 140,012 characters, 131,072 are allowed",
    "root ::= " + "()" * 10_001: "too many rules",
}
GOOD = [
    'root ::= "a"',
    '# a list\nroot ::= item ("," item)*\nitem ::= [a-z]+ # words\n\n',
    'root ::=\n  "a" |\n  "b"\n',
    'root ::= (\n"a"\n| "b"\n)\r\n',
    r'root ::= [^\x00-\x1f\\"] "\u00e9\U0001F600\t\r\n\"\\\[\]\-"',
    'root ::= "a"? "b"* "c"+ "d"{2} "e"{1,} "f"{0,3} "g"{0}',
    'root ::= "" | "a"',
    'root ::= ("a"*)*',
    "root ::= [] | [^] | [a-] | [-a] | [a-z-9]",
    'root ::= . "ü" [äöü]',
    "root ::= <one> !<one> <[99]> !<[0]>",
    'root ::= a\na ::= "x" a | "y"',
    "root ::= " + " | ".join(f'"{word}"' for word in range(3000)),
    'root ::= "a" | b\nb ::= "c"\nb ::= "d"',
    'root ::= ((("a"{10}){10}){10})',
    # Left recursion, also hidden; parts that may be empty in every way; ways that agree.
    'root ::= root "a" | "b"',
    'root ::= ("x"?) root "a" | "b"',
    'root ::= a "x"\na ::= b "y" | "v"\nb ::= "q"? a "z" | "w"',
    'root ::= root root | root? | ()* | "a"',
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(30)) + '\nr30 ::= "a"',
    "root ::= " + " ".join(['"a"?'] * 2000),
    "root ::= " + "|".join(["[a-z]"] * 9_000),
    'root ::= ("a"?){2000} "b"{0,100000} "c"{99999,}',
    "root ::= " + "(" * 100 + '"a"?' + ")*" * 100,
    # What cannot be is left out.
    'root ::= "a" | "b" [z-a] | c\nc ::= "c" c',
    r"root ::= [\x00-\U0010ffff]*",
]


@pytest.mark.parametrize(("grammar", "problem"), BAD.items(), ids=range(len(BAD)))
def test_bad_grammars_are_refused_with_a_reason(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(grammar)
    assert caught.value.field == "grammar"
    assert problem in caught.value.reason


@pytest.mark.parametrize("grammar", GOOD, ids=range(len(GOOD)))
def test_good_grammars_pass_here_and_there(tiny: Model, grammar: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = grammar.replace("<one>", "<|im_start|>")
    check_beginning(tiny, greedy(text), tables_of(tiny, text))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bad", ['root ::= "a', "root ::= root", 'root ::= "\0"', "root ::= [z-a]", ""])
async def test_A10_a_bad_grammar_is_an_invalid_request(tiny: Model, bad: str) -> None:
    async with decoder_of(tiny) as decoder:
        with pytest.raises(InvalidRequestError) as caught:
            decoder.check(greedy(bad))
        assert caught.value.field == "grammar"
        with pytest.raises(InvalidRequestError):
            decoder.open(0, greedy(bad), [1])
        decoder.open(0, GREEDY, [1])


async def test_a_checked_grammar_is_not_checked_again(tiny: Model) -> None:
    words = "root ::= " + " | ".join(f'"{word}"' for word in range(2000))
    async with decoder_of(tiny) as decoder:
        # The processor time of this thread: what else the machine does counts for nothing.
        began = time.thread_time()
        decoder.check(greedy(words))
        first = time.thread_time() - began
        began = time.thread_time()
        for _ in range(100):
            decoder.check(greedy(words))
        assert time.thread_time() - began < 10 * first


_items = st.recursive(
    st.sampled_from(['"a"', '"bc"', "[a-c]", "[^b]", ".", "root", "x", "y", "<[5]>"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + " | ".join(parts) + ")"),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + " ".join(parts) + ")"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])).map("".join),
    ),
    max_leaves=8,
)
_rules = st.lists(_items, min_size=1, max_size=3).map(" ".join)


def refusal(check_one: Callable[[], object]) -> str | None:
    """The reason for which a grammar is refused, or None."""
    try:
        check_one()
    except InvalidRequestError as error:
        return error.reason
    return None


@given(st.fixed_dictionaries({"root": _rules, "x": _rules, "y": _rules}))
def test_what_passes_is_followed(tiny: Model, rules: dict[str, str]) -> None:
    grammar = "\n".join(f"{name} ::= {body}" for name, body in rules.items())
    reason = refusal(lambda: tables_of(tiny, grammar))
    if reason is not None:
        assert "allows no answer" in reason
        return
    row = [math.sin(7 * token) for token in range(tiny.size)]
    with native_sampler(Sampling(temperature=1.0, seed=1, grammar=grammar), model=tiny) as sampler:
        for _ in range(6):
            if sampler.pick(row) in tiny.end_tokens:
                break


@given(st.text(alphabet='root:= "ab[]()|*+?{}0,1\\<>!.#\n-^x', max_size=40))
def test_any_text_is_a_grammar_or_is_refused(tiny: Model, text: str) -> None:
    for grammar in (text, "root ::= " + text):
        if refusal(lambda: tables_of(tiny, grammar)) is None:  # noqa: B023
            with native_sampler(greedy(grammar), model=tiny) as sampler:
                sampler.pick([0.0] * tiny.size)


# Grammar and bias together.


async def test_A10_a_bias_that_leaves_a_grammar_no_beginning_is_refused(tiny: Model) -> None:
    a = [*tiny.tokenize("a", bos=False), FIRST_BYTE + ord("a")]
    async with decoder_of(tiny) as decoder:
        decoder.check(greedy('root ::= "a" | "b"', logit_bias=dict.fromkeys(a, -math.inf)))
        decoder.check(greedy('root ::= "a"?', logit_bias=dict.fromkeys(a, -math.inf)))
        for grammar, forbidden in (('root ::= "a"', a), ('root ::= "a"?', [*a, *tiny.end_tokens])):
            with pytest.raises(InvalidRequestError, match="with which an answer of the grammar can begin") as caught:
                decoder.check(greedy(grammar, logit_bias=dict.fromkeys(forbidden, -math.inf)))
            assert caught.value.field == "logit_bias"


async def test_A10_a_bias_that_forbids_everything_is_refused(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        decoder.check(Sampling(logit_bias=dict.fromkeys(range(1, tiny.size), -math.inf)))
        with pytest.raises(InvalidRequestError, match="forbids every token"):
            decoder.check(Sampling(logit_bias=dict.fromkeys(range(tiny.size), -math.inf)))


async def test_A10_a_grammar_of_nothing_but_an_end_token_amid_it_is_refused(tiny: Model) -> None:
    async with decoder_of(tiny) as decoder:
        with pytest.raises(InvalidRequestError, match="no token of this model's vocabulary begins"):
            decoder.check(greedy('root ::= <|im_end|> "a"'))


async def test_grammars_and_free_answers_share_a_batch(tiny: Model) -> None:
    first, second = prompts(tiny, 2)
    async with decoder_of(tiny) as decoder:
        free = await answer(decoder, second, 10)
        decoder.open(0, greedy("root ::= [a-z]+"), first)
        token = (await decoder.step(StepBatch((Chunk(0, 0, first, True),)))).tokens[0]
        driver = Driver(decoder)
        driver.tokens[0] = [*first, token]
        await driver.start(1, second)
        for _ in range(9):
            await driver.decode()
        assert driver.tokens[1][len(second) :] == free
        text = b"".join(tiny.piece(token) for token in driver.tokens[0][len(first) :])
        assert text.isalpha()
        assert text.islower()
