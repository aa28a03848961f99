"""The example programs run, here on a scripted model."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import (
    MockClock,
    lockstep_stream_pair,
    memory_stream_pair,
    open_stream_to_socket_listener,
    wait_all_tasks_blocked,
)

import laneway
from laneway._sources import CATALOGUE
from laneway.testing import ScriptedLoader, ScriptedTokenizer
from tests.docs.pages import DOCS, load

quickstart = load(DOCS / "examples" / "quickstart.py")
server = load(DOCS / "examples" / "chat_server.py")

STEP = 0.01
ENDLESS: dict[str, Any] = {"end_every": None, "script": None}
tokenizer = ScriptedTokenizer()


def repeat(prompt: tuple[int, ...]) -> str:
    """The answer to a chat: how many messages it has, and the last one."""
    lines = tokenizer.text(prompt).splitlines()
    return f"{len(lines) // 2}: {lines[-2]}"


class Guest:
    """A client of the chat server."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._heard = b""

    async def say(self, *lines: str) -> None:
        await self.stream.send_all("".join(line + "\n" for line in lines).encode())

    async def hear(self) -> dict[str, Any]:
        """The next object; raises EOFError where there is none."""
        while b"\n" not in self._heard:
            data = await self.stream.receive_some()
            if not data:
                raise EOFError
            self._heard += data
        line, self._heard = self._heard.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    async def hear_answer(self) -> str:
        """The text of an answer that ends well."""
        text = ""
        while "done" not in (message := await self.hear()):
            text += message["text"]
        return text


class Room:
    """A chat server without sockets."""

    def __init__(self, nursery: trio.Nursery, model: laneway.Model, seconds: float) -> None:
        self.nursery = nursery
        self.model = model
        self.seconds = seconds

    @property
    def lane(self) -> laneway.LaneSnapshot:
        return self.model.engine.snapshot().model(self.model.name).lanes[0]

    def enter(self, ends: tuple[Any, Any] | None = None) -> Guest:
        """A new connection."""
        ours, theirs = ends or memory_stream_pair()
        self.nursery.start_soon(self._serve, theirs)
        return Guest(ours)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        # As trio.serve_tcp does it.
        try:
            await server.converse(self.model, self.seconds, stream)
        finally:
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def open_room(
    parallel: int = 2, queue_limit: int = 8, seconds: float = 60.0, **options: Any
) -> AsyncIterator[Room]:
    loader = ScriptedLoader(**{"context_size": 1024, "seconds_per_step": STEP, "script": repeat, **options})
    async with laneway.open_engine([loader.plugin]) as engine, trio.open_nursery() as nursery:
        model = await engine.load_model("scripted:model", parallel, queue_limit=queue_limit)
        room = Room(nursery, model, seconds)
        yield room
        nursery.cancel_scope.cancel()
    loader.assert_idle()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedLoader]:
    """Lets programs that open an engine of their own find scripted models, whose answers never end by themselves."""
    loader = ScriptedLoader(context_size=1024, seconds_per_step=STEP, end_every=None)
    open_engine = laneway.open_engine
    monkeypatch.setattr(
        laneway, "open_engine", lambda plugins=(), **options: open_engine([*plugins, loader.plugin], **options)
    )
    yield loader
    loader.assert_idle()


# The programs of the tutorial and of the page about embedding.


@pytest.mark.parametrize("name", ["answer", "stream"])
async def test_programs_of_the_tutorial(
    name: str, scripted: ScriptedLoader, capsys: pytest.CaptureFixture[str], autojump_clock: MockClock
) -> None:
    await load(DOCS / "tutorial" / f"{name}.py").main("scripted:model")
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    assert len(text) > 20
    assert "length" in last


async def test_the_program_of_the_page_about_embedding(
    scripted: ScriptedLoader, capsys: pytest.CaptureFixture[str], autojump_clock: MockClock
) -> None:
    await load(DOCS / "examples" / "embedding.py").main("scripted:model")
    sentence, late, batch, queue, busy, ends = capsys.readouterr().out.rstrip().rsplit("\n", 5)
    assert sentence.endswith(".")
    assert sentence.count(".") == 1
    assert late == "None"
    assert "no tokens" not in batch  # the scripted tokenizer begins a prompt with a token of its own
    assert queue == "['1. completion completion-6, 0.1 s']"
    assert busy == "busy: overflow"
    assert "('completion', 'cancelled'): 2" in ends


