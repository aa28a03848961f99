"""LoRA adapters, trained on a loaded model while nothing else runs on it.

::

    async with finetune.start(model, dataset="chats.jsonl", output="adapter.gguf", rank=8) as training:
        async for event in training: ...
        result = await training.result()

    model = await engine.load_model("smollm2", lora=["adapter.gguf"])

The training is the lane's exclusive writer: it waits for its turn like any other request, then runs alone, in a process
of its own, while the model's completions queue.  Models of other lanes, and those without a lane, go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypedDict, TypeVar, Unpack, final
from weakref import WeakKeyDictionary

import attrs
import trio

from laneway import (
    FinetuneError,
    InvalidRequestError,
    Model,
    ModelLoadError,
    Operation,
    PluginSpec,
    Prepared,
    Progress,
    RequestContext,
    Run,
    Scope,
    Use,
    hookimpl,
    threads,
)
from laneway.validators import number, of_type, optional, whole
from laneway_plugins._finetune_child import Child, Conversation, job_line, open_child
from laneway_plugins._finetune_command import finetune as command
from laneway_plugins._finetune_data import Loss as Loss
from laneway_plugins._finetune_dataset import Dataset, Format, Reader
from laneway_plugins._finetune_events import (
    Checkpointed,
    ChildEvent,
    Finished,
    NotAnEventError,
    Paused,
    Started,
    Stepped,
    Validated,
)
from laneway_plugins._finetune_files import PROBE_SECONDS, Curve, Record, TrainingFiles
from laneway_plugins._finetune_files import TrainingState as TrainingState

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger("laneway.finetune")

KIND = "finetune"

MODULES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Matrices of a layer that can be adapted, as a GGUF file names them."""

_RATE_STEPS = 20
"""Steps over which speed and time left are reckoned."""

_T = TypeVar("_T")


async def _off_loop(function: Callable[..., _T], *args: Any) -> _T:
    """Run what blocks in a thread: reading data may take minutes, and locks and disks may keep it waiting."""
    return await threads.run_long(partial(function, *args))


# The request.


class FinetuneFields(TypedDict, total=False):
    """The fields of :class:`FinetuneRequest` beside data and output, for signatures."""

    validation: float | str | os.PathLike[str] | None
    format: Format
    truncate: bool
    rank: int
    alpha: float | None
    modules: tuple[str, ...] | list[str] | str | None
    epochs: int
    context_length: int
    batch: int
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup: float
    weight_decay: float
    seed: int
    threads: int | None
    base: Literal["auto", "f32", "native"]
    checkpoint_every: int
    silence_timeout: float
    resume: bool


def _path(value: object, field: str) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InvalidRequestError(f"must be a path, not {value!r}", field)
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text:
        raise InvalidRequestError(f"must be a path of text, not {value!r}", field)
    # What is relative is so to the directory of now, and not to that of when it is read.
    return Path(os.path.abspath(os.path.expanduser(text)))


def _dataset_path(value: object) -> Path:
    return _path(value, "dataset")


def _output_path(value: object) -> Path:
    path = _path(value, "output")
    if path.name in ("", ".", ".."):
        raise InvalidRequestError(f"must name a file, not {value!r}", "output")
    return path


def _validation(value: object) -> float | Path | None:
    if value is None:
        return None
    if isinstance(value, (int, float)):
        if isinstance(value, bool) or not 0 < value < 1:
            raise InvalidRequestError(
                f"must be a file, or a share of the data above 0 and below 1, not {value!r}", "validation"
            )
        return float(value)
    return _path(value, "validation")


def _modules(value: object) -> tuple[str, ...]:
    if value is None:
        return MODULES
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or not names:
        raise InvalidRequestError(f"must be names out of {', '.join(MODULES)}, not {value!r}", "modules")
    for name in names:
        if name not in MODULES:
            raise InvalidRequestError(f"{name!r} is no module; there are {', '.join(MODULES)}", "modules")
    return tuple(name for name in MODULES if name in names)


