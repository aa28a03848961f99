"""Each hook does what its documentation says; a failing observer is somebody's bug and nobody's harm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest

import laneway
from laneway import PluginSpec, RequestRecord
from laneway._plugins import PluginHost
from tests.plugins_host.fake_site import FakeSite, operation

WAITING = RequestRecord(request_id="r1", kind="echo", model="m", state="waiting", queued_at=1.0, ticket=3)
RUNNING = attrs.evolve(WAITING, state="running", started_at=2.0)
CANCELLING = attrs.evolve(RUNNING, state="cancelling", error="cancelled by id")
ENDED = attrs.evolve(CANCELLING, state="cancelled", ended_at=4.0)

pytestmark = pytest.mark.usefixtures("site")


class Diary:
    """Writes down every call of every observer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, RequestRecord]] = []

    @laneway.hookimpl
    def laneway_request_queued(self, record: RequestRecord) -> None:
        self.calls.append(("queued", record))

    @laneway.hookimpl
    def laneway_request_admitted(self, record: RequestRecord) -> None:
        self.calls.append(("admitted", record))

    @laneway.hookimpl
    def laneway_request_cancelled(self, record: RequestRecord) -> None:
        self.calls.append(("cancelled", record))

    @laneway.hookimpl
    def laneway_request_ended(self, record: RequestRecord) -> None:
        self.calls.append(("ended", record))


