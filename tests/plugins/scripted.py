"""One scripted model in an engine of its own, for tests of operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import laneway
from laneway.decoder import Sampling
from laneway.testing import ScriptedAnswer, ScriptedDecoder, ScriptedLoader, ScriptedTokenizer

STEP = 0.01
"""Seconds of one step."""


class Scripted:
    """What a test needs at hand: engine, model, and the decoder under it."""

    def __init__(self, engine: laneway.Engine, model: laneway.Model, decoder: ScriptedDecoder) -> None:
        self.engine = engine
        self.model = model
        self.decoder = decoder
        self.tokenizer = ScriptedTokenizer()

    @property
    def lane(self) -> laneway.LaneSnapshot:
        """The model's own lane."""
        return self.engine.snapshot().model(self.model.name).lanes[0]

    def expected(self, text: str, max_tokens: int | None = None, **sampling: Any) -> ScriptedAnswer:
        """The answer to the prompt ``text``, special tokens spelled out, as a sequence alone would get it."""
        prompt = self.tokenizer.tokenize(text, special=True)
        return self.decoder.expected(prompt, Sampling(**sampling), max_tokens)

    def text(self, answer: ScriptedAnswer) -> str:
        """The text of an expected answer."""
        return self.tokenizer.text(answer.tokens)

    def assert_idle(self) -> None:
        """Nothing runs, nothing waits, every slot is free."""
        snapshot = self.engine.snapshot().model(self.model.name)
        assert [(lane.used, lane.running, lane.waiting) for lane in snapshot.lanes] == [(0, (), ())] * len(
            snapshot.lanes
        )
        assert (snapshot.sequences, snapshot.slot_waiters) == (0, 0)
        self.decoder.assert_idle()


@asynccontextmanager
async def scripted(parallel: int = 1, **options: Any) -> AsyncIterator[Scripted]:
    """A model with ``parallel`` slots and the options of the scripted loader, for the length of a block."""
    options = {"seconds_per_step": STEP, **options}
    loader = ScriptedLoader()
    engine_options = {
        name: options.pop(name) for name in ("queue_limit", "queue_timeout", "admission") if name in options
    }
    async with laneway.open_engine(plugins=[loader.plugin]) as engine:
        model = await engine.load_model("scripted:model", parallel, **engine_options, **options)
        yield Scripted(engine, model, loader.decoders["scripted:model"])
    loader.assert_idle()
    for decoder in loader.decoders.values():
        decoder.assert_obeyed()
