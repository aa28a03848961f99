"""``laneway demo``: what Laneway is for, on a real model, in a minute.

Four chats are answered together.  A fifth and a sixth wait in line: the fifth takes the place of one that is cancelled
half way, by its request id; the sixth's own deadline passes before its turn comes.  In the end the demo looks at what
really happened, and fails if any of this did not.

:func:`play` is the demo itself and knows no screen: tests run it on a scripted model in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import attrs
import click
import rich.box
import rich.console
import rich.table
import rich.text
import trio

from laneway import (
    Engine,
    EngineSnapshot,
    InferenceCancelledError,
    LanewayError,
    Model,
    RequestRecord,
    Stats,
    TextDelta,
    hookimpl,
    open_engine,
)
from laneway._cli import _answers
from laneway._cli._answers import LabelledLines, Pane
from laneway.terminal import echo, harmless

PARALLEL = 4
WINDOW = 512
"""Tokens of one slot: more than any of these chats needs."""
CANCELLED = "chat-2"
FIFTH = "chat-5"
SIXTH = "chat-6"
PROMPTS = (
    "Tell me a long story about a fox who wants to see the sea.",
    "Tell me a long story about an old lighthouse and its keeper.",
    "Explain in many words how bread is made, step by step.",
    "Describe a long walk through a city at night.",
    "Write a short poem about the rain.",
    "Tell me everything about the moon.",
)


@click.command()
@click.option("--model", "source", default="smollm2", show_default=True, help="The model: a path or a name.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(16, WINDOW // 2),
    default=96,
    show_default=True,
    help="The length of the answers.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of what is drawn.")
@click.option("--threads", type=int, help="CPU threads (default: one for each physical core).")
@click.pass_context
def demo(ctx: click.Context, source: str, max_tokens: int, seed: int, threads: int | None) -> None:
    """Watch answers side by side, cancels and the queue on a real model.

    Exits with status 1, and says why, if anything did not go as it should.
    """
    outcome = trio.run(_demo, source, max_tokens, seed, threads)
    for problem in outcome.problems:
        echo(f"laneway: demo: {problem}", err=True)
    if outcome.problems:
        ctx.exit(1)
    echo("All of it happened as it should.")


async def _demo(source: str, max_tokens: int, seed: int, threads: int | None) -> Outcome:
    watch = Watch()
    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    async with open_engine(plugins=[watch]) as engine:
        model = await engine.load_model(source, PARALLEL, context_size=WINDOW * PARALLEL, **options)
        if not _answers.wants_live_view():
            lines = Lines()
            outcome = await play(engine, model, watch, lines, max_tokens=max_tokens, seed=seed)
            console = rich.console.Console(width=120)
        else:
            console = rich.console.Console()
            picture = Picture(console)
            with _answers.live(console, keep=True) as view:
                async with _answers.redrawn(view, picture.draw):
                    outcome = await play(engine, model, watch, picture, max_tokens=max_tokens, seed=seed)
    console.print(summary(outcome))
    return outcome


# What happens.


@attrs.define
class Chat:
    """One request of the demo, and what has become of it."""

    id: str
    prompt: str
    text: str = ""
    status: str = "not asked yet"
    stop_reason: str | None = None
    error: LanewayError | None = None
    stats: Stats = attrs.field(factory=Stats)
    out_of_time: bool = False
    """Its caller's deadline passed."""

    @property
    def ended(self) -> bool:
        """Whether it is over, whatever way."""
        return self.stop_reason is not None or self.error is not None or self.out_of_time


@attrs.frozen(kw_only=True)
class Outcome:
    """How the demo went.  Times are seconds since it began."""

    chats: tuple[Chat, ...]
    records: dict[str, RequestRecord]
    """What an observer was told last of each request; its times are of Trio's clock."""
    cancelled_at: float | None
    """When :meth:`Engine.cancel` was called, by Trio's clock."""
    began_at: float
    seen_waiting: dict[str, tuple[int, float]]
    """Of whoever was seen in the queue: the position when first seen, and the longest wait."""
    problems: tuple[str, ...] = ()