def _one_of(*words: str) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in words:
            raise InvalidRequestError(f"must be one of {', '.join(map(repr, words))}, not {value!r}", attribute.name)

    return check


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise InvalidRequestError(f"must be more than 0, not {value!r}", attribute.name)


_flag = of_type(bool)


@attrs.frozen(kw_only=True)
class FinetuneRequest:
    """What to train, on what, and how.  Raises :class:`InvalidRequestError` when made with anything wrong.

    Paths are made absolute.  What the data look like is in the how-to.
    """

    dataset: Path = attrs.field(converter=_dataset_path)
    """Plain text, or chats: JSON lines ``{"messages": [{"role": ..., "content": ...}, ...]}``."""
    output: Path = attrs.field(converter=_output_path)
    """Where the adapter, a GGUF file, goes in the end.  One that is there is replaced then."""
    validation: float | Path | None = attrs.field(default=None, converter=_validation)
    """What to measure with: a file like the data, or a share of them that is not learned from; None: nothing."""
    format: Format = attrs.field(default="auto", validator=_one_of("auto", "text", "chat"))
    """Of the data; ``auto``: chats if it is JSON, by its content or its name, else text."""
    truncate: bool = attrs.field(default=False, validator=_flag)
    """Cut the ends of chats that are longer than ``context_length``, instead of refusing them."""
    rank: int = attrs.field(default=16, validator=whole(1, 256))
    alpha: float | None = attrs.field(default=None, validator=optional(number(1e-6, 1e6)))
    """The adapter's product is scaled by ``alpha / rank``; None: twice the rank."""
    modules: tuple[str, ...] = attrs.field(default=None, converter=_modules)
    """Which matrices of each layer are adapted; None: all of :data:`MODULES`."""
    epochs: int = attrs.field(default=3, validator=whole(1, 100_000))
    """How often the data are gone through."""
    context_length: int = attrs.field(default=512, validator=whole(16, 1 << 20))
    """Tokens of the longest sequence; bounds the memory too."""
    batch: int = attrs.field(default=8, validator=whole(1, 65_536))
    """Sequences that one step of the optimiser learns from."""
    learning_rate: float = attrs.field(default=1e-3, validator=[number(0, 1), _positive])
    schedule: Literal["constant", "linear", "cosine"] = attrs.field(
        default="cosine", validator=_one_of("constant", "linear", "cosine")
    )
    """How the learning rate falls after the warm-up."""
    warmup: float = attrs.field(default=0.05, validator=number(0, 1e9))
    """Steps over which the learning rate rises from 0: below 1 a share of all steps, else their number."""
    weight_decay: float = attrs.field(default=0.01, validator=number(0, 1))
    seed: int = attrs.field(default=0, validator=whole(0, (1 << 63) - 1))
    """Of the adapter's first weights, of the order of the data and of what is left out for the validation."""
    threads: int | None = attrs.field(default=None, validator=optional(whole(1, 512)))
    """None: one for each physical core."""
    base: Literal["auto", "f32", "native"] = attrs.field(default="auto", validator=_one_of("auto", "f32", "native"))
    """The model's weights while it is trained: a copy in ``f32``, or ``native`` as the file has them, which ``auto``
    is too."""
    checkpoint_every: int = attrs.field(default=50, validator=whole(1, 1 << 31))
    """Steps from one checkpoint to the next."""
    silence_timeout: float = attrs.field(default=3600.0, validator=[number(0, 1e9), _positive])
    """Seconds without a word of the training process after which it counts as hung, and is ended."""
    resume: bool = attrs.field(default=False, validator=_flag)
    """Go on from the checkpoint of ``output``; what the training was begun with must be the same."""

    @property
    def scaling(self) -> float:
        """``alpha``, or what it is by default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


_FREE = frozenset({"threads", "checkpoint_every", "silence_timeout"})
"""Fields that may differ when a training is resumed."""


def _settings(request: FinetuneRequest) -> dict[str, Any]:
    """What a request says, as JSON has it, but for what it is known by."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    fields = attrs.asdict(request, recurse=False)
    return {name: plain(value) for name, value in fields.items() if name not in ("output", "resume")}


# What a training says of itself.


