"""The engine: models, requests, and the two nurseries that they live in (rule C8).

::

    open_engine's block ─┬─ services: shielded; decode loops and unloads.  Ends last.
                         └─ requests: the registry's nursery.  A cancelled program cancels it, and its requests tear
                            down on decode loops that still run.

Both nurseries belong to tasks of their own rather than to the block: a shield around the block would keep the caller's
own cancel from its body, and a nursery around it would wrap the body's errors in groups (rule C6).
"""

from __future__ import annotations

import logging
from contextvars import Context
from typing import TYPE_CHECKING, Any, Literal, final

import attrs
import trio

from laneway._admission import check_parallel, check_queue_limit, normalise_cap
from laneway._declarations import Backend, Overflow, Prepared
from laneway._errors import (
    PROGRAM_ENDS,
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotLoadedError,
    holds,
)
from laneway._home import Home
from laneway._kvcache._caches import KVCaches
from laneway._lifecycle import State
from laneway._model import Model
from laneway._plugins import PluginHost
from laneway._registry import Registry
from laneway._run import Run
from laneway._snapshot import EngineSnapshot, LaneSnapshot, ModelSnapshot, RequestSnapshot
from laneway._sources import parse_source
from laneway.validators import is_number, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from laneway._declarations import Loader, Operation
    from laneway._kvcache._retention import CacheRetention
    from laneway._plugins import PluginRecord
    from laneway._request import Request

log = logging.getLogger("laneway.engine")


