"""Grammars: what is allowed, what is refused, and that no grammar stops the others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import Chunk, InvalidRequestError, Sampling, StepBatch
from laneway_native import Model
from laneway_native._decoder import check_grammar
from laneway_native._gbnf import check_gbnf
from tests.native.driving import GREEDY, Driver, answer, decoder_of, prompts
from tests.native.samplers import native_sampler
from tests.tiny_model import EOS, FIRST_BYTE, IM_END


def greedy(grammar: str, **fields: object) -> Sampling:
    return Sampling(temperature=0.0, grammar=grammar, **fields)  # type: ignore[arg-type]


def check(grammar: str) -> None:
    check_gbnf(grammar, vocabulary=100, tokenize=lambda text: [1] if text == "<one>" else [1, 2])


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
        # Whoever goes on regardless gets end tokens for ever.
        assert {sampler.pick(row) for _ in range(3)} == {EOS}


def test_an_answer_that_cannot_go_on_ends(tiny: Model, caplog: pytest.LogCaptureFixture) -> None:
    forbidden = [*tiny.tokenize("a", bos=False), FIRST_BYTE + ord("a"), *tiny.end_tokens]
    sampling = greedy('root ::= "a"', logit_bias=dict.fromkeys(forbidden, -math.inf))
    with caplog.at_level(logging.WARNING, logger="laneway.llama"):
        with native_sampler(sampling, model=tiny) as sampler:
            picked = {sampler.pick(row_of(tiny, "a")) for _ in range(2)}
    assert picked == {EOS}
    assert "allow no token" in caplog.text


async def test_C10_a_grammar_that_explodes_ends_alone(tiny: Model, caplog: pytest.LogCaptureFixture) -> None:
    """Each "a" doubles the ways that the rest may go; the answer ends before the machine does."""
    grammar = 'root ::= s\ns ::= "a" (x | y) | "b"\nx ::= s "b"\ny ::= s "c"'
    async with decoder_of(tiny) as decoder:
        first, second = prompts(tiny, 2)
        expected = await answer(decoder, second, 40)
        driver = Driver(decoder)
        (a,) = tiny.tokenize("a", bos=False)
        await driver.start(0, first, greedy(grammar, logit_bias={a: 100.0}))
        await driver.start(1, second)
        for _ in range(39):
            await driver.decode()
        assert driver.tokens[1][len(second) :] == expected
        assert driver.tokens[0][-1] == EOS
    assert "too ambiguous" in caplog.text


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
    'root ::= "a"{2001}': "2001 repetitions",
    'root ::= "a"{99999999999999999999}': "a number of repetitions",
    'root ::= ("a"?){2000}': "2000 repetitions of something with 2 rules",
    "root ::= other": "rule 'other' is used and never defined",
    "root ::= <[100]>": "token 100 is not in the vocabulary",
    "root ::= <[99999999999999]>": "a token is written",
    "root ::= <[7>": "a token is written",
    "root ::= <one": "a token is written",
    "root ::= <two>": "<two> is not one token",
    'root ::= root "a" | "b"': "rule 'root' can begin with itself",
    'root ::= ("x"?) root "a" | "b"': "rule 'root' can begin with itself",
    'root ::= a "x"\na ::= b "y"\nb ::= "q"? a "z" | "w"': "can begin with itself",
    'root ::= ("a"* "b"?)* "c" root': None,
    "root ::= " + "(" * 101 + '"a"' + ")" * 101: "more than 100 deep",
    "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000: "more than 100 deep",
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(30)) + '\nr30 ::= "a"': "too ambiguous",
    "root ::= " + " ".join(['"a"?'] * 2000): "in more than 256 ways",
    'root ::= "a"' + " " * 70_000: "has 70,012 characters",
    "root ::= " + '"a"? ' * 10_001: "too many rules",
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
]


@pytest.mark.parametrize(("grammar", "problem"), BAD.items(), ids=range(len(BAD)))
def test_bad_grammars_are_refused_with_a_reason(grammar: str, problem: str | None) -> None:
    if problem is None:
        check(grammar)
        return
    with pytest.raises(InvalidRequestError) as caught:
        check(grammar)
    assert caught.value.field == "grammar"
    assert problem in caught.value.reason


@pytest.mark.parametrize("grammar", GOOD, ids=range(len(GOOD)))
def test_good_grammars_pass_here_and_there(tiny: Model, grammar: str, capfd: pytest.CaptureFixture[str]) -> None:
    check_grammar(tiny, grammar.replace("<one>", "<|im_end|>"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bad", ['root ::= "a', "root ::= root", 'root ::= "\0"', ""])
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
        # Time of this thread's own, whatever else the machine does.
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
def test_what_passes_here_llama_parses_and_follows(tiny: Model, rules: dict[str, str]) -> None:
    grammar = "\n".join(f"{name} ::= {body}" for name, body in rules.items())
    reason = refusal(lambda: check_gbnf(grammar, vocabulary=tiny.size, tokenize=lambda _: []))
    if reason is not None:
        assert "begin with itself" in reason or "too ambiguous" in reason
        return
    reason = refusal(lambda: check_grammar(tiny, grammar))
    if reason is not None:
        # It also refuses cycles that do no harm.
        assert "left recursion" in reason
        return
    row = [math.sin(7 * token) for token in range(tiny.size)]
    with native_sampler(Sampling(temperature=1.0, seed=1, grammar=grammar), model=tiny) as sampler:
        for _ in range(6):
            if sampler.pick(row) in tiny.end_tokens:
                break


@given(st.text(alphabet='root:= "ab[]()|*+?{}0,1\\<>!.#\n-^x', max_size=40))
def test_no_text_reaches_llamas_parser_that_it_would_complain_of(tiny: Model, text: str) -> None:
    for grammar in (text, "root ::= " + text):
        # "failed to parse grammar" would be llama.cpp's: it has then printed to standard error.
        assert "failed to parse" not in (refusal(lambda: check_grammar(tiny, grammar)) or "")  # noqa: B023


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