@attrs.frozen
class FinetuneProgress(Progress):
    """How far a training has come, ``done`` steps of ``total``.  The figures are in ``metrics``, too."""

    def _metric(self, name: str) -> float | None:
        return self.metrics.get(name)

    @property
    def epoch(self) -> int | None:
        """From 1 on."""
        epoch = self._metric("epoch")
        return None if epoch is None else int(epoch)

    @property
    def loss(self) -> float | None:
        """The mean over the tokens of the last step that count, in nats."""
        return self._metric("loss")

    @property
    def validation_loss(self) -> float | None:
        """The last one that was measured."""
        return self._metric("validation_loss")

    @property
    def learning_rate(self) -> float | None:
        """Of the last step."""
        return self._metric("learning_rate")

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps."""
        return self._metric("tokens_per_second")

    @property
    def seconds_left(self) -> float | None:
        """By the pace of the last steps."""
        return self._metric("seconds_left")


@attrs.frozen(kw_only=True)
class FinetuneResult:
    """How a training ended that ended well."""

    state: Literal["completed", "paused"]
    output: Path
    """The adapter; not there yet if it was paused."""
    step: int
    steps: int
    base: str
    """``f32`` or ``native``: how the model's weights were held."""
    curve: tuple[Loss, ...] = attrs.field(repr=False)
    """The losses of all steps, those before a pause included, and of the validation."""
    tokens: int
    """Gone through in this run."""
    seconds: float
    """From the permit to the end, of this run."""

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return next((point.loss for point in reversed(self.curve) if not point.validation), None)

    @property
    def validation_loss(self) -> float | None:
        """The last one that was measured."""
        return next((point.loss for point in reversed(self.curve) if point.validation), None)


@final
class Training:
    """A training, as the block of :func:`start` or :func:`resume` gives it: a run that can be paused."""

    def __init__(self, run: Run, model: Model, request: FinetuneRequest, control: _Control) -> None:
        self._run = run
        self._model = model
        self._request = request
        self._control = control

    def __repr__(self) -> str:
        return f"<laneway_plugins.finetune.Training {self.request_id!r} of {self._model.name!r}: {self.state}>"

    @property
    def request(self) -> FinetuneRequest:
        """What was asked for."""
        return self._request

    @property
    def request_id(self) -> str:
        """The id to cancel it by."""
        return self._run.request_id

    @property
    def state(self) -> str:
        """``paused`` if it is; else that of a run: ``waiting``, ``running``, ``cancelling``, ``completed``,
        ``cancelled``, ``failed`` or ``rejected``."""
        return "paused" if self._control.paused and self._run.state == "completed" else self._run.state

    async def admitted(self) -> None:
        """Wait until its turn has come.  Raises its error if it ended before that."""
        await self._run.admitted()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._run.__anext__()

    async def result(self) -> FinetuneResult:
        """Wait for the end, paused or completed.  Unread events are dropped."""
        result: FinetuneResult = await self._run.result()
        return result

    async def pause(self) -> str:
        """End the run with a checkpoint, and return what has become of it: :attr:`state`.

        When this returns, the checkpoint is on the disk, the process gone and the lane free; :meth:`result` says
        ``paused``.  A training that was just done is ``completed``.  One that has not begun leaves the queue, as if
        cancelled, and one that fails meanwhile has failed.
        """
        if self._run.state == "waiting":
            self.cancel("paused before it began")
        else:
            self._control.pause.set()
        await self._model.engine.wait_ended(self.request_id)
        return self.state

    def cancel(self, reason: str = "cancelled by its caller") -> int:
        """End it, and remove its checkpoint if it has begun; whether there was something to end: 1 or 0."""
        if self._run.state not in ("waiting", "running"):
            return 0
        return self._model.engine.cancel(self.request_id, reason)


@final
class _OpenTraining:
    """The block of a training: a run's, with a way to its handler."""

    def __init__(self, model: Model, request: FinetuneRequest, options: dict[str, Any]) -> None:
        self._model = model
        self._request = request
        self._opening = model.engine.run(model, KIND, request, **options)

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Training:
        self._run = await self._opening.__aenter__()
        self._control = _control(self._model, self._run.request_id)
        return Training(self._run, self._model, self._request, self._control)

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._opening.__aexit__(kind, error, traceback)
        finally:
            _forget(self._model, self._run.request_id, self._control)


