"""Jobs and events of the training child: what is refused, what a line says, and how the learning rate goes."""

from __future__ import annotations

import json
import math

import pytest

from laneway.decoder import InvalidRequestError
from laneway_native import training
from laneway_native.training import MODULES, Event, Job, Settings, event_from_json, event_to_json


def job(**settings: object) -> Job:
    return Job(model="m.gguf", data="d", output="o.gguf", checkpoint="c", settings=Settings(**settings))  # type: ignore[arg-type]


def test_a_job_is_one_line_and_comes_back_from_it() -> None:
    given = job(rank=4, modules=["ffn_up", "attn_q"], schedule="linear", threads=1)
    line = given.to_json()
    assert "\n" not in line
    assert Job.from_json(line) == given
    assert json.loads(line)["rank"] == 4
    # Their order is the file's.
    assert given.settings.modules == ("attn_q", "ffn_up")


def test_what_is_not_said_is_the_default() -> None:
    found = Job.from_json('{"model": "m", "data": "d", "output": "o", "checkpoint": "c", "modules": null}')
    assert found.settings == Settings()
    assert found.settings.modules == MODULES
    assert not found.resume


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", 1.5),
        ("rank", True),
        ("alpha", 0),
        ("alpha", math.inf),
        ("modules", []),
        ("modules", ["attn_qkv"]),
        ("epochs", 0),
        ("context_length", 8),
        ("batch", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("learning_rate", "1e-3"),
        ("schedule", "step"),
        ("warmup", -1),
        ("weight_decay", 2),
        ("seed", -1),
        ("threads", 0),
        ("base", "q8_0"),
        ("checkpoint_every", 0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Settings(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"model": "m", "data": "d", "output": "o", "checkpoint": "c", "colour": 1}',
        b'{"model": "", "data": "d", "output": "o", "checkpoint": "c"}',
        b'{"model": "m", "data": "d", "output": "o", "checkpoint": "c", "rank": "8"}',
    ],
)
def test_a_line_that_is_no_job(line: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        Job.from_json(line)


@pytest.mark.parametrize(
    "event",
    [
        training.Started(steps=10, start_step=0, base="f32", parameters=5, memory=6),
        training.Step(epoch=0, step=1, loss=2.5, learning_rate=1e-3, tokens=9, seconds=0.5),
        training.Validation(step=0, loss=3.0),
        training.Checkpoint(step=5),
        training.Paused(step=5),
        training.Done(step=10, adapter="a"),
        training.Error(kind="memory", message="no\nmore", step=3),
    ],
)
def test_events_are_one_line_and_come_back_from_it(event: Event) -> None:
    line = event_to_json(event)
    assert "\n" not in line
    assert event_from_json(line) == event
    # A newer child may say more.
    assert event_from_json(json.dumps({**json.loads(line), "more": 1})) == event


@pytest.mark.parametrize("line", ["", "1", "{}", '{"event": "song"}', '{"event": "paused"}'])
def test_a_line_that_is_no_event(line: str) -> None:
    with pytest.raises(ValueError):
        event_from_json(line)


def rates(steps: int, **settings: object) -> list[float]:
    made = Settings(learning_rate=0.5, **settings)  # type: ignore[arg-type]
    return [made.rate_at(step, steps) for step in range(1, steps + 1)]


def test_schedules() -> None:
    assert rates(4, schedule="constant", warmup=0) == [0.5] * 4
    assert rates(4, schedule="linear", warmup=0) == pytest.approx([0.5, 0.375, 0.25, 0.125])
    assert rates(4, schedule="cosine", warmup=0) == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * done / 4)) for done in range(4)]
    )


@pytest.mark.parametrize("warmup", [0.2, 2])
def test_the_rate_rises_first(warmup: float) -> None:
    found = rates(10, schedule="linear", warmup=warmup)
    assert found[:3] == pytest.approx([0.25, 0.5, 0.5])
    assert found[2:] == pytest.approx([0.5 * (8 - done) / 8 for done in range(8)])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 0.999, 1, 3, 100])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_learns(schedule: str, warmup: float, steps: int) -> None:
    found = rates(steps, schedule=schedule, warmup=warmup)
    assert all(0 < rate <= 0.5 for rate in found)