def open_engine(
    plugins: Iterable[Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict_plugins: bool = False,
    cache_retention: CacheRetention | None = None,
) -> AbstractAsyncContextManager[Engine]:
    """An engine for the length of a block.

    Leaving the block ends what still runs, waits for its teardown and frees every model.

    :param plugins: more plugins than the built-in and the installed ones; see :class:`laneway.PluginSpec`
    :param cache_dir: where models are looked for and KV caches lie; ``LANEWAY_CACHE_DIR``, else the user's cache
        directory by default
    :param strict_plugins: raise :class:`PluginDeclarationError` for a broken plugin instead of going on without it
    :param cache_retention: the bounds of automatic KV caches (rule K6)
    """
    return _OpenEngine(plugins, cache_dir, strict_plugins, cache_retention)


@final
class _OpenEngine:
    def __init__(
        self,
        plugins: Iterable[Any] | None,
        cache_dir: Any,
        strict_plugins: bool,
        cache_retention: CacheRetention | None,
    ) -> None:
        self._plugins = plugins
        self._cache_dir = cache_dir
        self._strict = strict_plugins
        self._caches = KVCaches(cache_dir, cache_retention)
        self._entered = False
        self._fatal: BaseException | None = None

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Engine:
        if self._entered:
            raise RuntimeError("an engine's block can be entered once: call open_engine() again for another engine")
        self._entered = True
        host = PluginHost.load(self._plugins, strict=self._strict)
        registry = Registry(host, self._on_fatal)
        self._services = _Host(self._on_fatal)
        self._requests = _Host(self._on_fatal, on_cancelled=registry.shut)
        registry.start_soon = self._requests.start_soon
        self._engine = Engine(host, registry, self._services, self._cache_dir, self._caches)
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        self._nursery.start_soon(self._services.run)
        self._nursery.start_soon(self._requests.run)
        try:
            # Shielded, for a caller that is cancelled already must not leave them half begun.
            with trio.CancelScope(shield=True):
                await self._services.opened.wait()
                await self._requests.opened.wait()
        except BaseException:
            await self._end()
            raise
        return self._engine

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine._home.check()
        await self._through(self._engine._close)
        await self._end()
        if self._fatal is not None:
            raise self._fatal

    async def _end(self) -> None:
        self._requests.stop.set()
        self._services.stop.set()
        await self._through(self._requests.ended.wait)
        await self._through(self._services.ended.wait)
        # The block's error is kept from the nursery, which would wrap it in a group.
        await self._manager.__aexit__(None, None, None)

    async def _through(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Wait, whatever comes.  As in a nursery, KeyboardInterrupt is kept until nothing is left to wait for."""
        with trio.CancelScope(shield=True):
            while True:
                try:
                    return await wait()
                except KeyboardInterrupt as interrupt:
                    self._on_fatal(interrupt)

    def _on_fatal(self, error: BaseException) -> None:
        """Something came up, in a request or in a service, that is for the whole program: end the block with it."""
        if self._fatal is None:
            self._fatal = error
            self._nursery.cancel_scope.cancel()


@final
class _Host:
    """A nursery that stays open until ``stop``, and which no task of it can break.

    Without ``on_cancelled`` it is shielded from the program's own cancel.
    """

    def __init__(
        self, on_fatal: Callable[[BaseException], None], on_cancelled: Callable[[], None] | None = None
    ) -> None:
        self.opened, self.stop, self.ended = trio.Event(), trio.Event(), trio.Event()
        self._on_fatal = on_fatal
        self._on_cancelled = on_cancelled
        self._nursery: trio.Nursery

    def start_soon(self, task: Callable[..., Awaitable[None]], *args: Any, name: str) -> None:
        """Start a task, which is expected to handle its own errors; what it raises all the same ends the engine."""
        self._nursery.start_soon(self._guard, task, *args, name=name)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        try:
            with trio.CancelScope(shield=self._on_cancelled is None):
                async with trio.open_nursery() as self._nursery:
                    self.opened.set()
                    try:
                        await self.stop.wait()
                    except trio.Cancelled:
                        # Before the nursery closes: a request that comes from now on finds a closed engine.
                        assert self._on_cancelled is not None
                        self._on_cancelled()
                        raise
        except* trio.Cancelled:
            # The block around it sees its own Cancelled; one from here would reach it wrapped in a group.
            pass
        finally:
            self.ended.set()

    @trio.lowlevel.enable_ki_protection
    async def _guard(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        try:
            await task(*args)
        except trio.Cancelled:
            raise
        except BaseException as error:
            self._on_fatal(error)


@final
class Engine:
    """Models and the requests that run on them.  Made by :func:`open_engine` alone.

    An engine, its models and its runs belong to the ``trio.run`` in which it was opened.  Methods that start, end or
    wait for something, and :meth:`snapshot`, raise :class:`RuntimeError` elsewhere, before anything has changed.
    """

    def __init__(
        self, host: PluginHost, registry: Registry, services: _Host, cache_dir: Any, kv_caches: KVCaches
    ) -> None:
        self._host = host
        self._registry = registry
        self._services = services
        self._cache_dir = cache_dir
        self._kv_caches = kv_caches
        self._home = Home()
        self._models: dict[str, Model] = {}
        self._loading: set[str] = set()

    def __repr__(self) -> str:
        state = "closed" if self._registry.closed else f"{len(self._models)} models"
        return f"<laneway.Engine {state}>"

    @property
    def models(self) -> tuple[Model, ...]:
        """The loaded models, oldest first."""
        return tuple(self._models.values())

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """What is known of every plugin, broken ones included."""
        return tuple(self._host.records)

    @property
    def kv_caches(self) -> KVCaches:
        """The conversations on disk: list, delete and prune them."""
        return self._kv_caches

    # Models.

    # KeyboardInterrupt is held off, but for the loader: what it has made must be registered or freed.
    @trio.lowlevel.enable_ki_protection
    async def load_model(
        self,
        source: str | os.PathLike[str],
        parallel: int = 1,
        *,
        name: str | None = None,
        queue_limit: int = 64,
        queue_timeout: float | None = None,
        admission: Literal["requests", "slots"] = "requests",
        **options: Any,
    ) -> Model:
        """Load a model; nothing is downloaded.

        :param source: a path, a name of the catalogue, or a ``pypi:`` source that was pulled before
        :param parallel: how many requests may run at a time, 1 to 256 (rule A2)
        :param name: what errors and snapshots call it; made from the source by default
        :param queue_limit: how many may wait in each of its lanes (rule A4)
        :param queue_timeout: how many seconds one may wait; None: as long as the caller does (rule A5)
        :param admission: ``"slots"`` makes a batch of N take min(N, cap) permits at once (rule A12)
        :param options: the loader's own, such as ``context_size`` and ``threads`` for GGUF files
        :raises ModelLoadError: it cannot be loaded, or the parameters are wrong; nothing has changed
        :raises EngineClosedError: the engine is closing
        """
        self._home.check()
        if self._registry.closed:
            raise EngineClosedError
        text = str(source)
        try:
            check_parallel(parallel)
            _check_queue(queue_limit, queue_timeout)
        except (TypeError, ValueError) as error:
            raise ModelLoadError(text, str(error)) from None
        if admission not in ("requests", "slots"):
            raise ModelLoadError(text, f"admission must be 'requests' or 'slots', not {shown(admission)}")
        parsed = parse_source(source, cache_dir=self._cache_dir)
        loader = self._loader_for(parsed, text)
        checked = _loader_options(loader, options, text)
        name = self._free_name(name, parsed.name, text)
        self._loading.add(name)
        try:
            backend = await _unprotected(loader.load, parsed, parallel, checked)
        finally:
            self._loading.discard(name)
        # No checkpoint from here on: a cancel now is too late, and the model is registered or freed.
        if not isinstance(backend, Backend):
            raise ModelLoadError(text, f"the {loader.name} loader must return a Backend, not {backend!r}")
        try:
            if self._registry.closed:
                raise EngineClosedError
            return self._register(name, backend, parallel, queue_limit, queue_timeout, admission)
        except BaseException:
            with trio.CancelScope(shield=True):
                if backend.aclose is not None:
                    await backend.aclose()
            raise

    def _register(
        self,
        name: str,
        backend: Backend,
        parallel: int,
        queue_limit: int,
        queue_timeout: float | None,
        admission: Literal["requests", "slots"],
    ) -> Model:
        model = Model(
            self,
            name,
            backend,
            parallel=parallel,
            admission=admission,
            queue_limit=queue_limit,
            queue_timeout=queue_timeout,
            on_start=self._registry.granted,
            on_failed=self._registry.model_failed,
        )
        if model.decode_loop is not None:
            # In a context of its own, or a model that a handler has loaded would keep that request in memory.
            Context().run(self._services.start_soon, model.decode_loop.run, name=f"laneway decode loop {name}")
        self._models[name] = model
        log.info("model=%s loaded parallel=%d", name, parallel)
        return model

    def _loader_for(self, source: Any, text: str) -> Loader:
        failed = ""
        for loader in self._host.loaders:
            try:
                if loader.accepts(source):
                    return loader
            except Exception as error:
                # Rule C10: it stands in the way of nobody but those whose models it would have loaded.
                log.exception("loader %r could not look at %s", loader.name, text)
                failed += f"; {loader.name} failed: {error!r}"
        known = ", ".join(loader.name for loader in self._host.loaders) or "none"
        raise ModelLoadError(text, f"no loader takes it; loaders: {known}{failed} (see: laneway plugins)")

    def _free_name(self, wanted: str | None, suggested: str, text: str) -> str:
        taken = self._models.keys() | self._loading
        if wanted is not None:
            if not isinstance(wanted, str) or not wanted:
                raise ModelLoadError(text, f"a model's name is a non-empty str, not {shown(wanted)}")
            if wanted in taken:
                raise ModelLoadError(text, f"the name {wanted!r} is in use; unload that model or choose another name")
            return wanted
        name, number = suggested, 1
        while name in taken:
            number += 1
            name = f"{suggested}-{number}"
        return name

    async def unload_model(self, model: Model) -> None:
        """End the model's requests and free it.  Once begun it runs to its end, also if the caller is cancelled.

        Returns when the model is gone; a second call waits for the same end.

        :raises InvalidRequestError: called from inside the handler of a request on that model
        """
        self._home.check()
        self._own(model)
        self._registry.check_outside(model)
        self._begin_unload(model, "it is unloading")
        await model.gone.wait()

    @trio.lowlevel.enable_ki_protection
    def _begin_unload(self, model: Model, reason: str) -> None:
        if not model.close_door(reason):
            return
        self._registry.cancel_many(self._registry.of_model(model), f"model {model.name!r} was unloaded")
        self._services.start_soon(self._unload, model, name=f"laneway unload {model.name}")

    async def _unload(self, model: Model) -> None:
        try:
            await self._registry.wait_none(model)
            await model.free()
        except BaseException as error:
            log.exception("freeing model %r failed", model.name)
            if holds(error, PROGRAM_ENDS):
                raise
        finally:
            del self._models[model.name]
            model.gone.set()
            log.info("model=%s unloaded", model.name)

    # Requests.

    def run(
        self,
        model: Model,
        kind: str,
        request: Any,
        *,
        request_id: str | None = None,
        overflow: Literal["queue", "reject"] | None = None,
        queue_timeout: float | None = None,
        cap: float | None = None,
        backpressure: Literal["merge", "pause"] = "merge",
    ) -> AbstractAsyncContextManager[Run]:
        """Run an operation for the length of a block (rules R1-R6).

        Entering validates the request, takes its ticket and starts its task; it does not wait for the permit.

        :param kind: the operation, such as ``"completion"``
        :param request: what its plugin takes, such as a :class:`CompletionRequest`
        :param request_id: for :meth:`cancel`; made up by default.  Unique among live requests (rule A9)
        :param overflow: ``"reject"`` refuses at once what cannot start at once (rule A7)
        :param queue_timeout: seconds that it may wait; the model's own by default
        :param cap: the lane's cap, if this request finds it idle (rule A14)
        :param backpressure: ``"pause"`` stops decoding while the reader lags behind (rule S2)
        """
        return _OpenRun(self, model, kind, request, request_id, overflow, queue_timeout, cap, backpressure)

    def operation(self, model: Model, kind: str) -> Operation:
        """What runs ``kind`` on ``model``; its ``request_type`` is what :meth:`run` takes.

        :raises OperationNotFoundError: no plugin declares it for such a model
        """
        self._own(model)
        return self._host.operation(kind, model.has_decoder, model.name)

    async def _admit(self, opening: _OpenRun) -> Request:
        self._home.check()
        model = opening.model
        if self._registry.closed:
            raise EngineClosedError
        self._own(model)
        model.check_open()
        operation = self.operation(model, opening.kind)
        overflow = _check_run(opening)
        if not isinstance(opening.request, operation.request_type):
            wanted, got = operation.request_type.__name__, type(opening.request).__name__
            raise InvalidRequestError(f"a {operation.kind} request is a {wanted}, not {got}", "request")
        prepared = await _unprotected(operation.prepare, model, opening.request)
        if not isinstance(prepared, Prepared):
            raise TypeError(f"the prepare of {operation.kind} requests must return a Prepared, not {prepared!r}")
        return self._registry.admit(
            operation,
            model,
            prepared,
            request_id=opening.request_id,
            overflow=overflow,
            queue_timeout=opening.queue_timeout,
            cap=opening.cap,
            merging=opening.backpressure == "merge",
        )

    def cancel(self, request_id: str, reason: str = "cancelled by id") -> int:
        """Cancel a request by its id and return how many requests end because of this call (rule C3).

        A waiter has left the queue when this returns, a running request leaves at the next step.  A request that is
        cancelling already counts 0 and keeps its first reason.  A request in its teardown counts 0 and keeps its
        outcome.  An id that no live request has is remembered for 30 s, and ends the request that comes with it (rule
        C5).
        """
        self._home.check()
        return self._registry.cancel(request_id, reason)

    def cancel_all(
        self, *, model: Model | None = None, kind: str | None = None, reason: str = "cancelled with others"
    ) -> int:
        """Cancel the live requests on ``model`` and of ``kind``, None meaning any.

        Returns how many requests end because of this call, as :meth:`cancel` does.
        """
        self._home.check()
        return self._registry.cancel_many(
            (
                request
                for request in self._registry
                if (model is None or request.model is model) and (kind is None or request.kind == kind)
            ),
            reason,
            asked=True,
        )

    async def wait_ended(self, request_id: str) -> None:
        """Wait until no live request has this id: its teardown is over and its slot is really free (rule C4).

        :raises InvalidRequestError: called from inside that request's own handler
        """
        self._home.check()
        await self._registry.wait_ended(request_id)

    def snapshot(self) -> EngineSnapshot:
        """Lanes, requests, slots and stalls of this moment."""
        self._home.check()
        return EngineSnapshot(models=tuple(map(self._snapshot_model, self.models)), closed=self._registry.closed)

    def _snapshot_model(self, model: Model) -> ModelSnapshot:
        now = trio.current_time()
        loop = model.decode_loop
        slots: dict[int, int] = {}
        slot_waiters: dict[int, int] = {}
        figures: dict[str, Any] = {}
        if loop is not None:
            held = loop.scheduler.snapshot()
            slot_waiters = dict(held.waiting)
            for number, _index, _state in held.slots.values():
                slots[number] = slots.get(number, 0) + 1
            counts = loop.statistics()
            figures = {
                "sequences": counts.sequences,
                "slot_waiters": counts.slot_waiters,
                "steps": counts.steps,
                "decode_steps": counts.decode_steps,
                "tokens": counts.tokens,
                "step_seconds": counts.step_seconds,
            }
        requests = self._registry.of_model(model)

        def look(request: Request, position: int | None = None) -> RequestSnapshot:
            return RequestSnapshot(
                request_id=request.id,
                kind=request.kind,
                state=request.state.value,
                age=now - request.arrived_at,
                position=position,
                paused_seconds=None if request.paused_at is None else now - request.paused_at,
                slots=slots.get(request.number, 0),
                slot_waiters=slot_waiters.get(request.number, 0),
            )

        by_ticket = {request.ticket.number: request for request in requests if request.ticket is not None}
        lanes = tuple(
            LaneSnapshot(
                group=lane.name,
                cap=lane.cap,
                used=lane.used,
                queue_limit=lane.queue_limit,
                running=tuple(look(by_ticket[ticket.number]) for ticket in lane.running),
                waiting=tuple(look(by_ticket[ticket.number], ticket.position) for ticket in lane.waiting),
            )
            for lane in model.lanes.statistics()
        )
        return ModelSnapshot(
            name=model.name,
            state=model.state,
            parallel=model.parallel,
            lanes=lanes,
            without_lane=tuple(look(request) for request in requests if request.ticket is None),
            stalled=tuple(look(request) for request in requests if request.paused_at is not None),
            **figures,
        )

    # Ends.

    def _own(self, model: Model) -> None:
        if not isinstance(model, Model):
            raise InvalidRequestError(f"a model is what load_model() returned, not {model!r}", "model")
        if model.engine is not self:
            raise ModelNotLoadedError(model.name, "it belongs to another engine")

    async def _close(self) -> None:
        self._registry.close()
        for model in self.models:
            self._begin_unload(model, "the engine is closing")
        await self._registry.wait_none()
        for model in self.models:
            await model.gone.wait()


@final
class _OpenRun:
    """The block of a run: entering lets the request arrive, leaving sees to its end (rule R3)."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        kind: str,
        request: Any,
        request_id: str | None,
        overflow: str | None,
        queue_timeout: float | None,
        cap: float | None,
        backpressure: str,
    ) -> None:
        self.engine = engine
        self.model = model
        self.kind = kind
        self.request = request
        self.request_id = request_id
        self.overflow = overflow
        self.queue_timeout = queue_timeout
        self.cap = cap
        self.backpressure = backpressure
        self._entered = False

    # KeyboardInterrupt is held off, but for the plugin's prepare: a request that has arrived must reach its block.
    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Run:
        if self._entered:
            raise RuntimeError("a run can be entered once: call engine.run() again for another request")
        self._entered = True
        self._live = await self.engine._admit(self)
        self._run = Run(self._live, self.engine._registry.run_dropped)
        return self._run

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failure = self._run.unseen_error()
        if not self._live.ended.is_set():
            self.engine._home.check()
            must_wait = self.engine._registry.leave(self._live)
            self._live.discard()
            if must_wait:
                await _outlast(self._live.ended)
            if self._live.state is State.FAILED:
                failure = self._run.unseen_error()  # its handler had failed before, and was in its teardown
        self._live.attached = False
        if failure is None:
            return
        if error is None:
            try:
                # Rule C6: the caller's own cancel goes before ours.
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled as cancelled:
                self._log_beside(cancelled, failure)
                raise
            raise failure
        if error is not failure:
            self._log_beside(error, failure)

    def _log_beside(self, error: BaseException, failure: BaseException) -> None:
        log.error("request %r failed as well, beside %r: %s", self._live.id, error, failure)


@trio.lowlevel.disable_ki_protection
async def _unprotected(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    return await function(*args)


async def _outlast(event: trio.Event) -> None:
    """Wait for ``event`` whatever comes, and only then let a KeyboardInterrupt through."""
    interrupt: KeyboardInterrupt | None = None
    with trio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except KeyboardInterrupt as caught:
                interrupt = caught
    if interrupt is not None:
        raise interrupt


def _check_queue(queue_limit: Any, queue_timeout: Any) -> None:
    check_queue_limit(queue_limit)
    _check_seconds(queue_timeout, "queue_timeout")


def _check_seconds(value: Any, what: str) -> None:
    if value is None:
        return
    if not is_number(value) or value < 0:
        raise ValueError(f"{what} must be seconds of at least 0, or None, not {shown(value)}")


def _check_run(opening: _OpenRun) -> Overflow | None:
    try:
        _check_seconds(opening.queue_timeout, "queue_timeout")
        if opening.cap is not None:
            normalise_cap(opening.cap)
        if opening.backpressure not in ("merge", "pause"):
            raise ValueError(f"backpressure must be 'merge' or 'pause', not {shown(opening.backpressure)}")
        if opening.request_id is not None and (not isinstance(opening.request_id, str) or not opening.request_id):
            raise ValueError(f"request_id must be a non-empty str, or None, not {shown(opening.request_id)}")
        return None if opening.overflow is None else Overflow(opening.overflow)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(str(error)) from None


def _loader_options(loader: Loader, options: dict[str, Any], text: str) -> Any:
    known = [field.alias for field in attrs.fields(loader.options_type) if field.init]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ModelLoadError(
            text, f"the {loader.name} loader has no option {', '.join(unknown)}; it has: {', '.join(sorted(known))}"
        )
    try:
        return loader.options_type(**options)
    except (TypeError, ValueError, InvalidRequestError) as error:
        raise ModelLoadError(text, f"a wrong option: {error}") from error
