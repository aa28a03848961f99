"""What a plugin says of itself: plain data, checked when it is made.

Hooks return these; the engine does everything that has an effect.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import attrs

if TYPE_CHECKING:
    from laneway._events import Stats, TextDelta
    from laneway._kvcache._caches import CachePlan
    from laneway._kvcache._turns import CacheTurn
    from laneway._model import Model
    from laneway._sources import ModelSource
    from laneway._tokens import SavedState, Tokens
    from laneway.decoder import Decoder, Sampling, Tokenizer


class Scope(enum.Enum):
    """Whom a cancel reaches: rule C1."""

    REQUEST = "request"
    MODEL = "model"
    NONE = "none"


class Use(enum.Enum):
    """How an operation uses the model's lane: beside others, alone, or not at all."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    NONE = "none"


class Overflow(enum.Enum):
    """What a request does that cannot start at once: wait in line, or be refused (rule A7)."""

    QUEUE = "queue"
    REJECT = "reject"


# Validators.  Their messages name the object and the field, because a declaration is often one of many in a module, and
# what they raise is shown as the last line of a traceback in a table.


def _field(instance: object, attribute: attrs.Attribute[Any]) -> str:
    name = getattr(instance, "kind", None) or getattr(instance, "name", None)
    return f"{attribute.name} of {type(instance).__name__} {name!r}" if name else attribute.name


@attrs.frozen
class _InstanceOf:
    wanted: type[Any]
    noun: str

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, self.wanted):
            raise TypeError(f"{_field(instance, attribute)} must be {self.noun}, not {value!r}")


@attrs.frozen
class _Name:
    pattern: str
    noun: str

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        owner = type(instance).__name__
        if not isinstance(value, str):
            raise TypeError(f"{attribute.name} of {owner} must be a string, not {value!r}")
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"{attribute.name} of {owner} must be {self.noun}, not {value!r}")


_WORD = _Name(r"[a-z][a-z0-9_]*", "lower-case letters, digits and underscores, beginning with a letter")
_DASHED_WORD = _Name(r"[a-z][a-z0-9_-]*", "lower-case letters, digits, underscores and dashes, beginning with a letter")
_WORD_OR_NOTHING = _Name(f"({_WORD.pattern})?", f"empty, or {_WORD.noun}")


def is_async(function: object) -> bool:
    """Whether calling ``function`` gives an awaitable: an async function, a partial of one, or an object with one."""
    call = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is wanted
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@attrs.frozen
class _Function:
    """A callable that takes ``parameters`` by position, async or not, as the engine is going to call it."""

    parameters: tuple[str, ...]
    asynchronous: bool

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        where = _field(instance, attribute)
        if not callable(value):
            raise TypeError(f"{where} must be a function, not {value!r}")
        if is_async(value) is not self.asynchronous:
            raise TypeError(f"{where} must be {'an async' if self.asynchronous else 'a plain'} function, not {value!r}")
        try:
            signature = inspect.signature(value)
        except ValueError:
            return  # written in C without a signature: nothing can be said about it
        try:
            signature.bind(*self.parameters)
        except TypeError as error:
            wanted = ", ".join(self.parameters)
            raise TypeError(f"{where} must take ({wanted}), but its signature is {signature}: {error}") from None


def _options_class(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, type) or not attrs.has(value):
        raise TypeError(f"{_field(instance, attribute)} must be an attrs class, not {value!r}")


_Member = TypeVar("_Member", bound=enum.Enum)


def _member(enumeration: type[_Member], value: object) -> _Member:
    try:
        return enumeration(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in enumeration)
        raise ValueError(f"{enumeration.__name__.lower()} must be one of {known}, not {value!r}") from None


def _scope(value: Scope | str) -> Scope:
    return _member(Scope, value)


def _use(value: Use | str) -> Use:
    return _member(Use, value)


def _overflow(value: Overflow | str) -> Overflow:
    return _member(Overflow, value)


def _weight(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"weight must be an integer of at least 1, not {value!r}")