def start(
    model: Model,
    *,
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str],
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
    **fields: Unpack[FinetuneFields],
) -> AbstractAsyncContextManager[Training]:
    """Train an adapter for the length of a block, which gets the :class:`Training`.

    Iterate for :class:`FinetuneProgress` events; the last event is :class:`laneway.Done`.  Leaving the block before the
    end stops the training; its last checkpoint stays.

    :param dataset: and ``output`` and ``fields``: those of :class:`FinetuneRequest`
    :param request_id: and what follows up to ``queue_timeout``: see :meth:`laneway.Engine.run`
    :raises FinetuneError: there is a paused training for this output; resume or discard it
    :raises RequestRejectedByPolicyError: ``busy``: another training waits or runs on this model
    """
    request = FinetuneRequest(dataset=dataset, output=output, **fields)
    return start_request(model, request, request_id=request_id, overflow=overflow, queue_timeout=queue_timeout)


def resume(
    model: Model,
    *,
    output: str | os.PathLike[str],
    threads: int | None = None,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
) -> AbstractAsyncContextManager[Training]:
    """Go on with the paused training of ``output``, as it was begun: a new request, which queues.

    It goes on with the data that were read when it began, and with as many threads as it had unless told otherwise.
    The parameters are those of :func:`start`.  Reads a small file.  Raises :class:`FinetuneError` if there is none.
    """
    request = stored_request(output)
    if threads is not None:
        request = attrs.evolve(request, threads=threads)
    return start_request(model, request, request_id=request_id, overflow=overflow, queue_timeout=queue_timeout)


def start_request(
    model: Model,
    request: FinetuneRequest,
    *,
    request_id: str | None = None,
    overflow: Literal["queue", "reject"] | None = None,
    queue_timeout: float | None = None,
) -> AbstractAsyncContextManager[Training]:
    """What :func:`start` and :func:`resume` do, for a request that is made already."""
    options = {"request_id": request_id, "overflow": overflow, "queue_timeout": queue_timeout}
    return _OpenTraining(model, request, options)


def stored_request(output: str | os.PathLike[str]) -> FinetuneRequest:
    """The request that resumes the paused training of ``output``.  Reads a small file.

    Raises :class:`FinetuneError` if there is none.
    """
    files = TrainingFiles(_output_path(output))
    record = files.read()
    if not files.has_checkpoint:
        raise _nothing_to_resume(files.output)
    if record is None:
        raise _no_record(files.output)
    try:
        return FinetuneRequest(output=files.output, resume=True, **record.settings)
    except TypeError as error:
        raise _no_record(files.output) from error


def state(output: str | os.PathLike[str]) -> TrainingState:
    """What has become of the training of ``output``, from memory and from the disk.  Reads a small file."""
    path = _output_path(output)
    live = _live.get(path)
    return live.state if live is not None else TrainingFiles(path).state()


def discard(output: str | os.PathLike[str]) -> None:
    """Throw away the paused training of ``output``.  An adapter that is there stays.

    Raises :class:`FinetuneError` while it runs.  Removes files: it blocks for a moment.
    """
    files = TrainingFiles(_output_path(output))
    if not files.folder.exists():
        return
    files.lock()
    try:
        files.discard()
    finally:
        files.unlock()


def _nothing_to_resume(output: Path) -> FinetuneError:
    return FinetuneError(f"there is no checkpoint of a training of {output} to resume; start it anew")


def _no_record(output: Path) -> FinetuneError:
    return FinetuneError(
        f"there is a checkpoint of a training of {output}, and what was written down of it cannot be read, so it "
        "cannot go on; throw it away (discard, or --restart), or choose another output"
    )


# What callers and handlers share.


@attrs.define(eq=False)
class _Control:
    """A caller's way to the handler of its request."""

    pause: trio.Event = attrs.field(factory=trio.Event)
    paused: bool = False


