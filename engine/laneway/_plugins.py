"""The plugin host: finds plugins, checks what they declare, and keeps the broken ones out.

This module and ``hookspecs.py`` are all of the engine that knows pluggy.  pluggy keeps the register of hooks and
implementations and checks signatures; it does not find entry points here and it does not call observers: it skips an
entry point of a known name silently, the first failing import ends its loading, and the first failing implementation
ends a call.

A plugin is taken whole or not at all.  It is registered, its declaration asked for and checked; whatever goes wrong on
the way, it is unregistered and recorded as broken, with the traceback, and the others go on.

Who comes first keeps a name: the built-ins in their fixed order, then what the program gave, then what is installed,
in alphabetical order.  An installed plugin can so never take a name away from the program that merely runs beside it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, final

import attrs
import pluggy

from laneway import hookspecs
from laneway._declarations import Loader, Operation, PluginSpec, is_async
from laneway._errors import OperationNotFoundError, PluginDeclarationError

if TYPE_CHECKING:
    import click

    from laneway._records import RequestRecord

DEFAULT_PLUGINS = (
    "laneway_plugins.nmt",
    "laneway_plugins.llama",
    "laneway_plugins.completion",
    "laneway_plugins.batch",
    "laneway_plugins.llm_translate",
    "laneway_plugins.finetune",
)
"""Modules of the built-in plugins.  The last part of the path is the plugin's name."""

ENTRY_POINT_GROUP = "laneway"

RESERVED_COMMANDS = frozenset({"bench", "cache", "demo", "plugins", "pull", "run", "translate"})
"""Commands of the ``laneway`` program itself, which no plugin may declare."""

logger = logging.getLogger("laneway.plugins")
trace_logger = logging.getLogger("laneway.plugins.trace")

_OWN_DISTRIBUTION = "laneway"
_GIVEN = "this program"


@final
@attrs.frozen(kw_only=True)
class PluginRecord:
    """What became of one plugin.  Of one that is not ``loaded`` nothing is in use, and what it brings is not listed."""

    name: str
    origin: Literal["built-in", "given", "installed"]
    distribution: str
    """Who brought it; ``this program`` for one that was handed to the engine as an object."""
    version: str
    """The distribution's version; empty if it is not known."""
    state: Literal["loaded", "broken", "disabled"]
    operations: tuple[Operation, ...] = ()
    loaders: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    observes: tuple[str, ...] = ()
    """The names of the hooks through which it looks on."""
    reason: str = ""
    """Why it is not loaded, in one line."""
    traceback: str = ""
    """The whole traceback of a broken one."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its operations, in the order of their declaration."""
        return tuple(operation.kind for operation in self.operations)


@attrs.frozen(kw_only=True)
class _Candidate:
    """A plugin before it is loaded."""

    name: str
    origin: Literal["built-in", "given", "installed"]
    distribution: str
    version: str
    get: Callable[[], object]

    def record(self, state: Literal["loaded", "broken", "disabled"], **more: Any) -> PluginRecord:
        return PluginRecord(
            name=self.name,
            origin=self.origin,
            distribution=self.distribution,
            version=self.version,
            state=state,
            **more,
        )


class _Refused(Exception):  # noqa: N818 - never leaves this module: it becomes a record or a PluginDeclarationError
    """A plugin cannot be taken; the text is the reason."""


@final
class _SpecAlone:
    """A plugin that is nothing but its declaration."""

    def __init__(self, spec: PluginSpec) -> None:
        self._spec = spec

    @hookspecs.hookimpl
    def laneway_plugin(self) -> PluginSpec:
        return self._spec


Observer = Callable[["RequestRecord"], object]