class Failing:
    """Raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @laneway.hookimpl
    def laneway_request_ended(self, record: RequestRecord) -> None:
        raise self.error


def test_hook_laneway_plugin_declares_what_the_host_then_offers() -> None:
    class Plugin:
        asked = 0

        @laneway.hookimpl
        def laneway_plugin(self) -> PluginSpec:
            self.asked += 1
            return PluginSpec(name="echo", operations=[operation("echo")])

    plugin = Plugin()
    host = PluginHost.load([plugin], strict=True)
    assert plugin.asked == 1
    assert list(host.operations) == ["echo"]
    assert [(record.name, record.kinds) for record in host.records] == [("echo", ("echo",))]


def test_hook_laneway_plugin_may_decline() -> None:
    class Plugin:
        @laneway.hookimpl
        def laneway_plugin(self) -> PluginSpec | None:
            return None

    host = PluginHost.load([Plugin()], strict=True)
    assert not host.operations
    assert [(record.name, record.state) for record in host.records] == [("Plugin", "loaded")]


def test_hook_laneway_request_queued() -> None:
    diary = Diary()
    PluginHost.load([diary], strict=True).notify_queued(WAITING)
    assert diary.calls == [("queued", WAITING)]
    assert WAITING.outcome is None


def test_hook_laneway_request_admitted() -> None:
    diary = Diary()
    PluginHost.load([diary], strict=True).notify_admitted(RUNNING)
    assert diary.calls == [("admitted", RUNNING)]


def test_hook_laneway_request_cancelled() -> None:
    diary = Diary()
    PluginHost.load([diary], strict=True).notify_cancelled(CANCELLING)
    assert diary.calls == [("cancelled", CANCELLING)]
    assert CANCELLING.outcome is None


def test_hook_laneway_request_ended() -> None:
    diary = Diary()
    PluginHost.load([diary], strict=True).notify_ended(ENDED)
    assert diary.calls == [("ended", ENDED)]
    assert ENDED.outcome == "cancelled"


def test_without_observers_nobody_need_make_a_record() -> None:
    assert not PluginHost.load([PluginSpec(name="echo", operations=[operation("echo")])]).observed
    host = PluginHost.load([Diary()])
    assert host.observed
    assert host.records[0].observes == (
        "laneway_request_admitted",
        "laneway_request_cancelled",
        "laneway_request_ended",
        "laneway_request_queued",
    )


def test_a_record_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        WAITING.state = "running"  # type: ignore[misc]


def test_two_objects_that_only_look_on_keep_apart() -> None:
    first, second = Diary(), Diary()
    host = PluginHost.load([first, second], strict=True)
    host.notify_queued(WAITING)
    assert first.calls == second.calls == [("queued", WAITING)]
    assert [record.name for record in host.records] == ["Diary", "Diary-2"]


def _observing(order: list[str], name: str, tryfirst: bool = False, trylast: bool = False) -> object:
    class Observer:
        @laneway.hookimpl
        def laneway_plugin(self) -> PluginSpec:
            return PluginSpec(name=name)

        @laneway.hookimpl(tryfirst=tryfirst, trylast=trylast)
        def laneway_request_queued(self) -> None:
            order.append(name)

    return Observer()


def test_the_last_loaded_observer_is_called_first_unless_it_says_otherwise() -> None:
    order: list[str] = []
    plugins = [
        _observing(order, "a"),
        _observing(order, "b", tryfirst=True),
        _observing(order, "c"),
        _observing(order, "d", trylast=True),
    ]
    PluginHost.load(plugins, strict=True).notify_queued(WAITING)
    assert order == ["b", "c", "a", "d"]


@pytest.mark.parametrize(
    "error", [ValueError("oops"), SystemExit(3), GeneratorExit()], ids=lambda error: type(error).__name__
)
def test_C10_a_failing_observer_stops_neither_the_others_nor_the_engine(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Diary(), Diary()
    host = PluginHost.load([before, Failing(error), after], strict=True)
    host.notify_ended(ENDED)
    assert before.calls == after.calls == [("ended", ENDED)]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "laneway_request_ended of plugin 'Failing' failed" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert host.observer_failures == {("Failing", "laneway_request_ended"): 1}


def test_failures_of_an_observer_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    host = PluginHost.load([Failing(ValueError("oops"))], strict=True)
    for _ in range(250):
        host.notify_ended(ENDED)
    assert host.observer_failures == {("Failing", "laneway_request_ended"): 250}
    assert [(bool(record.exc_info), record.getMessage()) for record in caplog.records] == [
        (True, "observer laneway_request_ended of plugin 'Failing' failed; later failures are counted"),
        (False, "observer laneway_request_ended of plugin 'Failing' has failed 10 times, now with ValueError('oops')"),
        (False, "observer laneway_request_ended of plugin 'Failing' has failed 100 times, now with ValueError('oops')"),
    ]


def test_ctrl_c_in_an_observer_is_not_swallowed() -> None:
    host = PluginHost.load([Failing(KeyboardInterrupt())], strict=True)
    with pytest.raises(KeyboardInterrupt):
        host.notify_ended(ENDED)
    assert host.observer_failures == {}


def test_an_observer_that_gives_a_coroutine_has_failed() -> None:
    async def later() -> None:
        raise AssertionError("nobody awaits this")

    class Sly:
        @laneway.hookimpl
        def laneway_request_queued(self, record: RequestRecord) -> object:
            return later()  # closed by the host: the warning that it was never awaited would fail the test

    host = PluginHost.load([Sly()], strict=True)
    host.notify_queued(WAITING)
    assert host.observer_failures == {("Sly", "laneway_request_queued"): 1}


def _plain(function: Callable[..., Any]) -> object:
    return type("Odd", (), {"laneway_request_queued": laneway.hookimpl(function)})()


@pytest.mark.parametrize(
    "function",
    [
        lambda self: SEEN.append(None),
        lambda self, record: SEEN.append(record),
        lambda self, record=None: SEEN.append(record),
        lambda self, factor=1, record=None: SEEN.append(record if factor == 1 else factor),
    ],
    ids=["leaves it out", "takes it", "with a default", "behind one of its own"],
)
def test_an_observer_is_given_the_record_if_it_names_it(function: Callable[..., Any]) -> None:
    SEEN.clear()
    host = PluginHost.load([_plain(function)], strict=True)
    host.notify_queued(WAITING)
    assert host.observer_failures == {}
    assert [WAITING if seen is None else seen for seen in SEEN] == [WAITING]
    if function.__code__.co_argcount > 1:
        assert SEEN == [WAITING]


SEEN: list[RequestRecord | None] = []


def test_tracing_logs_every_call(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.plugin(
        "watch",
        """
        import laneway

        @laneway.hookimpl
        def laneway_plugin():
            return laneway.PluginSpec(name="watch")

        @laneway.hookimpl
        def laneway_request_queued(record): ...
        """,
    )
    PluginHost.load().notify_queued(WAITING)
    assert caplog.records == []
    monkeypatch.setenv("LANEWAY_TRACE_PLUGINS", "1")
    PluginHost.load().notify_queued(WAITING)
    messages = [record.getMessage() for record in caplog.records if record.name == "laneway.plugins.trace"]
    assert messages[0] == "laneway_plugin of plugin 'watch' is called"
    assert messages[1].startswith("laneway_plugin of plugin 'watch' gave PluginSpec(name='watch'")
    assert messages[2].startswith("laneway_request_queued of plugin 'watch' is called with RequestRecord(")
    assert len(messages) == 3