class Reporter(Protocol):
    """Who shows the demo."""

    def begin(self, chats: Sequence[Chat]) -> None:
        """Before anything happens.  The chats change while the demo runs."""

    def said(self, chat: Chat, text: str) -> None:
        """More of an answer."""

    def ended(self, chat: Chat) -> None:
        """No more of an answer."""

    def happened(self, seconds: float, what: str) -> None:
        """Something worth a line, so many seconds after the beginning."""

    def queue(self, seconds: float, waiting: Sequence[tuple[str, int, float]]) -> None:
        """Who waits now: id, position and age in seconds; often empty, and called often."""


@final
class Watch:
    """An observer plugin that remembers the last record of each request."""

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}

    @hookimpl
    def laneway_request_admitted(self, record: RequestRecord) -> None:
        """Remember when it started."""
        self.records[record.request_id] = record

    @hookimpl
    def laneway_request_ended(self, record: RequestRecord) -> None:
        """Remember how it ended."""
        self.records[record.request_id] = record


async def play(
    engine: Engine, model: Model, watch: Watch, reporter: Reporter, *, max_tokens: int, seed: int
) -> Outcome:
    """The demo, on a model that was loaded with ``parallel=4``.

    ``watch`` must be a plugin of the engine.  Raises :class:`LanewayError` only for what concerns the model as a whole;
    whatever else goes wrong is among the problems of the outcome.
    """
    return await _Play(engine, model, watch, reporter, max_tokens, seed).play()


