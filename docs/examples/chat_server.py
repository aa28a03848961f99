"""A chat server on loopback: one conversation a connection, answers streamed as they are made.

    laneway pull smollm2
    python chat_server.py smollm2
    nc 127.0.0.1 8765

A client sends lines.  ``/new`` begins a new chat, ``/stats`` asks for figures, every other line is a message.  The
server sends objects of JSON, one a line::

    {"waiting": 2}                          the message is second in line
    {"text": "Once"}                        more of the answer
    {"done": "eos", "tokens": 21}           the answer is complete
    {"error": "...", "retry": true}         there will be no more of it; whether it may go better later
    {"stats": {...}}                        the model's snapshot

Who hangs up has the request cancelled then and there, and its place goes to the next in line.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from typing import Any

import attrs
import trio

import laneway
from laneway_plugins import completion

MAX_LINE = 16_384
"""Bytes that a client may send without ending the line."""
MAX_AHEAD = 16
"""Lines that a client may send while one is being answered."""


class Client:
    """The other end of a connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._sending = False

    async def send(self, **message: Any) -> None:
        """Send one object.  Raises :class:`trio.BrokenResourceError` if nobody listens any more."""
        if self._sending:
            # The send before this one was cancelled and may have left half a line behind.
            raise trio.BrokenResourceError("the line is broken")
        self._sending = True
        await self._stream.send_all(json.dumps(message).encode() + b"\n")
        self._sending = False

    async def read(self, lines: trio.MemorySendChannel[str], scope: trio.CancelScope) -> None:
        """Hand on what the client sends, and cancel ``scope`` when it hangs up or sends too much."""
        rest = b""
        async for data in self._stream:
            *whole, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE or len(whole) > MAX_AHEAD - lines.statistics().current_buffer_used:
                break
            for line in whole:
                lines.send_nowait(line.decode("utf-8", "replace").strip())
        scope.cancel(reason="the client has gone")


async def converse(model: laneway.Model, seconds: float, stream: trio.abc.Stream) -> None:
    """Serve one connection to its end."""
    client = Client(stream)
    chat: list[dict[str, str]] = []
    put, lines = trio.open_memory_channel[str](MAX_AHEAD)
    try:
        async with trio.open_nursery() as nursery:
            # Beside the answers, so that a hang-up shows while one is being made.
            nursery.start_soon(client.read, put, nursery.cancel_scope)
            async for line in lines:
                if line == "/new":
                    chat.clear()
                elif line == "/stats":
                    await client.send(stats=attrs.asdict(model.engine.snapshot().model(model.name)))
                elif line:
                    await answer(model, chat, line, client, seconds)
    except* trio.BrokenResourceError:
        pass  # gone without a goodbye


async def answer(
    model: laneway.Model, chat: list[dict[str, str]], message: str, client: Client, seconds: float
) -> None:
    """Answer ``message``; the two become part of the chat if that goes well."""
    asked = [*chat, {"role": "user", "content": message}]
    try:
        # One deadline for everything: the queue, the prompt, the answer, and a client that reads slowly.
        with trio.fail_after(seconds):
            async with completion.stream(model, asked, max_tokens=256) as run:
                await tell_place(model, run, client)
                async for event in run:
                    # While this waits for a slow client, the engine goes on, and unread text merges.
                    if isinstance(event, laneway.TextDelta):
                        await client.send(text=event.text)
                reply: completion.Completion = await run.result()
    except laneway.RequestRejectedByPolicyError as error:
        await client.send(error=str(error), retry=True)
    except laneway.LanewayError as error:
        await client.send(error=str(error), retry=False)
    except trio.TooSlowError:
        await client.send(error=f"the answer was not complete after {seconds:g} s", retry=True)
    else:
        chat[:] = [*asked, {"role": "assistant", "content": reply.text}]
        await client.send(done=reply.stop_reason, tokens=len(reply.tokens))


async def tell_place(model: laneway.Model, run: laneway.Run, client: Client) -> None:
    """Tell the client where in the queue its message is, if it has to wait."""
    for lane in model.engine.snapshot().model(model.name).lanes:
        for waiter in lane.waiting:
            if waiter.request_id == run.request_id:
                await client.send(waiting=waiter.position)


async def serve(
    source: str,
    *,
    parallel: int = 4,
    queue_limit: int = 8,
    seconds: float = 60.0,
    port: int = 8765,
    plugins: Sequence[Any] = (),
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load the model and serve until cancelled.  ``seconds`` is what one answer may take."""
    async with laneway.open_engine(plugins) as engine:
        model = await engine.load_model(source, parallel, queue_limit=queue_limit)
        handler = functools.partial(converse, model, seconds)
        await trio.serve_tcp(handler, port, host="127.0.0.1", task_status=task_status)


async def main(options: argparse.Namespace) -> None:
    """Serve, and say where."""
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(functools.partial(serve, **vars(options)))
        host, port = listener.socket.getsockname()
        print(f"listening on {host}, port {port}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A chat server on loopback.")
    parser.add_argument("source", help="a name, path or pypi: source of a model")
    parser.add_argument("--parallel", type=int, default=4, help="how many are answered at a time (default: 4)")
    parser.add_argument("--queue-limit", type=int, default=8, help="how many more may wait (default: 8)")
    parser.add_argument("--seconds", type=float, default=60.0, help="what one answer may take (default: 60)")
    parser.add_argument("--port", type=int, default=8765, help="0 takes any that is free (default: 8765)")
    try:
        trio.run(main, parser.parse_args())
    except* KeyboardInterrupt:
        pass
