"""A program for tests: loads each model that is named on a line of its input, and says how that went.

It may be ended by an assertion of llama.cpp at any time; the last line that it wrote then names the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

from laneway.decoder import Chunk, DecodeError, InvalidRequestError, ModelLoadError, Sampling, StepBatch
from laneway_native import LlamaDecoder, Model

CONTEXT = 256


async def decode(model: Model) -> None:
    """A prompt and two more tokens, on a context of the model."""
    prompt = model.tokenize("Hello, world!\nHéllo <|im_end|>", special=True) or [0]
    decoder = LlamaDecoder(model, context_size=CONTEXT, parallel=1, threads=1, poll=0)
    try:
        decoder.open(0, Sampling(temperature=0.0), prompt)
        tokens, position = prompt, 0
        for _ in range(3):
            result = await decoder.step(StepBatch((Chunk(0, position, tokens, True),)))
            position += len(tokens)
            tokens = [result.tokens[0]]
            model.piece(tokens[0])
    finally:
        await decoder.aclose()


def try_out(path: str) -> str:
    """Load and use a model."""
    try:
        with Model.load(path) as model:
            trio.run(decode, model)
    except (ModelLoadError, DecodeError, InvalidRequestError) as error:
        return f"{type(error).__name__}: {error}"
    return "used"


def main() -> None:
    for line in sys.stdin:
        path = str(Path(line.rstrip("\n")))
        say(path=path)
        say(path=path, outcome=try_out(path))


def say(**what: str) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
