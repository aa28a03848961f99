"""What a training of ten minutes on two cores can do: SmolLM2-135M learns to answer in a fixed JSON form.

    nice -n 5 python -m benchmarks.finetune [--model smollm2] [--examples 128] [--epochs 3] [--json FILE]

The data are made up here: orders in many words, ``Could you send Anna three red lamps?``, and what is ordered as one
line of JSON with the keys in a fixed order.  The names, things and numbers of the held-out orders all occur in the
data, their combinations do not.  Measured are the answers to the held-out orders that are exactly right, before and
after (the likeliest token always), the loss, steps a second, and the most memory that the training process had.

Figures of a machine that does other work say little: the load is printed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import trio

import laneway
from laneway_plugins import batch, finetune

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in one unit of ``ru_maxrss``."""

NAMES = ("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Leo")
THINGS = ("lamp", "chair", "book", "cup", "plate", "clock", "pen", "bag")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FORMS = (
    "{name} would like {number} {colour} {things}.",
    "Please send {number} {colour} {things} to {name}.",
    "Could you send {name} {number} {colour} {things}?",
    "An order from {name}: {number} {things} in {colour}.",
    "{name} called and wants {number} {things}, {colour} ones.",
    "I need {number} {colour} {things}. My name is {name}.",
)


@attrs.frozen
class Order:
    """A question and its answer."""

    question: str
    answer: str

    def chat(self) -> str:
        """A line of the data."""
        messages = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
        return json.dumps({"messages": messages})


def make_orders(count: int, seed: int) -> list[Order]:
    """So many different orders, no two of which are for the same person, thing, colour and number."""
    chance = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    orders: list[Order] = []
    while len(orders) < count:
        name, thing, colour, number = (chance.choice(words) for words in (NAMES, THINGS, COLOURS, NUMBERS))
        if (name, thing, colour, number) in seen:
            continue
        seen.add((name, thing, colour, number))
        things = thing if number == "one" else f"{thing}s"
        question = chance.choice(FORMS).format(name=name, number=number, colour=colour, things=things)
        answer = {"item": thing, "colour": colour, "count": NUMBERS.index(number) + 1, "customer": name}
        orders.append(Order(question, json.dumps(answer)))
    return orders


async def exact(model: laneway.Model, orders: list[Order]) -> tuple[float, str]:
    """The share of orders that are answered exactly right, and one answer to look at."""
    prompts = [[{"role": "user", "content": order.question}] for order in orders]
    outcomes = await batch.complete(model, prompts, max_tokens=48, temperature=0.0)
    right = sum(outcome.text.strip() == order.answer for outcome, order in zip(outcomes, orders, strict=True))
    return right / len(orders), outcomes[0].text


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    orders = make_orders(args.examples + args.held_out, args.seed)
    train, held_out = orders[: args.examples], orders[args.examples :]
    data, output = folder / "orders.jsonl", folder / "orders.gguf"
    await trio.Path(data).write_text("".join(order.chat() + "\n" for order in train))
    figures: dict[str, Any] = {"load before": os.getloadavg()[0], "examples": len(train), "held out": len(held_out)}
    async with laneway.open_engine() as engine:
        model = await engine.load_model(args.model, 8, context_size=8 * 256)
        figures["exact before"], figures["an answer before"] = await exact(model, held_out)
        began = time.monotonic()
        async with finetune.start(
            model,
            dataset=data,
            output=output,
            rank=args.rank,
            modules=args.modules,
            epochs=args.epochs,
            context_length=args.context_length,
            batch=args.batch,
            learning_rate=args.learning_rate,
            base=args.base,
            threads=args.threads,
            seed=args.seed,
        ) as training:
            shown = 0
            async for event in training:
                if isinstance(event, finetune.FinetuneProgress) and event.loss is not None and event.done > shown:
                    shown = event.done
                    rate, left = event.tokens_per_second or 0.0, event.seconds_left or 0.0
                    print(
                        f"step {event.done}/{event.total} loss {event.loss:.4f} {rate:.0f} tokens/s {left:.0f} s left",
                        file=sys.stderr,
                    )
            result = await training.result()
        seconds = time.monotonic() - began
        await engine.unload_model(model)
        model = await engine.load_model(args.model, 8, context_size=8 * 256, lora=[(output, 1.0)])
        figures["exact after"], figures["an answer after"] = await exact(model, held_out)
    figures.update(
        {
            "base": result.base,
            "steps": result.steps,
            "first loss": result.curve[0].loss,
            "last loss": result.loss,
            "seconds": seconds,
            "steps a second": result.steps / result.seconds,
            "tokens a second": result.tokens / result.seconds,
            "peak MiB of the training process": round(
                resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * MAXRSS_UNIT / 2**20
            ),
            "adapter MiB": round((await trio.Path(output).stat()).st_size / 2**20, 2),
            "load after": os.getloadavg()[0],
        }
    )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", help="comma-separated; all by default")
    parser.add_argument("--context-length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--base", choices=("auto", "f32", "native"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="fail if fewer than 0.9 are right, or after ten minutes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = trio.run(measure, args, Path(folder))
    for name, value in figures.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(args.check and (figures["exact after"] < 0.9 or figures["seconds"] > 600))


if __name__ == "__main__":
    sys.exit(main())