_controls: WeakKeyDictionary[Model, dict[str, _Control]] = WeakKeyDictionary()
"""Of the trainings whose block is open, or whose handler runs."""


def _control(model: Model, request_id: str) -> _Control:
    return _controls.setdefault(model, {}).setdefault(request_id, _Control())


def _forget(model: Model, request_id: str, control: _Control) -> None:
    # The id may be another training's by now.
    known = _controls.get(model, {})
    if known.get(request_id) is control:
        del known[request_id]


_live: dict[Path, _Fit] = {}
"""Trainings that run in this process, by their output."""


# What trains.


@attrs.frozen(kw_only=True)
class Plan:
    """What is known of a training before it begins."""

    model_path: str
    fingerprint: str
    """Of the model file's header."""
    weights: str | None = None
    """The digest of the whole file; None until it has been read."""
    threads: int
    need: int | None = None
    """Bytes that it takes at most, beside the loaded model; None: not known."""


class Trainer(Protocol):
    """The native part, as this module needs it."""

    async def plan(self, model: Model, request: FinetuneRequest, longest: int | None = None) -> Plan:
        """``longest``: tokens of the longest sequence, once that is known.

        Raises :class:`InvalidRequestError` or :class:`FinetuneError` for what cannot be trained.
        """

    async def digest_weights(self, plan: Plan) -> str:
        """The digest of the model's file.  Reads all of it, so it may take seconds.

        Raises :class:`FinetuneError` if the file cannot be read.
        """

    async def check_memory(self, plan: Plan) -> None:
        """Raises :class:`FinetuneError` if there is too little memory now."""

    def open(self) -> AbstractAsyncContextManager[Child]:
        """A process that waits for its job."""


@final
class _NativeTrainer:
    """``laneway_native.training``."""

    async def plan(self, model: Model, request: FinetuneRequest, longest: int | None = None) -> Plan:
        path = model.metadata.get("path")
        if not path:
            raise InvalidRequestError(
                f"model {model.name!r} was not loaded from a GGUF file, and only such can be trained", "model"
            )
        return await _off_loop(self._plan, path, request, longest)

    def _plan(self, path: str, request: FinetuneRequest, longest: int | None) -> Plan:
        native = _native()
        training = native.training
        header = native.check_gguf(path)
        try:
            need = training.estimate(header, training.Settings(**_native_settings(request)), longest=longest)
        except training.TrainingError as error:
            raise FinetuneError(f"{Path(path).name}: {error}") from error
        total = native.available().total
        if total is not None and need > total:
            raise FinetuneError(
                f"the training needs about {_size(need)}, and there are {_size(total)} of memory in all; {_LESS}"
            )
        return Plan(
            model_path=os.path.abspath(path),
            fingerprint=header.sha256,
            threads=request.threads or native.default_threads(),
            need=need,
        )

    async def digest_weights(self, plan: Plan) -> str:
        try:
            digest: bytes = await _native().file_digest(plan.model_path)
        except ModelLoadError as error:
            raise FinetuneError(str(error)) from error
        return digest.hex()

    async def check_memory(self, plan: Plan) -> None:
        if plan.need is not None:
            await _off_loop(self._check_memory, plan.need)

    def _check_memory(self, need: int) -> None:
        there = _native().available().now
        if there is not None and need > there:
            raise FinetuneError(
                f"the training needs about {_size(need)} beside the loaded model, and {_size(there)} of memory are "
                f"free; {_LESS}"
            )

    def open(self) -> AbstractAsyncContextManager[Child]:
        return open_child()


_LESS = "a smaller context_length, fewer modules, a smaller rank, or base='native' need less"


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def _native_settings(request: FinetuneRequest) -> dict[str, Any]:
    return {
        "rank": request.rank,
        "alpha": request.scaling,
        "modules": list(request.modules),
        "epochs": request.epochs,
        "context_length": request.context_length,
        "batch": request.batch,
        "learning_rate": request.learning_rate,
        "schedule": request.schedule,
        "warmup": request.warmup,
        "weight_decay": request.weight_decay,
        "seed": request.seed,
        "threads": request.threads,
        "base": request.base,
        "checkpoint_every": request.checkpoint_every,
    }