@final
class _Play:
    def __init__(
        self, engine: Engine, model: Model, watch: Watch, reporter: Reporter, max_tokens: int, seed: int
    ) -> None:
        self._engine = engine
        self._model = model
        self._watch = watch
        self._reporter = reporter
        self._max_tokens = max_tokens
        self._seed = seed
        self._chats = [Chat(f"chat-{number}", prompt) for number, prompt in enumerate(PROMPTS, 1)]
        self._changed = trio.Event()
        self._seen_waiting: dict[str, tuple[int, float]] = {}
        self._cancelled_at: float | None = None

    async def play(self) -> Outcome:
        self._began_at = trio.current_time()
        self._reporter.begin(self._chats)
        async with trio.open_nursery() as looking:
            looking.start_soon(self._look_again_and_again)
            async with trio.open_nursery() as chatting:
                await self._direct(chatting)
            looking.cancel_scope.cancel()
        outcome = Outcome(
            chats=tuple(self._chats),
            records={chat.id: self._watch.records[chat.id] for chat in self._chats if chat.id in self._watch.records},
            cancelled_at=self._cancelled_at,
            began_at=self._began_at,
            seen_waiting=self._seen_waiting,
        )
        return attrs.evolve(outcome, problems=tuple(problems(outcome)))

    async def _direct(self, chatting: trio.Nursery) -> None:
        """Everything in its time; times are counted in tokens, so that they suit machines of any speed."""
        four, fifth, sixth = self._chats[:PARALLEL], self._chats[PARALLEL], self._chats[PARALLEL + 1]
        chosen = next(chat for chat in four if chat.id == CANCELLED)
        for chat in four:
            # One after the other: each has arrived when the next one is asked.
            await chatting.start(self._chat, chat)
        few = self._max_tokens // 8
        await self._until(lambda: all(chat.ended or chat.stats.generated_tokens >= few for chat in four))
        await chatting.start(self._chat, fifth)
        # Half of what it took the others to get here: over well before one of them has ended.
        patience = (trio.current_time() - self._began_at) / 2
        await chatting.start(self._chat_for, sixth, patience)
        self._look()
        await self._until(lambda: chosen.ended or chosen.stats.generated_tokens >= self._max_tokens // 2)
        self._cancelled_at = trio.current_time()
        reached = self._engine.cancel(chosen.id, "half way was enough")
        self._happened(f'cancel("{chosen.id}") reached {reached} live request')
        await self._engine.wait_ended(chosen.id)
        self._look()

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _chat_for(self, chat: Chat, seconds: float, *, task_status: trio.TaskStatus[None]) -> None:
        self._happened(f"{chat.id} is asked by a caller who waits {seconds:.2f} s at most")
        with trio.move_on_after(seconds) as deadline:
            await self._chat(chat, task_status=task_status)
        if deadline.cancelled_caught:
            chat.out_of_time = True
            record = self._watch.records.get(chat.id)
            where = "in the queue" if record is None or record.started_at is None else "while it was answered"
            chat.status = f"deadline passed {where}"
            self._happened(f"{chat.id}: its caller's deadline has passed, {where}")
            self._change()

    async def _chat(self, chat: Chat, *, task_status: trio.TaskStatus[None]) -> None:
        arrived = False
        try:
            request = self._request(chat)
            async with self._engine.run(self._model, "completion", request, request_id=chat.id) as run:
                chat.status = run.state
                arrived = True
                task_status.started()
                await run.admitted()
                chat.status = run.state
                self._happened(f"{chat.id} is admitted")
                async for event in run:
                    if isinstance(event, TextDelta):
                        chat.text += event.text
                        chat.stats = run.stats
                        self._reporter.said(chat, event.text)
                        self._change()
                chat.stats = run.stats
                chat.stop_reason = (await run.result()).stop_reason
            self._reporter.ended(chat)
            chat.status = f"{chat.stop_reason}, {chat.stats.generated_tokens} tokens"
            self._happened(f"{chat.id} has ended: {chat.stop_reason} after {chat.stats.generated_tokens} tokens")
        except LanewayError as error:
            chat.error = error
            if isinstance(error, InferenceCancelledError):
                chat.stats = error.stats or chat.stats
                chat.status = f"cancelled, {chat.stats.generated_tokens} tokens"
            else:
                chat.status = type(error).__name__
            self._reporter.ended(chat)
            self._happened(f"{chat.id}: {error}")
            if not arrived:
                task_status.started()
        finally:
            self._change()

    def _request(self, chat: Chat) -> Any:
        first_four = chat in self._chats[:PARALLEL]
        return _answers.completion_request(
            self._engine,
            self._model,
            [{"role": "user", "content": chat.prompt}] if self._model.tokenizer.chat_template else chat.prompt,
            max_tokens=self._max_tokens,
            seed=self._seed + self._chats.index(chat),
            # Without an end token, so that none of the four makes room before one is cancelled.
            logit_bias=dict.fromkeys(self._model.tokenizer.end_tokens, -math.inf) if first_four else None,
        )

    # Looking on.

    def _happened(self, what: str) -> None:
        self._reporter.happened(trio.current_time() - self._began_at, what)

    async def _look_again_and_again(self) -> None:
        while True:
            self._look()
            await trio.sleep(_answers.REFRESH_SECONDS)

    def _look(self) -> None:
        waiting = _waiting(self._engine.snapshot(), self._model.name)
        for name, position, age in waiting:
            first, _ = self._seen_waiting.get(name, (position, age))
            self._seen_waiting[name] = (first, age)
        self._reporter.queue(trio.current_time() - self._began_at, waiting)


def _waiting(snapshot: EngineSnapshot, model: str) -> list[tuple[str, int, float]]:
    return [
        (waiter.request_id, waiter.position or 0, waiter.age)
        for lane in snapshot.model(model).lanes
        for waiter in lane.waiting
    ]


# What must have happened.


def problems(outcome: Outcome) -> list[str]:
    """What did not go as it should, a sentence for each; nothing if all is well."""
    chats = {chat.id: chat for chat in outcome.chats}
    cancelled, fifth, sixth = chats[CANCELLED], chats[FIFTH], chats[SIXTH]
    peers = [chat for chat in outcome.chats[:PARALLEL] if chat is not cancelled]
    return [
        *_problems_of_cancelled(cancelled),
        *(problem for peer in peers for problem in _problems_of_peer(peer)),
        *_problems_of_fifth(fifth, outcome),
        *_problems_of_sixth(sixth, outcome),
        *_problems_of_queue(outcome),
    ]


def _problems_of_cancelled(chat: Chat) -> list[str]:
    if not isinstance(chat.error, InferenceCancelledError):
        return [f"{chat.id} was to be cancelled and was not: {chat.status}"]
    if not chat.error.tokens:
        return [f"{chat.id} was to be cancelled half way, and had no token yet"]
    return []


def _problems_of_peer(chat: Chat) -> list[str]:
    if chat.stop_reason not in ("eos", "length", "stop"):
        return [f"{chat.id} did not finish: {chat.error or chat.status}"]
    concurrent = chat.stats.average_concurrent_sequences
    if concurrent is None or concurrent <= 1:
        return [f"{chat.id} was answered alone: {concurrent} sequences in its steps on average"]
    return []


def _problems_of_fifth(chat: Chat, outcome: Outcome) -> list[str]:
    if chat.stop_reason not in ("eos", "length", "stop"):
        return [f"{chat.id} did not finish: {chat.error or chat.status}"]
    started = _started(outcome, chat.id)
    freed = outcome.records[CANCELLED].ended_at if CANCELLED in outcome.records else None
    if started is None or freed is None or outcome.cancelled_at is None:
        return [f"{chat.id} or the cancel before it was not seen"]
    if not outcome.cancelled_at <= started <= freed:
        after, release = started - outcome.cancelled_at, freed - outcome.cancelled_at
        return [
            f"{chat.id} did not start as {CANCELLED} gave its place back: it started {after:.3f} s after the cancel, "
            f"and the place was free {release:.3f} s after it"
        ]
    return []


def _problems_of_sixth(chat: Chat, outcome: Outcome) -> list[str]:
    if not chat.out_of_time:
        return [f"{chat.id} was to run out of time and did not: {chat.status}"]
    if _started(outcome, chat.id) is not None or chat.text:
        return [f"{chat.id} was to run out of time in the queue, but it ran"]
    return []


def _problems_of_queue(outcome: Outcome) -> list[str]:
    seen = {name: position for name, (position, _) in outcome.seen_waiting.items()}
    if seen != {FIFTH: 1, SIXTH: 2}:
        return [f"the queue was to show {FIFTH} first and {SIXTH} second, and showed {seen}"]
    return []


def _started(outcome: Outcome, name: str) -> float | None:
    record = outcome.records.get(name)
    return None if record is None else record.started_at


# How it is shown.


def summary(outcome: Outcome) -> rich.table.Table:
    """The table at the end."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for heading in ("request", "waited", "first token", "tokens", "tokens/s", "side by side"):
        table.add_column(heading, justify="left" if heading == "request" else "right")
    table.add_column("end")
    for chat in outcome.chats:
        stats = chat.stats
        table.add_row(
            chat.id,
            _seconds(_waited(outcome, chat)),
            _seconds(stats.time_to_first_token),
            str(stats.generated_tokens),
            _figure(stats.tokens_per_second, 1),
            _figure(stats.average_concurrent_sequences, 2),
            rich.text.Text(harmless(_end(outcome, chat), one_line=True)),
        )
    return table


def _waited(outcome: Outcome, chat: Chat) -> float | None:
    record = outcome.records.get(chat.id)
    if record is None:
        return None
    until = record.started_at if record.started_at is not None else record.ended_at
    return None if until is None else until - record.queued_at


def _end(outcome: Outcome, chat: Chat) -> str:
    if isinstance(chat.error, InferenceCancelledError) and outcome.cancelled_at is not None:
        return f"cancelled by id at {outcome.cancelled_at - outcome.began_at:.2f} s"
    if chat.out_of_time:
        record = outcome.records.get(chat.id)
        at = "" if record is None or record.ended_at is None else f" at {record.ended_at - outcome.began_at:.2f} s"
        return f"{chat.status}{at}"
    return str(chat.error) if chat.error is not None else str(chat.stop_reason)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@final
class Lines:
    """Shows the demo line by line."""

    QUEUE_SECONDS = 0.5
    """How often the queue gets a line."""

    def __init__(self, write: Callable[[str], None] = echo) -> None:
        self._write = write
        self._texts = LabelledLines(write, width=100)
        self._queue_shown_at = -math.inf
        self._was_waiting: list[str] = []

    def begin(self, chats: Sequence[Chat]) -> None:
        """Say what will be asked."""
        for chat in chats:
            self._write(f"{chat.id}: {chat.prompt}")

    def said(self, chat: Chat, text: str) -> None:
        """Print whole lines, labelled."""
        self._texts.add(f"  {chat.id}|", text)

    def ended(self, chat: Chat) -> None:
        """Print the rest."""
        self._texts.end(f"  {chat.id}|")

    def happened(self, seconds: float, what: str) -> None:
        """Print it with its time."""
        self._write(f"[{seconds:6.2f} s] {what}")

    def queue(self, seconds: float, waiting: Sequence[tuple[str, int, float]]) -> None:
        """Print the queue when it changes, and now and then while it does not."""
        names = [name for name, _, _ in waiting]
        if names != self._was_waiting or (names and seconds - self._queue_shown_at >= self.QUEUE_SECONDS):
            self.happened(seconds, _queue_line(waiting))
            self._queue_shown_at = seconds
            self._was_waiting = names


def _queue_line(waiting: Sequence[tuple[str, int, float]]) -> str:
    if not waiting:
        return "nobody waits"
    return "queue: " + ", ".join(f"{position}. {name} for {age:.2f} s" for name, position, age in waiting)


class Picture:
    """Shows the demo side by side on a terminal."""

    EVENTS = 6
    """How many of the last happenings are shown."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._places: list[Chat] = []
        self._events: list[str] = []
        self._queue = ""

    def begin(self, chats: Sequence[Chat]) -> None:
        """Take the four that begin."""
        self._places = list(chats[:PARALLEL])

    def said(self, chat: Chat, text: str) -> None:
        """Give the fifth the pane of the one that was cancelled."""
        if chat not in self._places:
            place = next(index for index, shown in enumerate(self._places) if shown.id == CANCELLED)
            self._places[place] = chat

    def ended(self, chat: Chat) -> None:
        """Nothing to do: the chat's state shows it."""

    def happened(self, seconds: float, what: str) -> None:
        """Put it into the list below the panes."""
        self._events.append(f"{seconds:6.2f} s  {what}")

    def queue(self, seconds: float, waiting: Sequence[tuple[str, int, float]]) -> None:
        """Keep it for the next picture."""
        self._queue = _queue_line(waiting)

    def draw(self) -> rich.console.RenderableType:
        """The picture of this moment."""
        below = self.EVENTS + 2
        panes = [Pane(f"{chat.id}: {chat.prompt}", chat.text, chat.status, _style(chat)) for chat in self._places]
        events = self._events[-self.EVENTS :]
        lines = [self._queue, *events, *[""] * (self.EVENTS - len(events))]
        return rich.console.Group(
            _answers.side_by_side(panes, self._console, min(24, self._console.height - below)),
            rich.text.Text(harmless("\n".join(lines)), no_wrap=True, overflow="ellipsis"),
        )


def _style(chat: Chat) -> str:
    if chat.error is not None:
        return "red"
    return "green" if chat.ended else "cyan"
