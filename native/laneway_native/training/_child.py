"""The child process: reads a job, trains, reports; ends when told to, and at once when its standard input ends.

Nothing of it is shared with the parent, so whatever happens here - llama.cpp aborting, memory running out - ends this
process alone.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from typing import BinaryIO

import attrs

from laneway.decoder import InvalidRequestError, ModelLoadError
from laneway_native._gguf import GgufHeader, check_gguf
from laneway_native._log import follow_level
from laneway_native._machine import default_threads
from laneway_native._weights import file_digest_here, stamp_of
from laneway_native.training._files import (
    Data,
    checkpoint_info,
    data_order,
    read_checkpoint,
    read_data,
    remove_checkpoint,
    write_adapter,
    write_checkpoint,
)
from laneway_native.training._job import (
    Checkpoint,
    Done,
    Error,
    Event,
    Job,
    Paused,
    Started,
    Step,
    TrainingError,
    Validation,
    event_to_json,
)
from laneway_native.training._plan import Plan, plan
from laneway_native.training._trainer import Trainer, pass_tokens

logger = logging.getLogger("laneway.training")

ORPHANED = 3
"""Exit status of a child whose parent is gone."""
_LOOK_SECONDS = 1.0


class _Reporter:
    """Events out, one line each."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.step = 0
        """The last step that was done."""

    def __call__(self, event: Event) -> None:
        try:
            self._out.write(event_to_json(event).encode() + b"\n")
            self._out.flush()
        except OSError:
            # Nobody listens any more.
            os._exit(ORPHANED)


def _listen(lines: BinaryIO, pause: threading.Event) -> None:
    """Follow the parent's word until it is gone, in a thread of its own."""
    for line in lines:
        if line.strip() == b"pause":
            pause.set()
    # The main thread may be deep in native code: there is nothing to tidy up, files are written whole.
    os._exit(ORPHANED)


