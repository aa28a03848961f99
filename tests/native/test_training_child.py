"""The training child as its parent sees it: lines out, lines in, and what an end of either does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from laneway_native import Model, check_gguf
from laneway_native._weights import file_digest_here
from laneway_native.training import (
    Checkpoint,
    Done,
    Error,
    Event,
    Job,
    Paused,
    Settings,
    Started,
    Step,
    Validation,
    checkpoint_info,
    estimate,
)
from tests.native.driving import answer, decoder_of
from tests.native.training import COMMAND, Start, random_samples, sample, write_data, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("child") / "tiny.gguf")


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Job:
    """12 steps: 3 epochs of 4 batches, the last of which is short."""
    return Job(
        model=str(model),
        data=str(write_data(tmp_path / "data", random_samples(15, seed=1))),
        validation=str(write_data(tmp_path / "validation", random_samples(3, seed=2))),
        output=str(tmp_path / "out" / "adapter.gguf"),
        checkpoint=str(tmp_path / "checkpoint"),
        settings=Settings(rank=4, alpha=8.0, batch=4, epochs=3, threads=1, checkpoint_every=5, learning_rate=0.01),
    )


def of(kind: type[Any], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def told(events: list[Event]) -> list[Any]:
    """What of the events must be the same in every run: all but the time that a step took."""
    kept = [event for event in events if isinstance(event, (Step, Validation))]
    return [attrs.evolve(event, seconds=0.0) if isinstance(event, Step) else event for event in kept]


def run_to_end(start: Start, job: Job) -> list[Event]:
    child = start(job)
    events = child.events()
    status, log = child.end()
    assert isinstance(events[-1], Done), (events[-1], log)
    assert status == 0
    return events


def test_a_whole_run(start: Start, job: Job) -> None:
    child = start(job)
    events = child.events()
    status, log = child.end()
    assert status == 0, log
    assert "1 threads on a native base" in log
    (begun,) = of(Started, events)
    assert events[0] == begun
    assert (begun.steps, begun.start_step, begun.base) == (12, 0, "native")
    steps = of(Step, events)
    assert [(step.epoch, step.step) for step in steps] == [(at // 4, at + 1) for at in range(12)]
    assert [step.learning_rate for step in steps] == [job.settings.rate_at(at, 12) for at in range(1, 13)]
    assert sum(step.tokens for step in steps) == 3 * sum(len(each.tokens) for each in random_samples(15, seed=1))
    assert [event.step for event in of(Validation, events)] == [0, 4, 8, 12]
    assert [event.step for event in of(Checkpoint, events)] == [5, 10, 12]
    assert steps[-1].loss < steps[0].loss
    assert events[-1] == Done(step=12, adapter=job.output)
    # It served its purpose, and nothing half done lies about.
    assert not os.path.exists(job.checkpoint)
    assert os.listdir(os.path.dirname(job.output)) == ["adapter.gguf"]


async def test_the_adapter_is_one(start: Start, job: Job, model: Path) -> None:
    run_to_end(start, job)
    with Model.load(model) as loaded:
        found = []
        for lora in ((), ((job.output, 1.0),)):
            async with decoder_of(loaded, lora=lora) as decoder:
                found.append(await answer(decoder, [1, 40, 300], 8))
    assert found[0] != found[1]


def test_the_same_job_gives_the_same_adapter(start: Start, job: Job, tmp_path: Path) -> None:
    first = told(run_to_end(start, job))
    again = attrs.evolve(job, output=str(tmp_path / "again.gguf"))
    assert told(run_to_end(start, again)) == first
    assert Path(again.output).read_bytes() == Path(job.output).read_bytes()


def test_paused_and_resumed_it_is_the_unbroken_run(start: Start, job: Job, tmp_path: Path) -> None:
    unbroken = told(run_to_end(start, attrs.evolve(job, output=str(tmp_path / "unbroken.gguf"))))
    child = start(job)
    events = child.events(lambda event: isinstance(event, Step) and event.step == 2)
    child.tell("pause")
    events += child.events()
    assert child.end()[0] == 0
    paused = events[-1]
    assert isinstance(paused, Paused)
    assert events[-2] == Checkpoint(step=paused.step)
    info = checkpoint_info(job.checkpoint)
    assert info is not None
    assert (info.step, info.steps) == (paused.step, 12)
    assert not os.path.exists(job.output)
    rest = run_to_end(start, attrs.evolve(job, resume=True))
    (begun,) = of(Started, rest)
    assert begun.start_step == paused.step
    # Bit for bit: losses, learning rates and the adapter itself.
    assert told(events) + told(rest) == unbroken
    assert Path(job.output).read_bytes() == (tmp_path / "unbroken.gguf").read_bytes()


def test_killed_and_resumed_it_is_the_unbroken_run(start: Start, job: Job, tmp_path: Path) -> None:
    unbroken = told(run_to_end(start, attrs.evolve(job, output=str(tmp_path / "unbroken.gguf"))))
    child = start(job)
    child.events(lambda event: event == Checkpoint(step=5))
    child.process.send_signal(signal.SIGKILL)
    child.events()
    assert child.end()[0] == -signal.SIGKILL
    rest = run_to_end(start, attrs.evolve(job, resume=True))
    (begun,) = of(Started, rest)
    assert begun.start_step in (5, 10)
    assert told(rest) == unbroken[-len(told(rest)) :]
    assert Path(job.output).read_bytes() == (tmp_path / "unbroken.gguf").read_bytes()


def test_killed_in_the_midst_of_a_checkpoint_it_goes_on_from_the_one_before(
    start: Start, job: Job, tmp_path: Path
) -> None:
    unbroken = told(run_to_end(start, attrs.evolve(job, output=str(tmp_path / "unbroken.gguf"))))
    child = start(job)
    child.tell("pause")
    paused = child.events()[-1]
    assert isinstance(paused, Paused)
    assert paused.step < 10
    assert child.end()[0] == 0
    # A pipe that nobody reads from holds it up where it begins to write.
    part = Path(job.checkpoint) / "state.part"
    os.mkfifo(part)
    child = start(attrs.evolve(job, resume=True))
    due = paused.step - paused.step % 5 + 5
    child.events(lambda event: isinstance(event, Step) and event.step == due)
    child.process.send_signal(signal.SIGKILL)
    assert of(Checkpoint, child.events()) == []
    assert child.end()[0] == -signal.SIGKILL
    part.unlink()
    part.write_bytes(b"LWTRAIN1 and no more")
    info = checkpoint_info(job.checkpoint)
    assert info is not None
    assert info.step == paused.step
    rest = run_to_end(start, attrs.evolve(job, resume=True))
    assert told(rest) == unbroken[-len(told(rest)) :]
    assert Path(job.output).read_bytes() == (tmp_path / "unbroken.gguf").read_bytes()
    assert not part.exists()


def test_it_ends_at_once_when_its_parent_is_gone(start: Start, job: Job) -> None:
    child = start(attrs.evolve(job, settings=attrs.evolve(job.settings, epochs=100_000, schedule="constant")))
    child.events(lambda event: isinstance(event, Step))
    child.stdin.close()
    assert child.process.wait(timeout=600) == 3
    assert not os.path.exists(job.output)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no way to wait for a process that is not our child")
def test_it_ends_when_its_parent_is_gone_although_somebody_holds_the_pipe(job: Job) -> None:
    """As a process does that the parent has forked, which has all its pipes."""
    endless = attrs.evolve(job, settings=attrs.evolve(job.settings, epochs=100_000, schedule="constant"))
    line = endless.to_json().encode() + b"\n"
    program = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        child.stdin.write({line!r})
        child.stdin.flush()
        child.stdout.readline()
        holder = os.fork()
        if not holder:
            sys.stdout.close()
            os.close(1)
            time.sleep(600)
        print(child.pid, holder, flush=True)
        child.wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child, holder = map(int, parent.stdout.readline().split())
        watch = os.pidfd_open(child)
        try:
            parent.kill()
            parent.wait(600)
            assert select.select([watch], [], [], 600)[0]
        finally:
            os.close(watch)
            os.kill(holder, signal.SIGKILL)


def test_it_ends_when_it_was_told_nothing() -> None:
    done = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (3, b"")


def test_an_abort_in_native_code_ends_the_child_alone(start: Start, job: Job) -> None:
    child = start(attrs.evolve(job, settings=attrs.evolve(job.settings, epochs=100_000, schedule="constant")))
    child.events(lambda event: isinstance(event, Step) and event.step == 6)
    # What abort() in llama.cpp does.
    child.process.send_signal(signal.SIGABRT)
    child.events()
    assert child.end()[0] == -signal.SIGABRT
    # The checkpoint of before is whole.
    info = checkpoint_info(job.checkpoint)
    assert info is not None
    assert info.step % 5 == 0


def fails(start: Start, job: Job, kind: str) -> Error:
    child = start(job)
    events = child.events()
    status, log = child.end()
    last = events[-1]
    assert isinstance(last, Error), log
    assert (status, last.kind) == (1, kind), last
    assert not os.path.exists(job.output)
    return last


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(start: Start, job: Job) -> None:
    settings = attrs.evolve(job.settings, alpha=1e36, checkpoint_every=1, warmup=0.0)
    error = fails(start, attrs.evolve(job, settings=settings), "not_finite")
    assert "loss is nan" in error.message or "loss is inf" in error.message or "gradient" in error.message
    info = checkpoint_info(job.checkpoint)
    assert info is not None
    assert error.step == info.step + 1


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"model": "none.gguf"}, "model", "no such file"),
        ({"data": "none"}, "data", "cannot be read"),
        ({"validation": "none"}, "data", "cannot be read"),
        ({"resume": True}, "checkpoint", "no checkpoint"),
        ({"settings": Settings(context_length=600)}, "model", "context_length of 600"),
        ({"settings": Settings(context_length=16)}, "data", "more than the context_length"),
    ],
)
def test_what_is_wrong_with_a_job(start: Start, job: Job, change: dict[str, Any], kind: str, words: str) -> None:
    error = fails(start, attrs.evolve(job, **change), kind)
    assert words in error.message
    assert error.step == 0


def test_a_line_that_is_no_job_is_an_error(start: Start) -> None:
    child = start("{}")
    (event,) = child.events()
    assert isinstance(event, Error)
    assert (child.end()[0], event.kind) == (1, "job")


def test_a_checkpoint_is_neither_overwritten_nor_taken_for_another(start: Start, job: Job) -> None:
    child = start(job)
    child.tell("pause")
    assert isinstance(child.events()[-1], Paused)
    child.end()
    assert "resume it, or remove it" in fails(start, job, "checkpoint").message
    other = attrs.evolve(job, resume=True, settings=attrs.evolve(job.settings, seed=5))
    assert "seed 0, not 5" in fails(start, other, "checkpoint").message
    # What does not change the losses may change.
    again = attrs.evolve(job, resume=True, settings=attrs.evolve(job.settings, checkpoint_every=2))
    run_to_end(start, again)


def test_a_checkpoint_is_of_the_weights_under_the_header(start: Start, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(Path(job.model).read_bytes())
    job = attrs.evolve(job, model=str(path))
    child = start(job)
    child.tell("pause")
    assert isinstance(child.events()[-1], Paused)
    child.end()
    raw, header = path.read_bytes(), check_gguf(path).sha256
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert check_gguf(path).sha256 == header
    again = attrs.evolve(job, resume=True)
    assert "of other weights" in fails(start, again, "checkpoint").message
    path.write_bytes(raw)
    run_to_end(start, again)


def test_a_model_that_changed_after_the_job_was_made_is_not_trained(start: Start, job: Job) -> None:
    _, digest = file_digest_here(job.model)
    assert "has changed" in fails(start, attrs.evolve(job, weights="0" * 64), "model").message
    run_to_end(start, attrs.evolve(job, weights=digest.hex()))


def test_an_adapter_that_cannot_be_written_loses_nothing(start: Start, job: Job, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    error = fails(start, job, "output")
    assert error.step == 12
    (tmp_path / "out").unlink()
    rest = run_to_end(start, attrs.evolve(job, resume=True))
    assert [type(event) for event in rest] == [Started, Done]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("base", ["f32", "native"])
def test_the_memory_estimate_bounds_the_child_s_and_is_near_it(
    start: Start, tmp_path: Path, base: Literal["f32", "native"]
) -> None:
    settings = Settings(rank=16, batch=2, epochs=1000, threads=1, context_length=256, base=base, schedule="constant")
    path = write_model(tmp_path / "m.gguf", types=["Q8_0"], embd=512, ff=1024, layers=3, n_vocab=4096)
    # As much as fits into one pass, and every prediction counts.
    samples = [sample([5 + (7 * place + each) % 380 for place in range(256)]) for each in range(2)]
    job = Job(
        model=str(path),
        data=str(write_data(tmp_path / "data", samples)),
        output=str(tmp_path / "a.gguf"),
        checkpoint=str(tmp_path / "c"),
        settings=settings,
    )
    child = start(job)
    child.events(lambda event: isinstance(event, Step) and event.step == 2)
    status = Path(f"/proc/{child.process.pid}/status").read_text()
    (peak,) = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    total = estimate(check_gguf(path), settings)
    assert 0.6 * total < peak < total