def _native() -> ModuleType:
    try:
        import laneway_native
        import laneway_native.training
    except ImportError as error:
        raise FinetuneError(
            f"the native part of Laneway cannot be imported ({error}); build it: `make build` in a checkout, "
            "`python -m pip install --force-reinstall --no-deps laneway` elsewhere"
        ) from error
    return laneway_native


_trainer: Trainer = _NativeTrainer()


# The operation.


@attrs.frozen
class Job:
    """A valid request, ready to run; without data if it is resumed."""

    request: FinetuneRequest
    plan: Plan
    dataset: Dataset | None


async def prepare(model: Model, request: FinetuneRequest) -> Prepared:
    """The operation's ``prepare``: what cannot be trained, and what is wrong with the data, is found here."""
    plan = await _trainer.plan(model, request)
    await _off_loop(_check_paths, request, plan)
    weights = await _trainer.digest_weights(plan)
    if request.resume:
        await _off_loop(_check_paths, request, attrs.evolve(plan, weights=weights))
        record = await _off_loop(TrainingFiles(request.output).read)
        if record is not None and record.base:
            # Whatever fits now: it goes on as it was begun.
            base: Any = record.base
            plan = await _trainer.plan(model, attrs.evolve(request, base=base))
        return Prepared(payload=Job(request, attrs.evolve(plan, weights=weights), None))
    reader = Reader(
        model=model,
        length=request.context_length,
        format=request.format,
        truncate=request.truncate,
        off_loop=_off_loop,
    )
    dataset = await reader.read(request.dataset, request.validation, request.seed)
    plan = await _trainer.plan(model, request, dataset.longest)
    return Prepared(payload=Job(request, attrs.evolve(plan, weights=weights), dataset))


def _check_paths(request: FinetuneRequest, plan: Plan) -> None:
    output = request.output
    folder = TrainingFiles(output).folder
    for field, other in (("dataset", request.dataset), ("validation", request.validation), ("model", plan.model_path)):
        if isinstance(other, (Path, str)):
            if _same(output, Path(other)):
                raise InvalidRequestError(f"{output} is the {field} itself; choose another file", "output")
            if not request.resume and Path(other).is_relative_to(folder):
                raise InvalidRequestError(f"{other} is in {folder}, which the training clears; move it", field)
    try:
        # Of the names beside it, this is the longest.
        with contextlib.suppress(FileNotFoundError):
            folder.stat()
    except OSError as error:
        raise InvalidRequestError(f"{output}: {error.strerror}", "output") from error
    if output.is_dir():
        raise InvalidRequestError(f"{output} is a directory; name a file in it", "output")
    if output.exists() and not output.is_file():
        raise InvalidRequestError(f"{output} is no file that could be replaced, such as a device", "output")
    if not output.parent.is_dir():
        raise InvalidRequestError(f"there is no directory {output.parent}", "output")
    if not os.access(output.parent, os.W_OK):
        raise InvalidRequestError(f"{output.parent} cannot be written to", "output")
    # One that runs is the lane's affair, or the lock's.
    if state(output).state != "running":
        _check_start(request, plan, TrainingFiles(output))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other


def _check_start(request: FinetuneRequest, plan: Plan, files: TrainingFiles) -> Record | None:
    """The record to go on from; None for a new training.  Raises :class:`FinetuneError` if it may not begin so."""
    record = files.read()
    there = files.has_checkpoint
    if there and record is None:
        # Rather than to throw away what somebody may have waited days for.
        raise _no_record(files.output)
    if not request.resume:
        if there:
            raise FinetuneError(
                f"there is a paused training of {files.output}; go on with it (resume, or --resume), throw it away "
                "(discard, or --restart), or choose another output"
            )
        return None
    if record is None or not there:
        raise _nothing_to_resume(files.output)
    if record.model != plan.fingerprint:
        raise FinetuneError(f"the paused training of {files.output} is of another model; load that one to resume it")
    if not record.weights:
        raise FinetuneError(
            f"the paused training of {files.output} was begun by an earlier version of Laneway, which did not record "
            "its weights, so it cannot go on; throw it away (discard, or --restart), or choose another output"
        )
    if plan.weights not in (None, record.weights):
        raise FinetuneError(
            f"the paused training of {files.output} is of other weights: the model's file has changed since it was "
            "begun; put that file back to resume it, throw the training away (discard, or --restart), or choose "
            "another output"
        )
    wanted = _settings(request)
    for name, value in record.settings.items():
        if name not in _FREE and wanted.get(name) != value:
            raise InvalidRequestError(
                f"the training was begun with {value!r} and cannot be resumed with {wanted.get(name)!r}", name
            )
    return record


