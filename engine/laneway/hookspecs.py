"""The hooks that a plugin can implement.

A plugin is a module (or an object) with functions that carry the names below, each marked with
:data:`laneway.hookimpl`.  A distribution announces it by an entry point in the group ``laneway``; the entry point's
name is the plugin's.  Hooks declare and look on; whatever has an effect, the engine does.

A complete plugin::

    # laneway_shout.py; in its pyproject.toml:
    #     [project.entry-points.laneway]
    #     shout = "laneway_shout"
    import attrs
    import laneway

    @attrs.frozen
    class ShoutRequest:
        text: str

    async def prepare(model: laneway.Model, request: ShoutRequest) -> laneway.Prepared:
        if not request.text:
            raise laneway.InvalidRequestError("there is nothing to shout", "text")
        return laneway.Prepared(payload=request.text)

    async def handler(ctx: laneway.RequestContext, prepared: laneway.Prepared) -> str:
        return prepared.payload.upper()

    @laneway.hookimpl
    def laneway_plugin() -> laneway.PluginSpec:
        shout = laneway.Operation(kind="shout", request_type=ShoutRequest, prepare=prepare, handler=handler)
        return laneway.PluginSpec(name="shout", operations=[shout])

    @laneway.hookimpl
    def laneway_request_ended(record: laneway.RequestRecord) -> None:
        print(record.request_id, record.outcome)

An implementation may leave out arguments that it does not need.  New hooks and new arguments may come with any minor
release; an implementation of a hook that older releases lack is marked ``@laneway.hookimpl(optionalhook=True)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from laneway._declarations import PluginSpec
    from laneway._records import RequestRecord

__all__ = [
    "hookimpl",
    "laneway_plugin",
    "laneway_request_admitted",
    "laneway_request_cancelled",
    "laneway_request_ended",
    "laneway_request_queued",
]

_hookspec = pluggy.HookspecMarker("laneway")

hookimpl = pluggy.HookimplMarker("laneway")
"""Marks a function as the implementation of the hook of the same name."""


@_hookspec
def laneway_plugin() -> PluginSpec | None:
    """Say what this plugin brings: operations, loaders, commands.

    Called once for each engine, when it opens, and by the ``laneway`` command; it should be quick and change nothing.
    The engine checks the answer; a plugin whose answer is wrong, or that raises, is left out whole, and
    ``laneway plugins -v`` shows why.

    Example::

        @laneway.hookimpl
        def laneway_plugin() -> laneway.PluginSpec | None:
            if sys.platform == "win32":
                return None
            return laneway.PluginSpec(name="shout", operations=[SHOUT])

    :returns: the declaration, its ``name`` equal to that of the entry point; None to bring nothing here.

    .. versionadded:: 0.1
    """


@_hookspec
def laneway_request_queued(record: RequestRecord) -> None:
    """A request has arrived and has its ticket.  It may start at once: ``laneway_request_admitted`` then follows.

    Observers are plain functions, called one by one where the engine changes the state of the request: they must be
    quick and never block.  One that raises is reported in the log with its plugin's name; nothing else comes of it.

    Example::

        @laneway.hookimpl
        def laneway_request_queued(record: laneway.RequestRecord) -> None:
            logger.info("%s %s arrived as number %s", record.kind, record.request_id, record.ticket)

    :param record: the request; ``state`` is ``waiting``.

    .. versionadded:: 0.1
    """


@_hookspec
def laneway_request_admitted(record: RequestRecord) -> None:
    """A request has got its permit and its handler is about to run.

    Example::

        @laneway.hookimpl
        def laneway_request_admitted(record: laneway.RequestRecord) -> None:
            WAITED.observe(record.started_at - record.queued_at)

    :param record: the request; ``state`` is ``running`` and ``started_at`` is set.

    .. versionadded:: 0.1
    """


@_hookspec
def laneway_request_cancelled(record: RequestRecord) -> None:
    """A cancel has reached a live request; its teardown is still to come, and so is ``laneway_request_ended``.

    The request may yet end as ``completed`` or ``failed``, where the cancel came too late.

    Example::

        @laneway.hookimpl
        def laneway_request_cancelled(record: laneway.RequestRecord) -> None:
            logger.info("%s was cancelled: %s", record.request_id, record.error)

    :param record: the request; ``state`` is ``cancelling`` and ``error`` says who asked.

    .. versionadded:: 0.1
    """


@_hookspec
def laneway_request_ended(record: RequestRecord) -> None:
    """A request has ended: its teardown is over, its permit is free again, its id too.

    Called exactly once for each request.  For one that was refused on arrival it is the only call.

    Example::

        @laneway.hookimpl
        def laneway_request_ended(record: laneway.RequestRecord) -> None:
            ENDED.labels(kind=record.kind, outcome=record.outcome).inc()

    :param record: the request; ``outcome`` and ``ended_at`` are set, ``error`` too unless it completed.

    .. versionadded:: 0.1
    """
