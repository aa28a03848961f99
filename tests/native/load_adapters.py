"""A program for tests: loads the adapters that are named on lines of its input with one model, and says how that went.

Its argument is the model.  It may be ended by an assertion of llama.cpp at any time; the last line that it wrote then
names the file.
"""

from __future__ import annotations

import sys

import trio

from laneway.decoder import DecodeError, ModelLoadError
from laneway_native import Model
from tests.native.driving import answer, decoder_of
from tests.native.load_models import say


async def try_out(model: Model, path: str) -> str:
    """Decode a few tokens with an adapter."""
    try:
        async with decoder_of(model, context_size=256, parallel=1, lora=[(path, 1.0)]) as decoder:
            await answer(decoder, model.tokenize("Hello, world!"), 3)
    except (ModelLoadError, DecodeError) as error:
        return f"{type(error).__name__}: {error}"
    return "used"


async def main() -> None:
    with Model.load(sys.argv[1]) as model:
        for line in sys.stdin:
            path = line.rstrip("\n")
            say(path=path)
            say(path=path, outcome=await try_out(model, path))


if __name__ == "__main__":
    trio.run(main)