@final
class PluginHost:
    """The plugins of one engine.  Made by :meth:`load`, and not changed afterwards but for the count of failures."""

    def __init__(self, *, trace: bool = False) -> None:
        """An empty host; use :meth:`load`."""
        self._manager = pluggy.PluginManager("laneway")
        self._manager.add_hookspecs(hookspecs)
        self._trace = trace
        self._loaded: dict[str, PluginRecord] = {}  # by _key of the name
        self._plugin_names: dict[int, str] = {}  # id(plugin object) -> name
        self._operations: dict[str, Operation] = {}
        self._loaders: dict[str, Loader] = {}
        self._commands: dict[str, click.Command] = {}
        self._owners: dict[tuple[str, str], PluginRecord] = {}  # by what _parts gives
        self._records: list[PluginRecord] = []
        self._observers: dict[str, tuple[tuple[str, Observer], ...]] = dict.fromkeys(_OBSERVER_HOOKS, ())
        self._failures: dict[tuple[str, str], int] = {}  # (plugin, hook) -> how often

    @classmethod
    def load(
        cls, plugins: Iterable[str | object] | None = None, strict: bool = False, *, announce: bool = True
    ) -> PluginHost:
        """Load the built-in plugins, those that the program gives, and those that are installed.

        Each item of ``plugins`` that is no string is a plugin to load: a :class:`PluginSpec`, or a module or object
        with hook implementations.  The strings, if there are any, are the names of the installed plugins that may
        load; without one, the environment variable ``LANEWAY_PLUGINS`` says so (names, separated by commas; set to
        nothing: none), and where it is not set, all do.  The built-ins need no leave.

        What ``LANEWAY_DISABLE_PLUGINS`` names, built-ins included, is not even imported; ``LANEWAY_TRACE_PLUGINS=1``
        logs every call of a hook to ``laneway.plugins.trace``.  In names, case and the difference of ``-`` and ``_`` do
        not matter.  What the program gives is its own affair: no variable concerns it.

        A broken plugin is left out and recorded; with ``announce`` a warning is logged.  With ``strict`` it raises
        :class:`PluginDeclarationError`, the cause chained.  Imports modules and reads metadata of what is installed:
        blocking, tens of milliseconds.
        """
        allowed, given = _split_plugins(plugins)
        blocked = {_key(name): name for name in _names(os.environ.get("LANEWAY_DISABLE_PLUGINS", ""))}
        trace = truthy(os.environ.get("LANEWAY_TRACE_PLUGINS", ""))
        if trace:
            trace_logger.setLevel(logging.INFO)
        host = cls(trace=trace)

        installed = _installed()
        candidates = [*_built_ins(), *given, *installed]
        found = {_key(candidate.name) for candidate in candidates}
        for key, name in (allowed or {}).items():
            if key not in found:
                known = ", ".join(sorted({candidate.name for candidate in installed})) or "none"
                candidates.append(_missing(name, f"no plugin of this name is installed; installed are: {known}"))
        for key, name in blocked.items():
            if key not in found:
                logger.info("LANEWAY_DISABLE_PLUGINS names %r, and there is no such plugin", name)

        for candidate in candidates:
            key = _key(candidate.name)
            if candidate.origin != "given" and key in blocked:
                host._skip(candidate, "switched off by LANEWAY_DISABLE_PLUGINS")
            elif candidate.origin == "installed" and allowed is not None and key not in allowed:
                host._skip(candidate, "not among the installed plugins that may load")
            else:
                host._consider(candidate, strict=strict)

        host._manager.check_pending()  # a gate: everything unknown was refused above, plugin by plugin
        host._observers = {name: host._observers_of(name) for name in _OBSERVER_HOOKS}
        for record in host._records:
            if announce and record.state == "broken":
                logger.warning(
                    "plugin %r (from %s) is broken and was left out: %s",
                    record.name,
                    record.distribution,
                    record.reason,
                )
                logger.debug("%s", record.traceback)
        return host

    def __repr__(self) -> str:
        states = [record.state for record in self._records]
        return (
            f"<laneway.PluginHost {states.count('loaded')} loaded, {states.count('broken')} broken, "
            f"{states.count('disabled')} disabled>"
        )

    # What there is.

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """Every plugin that was found or named, in the order in which they were loaded."""
        return tuple(self._records)

    @property
    def operations(self) -> Mapping[str, Operation]:
        """All operations by kind, whatever model they are for."""
        return types.MappingProxyType(self._operations)

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """All loaders, in the order in which they are to be asked."""
        return tuple(self._loaders.values())

    @property
    def commands(self) -> Mapping[str, click.Command]:
        """Commands for the ``laneway`` program, by name."""
        return types.MappingProxyType(self._commands)

    def operations_for(self, has_decoder: bool) -> dict[str, Operation]:
        """The operations that a model with or without a decoder is offered, by kind, sorted."""
        return {
            kind: operation
            for kind, operation in sorted(self._operations.items())
            if operation.needs_decoder is has_decoder
        }

    def operation(self, kind: str, has_decoder: bool, model: str) -> Operation:
        """The operation of this kind for a model with or without a decoder.  ``model`` is its name, for the error.

        Raises :class:`OperationNotFoundError`, which lists the kinds that the model does have.
        """
        operation = self._operations.get(kind)
        if operation is None or operation.needs_decoder is not has_decoder:
            raise OperationNotFoundError(kind, model, tuple(self.operations_for(has_decoder)))
        return operation

    # Observers.

    @property
    def observed(self) -> bool:
        """Whether anybody looks on: without observers a record need not be made at all."""
        return any(self._observers.values())

    @property
    def observer_failures(self) -> dict[tuple[str, str], int]:
        """How often which observer has failed: ``{(plugin, hook): times}``."""
        return dict(self._failures)

    def notify_queued(self, record: RequestRecord) -> None:
        """Tell the observers that a request has arrived.  Raises nothing but KeyboardInterrupt, as all of these."""
        self._notify("laneway_request_queued", record)

    def notify_admitted(self, record: RequestRecord) -> None:
        """Tell the observers that a request has got its permit."""
        self._notify("laneway_request_admitted", record)

    def notify_cancelled(self, record: RequestRecord) -> None:
        """Tell the observers that a cancel has reached a live request."""
        self._notify("laneway_request_cancelled", record)

    def notify_ended(self, record: RequestRecord) -> None:
        """Tell the observers that a request has ended and its teardown is over."""
        self._notify("laneway_request_ended", record)

    def _notify(self, hook: str, record: RequestRecord) -> None:
        for plugin, observer in self._observers[hook]:
            if self._trace:
                trace_logger.info("%s of plugin %r is called with %r", hook, plugin, record)
            try:
                result = observer(record)
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError(f"{hook} gave a coroutine; observers are plain functions and are not awaited")
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # Also SystemExit and the like: a plugin that only looks on cannot end the engine.
                self._count_failure(plugin, hook, error)

    def _count_failure(self, plugin: str, hook: str, error: BaseException) -> None:
        times = self._failures.get((plugin, hook), 0) + 1
        self._failures[plugin, hook] = times
        if times == 1:
            logger.error("observer %s of plugin %r failed; later failures are counted", hook, plugin, exc_info=error)
        elif str(times).strip("0") == "1":
            logger.error("observer %s of plugin %r has failed %d times, now with %r", hook, plugin, times, error)

    def _observers_of(self, hook: str) -> tuple[tuple[str, Observer], ...]:
        # pluggy keeps implementations in the reverse of the order in which they are called.
        implementations = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        return tuple((self._plugin_names[id(impl.plugin)], _taking_record(impl.function)) for impl in implementations)

    # Loading.

    def _consider(self, candidate: _Candidate, *, strict: bool) -> None:
        try:
            record = self._take(candidate)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Not only Exception: sys.exit() at import, a test framework's skip, and a panic in an extension module
            # are none, and are no reason for the host to end either.
            known = isinstance(error, _Refused)
            refusal = PluginDeclarationError(
                candidate.name, candidate.distribution, str(error) if known else _one_line(error)
            )
            refusal.__cause__ = error.__cause__ if known else error
            if strict:
                raise refusal from refusal.__cause__
            text = "".join(traceback.format_exception(refusal))
            record = candidate.record("broken", reason=refusal.reason, traceback=text)
        self._records.append(record)

    def _skip(self, candidate: _Candidate, reason: str) -> None:
        self._records.append(candidate.record("disabled", reason=reason))

    def _take(self, candidate: _Candidate) -> PluginRecord:
        """Load, register, ask and check one plugin.  Whatever it raises, nothing of the plugin stays behind."""
        if candidate.origin != "given":
            self._check_name(candidate.name)
        plugin = _load(candidate)
        registered = self._free_name(candidate.name)
        try:
            self._register(plugin, registered)
            spec = self._ask(plugin, candidate)
            record = self._check(spec, plugin, candidate)
        except BaseException:
            if self._manager.get_plugin(registered) is plugin:
                self._manager.unregister(plugin, registered)
            raise
        # From here on nothing can fail.
        self._loaded[_key(record.name)] = record
        self._plugin_names[id(plugin)] = record.name  # the manager keeps the object, and with it the id
        if spec is not None:
            self._operations.update((operation.kind, operation) for operation in spec.operations)
            self._loaders.update((loader.name, loader) for loader in spec.loaders)
            self._commands.update((command.name, command) for command in spec.commands)
        self._owners.update((part, record) for part in _parts(record))
        return record

    def _check_name(self, name: str) -> None:
        earlier = self._loaded.get(_key(name))
        if earlier is not None:
            raise _Refused(f"the name {name!r} is taken by the plugin from {earlier.distribution}")

    def _free_name(self, name: str) -> str:
        """``name``, or with a number behind it: two objects of one class, which declare no name, may look on."""
        number, free = 1, name
        while self._manager.has_plugin(free) or _key(free) in self._loaded:
            number += 1
            free = f"{name}-{number}"
        return free

    def _register(self, plugin: object, name: str) -> None:
        for other_name, other in self._manager.list_name_plugin():
            if other is plugin or other == plugin:
                raise _Refused(f"it is, or equals, the object that is loaded as plugin {other_name!r} already")
        try:
            self._manager.register(plugin, name)
        except pluggy.PluginValidationError as error:
            raise _Refused(" ".join(str(error).split())) from error
        callers = self._manager.get_hookcallers(plugin)
        if not callers:
            raise _Refused(_no_hooks(plugin))
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    _check_implementation(caller, impl)

    def _ask(self, plugin: object, candidate: _Candidate) -> PluginSpec | None:
        implementations = self._manager.hook.laneway_plugin.get_hookimpls()
        functions = [impl.function for impl in implementations if impl.plugin is plugin]
        if len(functions) > 1:
            raise _Refused(f"it implements laneway_plugin {len(functions)} times; a plugin makes one declaration")
        for function in functions:
            if self._trace:
                trace_logger.info("laneway_plugin of plugin %r is called", candidate.name)
            try:
                spec = function()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise _Refused(f"laneway_plugin() raised {_one_line(error)}") from error
            if self._trace:
                trace_logger.info("laneway_plugin of plugin %r gave %r", candidate.name, spec)
            if spec is not None and not isinstance(spec, PluginSpec):
                raise _Refused(f"laneway_plugin() must give a PluginSpec or None, not {spec!r}")
            return spec
        return None

    def _check(self, spec: PluginSpec | None, plugin: object, candidate: _Candidate) -> PluginRecord:
        """The record of a plugin that can be loaded beside those that are."""
        implemented = {caller.name for caller in self._manager.get_hookcallers(plugin) or ()}
        observes = tuple(hook for hook in _OBSERVER_HOOKS if hook in implemented)
        if spec is None:
            name = self._manager.get_name(plugin) or candidate.name
            return attrs.evolve(candidate, name=name).record("loaded", observes=observes)
        if candidate.origin == "given":
            self._check_name(spec.name)
        elif _key(spec.name) != _key(candidate.name):
            raise _Refused(
                f"it declares the name {spec.name!r}, but it is found as {candidate.name!r}; the two must be equal, "
                "because a plugin is switched on and off by its name before it is imported"
            )
        record = attrs.evolve(candidate, name=spec.name).record(
            "loaded",
            operations=spec.operations,
            loaders=tuple(loader.name for loader in spec.loaders),
            commands=tuple(_command_name(command) for command in spec.commands),
            observes=observes,
        )
        for noun, name in _parts(record):
            if noun == "command" and name in RESERVED_COMMANDS:
                raise _Refused(f"the command {name!r} is one of the laneway program's own")
            if noun == "command" and record.commands.count(name) > 1:
                raise _Refused(f"it declares the command {name!r} twice")
            owner = self._owners.get((noun, name))
            if owner is not None:
                raise _Refused(f"the {noun} {name!r} is taken by plugin {owner.name!r} (from {owner.distribution})")
        return record