def _keys(value: Iterable[Hashable]) -> tuple[Hashable, ...]:
    # A string is iterable: each of its letters would become a key of its own.
    if isinstance(value, (str, bytes)):
        raise TypeError(f"keys must be a sequence of keys, not the single key {value!r}; write ({value!r},)")
    keys = tuple(value)
    for key in keys:
        hash(key)
    return keys


def _lane_group_needs_a_lane(instance: Operation, attribute: attrs.Attribute[Any], value: str) -> None:
    if value and instance.use is Use.NONE:
        raise ValueError(f"Operation {instance.kind!r} names the lane group {value!r} but uses no lane (use='none')")


def _unique_needs_a_lane(instance: Operation, attribute: attrs.Attribute[Any], value: bool) -> None:
    if value and instance.use is Use.NONE:
        raise ValueError(f"Operation {instance.kind!r} is unique but uses no lane (use='none') that could hold it so")


_Part = TypeVar("_Part")


def _parts(value: Iterable[_Part], field: str) -> tuple[_Part, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{field} of PluginSpec must be a sequence, not {value!r}")
    return tuple(value)


def _operations(value: Iterable[Operation]) -> tuple[Operation, ...]:
    return _parts(value, "operations")


def _loaders(value: Iterable[Loader]) -> tuple[Loader, ...]:
    return _parts(value, "loaders")


def _commands(value: Iterable[Any]) -> tuple[Any, ...]:
    return _parts(value, "commands")


def _each_once(instance: PluginSpec, attribute: attrs.Attribute[Any], value: tuple[Operation | Loader, ...]) -> None:
    """All of the declared class, no two of one name."""
    wanted = Operation if attribute.name == "operations" else Loader
    seen = set()
    for part in value:
        if not isinstance(part, wanted):
            noun = wanted.__name__
            raise TypeError(f"{attribute.name} of PluginSpec {instance.name!r} must be {noun} objects, not {part!r}")
        name = part.kind if isinstance(part, Operation) else part.name
        if name in seen:
            raise ValueError(f"{attribute.name} of PluginSpec {instance.name!r} declares {name!r} twice")
        seen.add(name)


@runtime_checkable
class Gate(Protocol):
    """Something outside this process that a request must hold while it runs, such as the lock of a file (rule K2).

    The engine calls both from its own transitions: they must be quick, and must not raise.  While another process is
    inside, ``enter`` is tried again in worker threads, never twice at a time for one gate.
    """

    def enter(self) -> bool:
        """Take it if it is free, and say whether the request may go on; never waits."""

    def leave(self) -> None:
        """Give it back, if it was taken."""


def _is_gate(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, Gate):
        raise TypeError(f"gate must have the methods enter and leave, which {value!r} has not")


@attrs.frozen(kw_only=True)
class Prepared:
    """What ``prepare`` found out about a valid request, before it arrives.

    ``weight`` is how many slots it would like at once (rule A12), ``keys`` name what it must hold alone, such as cache
    files (rule A13), and ``gate`` is what other processes may hold of that: it is entered when the request is first for
    its keys, and left with its permit.  A request that waits at its gate is like one that waits for a key; an exclusive
    one has none.  ``payload`` is the plugin's own and goes to the handler untouched.
    """

    weight: int = attrs.field(default=1, validator=_weight)
    keys: tuple[Hashable, ...] = attrs.field(default=(), converter=_keys)
    gate: Gate | None = attrs.field(default=None, validator=_is_gate)
    payload: Any = None


class RequestContext(Protocol):
    """What the engine hands to a running request."""

    @property
    def request_id(self) -> str:
        """The request's id."""

    @property
    def model(self) -> Model:
        """The model that it runs on."""

    @property
    def stats(self) -> Stats:
        """Figures over all sequences that this request has opened so far."""

    @property
    def cancel_asked(self) -> bool:
        """Whether the request ends because of a call of ``cancel()`` or ``cancel_all()``.

        False for a caller that leaves, a deadline, an unload and a closing engine: work that can be resumed is kept
        then.
        """

    def put(self, event: object) -> None:
        """Hand an event to the reader without ever waiting: what a ``deliver`` callback wants."""

    async def emit(self, event: object) -> None:
        """Hand an event to the reader.  Waits only for a run that was opened with ``backpressure='pause'``."""

    def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        deliver: Callable[[TextDelta], None] | None = None,
        restore: SavedState | None = None,
        keep_state: bool = False,
    ) -> Tokens:
        """Ask the model's decode loop for an answer to ``prompt`` (tokens).

        ``restore`` saves computing what a kept state has in common with the prompt; ``keep_state`` keeps this one's.
        """

    def claim(self, key: Hashable) -> bool:
        """Try to hold one more key; False if somebody else does.  Never waits (rule A13)."""

    def cache_turn(self, plan: CachePlan, prompt: list[int]) -> CacheTurn:
        """A turn on the cache file that ``plan`` found, for the length of a block (rule K3)."""


