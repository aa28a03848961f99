"""``laneway demo``: the play itself in virtual time, what it makes of a play gone wrong, and how it is shown."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import rich.console
import trio.testing

import laneway
from laneway import DecodeError, InferenceCancelledError, RequestRecord, Stats
from laneway._cli import _answers, _demo
from laneway._cli._demo import Chat, Lines, Outcome, Picture, Watch, play, problems, summary
from laneway.testing import ScriptedLoader
from tests.cli.scripted_program import Program

STEP = 0.02


class Notes:
    """A reporter that writes everything down."""

    def __init__(self) -> None:
        self.happenings: list[tuple[float, str]] = []
        self.queues: list[tuple[float, list[tuple[str, int, float]]]] = []
        self.texts: dict[str, str] = {}
        self.ends: list[str] = []

    def begin(self, chats: Sequence[Chat]) -> None:
        assert [chat.status for chat in chats] == ["not asked yet"] * 6

    def said(self, chat: Chat, text: str) -> None:
        assert chat.id not in self.ends
        self.texts[chat.id] = self.texts.get(chat.id, "") + text

    def ended(self, chat: Chat) -> None:
        self.ends.append(chat.id)

    def happened(self, seconds: float, what: str) -> None:
        self.happenings.append((seconds, what))

    def queue(self, seconds: float, waiting: Sequence[tuple[str, int, float]]) -> None:
        self.queues.append((seconds, list(waiting)))


async def play_scripted(reporter: _demo.Reporter | None = None, *, max_tokens: int = 48, **options: Any) -> Outcome:
    """The demo on a scripted model."""
    loader, watch = ScriptedLoader(seconds_per_step=STEP, **options), Watch()
    async with laneway.open_engine(plugins=[loader.plugin, watch]) as engine:
        model = await engine.load_model("scripted:model", 4, context_size=4 * 512)
        outcome = await play(engine, model, watch, reporter or Notes(), max_tokens=max_tokens, seed=1)
        if model.state == "loaded":
            loader.assert_idle()
    return outcome


# The play.


@pytest.mark.parametrize("max_tokens", [16, 48, 96, 256])
@pytest.mark.parametrize("chat_template", [None, "{{ messages[0].content }}"])
async def test_all_of_it_happens(
    autojump_clock: trio.testing.MockClock, max_tokens: int, chat_template: str | None
) -> None:
    notes = Notes()
    outcome = await play_scripted(notes, max_tokens=max_tokens, chat_template=chat_template)
    assert outcome.problems == ()
    first, second, third, fourth, fifth, sixth = outcome.chats
    for peer in (first, third, fourth):
        assert (peer.stop_reason, peer.stats.generated_tokens) == ("length", max_tokens)
        assert peer.text == notes.texts[peer.id]
    assert isinstance(second.error, InferenceCancelledError)
    assert max_tokens // 2 <= len(second.error.tokens) <= max_tokens // 2 + 1
    assert second.error.text == second.text == notes.texts["chat-2"]
    assert fifth.stop_reason in ("eos", "length")
    assert sixth.out_of_time
    assert sixth.text == ""
    assert sixth.stop_reason is None
    assert sorted(notes.ends) == [f"chat-{number}" for number in range(1, 6)]

    records, cancelled_at = outcome.records, outcome.cancelled_at
    assert cancelled_at is not None
    # In virtual time "as it gives its place back" is the same moment.
    assert records["chat-5"].started_at == records["chat-2"].ended_at
    assert cancelled_at <= (records["chat-5"].started_at or 0) <= cancelled_at + STEP
    assert records["chat-6"].started_at is None
    assert records["chat-6"].outcome == "cancelled"
    assert [name for name, record in records.items() if record.started_at is not None] == [
        f"chat-{number}" for number in range(1, 6)
    ]


async def test_the_queue_is_seen_with_positions_and_ages(autojump_clock: trio.testing.MockClock) -> None:
    notes = Notes()
    outcome = await play_scripted(notes, max_tokens=96)
    seen = [waiting for _, waiting in notes.queues if waiting]
    assert [(name, position) for name, position, _ in seen[0]] == [("chat-5", 1), ("chat-6", 2)]
    assert [(name, position) for name, position, _ in seen[-1]] == [("chat-5", 1)]
    ages = [waiting[0][2] for waiting in seen]
    assert ages == sorted(ages)
    assert ages[-1] > 0.1
    position, age = outcome.seen_waiting["chat-5"]
    assert (position, age) == (1, ages[-1])
    assert outcome.seen_waiting["chat-6"][0] == 2


async def test_the_deadline_ends_the_sixth_while_it_waits(autojump_clock: trio.testing.MockClock) -> None:
    notes = Notes()
    outcome = await play_scripted(notes)
    asked = next(seconds for seconds, what in notes.happenings if what.startswith("chat-6 is asked"))
    over = next(seconds for seconds, what in notes.happenings if "deadline has passed, in the queue" in what)
    cancelled = next(seconds for seconds, what in notes.happenings if what.startswith('cancel("chat-2") reached 1'))
    assert asked < over < cancelled
    record = outcome.records["chat-6"]
    assert record.ended_at is not None
    assert record.ended_at - record.queued_at == pytest.approx(over - asked)


# A play gone wrong is told, and never hangs.


async def test_a_failed_step_is_reported_with_the_chats_that_it_ended(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await play_scripted(fail_at={30: DecodeError("a bad cell", 5)})
    assert any("a bad cell" in problem for problem in outcome.problems)
    assert any(problem.startswith("chat-2 was to be cancelled") for problem in outcome.problems)


async def test_a_model_that_breaks_ends_the_demo_with_problems(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await play_scripted(fail_at={number: DecodeError("gone") for number in range(20, 24)})
    ended = [chat.id for chat in outcome.chats if chat.error is not None]
    assert set(ended) >= {"chat-1", "chat-2", "chat-3", "chat-4", "chat-5"}
    assert len(outcome.problems) >= 5


async def test_requests_that_are_refused_end_the_demo_with_problems(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await play_scripted(chat_template="{{ raise_exception('no chats today') }}")
    assert all("no chats today" in str(chat.error) for chat in outcome.chats)
    assert sum("no chats today" in problem for problem in outcome.problems) >= 4


def record(name: str, queued: float, started: float | None, ended: float, state: str = "completed") -> RequestRecord:
    return RequestRecord(
        request_id=name,
        kind="completion",
        model="model",
        state=state,
        queued_at=queued,
        started_at=started,
        ended_at=ended,
    )


def good() -> Outcome:
    """What a demo that went well looks like."""
    stats = Stats(
        prompt_tokens=20,
        generated_tokens=96,
        queue_seconds=0.1,
        time_to_first_token=0.25,
        tokens_per_second=50.0,
        average_concurrent_sequences=3.5,
    )
    done = [Chat(f"chat-{number}", "x", "text", "length", "length", None, stats) for number in (1, 2, 3, 4, 5)]
    cancelled = attrs.evolve(stats, generated_tokens=48)
    done[1] = Chat(
        "chat-2", "x", "te", "cancelled", None, InferenceCancelledError("chat-2", "x", "te", (1,)), cancelled
    )
    sixth = Chat("chat-6", "x", status="deadline passed in the queue", out_of_time=True)
    return Outcome(
        chats=(*done, sixth),
        records={
            **{name: record(name, 10.0, 10.0, 14.0) for name in ("chat-1", "chat-3", "chat-4")},
            "chat-2": record("chat-2", 10.0, 10.0, 12.25, "cancelled"),
            "chat-5": record("chat-5", 11.0, 12.25, 15.0),
            "chat-6": record("chat-6", 11.0, None, 11.5, "cancelled"),
        },
        cancelled_at=12.0,
        began_at=10.0,
        seen_waiting={"chat-5": (1, 1.2), "chat-6": (2, 0.5)},
    )


def spoil(number: int, **changes: Any) -> Outcome:
    outcome = good()
    chats = list(outcome.chats)
    chats[number - 1] = attrs.evolve(chats[number - 1], **changes)
    return attrs.evolve(outcome, chats=tuple(chats))


def with_record(name: str, value: RequestRecord) -> Outcome:
    outcome = good()
    return attrs.evolve(outcome, records={**outcome.records, name: value})


ALONE = attrs.evolve(good().chats[0].stats, average_concurrent_sequences=1.0)


def test_a_good_demo_has_no_problems() -> None:
    assert problems(good()) == []


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (
            spoil(2, error=None, stop_reason="length", status="length, 96 tokens"),
            "chat-2 was to be cancelled and was not",
        ),
        (spoil(2, error=InferenceCancelledError("chat-2", "x")), "and had no token yet"),
        (spoil(1, error=DecodeError("boom"), stop_reason=None), "chat-1 did not finish: the decode step failed: boom"),
        (spoil(3, stop_reason=None, status="running"), "chat-3 did not finish: running"),
        (spoil(4, stats=ALONE), "chat-4 was answered alone: 1.0"),
        (spoil(4, stats=Stats()), "chat-4 was answered alone: None"),
        (spoil(5, stop_reason=None), "chat-5 did not finish"),
        (with_record("chat-5", record("chat-5", 11.0, 11.9, 15.0)), "chat-5 did not start as chat-2 gave"),
        (with_record("chat-5", record("chat-5", 11.0, 12.5, 15.0)), "it started 0.500 s after the cancel"),
        (with_record("chat-5", record("chat-5", 11.0, None, 15.0)), "was not seen"),
        (spoil(6, out_of_time=False, status="eos"), "chat-6 was to run out of time and did not: eos"),
        (with_record("chat-6", record("chat-6", 11.0, 11.2, 11.5)), "run out of time in the queue, but it ran"),
        (attrs.evolve(good(), seen_waiting={"chat-5": (1, 1.0)}), "the queue was to show chat-5 first"),
        (attrs.evolve(good(), seen_waiting={"chat-5": (2, 1.0), "chat-6": (1, 1.0)}), "the queue was to show"),
    ],
)
def test_each_thing_that_can_be_missing_is_a_problem(outcome: Outcome, problem: str) -> None:
    (found,) = problems(outcome)
    assert problem in found


# How it is shown.


def test_the_table_has_every_figure() -> None:
    console = rich.console.Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as capture:
        console.print(summary(good()))
    rows = {line.split()[0]: line.split() for line in capture.get().splitlines() if line.strip().startswith("chat")}
    assert rows["chat-1"] == ["chat-1", "0.00", "s", "0.25", "s", "96", "50.0", "3.50", "length"]
    assert rows["chat-2"][5:] == ["48", "50.0", "3.50", "cancelled", "by", "id", "at", "2.00", "s"]
    assert rows["chat-5"][:3] == ["chat-5", "1.25", "s"]
    assert " ".join(rows["chat-6"]) == "chat-6 0.50 s - 0 - - deadline passed in the queue at 1.50 s"


async def test_lines_tell_the_story(autojump_clock: trio.testing.MockClock) -> None:
    out: list[str] = []
    outcome = await play_scripted(Lines(out.append), max_tokens=96, end_every=None)
    assert out[0] == "chat-1: Tell me a long story about a fox who wants to see the sea."
    events = [line for line in out if line.startswith("[")]
    assert [line.partition("] ")[2] for line in events[:4]] == [f"chat-{number} is admitted" for number in (1, 2, 3, 4)]
    queue = [line.partition("] ")[2] for line in events if "queue:" in line or "nobody" in line]
    assert queue[0] == "queue: 1. chat-5 for 0.00 s, 2. chat-6 for 0.00 s"
    assert queue[-1] == "nobody waits"
    texts: dict[str, list[str]] = {}
    for line in out:
        if "|" in line[:10]:
            label, _, text = line.strip().partition("|")
            texts.setdefault(label, []).append(text.strip())
    for chat in outcome.chats[:5]:
        # Lines are broken at spaces, so all but spaces is there, the last words too.
        assert "".join("".join(texts[chat.id]).split()) == "".join(chat.text.split())


async def test_the_picture_gives_the_fifth_the_place_of_the_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    console = rich.console.Console(file=io.StringIO(), width=120, height=30, color_system=None)
    pictures: list[str] = []

    class Drawn(Picture):
        def queue(self, seconds: float, waiting: Sequence[tuple[str, int, float]]) -> None:
            super().queue(seconds, waiting)
            with console.capture() as capture:
                console.print(self.draw())
            pictures.append(capture.get())

    await play_scripted(Drawn(console), max_tokens=96)
    tops = [picture.split("\n")[0] for picture in pictures]
    assert "chat-2" in tops[0]
    assert "chat-5" not in tops[0]
    assert "chat-2" not in tops[-1]
    assert tops[-1].index("chat-1") < tops[-1].index("chat-5") < tops[-1].index("chat-3")
    assert any("queue: 1. chat-5" in picture and "2. chat-6" in picture for picture in pictures)
    assert all(len(picture.rstrip("\n").split("\n")) <= console.height for picture in pictures)
    assert "chat-2: request 'chat-2' was cancelled" in "".join(pictures)


# The command.


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, "laneway._cli._demo")


def test_the_command_ends_with_the_table(program: Program) -> None:
    result = program("demo", "--model", "scripted:m", "-n", "32")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.rstrip().endswith("All of it happened as it should.")
    assert "cancelled by id at" in result.stdout
    assert "deadline passed in the queue at" in result.stdout


def test_the_command_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch, "laneway._cli._demo", fail_at={40: DecodeError("a bad cell")})
    result = program("demo", "--model", "scripted:m")
    assert result.exit_code == 1
    assert "All of it" not in result.stdout
    assert "laneway: demo: chat-1 did not finish: the decode step failed: a bad cell" in result.stderr


def test_a_live_view_is_drawn_on_a_terminal(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=120, height=30, color_system=None)
    monkeypatch.setattr(_answers, "wants_live_view", lambda: True)
    monkeypatch.setattr(rich.console, "Console", lambda **options: console)
    result = program("demo", "--model", "scripted:m")
    assert result.exit_code == 0
    text = screen.getvalue()
    assert "╭─ chat-1: " in text
    assert "queue: 1. chat-5" in text
    assert "cancelled by id at" in text


@pytest.mark.parametrize(
    ("args", "status", "reason"),
    [
        ([], 1, "run: laneway pull smollm2"),
        (["--model", "/no/such.gguf"], 1, "there is no such file"),
        (["-n", "15"], 2, "15 is not in the range"),
        (["-n", "257"], 2, "257 is not in the range"),
        (["--seed", "-1"], 2, "-1 is not in the range"),
        (["extra"], 2, "unexpected extra argument"),
    ],
)
def test_errors_are_one_line(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str], status: int, reason: str
) -> None:
    monkeypatch.setenv("LANEWAY_CACHE_DIR", str(tmp_path))
    result = program("demo", *args)
    assert (result.exit_code, result.stdout) == (status, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.real_model
@pytest.mark.slow
def test_the_demo_on_the_real_model() -> None:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    command = [sys.executable, "-c", "from laneway._cli import main; main()", "demo", "--threads", "1", "-n", "48"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ), check=False)
    if "laneway pull smollm2" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "All of it happened as it should." in done.stdout