@trio.lowlevel.enable_ki_protection
async def handler(ctx: RequestContext, prepared: Prepared) -> FinetuneResult:
    """The operation's ``handler``."""
    control = _control(ctx.model, ctx.request_id)
    job: Job = prepared.payload
    files = TrainingFiles(job.request.output)
    fit = _Fit(ctx, job, files, control)
    try:
        await _off_loop(files.lock, PROBE_SECONDS)
        try:
            return await fit.run()
        finally:
            files.unlock()
    except OSError as error:
        raise FinetuneError(f"the training cannot go on: {error}", fit.state.step) from error
    finally:
        _forget(ctx.model, ctx.request_id, control)


@final
class _Fit:
    """One training while it runs."""

    def __init__(self, ctx: RequestContext, job: Job, files: TrainingFiles, control: _Control) -> None:
        self._ctx = ctx
        self._job = job
        self._files = files
        self._control = control
        self._began = trio.current_time()
        self._record = Record(state="running")
        self._curve: Curve | None = None
        self._unwanted: bool | None = None
        self._step = 0
        self._steps: int | None = None
        self._tokens = 0
        self._metrics: dict[str, float] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS)

    @property
    def state(self) -> TrainingState:
        """For whoever asks meanwhile."""
        return TrainingState("running", self._files.output, self._step, self._steps)

    async def run(self) -> FinetuneResult:
        """Train.  What is on the disk afterwards is what the outcome says."""
        earlier = await _off_loop(_check_start, self._job.request, self._job.plan, self._files)
        await _trainer.check_memory(self._job.plan)
        output = self._files.output
        _live[output] = self
        try:
            await self._begin(earlier)
            return await self._train()
        except Exception:
            await self._leave(self._keep_what_there_is)
            raise
        except BaseException:
            unwanted = self._ctx.cancel_asked if self._unwanted is None else self._unwanted
            await self._leave(self._files.cancel if unwanted else self._keep_what_there_is)
            raise
        finally:
            del _live[output]

    async def _leave(self, tidy: Callable[[], None]) -> None:
        # A cancel comes too late.
        with trio.CancelScope(shield=True):
            try:
                await _off_loop(tidy)
            except OSError as error:
                # How it ended is to be told, not this.  A checkpoint is found also under a record that was not updated.
                log.warning("what the training of %s leaves cannot be put in order: %s", self._files.output, error)

    async def _begin(self, earlier: Record | None) -> None:
        job, files = self._job, self._files
        if earlier is None:
            assert job.dataset is not None
            self._record = Record(
                state="running",
                settings=_settings(job.request),
                model=job.plan.fingerprint,
                weights=job.plan.weights or "",
            )
            await _off_loop(files.begin, self._record, job.dataset.train, job.dataset.validation)
        else:
            self._record = attrs.evolve(earlier, state="running", settings=_settings(job.request))
            await _off_loop(partial(files.write, self._record, durable=True))
            self._step = earlier.step or 0
            self._steps = earlier.steps

    async def _train(self) -> FinetuneResult:
        try:
            async with _trainer.open() as child:
                conversation = Conversation(
                    child,
                    job_line(self._message()),
                    pause=self._control.pause,
                    on_event=self._hear,
                    silence=self._job.request.silence_timeout,
                )
                try:
                    last = await conversation.run()
                except BaseException:
                    # Until the process has ended more may happen, which would have it look otherwise.
                    self._unwanted = self._ctx.cancel_asked
                    raise
        finally:
            if self._curve is not None:
                self._curve.close()
        return await self._finish(last)

    def _message(self) -> dict[str, Any]:
        request, files = self._job.request, self._files
        return {
            "model": self._job.plan.model_path,
            "weights": self._job.plan.weights,
            "data": str(files.train),
            "validation": str(files.validation) if files.validation.exists() else None,
            "output": str(files.output),
            "checkpoint": str(files.checkpoint),
            "resume": request.resume,
            **_native_settings(request),
            "threads": self._job.plan.threads,
            # What was chosen when it began: the losses would be others.
            "base": self._record.base or request.base,
        }

    async def _finish(self, last: Paused | Finished) -> FinetuneResult:
        self._step = last.step
        if isinstance(last, Finished):
            if not self._files.output.is_file():
                output = self._files.output
                raise FinetuneError(f"the training is done, and there is no adapter at {output}", last.step)
            await self._leave(self._files.discard)
        else:
            if not self._files.has_checkpoint:
                raise FinetuneError("the training is paused, and there is no checkpoint of it", last.step)
            self._control.paused = True
            self._record = attrs.evolve(self._record, step=last.step, steps=self._steps)
            await self._leave(self._keep_what_there_is)
        return FinetuneResult(
            state="completed" if isinstance(last, Finished) else "paused",
            output=self._files.output,
            step=last.step,
            steps=last.step if self._steps is None else self._steps,
            base=self._record.base,
            curve=() if self._curve is None else tuple(self._curve.points),
            tokens=self._tokens,
            seconds=trio.current_time() - self._began,
        )

    def _keep_what_there_is(self) -> None:
        """A checkpoint and what belongs to it, or nothing."""
        if self._files.has_checkpoint:
            self._files.write(attrs.evolve(self._record, state="paused"), durable=True)
        else:
            self._files.discard()

    # What it says.

    def _hear(self, event: ChildEvent) -> None:
        if isinstance(event, Started):
            self._start(event)
        elif self._curve is None:
            raise NotAnEventError(f"{event!r} before it has started")
        elif isinstance(event, Stepped):
            self._count(event)
            self._curve.add(Loss(event.step, event.loss))
        elif isinstance(event, Validated):
            self._metrics["validation_loss"] = event.loss
            self._curve.add(Loss(event.step, event.loss, validation=True))
        elif isinstance(event, Checkpointed):
            self._record = attrs.evolve(self._record, step=event.step, steps=self._steps)
            self._files.write(self._record)
        self._ctx.put(FinetuneProgress(self._step, self._steps, "step", dict(self._metrics)))

    def _start(self, event: Started) -> None:
        self._step = event.start_step
        self._steps = event.steps
        # What came after the checkpoint is done, and told, once more.
        self._curve = self._files.curve(event.start_step)
        self._record = attrs.evolve(self._record, base=event.base, steps=event.steps)
        self._files.write(self._record)
        log.info(
            "training request=%s model=%s steps=%d from=%d parameters=%d base=%s",
            self._ctx.request_id,
            self._ctx.model.name,
            event.steps,
            event.start_step,
            event.parameters,
            event.base,
        )

    def _count(self, event: Stepped) -> None:
        self._step = event.step
        self._tokens += event.tokens
        self._pace.append((event.tokens, event.seconds))
        self._metrics.update(epoch=event.epoch + 1, loss=event.loss, learning_rate=event.learning_rate)
        seconds = sum(each for _, each in self._pace)
        if seconds > 0:
            self._metrics["tokens_per_second"] = sum(tokens for tokens, _ in self._pace) / seconds
            if self._steps is not None:
                self._metrics["seconds_left"] = (self._steps - event.step) * seconds / len(self._pace)


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the operation ``finetune`` and the command of this name."""
    return PluginSpec(
        name="finetune",
        operations=(
            Operation(
                kind=KIND,
                request_type=FinetuneRequest,
                prepare=prepare,
                handler=handler,
                scope=Scope.MODEL,
                use=Use.EXCLUSIVE,
                unique=True,
            ),
        ),
        commands=(command,),
    )