@attrs.frozen(kw_only=True)
class Operation:
    """One kind of request that a plugin can run.

    ``prepare(model, request)`` validates and must change nothing; ``handler(ctx, prepared)`` runs under the permit and
    returns the result.
    """

    kind: str = attrs.field(validator=_WORD)
    request_type: type[Any] = attrs.field(validator=_InstanceOf(type, "a class"))
    prepare: Callable[[Model, Any], Awaitable[Prepared]] = attrs.field(
        validator=_Function(("model", "request"), asynchronous=True)
    )
    handler: Callable[[RequestContext, Prepared], Awaitable[Any]] = attrs.field(
        validator=_Function(("ctx", "prepared"), asynchronous=True)
    )
    scope: Scope = attrs.field(default=Scope.REQUEST, converter=_scope)
    use: Use = attrs.field(default=Use.SHARED, converter=_use)
    lane_group: str = attrs.field(default="", validator=[_WORD_OR_NOTHING, _lane_group_needs_a_lane])
    overflow: Overflow = attrs.field(default=Overflow.QUEUE, converter=_overflow)
    unique: bool = attrs.field(default=False, validator=[_InstanceOf(bool, "a bool"), _unique_needs_a_lane])
    needs_decoder: bool = attrs.field(default=True, validator=_InstanceOf(bool, "a bool"))
    """False for operations that work on a backend's ``service``; they are offered to models without a decoder only."""


@attrs.frozen(kw_only=True)
class Backend:
    """A loaded model as its loader hands it over.  The engine calls ``aclose`` once, whatever happened."""

    name: str
    decoder: Decoder | None = None
    tokenizer: Tokenizer | None = None
    service: Any = None
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    context_size: int | None = None
    """Tokens that all slots hold together, as errors tell it; ``window * parallel`` by default."""
    stall_timeout: float | None = None
    """Seconds for which a run may stay paused by its reader (rule S2); None: for ever."""
    prefix_cache: bool = True
    """Whether prompts share what they have in common at their beginning, if the decoder can."""
    aclose: Callable[[], Awaitable[None]] | None = None


@attrs.frozen(kw_only=True)
class Loader:
    """Turns a source into a :class:`Backend`.

    ``accepts(source)`` looks at the name and the file system only briefly; ``options_type`` is an attrs class whose
    fields are the loader's own options (unknown ones are refused before anything is loaded);
    ``load(source, parallel, options)`` does the work.
    """

    name: str = attrs.field(validator=_WORD)
    accepts: Callable[[ModelSource], bool] = attrs.field(validator=_Function(("source",), asynchronous=False))
    load: Callable[[ModelSource, int, Any], Awaitable[Backend]] = attrs.field(
        validator=_Function(("source", "parallel", "options"), asynchronous=True)
    )
    options_type: type[Any] = attrs.field(validator=_options_class)


@attrs.frozen(kw_only=True)
class PluginSpec:
    """Everything that one plugin brings.  ``commands`` are click commands for the ``laneway`` program."""

    name: str = attrs.field(validator=_DASHED_WORD)
    operations: tuple[Operation, ...] = attrs.field(default=(), converter=_operations, validator=_each_once)
    loaders: tuple[Loader, ...] = attrs.field(default=(), converter=_loaders, validator=_each_once)
    commands: tuple[Any, ...] = attrs.field(default=(), converter=_commands)
