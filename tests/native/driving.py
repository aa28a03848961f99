"""Drives a LlamaDecoder by hand, as the decode loop would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from laneway.decoder import Chunk, Sampling, StepBatch
from laneway_native import LlamaDecoder, Model

GREEDY = Sampling(temperature=0.0)

# Printable, so that the tiny model's tokenizer has a token for each character.
TEXTS = ("the quick brown fox", "on and on and on", "hello", "it is what it is, is it not?", "zebra", "a b c d e f g")


@asynccontextmanager
async def decoder_of(model: Model, **options: Any) -> AsyncIterator[LlamaDecoder]:
    """A decoder of one thread, so that tests may run beside each other."""
    decoder = LlamaDecoder(model, **{"context_size": 1024, "parallel": 4, "threads": 1, **options})
    try:
        yield decoder
    finally:
        await decoder.aclose()


def prompts(model: Model, count: int = len(TEXTS)) -> list[list[int]]:
    """Different prompts of different lengths."""
    return [model.tokenize(text) for text in TEXTS[:count]]


class Driver:
    """Keeps each sequence's slot and tokens; ``start`` and ``decode`` are steps."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self.decoder = decoder
        self.tokens: dict[int, list[int]] = {}
        """slot: prompt and answer, the last token not yet decoded."""
        self.moves: list[tuple[int, int]] = []

    async def start(
        self, slot: int, prompt: Sequence[int], sampling: Sampling = GREEDY, *, chunk: int = 512, done: int = 0
    ) -> int:
        """Open a slot and take in its prompt, chunk by chunk; ``done`` of its tokens are there already."""
        self.decoder.open(slot, sampling, prompt)
        token = -1
        for position in range(done, len(prompt), chunk):
            part = list(prompt[position : position + chunk])
            last = position + len(part) == len(prompt)
            result = await self.decoder.step(StepBatch((Chunk(slot, position, part, last),)))
            assert set(result.tokens) == ({slot} if last else set())
            token = result.tokens.get(slot, -1)
        self.tokens[slot] = [*prompt, token]
        return token

    async def decode(self, slots: Iterable[int] | None = None) -> dict[int, int]:
        """One token for each slot, after the moves that are due."""
        moves, self.moves = self.moves, []
        for source, target in moves:
            self.tokens[target] = self.tokens.pop(source)
        chosen = sorted(self.tokens if slots is None else slots)
        chunks = tuple(Chunk(slot, len(self.tokens[slot]) - 1, self.tokens[slot][-1:], True) for slot in chosen)
        result = await self.decoder.step(StepBatch(chunks, tuple(moves)))
        assert set(result.tokens) == set(chosen)
        for slot, token in result.tokens.items():
            self.tokens[slot].append(token)
        return dict(result.tokens)

    def drop(self, slot: int) -> None:
        self.decoder.drop(slot)
        del self.tokens[slot]


async def saved(decoder: LlamaDecoder, slot: int) -> bytes:
    """A slot's state, sealed."""
    seal = await decoder.save(slot)
    return await seal()


async def answer(
    decoder: LlamaDecoder, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY, **options: Any
) -> list[int]:
    """What an otherwise empty decoder answers in slot 0."""
    driver = Driver(decoder)
    await driver.start(0, prompt, sampling, **options)
    for _ in range(count - 1):
        await driver.decode()
    tokens = driver.tokens[0][len(prompt) :]
    driver.drop(0)
    return tokens
