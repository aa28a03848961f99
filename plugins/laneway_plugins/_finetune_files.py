"""What a training keeps on the disk beside its adapter, and what can be told from it.

``name.gguf.training/`` is there from the start of a training to its end and holds the data as tokens, the checkpoint
(which is the trainer's own affair), a record of the settings and the losses so far.  ``.name.gguf.lock`` is held by the
process that trains.  Its holder removes it before letting go: who has opened it meanwhile finds that out, and tries
again with a new one.

Everything here blocks for a short while.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, Self, get_args

import attrs
import filelock

from laneway import FinetuneError
from laneway_plugins._finetune_data import Example, Loss

log = logging.getLogger("laneway.finetune")

_FORMAT = 1

PROBE_SECONDS = 0.2
"""How long whoever only looks whether a training runs may hold its lock."""
_POLL_SECONDS = 0.02

State = Literal["idle", "running", "paused", "cancelled", "completed"]

_count = attrs.validators.optional(attrs.validators.instance_of(int))


@attrs.frozen
class TrainingState:
    """What has become of a training.

    ``idle``: there is none; ``running``: in this process or another; ``paused``: it can be resumed from a checkpoint;
    ``cancelled``: nothing is left of it; ``completed``: the adapter is there.  ``step`` of ``steps`` is how far it has
    come, as far as that is known.
    """

    state: State
    output: Path
    step: int | None = None
    steps: int | None = None


@attrs.frozen(kw_only=True)
class Record:
    """What is written down of a training."""

    state: State = attrs.field(validator=attrs.validators.in_(get_args(State)))
    settings: Mapping[str, Any] = attrs.field(factory=dict, validator=attrs.validators.instance_of(dict))
    """Of its request, as JSON has them."""
    model: str = attrs.field(default="", validator=attrs.validators.instance_of(str))
    """The fingerprint of what is trained."""
    weights: str = attrs.field(default="", validator=attrs.validators.instance_of(str))
    """The digest of its weights.  Records of earlier versions have none."""
    base: str = attrs.field(default="", validator=attrs.validators.instance_of(str))
    """How the weights are held while it trains, once that is decided."""
    step: int | None = attrs.field(default=None, validator=_count)
    """Of the last checkpoint."""
    steps: int | None = attrs.field(default=None, validator=_count)


class TrainingFiles:
    """The places, by the path of the adapter."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.training")
        self.train = self.folder / "train.jsonl"
        self.validation = self.folder / "validation.jsonl"
        self.checkpoint = self.folder / "checkpoint"
        self._record = self.folder / "training.json"
        self._losses = self.folder / "losses.jsonl"
        self._lock_path = output.with_name(f".{output.name}.lock")
        self._adapter_part = output.with_name(f"{output.name}.part")
        self._lock: filelock.BaseFileLock | None = None

    # What there is.

    @property
    def has_checkpoint(self) -> bool:
        """Whether something can be resumed.  The trainer writes checkpoints whole: what is there is good."""
        try:
            names = os.listdir(self.checkpoint)
        except OSError:
            return False
        return any(not name.startswith(".") and not name.endswith((".tmp", ".part")) for name in names)

    def state(self) -> TrainingState:
        """What the disk tells.  A training of another process counts as running."""
        record = self.read()
        state: State
        if record is not None and record.state == "running" and self.is_locked():
            state = "running"
        elif self.has_checkpoint and record is not None:
            state = "paused"
        elif record is not None and record.state == "cancelled":
            state = "cancelled"
        elif self.output.is_file():
            state = "completed"
        else:
            return TrainingState("idle", self.output)
        if record is None:
            return TrainingState(state, self.output)
        return TrainingState(state, self.output, record.step, record.steps)

    def read(self) -> Record | None:
        """The record, or None if there is none that can be read."""
        try:
            value: Any = json.loads(self._record.read_text(encoding="utf-8"))
            if value.pop("format") != _FORMAT:
                return None
            return Record(**value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def losses(self, up_to: int) -> list[Loss]:
        """The curve so far, to a step."""
        found = []
        with contextlib.suppress(OSError), self._losses.open(encoding="utf-8") as file:
            for line in file:
                # The last line may be cut off, where the process was.
                with contextlib.suppress(ValueError, TypeError):
                    loss = Loss(**json.loads(line))
                    if loss.step <= up_to:
                        found.append(loss)
        return found

    # Changing it.

    def begin(self, record: Record, train: Iterable[Example], validation: Iterable[Example]) -> None:
        """Make the folder anew, with the data in it."""
        self.discard()
        self.folder.mkdir(parents=True)
        for path, examples in ((self.train, train), (self.validation, validation)):
            lines = [example.to_json() for example in examples]
            if lines:
                with path.open("w", encoding="utf-8") as file:
                    for line in lines:
                        file.write(line + "\n")
                    _sync(file)
        self.write(record, durable=True)

    def write(self, record: Record, *, durable: bool = False) -> None:
        """Replace the record.  ``durable``: return when it is on the disk, not only on its way there."""
        part = self._record.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **attrs.asdict(record)}, file)
            if durable:
                _sync(file)
        part.replace(self._record)

    def cancel(self) -> None:
        """Leave nothing but the record that it was cancelled."""
        self.discard()
        self.folder.mkdir(parents=True)
        self.write(Record(state="cancelled"))

    def discard(self) -> None:
        """Remove everything but the adapter."""
        # The checkpoint first: cut off in between, nothing is left that looks as if it could be resumed.
        for folder in (self.checkpoint, self.folder):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
        # Of an adapter that the trainer was killed over.
        self._adapter_part.unlink(missing_ok=True)

    def curve(self, up_to: int) -> Curve:
        """The file of losses, to add to after those up to a step."""
        kept = self.losses(up_to)
        # Those that there are must not be lost where there is no room for them twice.
        part = self._losses.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(_loss_line(loss) for loss in kept)
        part.replace(self._losses)
        return Curve(self._losses.open("a", encoding="utf-8"), kept)

    # The lock.

    def lock(self, patience: float = 0.0) -> None:
        """Keep other trainings, also those of other processes, away from this output, until :meth:`unlock`.

        ``patience``: seconds to wait for another one.  Raises :class:`FinetuneError` if another one has it then, or
        :class:`OSError`.
        """
        # Soft locks would outlive a process that is killed.
        lock = filelock.FileLock(self._lock_path, timeout=patience, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(poll_interval=_POLL_SECONDS)
        except filelock.Timeout:
            raise FinetuneError(
                f"another training writes to {self.output}; wait for its end, or choose another output"
            ) from None
        self._lock = lock

    def unlock(self) -> None:
        """Let others have it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                self._lock_path.unlink(missing_ok=True)
            try:
                lock.release()
            except OSError as error:
                # Its descriptor is closed all the same, and with it the lock is gone.
                log.warning("letting go of %s failed: %s", self._lock_path, error)

    def is_locked(self) -> bool:
        """Whether somebody else trains for this output."""
        probe = TrainingFiles(self.output)
        try:
            probe.lock()
        except FinetuneError:
            return True
        except OSError:
            # It cannot be asked for, as where one may only read.  Whoever trains removes it in the end.
            return self._lock_path.exists()
        probe.unlock()
        return False


class Curve:
    """The losses of a training, in a file and in the memory."""

    def __init__(self, file: IO[str], points: Iterable[Loss] = ()) -> None:
        self._file = file
        self.points = list(points)
        """Those that are in the file."""

    def add(self, loss: Loss) -> None:
        """Add a point."""
        self.points.append(loss)
        self._file.write(_loss_line(loss))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _loss_line(loss: Loss) -> str:
    return json.dumps(attrs.asdict(loss)) + "\n"


def _sync(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