async def test_the_program_of_the_page_about_conversations(
    scripted: ScriptedLoader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await load(DOCS / "examples" / "conversations.py").main("scripted:model", tmp_path)
    *said, freed, first, second = capsys.readouterr().out.splitlines()
    assert len("".join(said)) > 100
    assert int(re.fullmatch(r"freed (\d+) bytes", freed)[1]) > 1000  # type: ignore[index]
    assert re.fullmatch(r"\d+ of \d+ tokens were there \(no cache begins with this history\); commit", first)
    assert re.fullmatch(r"[1-9]\d* of \d+ tokens were there( \(a slot in memory has .*\))?; commit", second)


async def test_embedding_tells_the_template_not_to_think(autojump_clock: MockClock) -> None:
    embedding = load(DOCS / "examples" / "embedding.py")
    template = "{{ messages[0].content }}{% if enable_thinking is false %}<|turn|>{% endif %}"
    loader = ScriptedLoader(chat_template=template, seconds_per_step=STEP, context_size=100)
    async with embedding.open_app("scripted:model", [loader.plugin]) as (model, _):
        text = await embedding.answer_without_thinking(model, "Hi")
        tokenizer = model.tokenizer
        prompt = tokenizer.tokenize("Hi<|turn|>", special=True)
        expected = loader.decoders["scripted:model"].expected(prompt, laneway.Sampling(), 32)
        assert text == b"".join(map(tokenizer.piece, expected.tokens)).decode("utf-8", "replace")


async def test_embedding_stops_everything_of_a_kind(scripted: ScriptedLoader, autojump_clock: MockClock) -> None:
    embedding = load(DOCS / "examples" / "embedding.py")
    reasons = []

    async def ask(model: laneway.Model) -> None:
        with pytest.raises(laneway.InferenceCancelledError) as caught:
            await embedding.first_sentence(model, "Once")
        reasons.append(caught.value.reason)

    async with embedding.open_app("scripted:model") as (model, nursery):
        for _ in range(3):
            nursery.start_soon(ask, model)
        await trio.sleep(STEP)
        assert [(len(lane.running), len(lane.waiting)) for lane in embedding.lanes(model)] == [(2, 1)]
        assert await embedding.stop_everything(model, "completion") == 3
        assert [(lane.running, lane.waiting) for lane in embedding.lanes(model)] == [((), ())]
    assert reasons == ["stopped by an operator"] * 3


# The quickstart.


async def test_quickstart_cancels_the_story_and_answers_the_rest(
    scripted: ScriptedLoader, capsys: pytest.CaptureFixture[str], autojump_clock: MockClock
) -> None:
    await quickstart.main("scripted:model")
    text = capsys.readouterr().out
    assert text.count("[length]\n") == 3
    assert text.count("[cancelled after ") == 1
    story = text.index("\nstory: ")
    assert text.startswith("greeting: ")
    assert story < text.index("[cancelled after ") < text.index("\nfruit: ")


@pytest.mark.slow
@pytest.mark.real_model
def test_quickstart_on_the_real_model() -> None:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    if not CATALOGUE["smollm2"].path().is_file():
        pytest.skip("smollm2 is not on this computer: laneway pull smollm2")
    command = [sys.executable, str(DOCS / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("greeting: ")
    assert done.stdout.count("[cancelled after ") == 1


# The chat server.


async def test_chat_is_answered_bit_by_bit_and_remembered(autojump_clock: MockClock) -> None:
    async with open_room() as room:
        guest = room.enter()
        await guest.say("Hello")
        first = await guest.hear()
        assert first == {"text": "1"}
        assert first["text"] + await guest.hear_answer() == "1: Hello"
        await guest.say("And now?")
        assert await guest.hear_answer() == "3: And now?"


async def test_chats_of_two_connections_are_apart(autojump_clock: MockClock) -> None:
    async with open_room() as room:
        one, other = room.enter(), room.enter()
        await one.say("Hello")
        await one.hear_answer()
        await other.say("Good day")
        assert await other.hear_answer() == "1: Good day"


async def test_new_begins_a_new_chat(autojump_clock: MockClock) -> None:
    async with open_room() as room:
        guest = room.enter()
        await guest.say("Hello", "/new", "Good day")
        assert [await guest.hear_answer(), await guest.hear_answer()] == ["1: Hello", "1: Good day"]


async def test_stats_are_the_snapshot(autojump_clock: MockClock) -> None:
    async with open_room() as room:
        guest = room.enter()
        await guest.say("/stats")
        stats = (await guest.hear())["stats"]
        assert (stats["name"], stats["parallel"]) == ("model", 2)
        assert stats["lanes"][0]["cap"] == 2


async def test_hanging_up_cancels_the_request(autojump_clock: MockClock) -> None:
    async with open_room(**ENDLESS) as room:
        guest = room.enter()
        await guest.say("Talk")
        await guest.hear()
        assert [request.state for request in room.lane.running] == ["running"]
        await guest.stream.aclose()
        await wait_all_tasks_blocked()
        assert (room.lane.running, room.lane.waiting) == ((), ())


async def test_a_waiter_knows_its_place_and_gives_it_up_by_hanging_up(autojump_clock: MockClock) -> None:
    async with open_room(parallel=1, **ENDLESS) as room:
        first, second, third = room.enter(), room.enter(), room.enter()
        for guest, heard in ((first, "text"), (second, "waiting"), (third, "waiting")):
            await guest.say("Talk")
            assert heard in await guest.hear()
        assert [waiter.position for waiter in room.lane.waiting] == [1, 2]
        await second.stream.aclose()
        await wait_all_tasks_blocked()
        assert [waiter.position for waiter in room.lane.waiting] == [1]
        await first.stream.aclose()
        assert "text" in await third.hear()


async def test_a_full_queue_is_told_and_the_connection_lives_on(autojump_clock: MockClock) -> None:
    async with open_room(parallel=1, queue_limit=0, script={}) as room:
        busy, late = room.enter(), room.enter()
        await busy.say("Talk")
        await busy.hear()
        await late.say("Me too")
        message = await late.hear()
        assert message["retry"] is True
        assert "the queue holds 0" in message["error"]
        await busy.stream.aclose()
        await wait_all_tasks_blocked()
        await late.say("Me too")
        assert "text" in await late.hear()


async def test_the_deadline_of_an_answer_is_told(autojump_clock: MockClock) -> None:
    # Between two steps: a deadline that falls into the send of a text breaks the line instead.
    async with open_room(seconds=10.5 * STEP, **ENDLESS) as room:
        guest = room.enter()
        await guest.say("Talk")
        while "text" in (message := await guest.hear()):
            pass
        assert message == {"error": "the answer was not complete after 0.105 s", "retry": True}
        assert room.lane.running == ()


async def test_the_deadline_includes_the_wait(autojump_clock: MockClock) -> None:
    async with open_room(parallel=1, **ENDLESS) as room:
        first = room.enter()
        await first.say("Talk")
        await first.hear()
        room.seconds = 10 * STEP
        second = room.enter()
        await second.say("Me too")
        assert [await second.hear(), (await second.hear())["retry"]] == [{"waiting": 1}, True]
        assert len(room.lane.running) == 1


async def test_a_client_that_does_not_read_is_cut_off_at_the_deadline(autojump_clock: MockClock) -> None:
    async with open_room(seconds=10 * STEP, **ENDLESS) as room:
        guest = room.enter(lockstep_stream_pair())
        await guest.say("Talk")
        assert await guest.stream.receive_some(1) == b"{"
        await trio.sleep(20 * STEP)
        assert room.lane.running == ()
        with pytest.raises((EOFError, trio.BrokenResourceError, json.JSONDecodeError)):
            while True:
                await guest.hear()


async def test_a_chat_that_outgrows_the_window_is_told(autojump_clock: MockClock) -> None:
    async with open_room(context_size=100) as room:
        guest = room.enter()
        await guest.say("Hello" * 200)
        message = await guest.hear()
        assert message["retry"] is False
        assert "larger context_size" in message["error"]
        await guest.say("Hi")
        assert await guest.hear_answer() == "1: Hi"


@pytest.mark.parametrize("flood", ["x" * 20_000, "\n".join("x" * 18) + "\n"], ids=["endless line", "many lines"])
async def test_a_client_that_floods_is_cut_off(flood: str, autojump_clock: MockClock) -> None:
    async with open_room(**ENDLESS) as room:
        guest = room.enter()
        await guest.say("Talk")
        await guest.hear()
        await guest.stream.send_all(flood.encode())
        with pytest.raises(EOFError):
            while True:
                await guest.hear()
        assert room.lane.running == ()


async def test_the_server_listens_on_loopback() -> None:
    loader = ScriptedLoader(context_size=1024, script=repeat)
    serve = functools.partial(server.serve, "scripted:model", port=0, plugins=[loader.plugin])
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(serve)
        assert listener.socket.getsockname()[0] == "127.0.0.1"
        async with await open_stream_to_socket_listener(listener) as stream:
            guest = Guest(stream)
            await guest.say("Hello")
            assert await guest.hear_answer() == "1: Hello"
        nursery.cancel_scope.cancel()
    loader.assert_idle()