def _watch(parent: int) -> None:
    """End with the parent even if a process that it has forked holds the pipe open, in a thread of its own."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(ORPHANED)


def main() -> int:
    """Run one job; the exit status is 0 if the run was done or paused, 1 after an ``error`` event."""
    # llama.cpp would start a debugger when it aborts.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    # Whatever native code prints goes to the log, not between the events.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    report = _Reporter(out)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    lines = sys.stdin.buffer
    first = lines.readline()
    if not first:
        return ORPHANED
    pause = threading.Event()
    threading.Thread(target=_listen, args=(lines, pause), daemon=True).start()
    try:
        run(Job.from_json(first), report, pause)
    except InvalidRequestError as error:
        report(Error(kind="job", message=str(error), step=report.step))
    except ModelLoadError as error:
        report(Error(kind="model", message=str(error), step=report.step))
    except TrainingError as error:
        report(Error(kind=error.kind, message=error.message, step=report.step))
    except MemoryError:
        report(Error(kind="memory", message="memory ran out", step=report.step))
    except Exception as error:  # a bug, which the parent must hear of like of everything else
        traceback.print_exc()
        report(Error(kind="internal", message=f"{type(error).__name__}: {error}", step=report.step))
    else:
        return 0
    return 1


def run(job: Job, report: _Reporter, pause: threading.Event) -> None:
    """Train as the job says.  Raises what :func:`main` reports as an error."""
    settings = job.settings
    there = checkpoint_info(job.checkpoint)
    if there is not None and not job.resume:
        raise TrainingError(
            "checkpoint", f"{job.checkpoint} holds a checkpoint of step {there.step}: resume it, or remove it first"
        )
    if there is None and job.resume:
        raise TrainingError("checkpoint", f"there is no checkpoint in {job.checkpoint} to resume from")
    follow_level()
    header = check_gguf(job.model)
    stamp, digest = file_digest_here(job.model)
    weights = digest.hex()
    if job.weights not in (None, weights):
        raise TrainingError("model", f"{job.model} has changed since the training was asked for; load the model again")

    def read(path: str) -> Data:
        return read_data(path, context_length=settings.context_length, vocabulary=header.vocabulary_size)

    data = read(job.data)
    validation = read(job.validation) if job.validation is not None else None
    longest = max(data.longest, validation.longest if validation else 0)
    if there is not None:
        there.check_resumable(settings, model=header.sha256, weights=weights, data=data.digest)
        # Whatever memory would allow now: the losses shall be those of the run that was begun.
        settings = attrs.evolve(settings, base=there.base)
    chosen = plan(header, settings, longest=longest)
    threads = settings.threads or default_threads()
    logger.info("laneway: training with %d threads on a %s", threads, chosen)

    with Trainer(
        job.model,
        settings,
        base=chosen.base,
        threads=threads,
        recompute=chosen.recompute,
        most_tokens=pass_tokens(settings, longest),
    ) as trainer:
        trainer.load()
        if stamp_of(job.model) != stamp:
            raise TrainingError("model", f"{job.model} changed while it was loaded; try again when it is complete")
        _train(job, trainer, chosen, header, weights, data, validation, report, pause)


def _train(
    job: Job,
    trainer: Trainer,
    chosen: Plan,
    header: GgufHeader,
    weights: str,
    data: Data,
    validation: Data | None,
    report: _Reporter,
    pause: threading.Event,
) -> None:
    settings = job.settings
    count = len(data.samples)
    steps_of_epoch = math.ceil(count / settings.batch)
    steps = steps_of_epoch * settings.epochs
    numbers = [trainer.numbers("adapter"), trainer.numbers("first"), trainer.numbers("second")]
    done = read_checkpoint(job.checkpoint, numbers).step if job.resume else 0
    saved = done if job.resume else -1

    def save(step: int) -> None:
        nonlocal saved
        if saved == step:
            return
        try:
            write_checkpoint(
                job.checkpoint,
                numbers,
                step=step,
                steps=steps,
                base=chosen.base,
                settings=settings,
                model=header.sha256,
                weights=weights,
                data=data.digest,
            )
        except OSError as error:
            raise TrainingError("checkpoint", f"no checkpoint can be written in {job.checkpoint}: {error}") from None
        saved = step
        report(Checkpoint(step=step))

    report.step = done
    report(
        Started(
            steps=steps,
            start_step=done,
            base=chosen.base,
            parameters=trainer.facts.parameters,
            memory=chosen.copied + chosen.activations + chosen.state,
        )
    )
    if validation is not None and done == 0:
        report(Validation(step=0, loss=trainer.mean_loss(validation.samples)))
    order: list[int] = []
    for step in range(done + 1, steps + 1):
        if pause.is_set():
            save(step - 1)
            report(Paused(step=step - 1))
            return
        report.step = step
        epoch, index = divmod(step - 1, steps_of_epoch)
        if not order or index == 0:
            order = data_order(settings.seed, epoch, count)
        batch = [data.samples[place] for place in order[index * settings.batch : (index + 1) * settings.batch]]
        rate = settings.rate_at(step, steps)
        began = time.monotonic()
        loss = trainer.step(batch, step, rate, settings.weight_decay)
        report(
            Step(
                epoch=epoch,
                step=step,
                loss=loss,
                learning_rate=rate,
                tokens=sum(len(sample.tokens) for sample in batch),
                seconds=time.monotonic() - began,
            )
        )
        if validation is not None and index == steps_of_epoch - 1:
            report(Validation(step=step, loss=trainer.mean_loss(validation.samples)))
        if step % settings.checkpoint_every == 0:
            save(step)
    # The adapter may fail to be written, and the run shall not be lost by that.
    save(steps)
    try:
        write_adapter(job.output, trainer.tensors, numbers[0], architecture=header.architecture, alpha=settings.alpha)
    except OSError as error:
        raise TrainingError(
            "output", f"the adapter cannot be written to {job.output}: {error}; mend that, then resume"
        ) from None
    remove_checkpoint(job.checkpoint)
    report(Done(step=steps, adapter=job.output))
