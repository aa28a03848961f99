"""Our reading of GBNF against llama.cpp's own grammar sampler, which nothing but this test uses.

Compared on what llama.cpp follows in time and without harm: no recursion, few optional parts in a row.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator

import pytest

from laneway.decoder import DecodeError, InvalidRequestError, Sampling
from laneway_native import Model, _llama
from laneway_native._decoder import tables_of
from laneway_native._ffi import ffi
from tests.native.grammars import Maker, written
from tests.native.samplers import native_sampler
from tests.tiny_model import EOS


class _TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class _TokenDataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(_TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class LlamaGrammar:
    """llama.cpp's grammar sampler.  Raises :class:`ValueError` for what its parser does not take."""

    def __init__(self, model: Model, text: str) -> None:
        self._lib = ctypes.CDLL(_llama.__file__)  # whose dependencies are looked up as well
        pointer = ctypes.c_void_p
        self._lib.llama_sampler_init_grammar.restype = pointer
        self._lib.llama_sampler_init_grammar.argtypes = (pointer, ctypes.c_char_p, ctypes.c_char_p)
        self._lib.llama_sampler_apply.argtypes = (pointer, ctypes.POINTER(_TokenDataArray))
        self._lib.llama_sampler_accept.argtypes = (pointer, ctypes.c_int32)
        self._lib.llama_sampler_free.argtypes = (pointer,)
        # A laneway_model begins with llama.cpp's model and its vocabulary.
        parts = ctypes.cast(int(ffi.cast("intptr_t", model.handle)), ctypes.POINTER(pointer))
        self._sampler = self._lib.llama_sampler_init_grammar(parts[1], text.encode(), b"root")
        if not self._sampler:
            raise ValueError("llama.cpp does not take this grammar")

    def allowed(self, tokens: list[int]) -> set[int]:
        """Those of ``tokens`` that may come next."""
        data = (_TokenData * len(tokens))(*(_TokenData(token, 1.0, 0.0) for token in tokens))
        array = _TokenDataArray(data, len(tokens), -1, False)
        self._lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {entry.id for entry in data if entry.logit > -math.inf}

    def accept(self, token: int) -> None:
        self._lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        self._lib.llama_sampler_free(self._sampler)


def compared(model: Model) -> list[int]:
    """Tokens of plain text and one end token.  Control tokens and raw bytes are read differently, and on purpose."""
    plain = (token for token in range(model.size) if model.piece(token).isascii() and b"\0" not in model.piece(token))
    return [*(token for token in plain if model.piece(token)), EOS]


def allowed(model: Model, text: str, prefix: list[int], tokens: list[int]) -> set[int]:
    """What our sampler allows after ``prefix``: it is asked again and again, each answer being forbidden afterwards."""
    found: set[int] = set()
    while True:
        with native_sampler(Sampling(temperature=0.0, grammar=text), model=model) as sampler:
            for token in prefix:
                row = [0.0] * model.size
                row[token] = 9.0
                assert sampler.pick(row) == token
            row = [-math.inf] * model.size
            for token in set(tokens) - found:
                row[token] = 1.0
            try:
                found.add(sampler.pick(row))
            except DecodeError:
                return found


FORMS = [
    'root ::= "a"? "b"* "c"+ "d"{2} "e"{1,} "f"{0,3} "g"{0} "h"{2,4}',
    'root ::= "" | "a"',
    'root ::= ("a" | "b" "c")* "d"',
    r"root ::= [a-] | [-b] [c-e-9] [^a-y] [--0]",
    r'root ::= [\x41-\x43] [\u0044] [\U00000045] "\x46\"\\\[\]\-\t"',
    "root ::= [] [^] [z-a]? .",
    'root ::= # a comment\n  "a" # another\n\n# and one more\nx ::= "b"\n',
    'root ::= ( # in here\n "a"\n |\n "b" ) x\nx ::= "c"{2}{2} | "d"+*\r\n',
    "root ::= !<[300]> <[301]> | <[302]>",
    'root ::= "a" | b\nb ::= "c"\nb ::= "d"',
    'root ::= the-9 "ing"?\nthe-9 ::= "the" | "th" [a-z]',
]


def grammars() -> Iterator[tuple[str, int]]:
    """Each form, and grammars from seeds."""
    for number, text in enumerate(FORMS):
        yield text, number
    for seed in range(60):
        maker = Maker(random.Random(seed), names=("root",))
        text = written(maker.grammar())
        body = text.partition("::=")[2]
        if not any(part in body for part in ("root", "{33,40}", "{0,70}", "{0,100000}")):
            yield text, seed


@pytest.mark.parametrize(("text", "seed"), list(grammars()))
def test_llama_allows_what_we_allow(tiny: Model, text: str, seed: int) -> None:
    rng = random.Random(seed)
    try:
        tables_of(tiny, text)
    except InvalidRequestError as error:
        # llama.cpp takes grammars that no answer is of.
        assert "allows no answer" in error.reason  # noqa: PT017
        return
    tokens = compared(tiny)
    theirs = LlamaGrammar(tiny, text)
    prefix: list[int] = []
    try:
        for _ in range(4):
            expected = theirs.allowed(tokens)
            assert allowed(tiny, text, prefix, tokens) == expected
            onward = sorted(expected - {EOS})
            if not onward:
                break
            prefix.append(rng.choice(onward))
            theirs.accept(prefix[-1])
    finally:
        theirs.close()


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a"{3,2}',
        'root ::= "\\q"',
        "root ::= [a",
        "root ::= (",
        "root ::= x",
        'root ::= "a"\n "b"',
        "root ::= ?",
    ],
)
def test_llama_refuses_what_we_refuse(tiny: Model, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequestError):
        tables_of(tiny, text)
    if "{3,2}" not in text:  # llama.cpp makes endless rules of it: too slow to try
        with pytest.raises(ValueError, match="does not take"):
            LlamaGrammar(tiny, text)
        assert "error parsing grammar" in capfd.readouterr().err
