"""What a training run is asked for, and what it reports: plain data, one JSON object a line on both pipes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import attrs

from laneway.decoder import InvalidRequestError
from laneway_native._numbers import is_finite

MODULES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Matrices of a layer that can be adapted, by the name that a GGUF file gives them."""

SCHEDULES = ("constant", "linear", "cosine")
BASES = ("auto", "f32", "native")

MOST_RANK = 256
SMALLEST_CONTEXT = 16


def _refuse(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, field)


def _whole(least: int, most: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(_: object, attribute: attrs.Attribute[int], value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _refuse(attribute.name, f"must be a whole number from {least} to {most}, not {value!r}")

    return check


def _number(
    least: float, most: float = math.inf, *, above: bool = False
) -> Callable[[object, attrs.Attribute[float], float], None]:
    def check(_: object, attribute: attrs.Attribute[float], value: float) -> None:
        if not is_finite(value) or value < least or (above and value == least) or value > most:
            floor = f"above {least:g}" if above else f"at least {least:g}"
            ceiling = "" if most == math.inf else f" and at most {most:g}"
            raise _refuse(attribute.name, f"must be a number {floor}{ceiling}, not {value!r}")

    return check


def _one_of(*choices: str) -> Callable[[object, attrs.Attribute[str], str], None]:
    def check(_: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in choices:
            raise _refuse(attribute.name, f"must be one of {', '.join(choices)}, not {value!r}")

    return check


def _to_modules(value: Any) -> tuple[str, ...]:
    if value is None:
        return MODULES
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    wanted = list(value)
    unknown = [name for name in wanted if name not in MODULES]
    if unknown or not wanted:
        what = f"{unknown[0]!r} is no module" if unknown else "names no module"
        raise _refuse("modules", f"{what}; there are {', '.join(MODULES)}")
    # The order of the file, whatever the order of the wish: a resumed run finds its weights where they were.
    return tuple(name for name in MODULES if name in wanted)


@attrs.frozen(kw_only=True)
class Settings:
    """How an adapter is trained.  Raises :class:`laneway.decoder.InvalidRequestError`, which names the field."""

    rank: int = attrs.field(default=16, validator=_whole(1, MOST_RANK))
    alpha: float = attrs.field(default=32.0, validator=_number(0.0, above=True))
    """The adapter's product is scaled by ``alpha / rank``."""
    modules: tuple[str, ...] = attrs.field(default=None, converter=_to_modules)
    """Which matrices of each layer are adapted; None: all of :data:`MODULES`."""
    epochs: int = attrs.field(default=3, validator=_whole(1, 100_000))
    context_length: int = attrs.field(default=512, validator=_whole(SMALLEST_CONTEXT, 1 << 20))
    """Tokens of a sequence, at most: longer ones are refused, never cut.  Bounds the memory, too."""
    batch: int = attrs.field(default=8, validator=_whole(1, 65_536))
    """Sequences that one step of the optimiser learns from."""
    learning_rate: float = attrs.field(default=1e-3, validator=_number(0.0, 1.0, above=True))
    schedule: Literal["constant", "linear", "cosine"] = attrs.field(default="cosine", validator=_one_of(*SCHEDULES))
    """How the learning rate falls after the warm-up: not at all, or to zero in a line or along a cosine."""
    warmup: float = attrs.field(default=0.05, validator=_number(0.0))
    """Steps over which the learning rate rises from zero: below 1 a share of all steps, else their number."""
    weight_decay: float = attrs.field(default=0.01, validator=_number(0.0, 1.0))
    seed: int = attrs.field(default=0, validator=_whole(0, (1 << 63) - 1))
    """Of the adapter's first weights and of the order of the data."""
    threads: int | None = attrs.field(default=None, validator=attrs.validators.optional(_whole(1, 1024)))
    """None: the physical cores that this process may use."""
    base: Literal["auto", "f32", "native"] = attrs.field(default="auto", validator=_one_of(*BASES))
    """The base model's weights while training: a copy in F32, or as the file has them, which ``auto`` is too."""
    checkpoint_every: int = attrs.field(default=50, validator=_whole(1, 1 << 31))
    """Steps from one checkpoint to the next."""

    def warmup_steps(self, steps: int) -> int:
        """How many of ``steps`` are warm-up."""
        return min(steps, round(self.warmup * steps) if self.warmup < 1 else round(self.warmup))

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step number ``step`` (the first is 1) of ``steps``."""
        rising = self.warmup_steps(steps)
        if step <= rising:
            return self.learning_rate * step / rising
        if self.schedule == "constant":
            return self.learning_rate
        # The last step still learns: zero would come one step after it.
        done = (step - 1 - rising) / (steps - rising)
        share = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate * share

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**attrs.asdict(self), "modules": list(self.modules)}


def _path(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not value:
        raise _refuse(attribute.name, f"must be a path, not {value!r}")


@attrs.frozen(kw_only=True)
class Job:
    """What the child process is told on the first line of its standard input."""

    model: str = attrs.field(validator=_path)
    data: str = attrs.field(validator=_path)
    """JSON lines ``{"tokens": [...], "mask": [...]}``: where the mask is 1 the prediction of that token counts."""
    output: str = attrs.field(validator=_path)
    """Where the adapter goes when the run is done."""
    checkpoint: str = attrs.field(validator=_path)
    """A folder; made if it is not there."""
    validation: str | None = attrs.field(default=None, validator=attrs.validators.optional(_path))
    """A file like ``data``."""
    weights: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(str))
    )
    """The digest, in hexadecimal digits, that the model's file must have; None: any."""
    resume: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    settings: Settings = attrs.field(factory=Settings, validator=attrs.validators.instance_of(Settings))

    def to_json(self) -> str:
        """One line, without its end; settings lie flat beside the paths."""
        flat = attrs.asdict(self, recurse=False)
        settings = flat.pop("settings")
        return json.dumps({**flat, **settings.as_dict()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The job of a line.  Raises :class:`laneway.decoder.InvalidRequestError`."""
        try:
            flat = json.loads(text)
        except ValueError as error:
            raise InvalidRequestError(f"the job is not JSON: {error}") from None
        if not isinstance(flat, dict):
            raise InvalidRequestError("the job is not a JSON object")
        names = {field.name for field in attrs.fields(Settings)}
        settings = {name: flat.pop(name) for name in list(flat) if name in names}
        try:
            return cls(settings=Settings(**settings), **flat)
        except TypeError as error:  # a field too many or too few
            raise InvalidRequestError(f"the job is incomplete: {error}") from None


@attrs.frozen(kw_only=True)
class Started:
    """The model is loaded and training begins.  First event of a run that gets so far."""

    steps: int
    start_step: int
    """How many of them were done before: 0, or the checkpoint's."""
    base: str
    """``f32`` or ``native``."""
    parameters: int
    """Numbers in the adapter."""
    memory: int
    """Bytes that the run has set aside beside the mapped model file."""


@attrs.frozen(kw_only=True)
class Step:
    """One step of the optimiser.  ``loss`` is the mean over the batch's tokens that count, before the step."""

    epoch: int
    """From 0 on."""
    step: int
    """From 1 on."""
    loss: float
    learning_rate: float
    tokens: int
    """In the batch, counted or not."""
    seconds: float


@attrs.frozen(kw_only=True)
class Validation:
    """The mean loss over the validation data after a step; ``step`` 0 is the base model's."""

    step: int
    loss: float


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A checkpoint is on disk."""

    step: int


@attrs.frozen(kw_only=True)
class Paused:
    """The run ends because it was told to; its checkpoint is on disk.  Last event."""

    step: int


@attrs.frozen(kw_only=True)
class Done:
    """The adapter is written.  Last event."""

    step: int
    adapter: str


@attrs.frozen(kw_only=True)
class Error:
    """The run ends because something is wrong.  Last event."""

    kind: str
    """``not_finite``, ``memory``, ``data``, ``model``, ``checkpoint``, ``output``, ``job`` or ``internal``."""
    message: str
    step: int


Event = Started | Step | Validation | Checkpoint | Paused | Done | Error

_EVENTS: Mapping[str, type[Event]] = {
    "started": Started,
    "step": Step,
    "validation": Validation,
    "checkpoint": Checkpoint,
    "paused": Paused,
    "done": Done,
    "error": Error,
}
_NAMES = {kind: name for name, kind in _EVENTS.items()}


def event_to_json(event: Event) -> str:
    """One line, without its end."""
    return json.dumps({"event": _NAMES[type(event)], **attrs.asdict(event)})


def event_from_json(line: str | bytes) -> Event:
    """The event of a line.  Raises :class:`ValueError` if it is none; fields that are not known are passed over."""
    found = json.loads(line)
    if not isinstance(found, dict) or found.get("event") not in _EVENTS:
        raise ValueError(f"not an event of a training run: {line!r}")
    kind = _EVENTS[found["event"]]
    try:
        return kind(**{field.name: found[field.name] for field in attrs.fields(kind)})
    except KeyError as error:
        raise ValueError(f"an event without {error}: {line!r}") from None


class TrainingError(Exception):
    """Why a model, its data or a checkpoint cannot be trained with.  ``kind`` as in :class:`Error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
