"""What a declaration refuses, and that the message names the object, the field and the fault."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from laneway import Loader, Operation, Overflow, PluginSpec, Prepared, Scope, Use
from tests.plugins_host.fake_site import EchoRequest, handler, operation, prepare


@attrs.frozen
class Options:
    size: int = 1


def accepts(source: Any) -> bool:
    return False


async def load(source: Any, parallel: int, options: Options) -> Any:
    raise NotImplementedError


def plain(ctx: Any, prepared: Any) -> None: ...


async def three(ctx: Any, prepared: Any, more: Any) -> None: ...


async def keyword(ctx: Any, *, prepared: Any) -> None: ...


class Handler:
    async def __call__(self, ctx: Any, prepared: Any) -> None: ...

    async def method(self, ctx: Any, prepared: Any) -> None: ...


def loader(**more: Any) -> Loader:
    settings: dict[str, Any] = {"name": "files", "accepts": accepts, "load": load, "options_type": Options, **more}
    return Loader(**settings)


def with_gap(ctx: Any, prepared: Any, extra: Any, more: Any) -> Any: ...


def test_an_operation_has_the_defaults_of_the_contract() -> None:
    made = operation("echo")
    assert (made.scope, made.use, made.lane_group) == (Scope.REQUEST, Use.SHARED, "")
    assert (made.overflow, made.unique, made.needs_decoder) == (Overflow.QUEUE, False, True)
    assert made.request_type is EchoRequest


def test_values_of_enumerations_are_taken_as_text() -> None:
    made = operation("echo", scope="model", use="exclusive", overflow="reject")
    assert (made.scope, made.use, made.overflow) == (Scope.MODEL, Use.EXCLUSIVE, Overflow.REJECT)


@pytest.mark.parametrize(
    "function",
    [handler, Handler(), Handler().method, functools.partial(three, more=1), functools.partial(handler)],
    ids=["function", "object", "method", "partial with the rest", "partial"],
)
def test_async_callables_of_every_sort_are_handlers(function: Callable[..., Any]) -> None:
    assert operation("echo", handler=function).handler is function


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "Echo"}, ValueError, "kind of Operation must be lower-case letters"),
        ({"kind": ""}, ValueError, "kind of Operation must be lower-case letters"),
        ({"kind": "echo\n"}, ValueError, "kind of Operation must be lower-case letters"),
        ({"kind": 7}, TypeError, "kind of Operation must be a string, not 7"),
        ({"request_type": EchoRequest()}, TypeError, "request_type of Operation 'echo' must be a class"),
        ({"prepare": None}, TypeError, "prepare of Operation 'echo' must be a function, not None"),
        ({"handler": plain}, TypeError, "handler of Operation 'echo' must be an async function"),
        ({"handler": Handler}, TypeError, "handler of Operation 'echo' must be an async function"),
        ({"handler": three}, TypeError, r"handler of Operation 'echo' must take \(ctx, prepared\), but .*'more'"),
        ({"handler": keyword}, TypeError, r"handler of Operation 'echo' must take \(ctx, prepared\)"),
        ({"prepare": functools.partial(prepare, 1)}, TypeError, r"prepare of Operation 'echo' must take \(model, requ"),
        ({"scope": "plugin"}, ValueError, "scope must be one of 'request', 'model', 'none', not 'plugin'"),
        ({"use": None}, ValueError, "use must be one of 'shared', 'exclusive', 'none', not None"),
        ({"overflow": "drop"}, ValueError, "overflow must be one of 'queue', 'reject', not 'drop'"),
        ({"lane_group": "Own Lane"}, ValueError, "lane_group of Operation must be empty, or lower-case letters"),
        ({"lane_group": None}, TypeError, "lane_group of Operation must be a string, not None"),
        ({"lane_group": "own", "use": "none"}, ValueError, "Operation 'echo' names the lane group 'own' but uses no"),
        ({"unique": True, "use": "none"}, ValueError, "Operation 'echo' is unique but uses no lane"),
        ({"unique": 1}, TypeError, "unique of Operation 'echo' must be a bool, not 1"),
        ({"needs_decoder": "no"}, TypeError, "needs_decoder of Operation 'echo' must be a bool, not 'no'"),
    ],
)
def test_a_wrong_operation_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    settings = {"kind": "echo", "request_type": EchoRequest, "prepare": prepare, "handler": handler, **change}
    with pytest.raises(error, match=message):
        Operation(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "GGUF"}, "name of Loader must be lower-case letters"),
        ({"accepts": load}, "accepts of Loader 'files' must be a plain function"),
        ({"accepts": plain}, r"accepts of Loader 'files' must take \(source\), but"),
        ({"load": with_gap}, "load of Loader 'files' must be an async function"),
        ({"load": handler}, r"load of Loader 'files' must take \(source, parallel, options\), but"),
        ({"options_type": dict}, "options_type of Loader 'files' must be an attrs class, not <class 'dict'>"),
        ({"options_type": Options()}, r"options_type of Loader 'files' must be an attrs class, not Options\(size=1\)"),
    ],
)
def test_a_wrong_loader_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        loader(**change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "My Plugin"}, "name of PluginSpec must be lower-case letters"),
        ({"name": "x", "operations": operation("echo")}, "operations of PluginSpec must be a sequence, not Operation"),
        ({"name": "x", "commands": "translate"}, "commands of PluginSpec must be a sequence, not 'translate'"),
        ({"name": "x", "operations": [loader()]}, "operations of PluginSpec 'x' must be Operation objects"),
        ({"name": "x", "loaders": [operation("echo")]}, "loaders of PluginSpec 'x' must be Loader objects"),
        ({"name": "x", "operations": [operation("a"), operation("a")]}, "operations of .* 'x' declares 'a' twice"),
        ({"name": "x", "loaders": [loader(), loader()]}, "loaders of PluginSpec 'x' declares 'files' twice"),
    ],
)
def test_a_wrong_spec_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        PluginSpec(**settings)


def test_a_spec_takes_any_iterable_and_keeps_tuples() -> None:
    spec = PluginSpec(name="echo-2", operations=[operation("a"), operation("b")], loaders=iter([loader()]))
    assert [made.kind for made in spec.operations] == ["a", "b"]
    assert isinstance(spec.operations, tuple)
    assert isinstance(spec.loaders, tuple)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": 0}, "weight must be an integer of at least 1, not 0"),
        ({"weight": True}, "weight must be an integer of at least 1, not True"),
        ({"weight": 1.5}, "weight must be an integer of at least 1, not 1.5"),
        ({"keys": "chat-1"}, "keys must be a sequence of keys, not the single key 'chat-1'"),
        ({"keys": [[]]}, "unhashable"),
    ],
)
def test_wrong_answers_of_prepare_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Prepared(**settings)
