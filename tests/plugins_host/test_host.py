"""Finding plugins, who comes first, and that a broken one is left out whole."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterable
from typing import Any

import attrs
import click
import pytest

import laneway
from laneway import Loader, OperationNotFoundError, PluginDeclarationError, PluginSpec, RequestRecord, _plugins
from laneway._plugins import PluginHost, PluginRecord
from tests.plugins_host.fake_site import SHOUT, FakeSite, operation

RECORD = RequestRecord(request_id="r1", kind="echo", model="m", state="waiting", queued_at=1.0)


@attrs.frozen
class Options:
    pass


async def load(source: Any, parallel: int, options: Options) -> Any:
    raise NotImplementedError


def loader(name: str) -> Loader:
    return Loader(name=name, accepts=lambda source: False, load=load, options_type=Options)


def named(host: PluginHost, name: str) -> PluginRecord:
    (record,) = [record for record in host.records if record.name == name]
    return record


def states(host: PluginHost) -> dict[str, str]:
    return {record.name: record.state for record in host.records}


# Finding.


def test_an_installed_plugin_is_found_by_its_entry_point(site: FakeSite) -> None:
    site.plugin("shout", SHOUT, version="2.3")
    host = PluginHost.load(strict=True)
    record = named(host, "shout")
    assert (record.origin, record.distribution, record.version) == ("installed", "laneway-shout", "2.3")
    assert (record.state, record.kinds, record.reason, record.traceback) == ("loaded", ("shout",), "", "")
    assert host.operation("shout", True, "m") is host.operations["shout"]
    assert repr(host) == "<laneway.PluginHost 1 loaded, 0 broken, 0 disabled>"


def test_an_entry_point_may_name_a_spec_or_an_object(site: FakeSite) -> None:
    source = """
        import laneway
        from tests.plugins_host.fake_site import operation

        SPEC = laneway.PluginSpec(name="alone", operations=[operation("alone")])

        class Plugin:
            @laneway.hookimpl
            def laneway_plugin(self):
                return laneway.PluginSpec(name="object", operations=[operation("object")])

        plugin = Plugin()
    """
    site.add("two", {"laneway_two": source}, {"alone": "laneway_two:SPEC", "object": "laneway_two:plugin"})
    host = PluginHost.load(strict=True)
    assert sorted(host.operations) == ["alone", "object"]


def test_what_the_program_gives_is_loaded_too(site: FakeSite) -> None:
    module = types.ModuleType("app.whisper")
    exec_source = laneway.hookimpl(lambda: PluginSpec(name="whisper", operations=[operation("whisper")]))
    module.laneway_plugin = exec_source  # type: ignore[attr-defined]
    host = PluginHost.load([PluginSpec(name="echo", operations=[operation("echo")]), module], strict=True)
    assert sorted(host.operations) == ["echo", "whisper"]
    assert [(record.name, record.origin, record.distribution) for record in host.records] == [
        ("echo", "given", "this program"),
        ("whisper", "given", "this program"),
    ]


def test_built_ins_come_first_then_the_programs_own_then_the_installed(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zebra", "ant", "monkey", "cat", "yak"):
        site.plugin(name, SHOUT.replace("shout", name))
    (site.path / "laneway_builtins_shout.py").write_text(
        "import laneway\nSPEC = laneway.PluginSpec(name='laneway_builtins_shout')\n"
        "@laneway.hookimpl\ndef laneway_plugin(): return SPEC\n"
    )
    monkeypatch.setattr(_plugins, "DEFAULT_PLUGINS", ("laneway_builtins_shout",))
    host = PluginHost.load([PluginSpec(name="mine")], strict=True)
    assert [(record.name, record.origin) for record in host.records] == [
        ("laneway_builtins_shout", "built-in"),
        ("mine", "given"),
        *((name, "installed") for name in ("ant", "cat", "monkey", "yak", "zebra")),
    ]
    assert (host.records[0].distribution, host.records[0].version) == ("laneway", laneway.__version__)


def test_the_built_in_plugins_are_all_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANEWAY_PLUGINS", "")
    monkeypatch.delenv("LANEWAY_DISABLE_PLUGINS", raising=False)
    host = PluginHost.load(strict=True)
    names = [path.rpartition(".")[2] for path in _plugins.DEFAULT_PLUGINS]
    assert [record.name for record in host.records if record.origin == "built-in"] == names
    assert {"completion", "batch"} <= set(host.operations)
    assert host.loaders


def test_an_unreadable_file_of_another_distribution_hides_no_plugin(site: FakeSite) -> None:
    site.add("aaa-noise", {}, raw="[console_scripts]\nthis is no entry point\n")
    site.plugin("shout", SHOUT)
    assert states(PluginHost.load(strict=True)) == {"shout": "loaded"}


def test_an_unreadable_file_of_a_plugins_own_distribution_is_reported(site: FakeSite) -> None:
    site.add("laneway-noise", {}, raw="[laneway]\nthis is no entry point\n")
    site.plugin("shout", SHOUT)
    host = PluginHost.load()
    assert states(host) == {"laneway-noise": "broken", "shout": "loaded"}
    assert named(host, "laneway-noise").reason.startswith("its entry_points.txt cannot be read: ")


def test_a_distribution_that_is_hidden_by_another_counts_once(site: FakeSite, tmp_path: Any) -> None:
    older = FakeSite(tmp_path / "older")
    older.path.mkdir()
    older.plugin("shout", SHOUT, version="0.1")
    sys.path.append(str(older.path))
    try:
        site.plugin("shout", SHOUT, version="2.0")
        assert [record.version for record in PluginHost.load().records] == ["2.0"]
        site.add("aaa-noise", {}, raw="[console_scripts]\nthis is no entry point\n")
        assert [record.version for record in PluginHost.load().records] == ["2.0"]
    finally:
        sys.path.remove(str(older.path))


def test_a_distribution_without_metadata_is_no_hindrance(site: FakeSite) -> None:
    site.plugin("shout", SHOUT, metadata=False)
    record = named(PluginHost.load(strict=True), "shout")
    assert record.state == "loaded"
    assert record.version == ""


# Allowing and blocking.


def test_the_variable_allows_installed_plugins_by_name(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ant", "bee-hive"):
        site.plugin(name, SHOUT.replace("shout", name).replace('operation("bee-hive")', 'operation("bee")'))
    monkeypatch.setenv("LANEWAY_PLUGINS", " Bee_Hive ,")
    host = PluginHost.load(strict=True)
    assert states(host) == {"ant": "disabled", "bee-hive": "loaded"}
    assert named(host, "ant").reason == "not among the installed plugins that may load"
    assert "laneway_ant" not in sys.modules
    monkeypatch.setenv("LANEWAY_PLUGINS", "")
    assert states(PluginHost.load(strict=True)) == {"ant": "disabled", "bee-hive": "disabled"}


def test_names_in_code_take_the_place_of_the_variable(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ant", "bee"):
        site.plugin(name, SHOUT.replace("shout", name))
    mine = PluginSpec(name="mine")
    monkeypatch.setenv("LANEWAY_PLUGINS", "bee")
    assert states(PluginHost.load(["ant", mine])) == {"mine": "loaded", "ant": "loaded", "bee": "disabled"}
    assert states(PluginHost.load([mine])) == {"mine": "loaded", "ant": "disabled", "bee": "loaded"}
    monkeypatch.delenv("LANEWAY_PLUGINS")
    assert states(PluginHost.load([mine])) == {"mine": "loaded", "ant": "loaded", "bee": "loaded"}


def test_blocked_plugins_are_not_imported_built_ins_included(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("shout", SHOUT)
    (site.path / "laneway_blocked.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(_plugins, "DEFAULT_PLUGINS", ("laneway_blocked",))
    monkeypatch.setenv("LANEWAY_DISABLE_PLUGINS", "SHOUT, laneway-blocked, mine, nobody")
    host = PluginHost.load([PluginSpec(name="mine")], strict=True)
    assert states(host) == {"laneway_blocked": "disabled", "mine": "loaded", "shout": "disabled"}
    assert named(host, "shout").reason == "switched off by LANEWAY_DISABLE_PLUGINS"
    assert not host.operations
    assert "laneway_shout" not in sys.modules


def test_the_block_list_outweighs_the_allow_list(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("shout", SHOUT)
    monkeypatch.setenv("LANEWAY_PLUGINS", "shout")
    monkeypatch.setenv("LANEWAY_DISABLE_PLUGINS", "shout")
    assert states(PluginHost.load()) == {"shout": "disabled"}


def test_an_allowed_name_that_is_not_installed_is_reported(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("shout", SHOUT)
    monkeypatch.setenv("LANEWAY_PLUGINS", "shuot")
    host = PluginHost.load()
    assert states(host) == {"shout": "disabled", "shuot": "broken"}
    assert named(host, "shuot").reason == "no plugin of this name is installed; installed are: shout"
    with pytest.raises(PluginDeclarationError, match=r"'shuot'.*no plugin of this name"):
        PluginHost.load(strict=True)


@pytest.mark.parametrize("plugins", ["shout", PluginSpec(name="echo"), 7, sys], ids=["text", "spec", "int", "module"])
def test_plugins_must_be_a_sequence(plugins: Any) -> None:
    with pytest.raises(TypeError, match="plugins must be a sequence"):
        PluginHost.load(plugins)


# Whoever comes first.


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (PluginSpec(name="first_one"), "the name 'first_one' is taken by the plugin from this program"),
        (PluginSpec(name="first-one"), "the name 'first-one' is taken by the plugin from this program"),
        (
            PluginSpec(name="later", operations=[operation("fresh"), operation("echo")]),
            "the kind 'echo' is taken by plugin 'first-one' (from this program)",
        ),
        (
            PluginSpec(name="later", operations=[operation("fresh")], loaders=[loader("files")]),
            "the loader 'files' is taken by plugin 'first-one' (from this program)",
        ),
        (
            PluginSpec(name="later", operations=[operation("fresh")], commands=[click.Command("say")]),
            "the command 'say' is taken by plugin 'first-one' (from this program)",
        ),
        (
            PluginSpec(name="later", commands=[click.Command("twice"), click.Command("twice")]),
            "it declares the command 'twice' twice",
        ),
        (
            PluginSpec(name="later", commands=[click.Command("pull")]),
            "the command 'pull' is one of the laneway program",
        ),
        (PluginSpec(name="later", commands=[print]), "commands must be click commands with a name, not <built-in"),
        (PluginSpec(name="later", commands=[click.Command(None)]), "commands must be click commands with a name, not"),
    ],
)
def test_what_is_taken_stays_with_who_came_first(site: FakeSite, later: PluginSpec, reason: str) -> None:
    first = PluginSpec(
        name="first-one", operations=[operation("echo")], loaders=[loader("files")], commands=[click.Command("say")]
    )
    host = PluginHost.load([first, later])
    assert [record.state for record in host.records] == ["loaded", "broken"]
    assert host.records[1].reason.startswith(reason)
    assert dict(host.operations) == {"echo": first.operations[0]}
    assert host.loaders == first.loaders
    assert dict(host.commands) == {"say": first.commands[0]}


def test_one_object_is_loaded_once(site: FakeSite) -> None:
    site.plugin("shout", SHOUT)
    site.add("laneway-again", {}, {"zz-again": "laneway_shout"})
    host = PluginHost.load()
    assert states(host) == {"shout": "loaded", "zz-again": "broken"}
    assert named(host, "zz-again").reason == "it is, or equals, the object that is loaded as plugin 'shout' already"


def test_what_the_program_gives_is_kept_from_the_installed(site: FakeSite) -> None:
    site.plugin("shout", SHOUT)
    mine = PluginSpec(name="shout", operations=[operation("shout")])
    host = PluginHost.load([mine])
    assert [(record.origin, record.state) for record in host.records] == [("given", "loaded"), ("installed", "broken")]
    assert host.operations["shout"] is mine.operations[0]


# Broken ones.

IMPL = "import laneway\nfrom laneway import PluginSpec\n"

BROKEN = {
    "import error": ("import no_such_module_anywhere", "it cannot be imported: ModuleNotFoundError: No module named"),
    "syntax error": ("def (:", "it cannot be imported: SyntaxError"),
    "exit at import": ("raise SystemExit(3)", "it cannot be imported: SystemExit: 3"),
    "odd base exception": (
        "class Panic(BaseException): ...\nraise Panic('the extension gave up')",
        "it cannot be imported: Panic: the extension gave up",
    ),
    "no hook": ("x = 1", "it implements no hook: <module 'laneway_bad' from "),
    "hook not marked": (
        "def laneway_plugin(): ...",
        "its laneway_plugin is not marked: put @laneway.hookimpl above it",
    ),
    "unknown hook": (
        IMPL + "@laneway.hookimpl\ndef laneway_request_endd(record): ...",
        "laneway_request_endd is no hook of this release of Laneway; did you mean laneway_request_ended?",
    ),
    "unknown argument": (
        IMPL + "@laneway.hookimpl\ndef laneway_request_ended(rec): ...",
        "Plugin 'bad' for hook 'laneway_request_ended' hookimpl definition: laneway_request_ended(rec) Argument(s) ",
    ),
    "argument of the declaration": (
        IMPL + "@laneway.hookimpl\ndef laneway_plugin(engine): ...",
        "Plugin 'bad' for hook 'laneway_plugin'",
    ),
    "keyword-only record": (
        IMPL + "@laneway.hookimpl\ndef laneway_request_ended(*, record=None): ...",
        "laneway_request_ended has the keyword-only argument 'record', which is never passed",
    ),
    "required keyword-only argument": (
        IMPL + "@laneway.hookimpl\ndef laneway_request_ended(record, *, log): ...",
        "laneway_request_ended has the keyword-only argument 'log', which is never passed",
    ),
    "star arguments": (
        IMPL + "@laneway.hookimpl\ndef laneway_request_ended(*args): ...",
        "laneway_request_ended takes *args: hooks pass their arguments by name, so write them out",
    ),
    "async observer": (
        IMPL + "@laneway.hookimpl\nasync def laneway_request_ended(record): ...",
        "laneway_request_ended is an async function: hooks are plain functions and are not awaited",
    ),
    "async generator": (
        IMPL + "@laneway.hookimpl\nasync def laneway_request_ended(record): yield",
        "laneway_request_ended is an async function: hooks are plain functions and are not awaited",
    ),
    "async declaration": (
        IMPL + "@laneway.hookimpl\nasync def laneway_plugin(): ...",
        "laneway_plugin is an async function: hooks are plain functions and are not awaited",
    ),
    "wrapper": (
        IMPL + "@laneway.hookimpl(wrapper=True)\ndef laneway_plugin(): return (yield)",
        "laneway_plugin is marked as a wrapper: hooks of Laneway are not wrapped",
    ),
    "declaration raises": (
        IMPL + "@laneway.hookimpl\ndef laneway_plugin(): return 1 / 0",
        "laneway_plugin() raised ZeroDivisionError: division by zero",
    ),
    "declaration exits": (
        IMPL + "import sys\n@laneway.hookimpl\ndef laneway_plugin(): sys.exit('no')",
        "laneway_plugin() raised SystemExit: no",
    ),
    "declaration of another type": (
        IMPL + "@laneway.hookimpl\ndef laneway_plugin(): return [PluginSpec(name='bad')]",
        "laneway_plugin() must give a PluginSpec or None, not [PluginSpec(name='bad'",
    ),
    "wrong declaration": (
        IMPL + "@laneway.hookimpl\ndef laneway_plugin(): return PluginSpec(name='Bad')",
        "laneway_plugin() raised ValueError: name of PluginSpec must be lower-case letters",
    ),
    "another name": (
        IMPL + "@laneway.hookimpl\ndef laneway_plugin(): return PluginSpec(name='good')",
        "it declares the name 'good', but it is found as 'bad'; the two must be equal",
    ),
    "two declarations": (
        IMPL
        + "@laneway.hookimpl\ndef laneway_plugin(): return PluginSpec(name='bad')\n"
        + "@laneway.hookimpl(specname='laneway_plugin')\ndef again(): return PluginSpec(name='bad')",
        "it implements laneway_plugin 2 times; a plugin makes one declaration",
    ),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_C10_a_broken_plugin_is_left_out_and_recorded(
    site: FakeSite, source: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.plugin("bad", source, version="0.9")
    site.plugin("shout", SHOUT)
    host = PluginHost.load()
    assert states(host) == {"bad": "broken", "shout": "loaded"}
    record = named(host, "bad")
    assert record.reason.startswith(reason)
    assert "\n" not in record.reason
    assert (record.distribution, record.version, record.kinds, record.observes) == ("laneway-bad", "0.9", (), ())
    assert record.traceback.rstrip().endswith(f"plugin 'bad' (from laneway-bad): {record.reason}")
    assert [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING] == [
        f"plugin 'bad' (from laneway-bad) is broken and was left out: {record.reason}"
    ]
    host.notify_ended(RECORD)
    assert host.observer_failures == {}
    assert not host.observed


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_strict_raises_what_would_be_recorded(site: FakeSite, source: str, reason: str) -> None:
    site.plugin("bad", source)
    with pytest.raises(PluginDeclarationError) as caught:
        PluginHost.load(strict=True)
    assert (caught.value.plugin, caught.value.distribution) == ("bad", "laneway-bad")
    assert caught.value.reason.startswith(reason)


def test_the_traceback_shows_the_plugins_own_line(site: FakeSite) -> None:
    site.plugin("bad", IMPL + "@laneway.hookimpl\ndef laneway_plugin():\n    return 1 / 0  # the culprit\n")
    text = named(PluginHost.load(), "bad").traceback
    assert text.startswith("Traceback (most recent call last):\n")
    assert "# the culprit" in text
    assert "ZeroDivisionError: division by zero\n\nThe above exception was the direct cause" in text
    with pytest.raises(PluginDeclarationError) as caught:
        PluginHost.load(strict=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_ctrl_c_while_a_plugin_is_imported_is_no_fault_of_the_plugin(site: FakeSite) -> None:
    site.plugin("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginHost.load()


def test_ctrl_c_while_a_plugin_declares_is_no_fault_of_the_plugin(site: FakeSite) -> None:
    site.plugin("slow", IMPL + "@laneway.hookimpl\ndef laneway_plugin(): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginHost.load()


def test_nothing_of_a_broken_plugin_stays_behind(site: FakeSite) -> None:
    class Bad:
        calls = 0

        @laneway.hookimpl
        def laneway_plugin(self) -> PluginSpec:
            parts = [operation("fresh"), operation("taken")]
            return PluginSpec(name="bad", operations=parts, loaders=[loader("files")], commands=[click.Command("say")])

        @laneway.hookimpl
        def laneway_request_queued(self) -> None:
            self.calls += 1

    bad = Bad()
    plugins: Iterable[Any] = [
        PluginSpec(name="first", operations=[operation("taken")]),
        bad,
        # All of this was bad's, for a moment.
        PluginSpec(
            name="bad", operations=[operation("fresh")], loaders=[loader("files")], commands=[click.Command("say")]
        ),
    ]
    host = PluginHost.load(plugins)
    assert [(record.name, record.state) for record in host.records] == [
        ("first", "loaded"),
        ("Bad", "broken"),
        ("bad", "loaded"),
    ]
    host.notify_queued(RECORD)
    assert bad.calls == 0
    assert sorted(host.operations) == ["fresh", "taken"]


def test_a_class_is_not_a_plugin(site: FakeSite) -> None:
    class Plugin:
        @laneway.hookimpl
        def laneway_plugin(self) -> PluginSpec | None: ...

    host = PluginHost.load([Plugin])
    assert host.records[0].reason.startswith("it is the class test_a_class_is_not_a_plugin.<locals>.Plugin: give an in")


def test_an_object_that_breaks_while_it_is_looked_at_is_a_broken_plugin(site: FakeSite) -> None:
    class Trap:
        def __dir__(self) -> list[str]:
            raise SystemExit("no looking")

    host = PluginHost.load([Trap(), PluginSpec(name="echo")])
    assert states(host) == {"Trap": "broken", "echo": "loaded"}
    assert host.records[0].reason == "SystemExit: no looking"


def test_an_error_that_cannot_even_be_shown_is_survived(site: FakeSite) -> None:
    site.plugin("bad", "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute")
    record = named(PluginHost.load(), "bad")
    assert (record.state, record.reason) == ("broken", "it cannot be imported: Mute")


def test_an_optional_hook_of_a_later_release_is_no_fault(site: FakeSite) -> None:
    site.plugin("shout", SHOUT + "\n    @laneway.hookimpl(optionalhook=True)\n    def laneway_weather(sky): ...\n")
    assert states(PluginHost.load(strict=True)) == {"shout": "loaded"}


# Looking up.


def test_a_model_is_offered_what_suits_it(site: FakeSite) -> None:
    spec = PluginSpec(
        name="both",
        operations=[operation("text"), operation("service", use="none", needs_decoder=False), operation("also")],
    )
    host = PluginHost.load([spec], strict=True)
    assert list(host.operations_for(True)) == ["also", "text"]
    assert list(host.operations_for(False)) == ["service"]
    assert host.operation("text", True, "m") is spec.operations[0]
    with pytest.raises(OperationNotFoundError) as caught:
        host.operation("service", True, "m")
    assert (caught.value.kind, caught.value.model, caught.value.known) == ("service", "m", ("also", "text"))
    with pytest.raises(OperationNotFoundError, match="known: service"):
        host.operation("unheard", False, "m")


def test_what_the_host_offers_cannot_be_changed_from_outside(site: FakeSite) -> None:
    host = PluginHost.load([PluginSpec(name="echo", operations=[operation("echo")])])
    with pytest.raises(TypeError):
        host.operations["more"] = operation("more")  # type: ignore[index]
    with pytest.raises(AttributeError):
        host.records = ()  # type: ignore[misc]