_OBSERVER_HOOKS = tuple(name for name in hookspecs.__all__ if name.startswith("laneway_request_"))


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def truthy(text: str) -> bool:
    """Whether an environment variable of this text switches something on."""
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own __str__ fails; the type must do
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _parts(record: PluginRecord) -> Iterator[tuple[str, str]]:
    """What a plugin brings that no other may bring too: ``(noun, name)``."""
    yield from (("kind", kind) for kind in record.kinds)
    yield from (("loader", name) for name in record.loaders)
    yield from (("command", name) for name in record.commands)


def _command_name(command: object) -> str:
    import click  # here, because a program that embeds the engine may have no use for commands

    if not isinstance(command, click.Command) or not command.name:
        raise _Refused(f"commands must be click commands with a name, not {command!r}")
    return command.name


def _check_implementation(caller: pluggy.HookCaller, impl: pluggy.HookImpl) -> None:
    hook = caller.name
    if not caller.has_spec():
        if impl.optionalhook:
            return
        close = difflib.get_close_matches(hook, hookspecs.__all__, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise _Refused(f"{hook} is no hook of this release of Laneway{hint}")
    if impl.wrapper or impl.hookwrapper:
        raise _Refused(f"{hook} is marked as a wrapper: hooks of Laneway are not wrapped")
    if is_async(impl.function) or inspect.isasyncgenfunction(impl.function):
        raise _Refused(f"{hook} is an async function: hooks are plain functions and are not awaited")
    # pluggy has refused positional arguments that the hook lacks, unless a default makes them the plugin's own affair.
    # It says nothing of arguments that would never be passed.
    for parameter in inspect.signature(impl.function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _Refused(f"{hook} takes {parameter}: hooks pass their arguments by name, so write them out")
        if parameter.kind is parameter.KEYWORD_ONLY and (
            parameter.name == "record" or parameter.default is parameter.empty
        ):
            raise _Refused(f"{hook} has the keyword-only argument {parameter.name!r}, which is never passed")


def _taking_record(function: Callable[..., object]) -> Observer:
    """``function``, which may have left the argument out, as one that takes a record by position."""
    parameters = list(inspect.signature(function).parameters)
    if parameters[:1] == ["record"]:
        return function
    if "record" in parameters:
        return lambda record: function(record=record)
    return lambda record: function()


def _split_plugins(plugins: Iterable[str | object] | None) -> tuple[dict[str, str] | None, list[_Candidate]]:
    """The names of installed plugins that may load, by key (None: all of them), and the plugins that were given."""
    if isinstance(plugins, (str, PluginSpec, types.ModuleType)) or not isinstance(plugins, Iterable | None):
        raise TypeError(f"plugins must be a sequence of names and plugins, such as [{plugins!r}], not {plugins!r}")
    names: list[str] | None = None
    given = []
    for plugin in plugins or ():
        if not isinstance(plugin, str):
            given.append(_given(plugin))
        elif names is None:
            names = [plugin]
        else:
            names.append(plugin)
    if names is None and "LANEWAY_PLUGINS" in os.environ:
        names = _names(os.environ["LANEWAY_PLUGINS"])
    return (None if names is None else {_key(name): name for name in names}), given


def _built_ins() -> Iterator[_Candidate]:
    from laneway import __version__  # late: the package imports this module

    for path in DEFAULT_PLUGINS:
        yield _Candidate(
            name=path.rpartition(".")[2],
            origin="built-in",
            distribution=_OWN_DISTRIBUTION,
            version=__version__,
            get=functools.partial(importlib.import_module, path),
        )


def _given(plugin: object) -> _Candidate:
    # What it is called until it has been asked, and afterwards if it declares nothing.
    if isinstance(plugin, PluginSpec):
        name = plugin.name
    elif isinstance(plugin, types.ModuleType):
        name = plugin.__name__.rpartition(".")[2]
    else:
        name = type(plugin).__name__
    return _Candidate(name=name, origin="given", distribution=_GIVEN, version="", get=lambda: plugin)


def _missing(name: str, reason: str) -> _Candidate:
    def get() -> object:
        raise _Refused(reason)

    return _Candidate(name=name, origin="installed", distribution="nowhere", version="", get=get)


def _installed() -> list[_Candidate]:
    """Plugins that installed distributions announce, sorted: the order of the file system decides nothing."""
    try:
        found = [_of_entry_point(point, point.dist) for point in _entry_points()]
    except Exception:
        # One unreadable entry_points.txt, of whatever distribution, spoils the list of all.
        found = list(_installed_one_by_one())
    return sorted(found, key=lambda candidate: (candidate.name, candidate.distribution))


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _installed_one_by_one() -> Iterator[_Candidate]:
    seen = set()
    for distribution in importlib.metadata.distributions():
        name, version = _name_and_version(distribution)
        if _key(name) in seen:
            continue  # hidden by one that comes earlier on sys.path
        seen.add(_key(name))
        try:
            points = [point for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP]
        except Exception as error:
            if f"[{ENTRY_POINT_GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
                yield _Candidate(
                    name=name,
                    origin="installed",
                    distribution=name,
                    version=version,
                    get=functools.partial(_raise_unreadable, error),
                )
            continue
        for point in points:
            yield _of_entry_point(point, distribution)


def _raise_unreadable(error: Exception) -> object:
    raise _Refused(f"its entry_points.txt cannot be read: {_one_line(error)}") from error


def _of_entry_point(
    point: importlib.metadata.EntryPoint, distribution: importlib.metadata.Distribution | None
) -> _Candidate:
    name, version = ("an unknown distribution", "") if distribution is None else _name_and_version(distribution)
    return _Candidate(name=point.name, origin="installed", distribution=name, version=version, get=point.load)


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        return distribution.metadata["Name"] or "an unknown distribution", distribution.metadata["Version"] or ""
    except Exception:  # no METADATA, or none that can be read: the plugin may be fine all the same
        return "an unknown distribution", ""


def _load(candidate: _Candidate) -> object:
    """The plugin object of a candidate."""
    try:
        plugin = candidate.get()
    except (KeyboardInterrupt, _Refused):
        raise
    except BaseException as error:
        raise _Refused(f"it cannot be imported: {_one_line(error)}") from error
    if isinstance(plugin, PluginSpec):
        return _SpecAlone(plugin)
    if isinstance(plugin, type):
        raise _Refused(f"it is the class {plugin.__qualname__}: give an instance of it, or a module")
    return plugin


def _no_hooks(plugin: object) -> str:
    unmarked = [name for name in hookspecs.__all__ if name.startswith("laneway_") and hasattr(plugin, name)]
    if unmarked:
        return f"its {unmarked[0]} is not marked: put @laneway.hookimpl above it"
    return f"it implements no hook: {plugin!r} has no function that is marked with @laneway.hookimpl"
