"""check_plugin: good plugins pass, and each of the bad ones is told which promise it breaks."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import laneway
from laneway import Operation, PluginSpec, Prepared, RequestContext, Scope, Use
from laneway.testing import BrokenPromise, CheckedOperation, Promise, ScriptedTokenizer, check_plugin
from laneway.testing import _check_plugin as check_plugin_module
from laneway_plugins import batch, completion, llm_translate, nmt
from tests.plugins import nmt_models

ROOT = Path(__file__).parents[2]
GREEDY = laneway.Sampling(temperature=0.0)

Handler = Callable[[RequestContext, Prepared], Awaitable[Any]]


@attrs.frozen
class Ask:
    """A request of the plugins below."""

    text: str = "Tell me"


async def prepare(model: laneway.Model, request: Ask) -> Prepared:
    prompt = await model.tokenize(request.text)
    model.check_prompt(prompt)
    return Prepared(payload=prompt)


async def handler(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
    async with ctx.generate(prepared.payload, GREEDY, max_tokens=4, deliver=ctx.put) as tokens:
        return await tokens.finish()


def operation(kind: str = "ask", **declared: Any) -> Operation:
    return Operation(**{"kind": kind, "request_type": Ask, "prepare": prepare, "handler": handler, **declared})


def plugin(*more: Operation, **declared: Any) -> PluginSpec:
    return PluginSpec(name="asker", operations=[operation(**declared), *more])


def check(spec: Any, **how: Any) -> CheckedOperation:
    """Check the first operation, and the others."""
    kinds = [each.kind for each in spec.operations] if isinstance(spec, PluginSpec) else ["ask"]
    return check_plugin(spec, **{"requests": dict.fromkeys(kinds, Ask()), **how})[0]


# Good ones


def test_completion() -> None:
    request = completion.CompletionRequest("Tell me", max_tokens=6, temperature=0.0)
    too_long = completion.CompletionRequest("x" * 2000)
    (checked,) = check_plugin(completion, requests={"completion": request}, wrong={"completion": [too_long]})
    assert (checked.kind, checked.failed_steps) == ("completion", checked.steps)
    assert checked.checkpoints >= 2
    assert checked.steps > 2
    assert checked.cancels >= checked.checkpoints + checked.steps


def test_batch() -> None:
    request = batch.BatchRequest(["One", "Two", batch.BatchItem("x" * 2000, id="too long")], max_tokens=4)
    (checked,) = check_plugin(batch, requests={"batch": request})
    assert checked.checkpoints >= 3
    assert checked.steps > 2


def test_translate() -> None:
    request = llm_translate.TranslateRequest(["One.", "Two."], source="en", target="de", max_tokens=4)
    (checked,) = check_plugin(llm_translate, requests={"translate": request})
    assert checked.steps > 2


def test_nmt_and_its_threads(tmp_path: Path) -> None:
    nmt_models.need_nmt()
    path = nmt_models.make_model(tmp_path / "words")

    async def load(engine: laneway.Engine) -> laneway.Model:
        return await engine.load_model(path, threads=1)

    (checked,) = check_plugin(nmt, requests={"nmt": nmt.NmtRequest(["Hello. You.", "World"])}, load=load)
    assert checked.checkpoints > 2


def test_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "plugins" / "template" / "src")
    summarise = importlib.import_module("laneway_summarise")
    tokenizer = ScriptedTokenizer()

    def answer(prompt: tuple[int, ...]) -> str:
        return "A long voyage." if "At sea." in tokenizer.text(prompt) else "At sea."

    story = "".join(f"On day {day} the ship sailed on. Nobody saw land.\n\n" for day in range(1, 9))
    (checked,) = check_plugin(
        summarise,
        requests={"summarise": summarise.SummariseRequest(story, max_tokens=16)},
        wrong={"summarise": [summarise.SummariseRequest(story * 20, max_tokens=16)]},
        load={"context_size": 640, "script": answer},
        most=20,
    )
    assert checked.steps > 20
    assert checked.failed_steps == 20


async def test_it_may_be_called_in_a_run() -> None:
    assert check(plugin()).steps > 0
    await trio.lowlevel.checkpoint()


def test_each_checkpoint_is_met_by_a_cancel() -> None:
    met: list[int] = []

    async def five(ctx: RequestContext, prepared: Prepared) -> None:
        for number in range(1, 6):
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                met.append(number)
                raise

    checked = check(plugin(handler=five))
    assert (checked.checkpoints, checked.steps, checked.failed_steps) == (5, 0, 0)
    # Once each on its own, and the middle one once more beside another request.
    assert met == [1, 2, 3, 4, 5, 3]


def test_each_step_is_met_by_a_cancel_and_by_a_failure() -> None:
    tokens_at_a_cancel: list[int] = []
    failures: list[laneway.DecodeError] = []

    async def child(ctx: RequestContext, prepared: Prepared) -> None:
        async with ctx.generate(prepared.payload, GREEDY, max_tokens=4) as tokens:
            try:
                await tokens.finish()
            except trio.Cancelled:
                tokens_at_a_cancel.append(len(tokens.tokens))
                raise
            except laneway.DecodeError as error:
                failures.append(error)

    async def parent(ctx: RequestContext, prepared: Prepared) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child, ctx, prepared)

    # Three steps for the prompt of 33 tokens, the last of which gives a token, and three for the others.
    checked = check(plugin(handler=parent), requests={"ask": Ask("x" * 32)})
    assert (checked.steps, checked.failed_steps, len(failures)) == (6, 6, 6)
    # Beside those at the parent's own checkpoints.
    assert Counter(tokens_at_a_cancel) >= Counter([0, 0, 0, 1, 2, 3])


def test_more_checkpoints_than_wanted_are_spread_out() -> None:
    met: set[int] = set()

    async def many(ctx: RequestContext, prepared: Prepared) -> None:
        for number in range(1, 101):
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                met.add(number)
                raise

    checked = check(plugin(handler=many), most=4)
    assert checked.checkpoints == 100
    assert met == {1, 34, 67, 100, 50}


def test_a_handler_without_a_checkpoint() -> None:
    async def shout(ctx: RequestContext, prepared: Prepared) -> str:
        return "TELL ME"

    checked = check(plugin(handler=shout))
    assert (checked.checkpoints, checked.steps) == (0, 0)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("use", [Use.SHARED, Use.EXCLUSIVE])
def test_every_scope_and_use(scope: Scope, use: Use) -> None:
    checked = check(plugin(scope=scope, use=use))
    assert checked.cancels >= checked.checkpoints > 0
    assert checked.failed_steps == checked.steps > 0


def test_other_declarations() -> None:
    assert check(plugin(use=Use.EXCLUSIVE, scope=Scope.MODEL, unique=True)).steps > 0
    assert check(plugin(lane_group="others", overflow="reject")).steps > 0
    assert check(plugin(), load={"parallel": 1}).steps > 0

    async def with_a_key(model: laneway.Model, request: Ask) -> Prepared:
        return attrs.evolve(await prepare(model, request), keys=("file",))

    assert check(plugin(prepare=with_a_key)).steps > 0


def test_two_operations() -> None:
    first, second = check_plugin(
        plugin(operation("tell", use="exclusive")), requests={"ask": Ask(), "tell": lambda: Ask("x")}
    )
    assert (first.kind, second.kind) == ("ask", "tell")
    assert first.steps > 0
    assert second.steps > 0


def test_an_operation_on_a_service() -> None:
    async def load_service(source: laneway.ModelSource, parallel: int, options: Any) -> laneway.Backend:
        return laneway.Backend(name="service", service=str.upper)

    @attrs.frozen
    class NoOptions:
        pass

    loader = laneway.Loader(
        name="service",
        accepts=lambda source: source.text == "service:upper",
        load=load_service,
        options_type=NoOptions,
    )

    async def prepare_text(model: laneway.Model, request: Ask) -> Prepared:
        return Prepared(payload=request.text)

    async def shout(ctx: RequestContext, prepared: Prepared) -> str:
        await trio.sleep(1)
        text: str = ctx.model.service(prepared.payload)
        return text

    async def load(engine: laneway.Engine) -> laneway.Model:
        return await engine.load_model("service:upper")

    spec = PluginSpec(
        name="shouter",
        operations=[operation("shout", prepare=prepare_text, handler=shout, use="none", needs_decoder=False)],
        loaders=[loader],
    )
    (checked,) = check_plugin(spec, requests={"shout": Ask()}, load=load)
    assert (checked.checkpoints, checked.steps) == (1, 0)
    with pytest.raises(ValueError, match="'shout' works on a service"):
        check_plugin(spec, requests={"shout": Ask()})


def test_cancels_of_its_own_are_its_own_affair() -> None:
    async def impatient(ctx: RequestContext, prepared: Prepared) -> str:
        with trio.move_on_after(0.25):
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep(0.25)
            nursery.cancel_scope.cancel()
        return (await handler(ctx, prepared)).text

    assert check(plugin(handler=impatient)).steps > 0


def test_an_error_of_its_own_may_stand_for_a_failed_step() -> None:
    class AskError(Exception):
        pass

    async def translating(ctx: RequestContext, prepared: Prepared) -> str:
        try:
            return (await handler(ctx, prepared)).text
        except laneway.DecodeError as error:
            raise AskError("no answer") from error

    async def trying_again(ctx: RequestContext, prepared: Prepared) -> str:
        for _ in range(2):
            try:
                async with ctx.generate(prepared.payload, GREEDY, max_tokens=4) as tokens:
                    return (await tokens.finish()).text
            except laneway.DecodeError:
                continue
        return ""

    for each in (translating, trying_again):
        checked = check(plugin(handler=each))
        assert checked.failed_steps == checked.steps > 0


def test_installed_plugins_and_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANEWAY_PLUGINS", "there_is_no_such_plugin")
    monkeypatch.delenv("LANEWAY_DISABLE_PLUGINS", raising=False)
    check(plugin())
    assert os.environ["LANEWAY_PLUGINS"] == "there_is_no_such_plugin"
    assert "LANEWAY_DISABLE_PLUGINS" not in os.environ


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="has the operations ask; give a request for each of them, not for tell"):
        check_plugin(plugin(), requests={"tell": Ask()})
    with pytest.raises(ValueError, match="not for ask, tell"):
        check_plugin(plugin(), requests={"ask": Ask()}, wrong={"tell": []})
    with pytest.raises(TypeError, match="the request for 'ask' must be a Ask, or make one, not 7"):
        check_plugin(plugin(), requests={"ask": 7})
    with pytest.raises(ValueError, match="most must be at least 2"):
        check_plugin(plugin(), requests={"ask": Ask()}, most=1)


def test_the_reference_has_its_signature_and_every_promise() -> None:
    page = (ROOT / "docs" / "reference" / "testing.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(def check_plugin\(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (function,) = ast.parse(f"{shown.rstrip()}: ...").body
    assert isinstance(function, ast.FunctionDef)
    real = inspect.signature(check_plugin)
    arguments = [*function.args.args, *function.args.kwonlyargs]
    assert [each.arg for each in arguments] == list(real.parameters)
    annotations = [each.annotation and ast.unparse(each.annotation) for each in arguments]
    assert annotations == [each.annotation for each in real.parameters.values()]
    defaults = [each and ast.literal_eval(each) for each in function.args.kw_defaults]
    assert defaults == [None, *(each.default for each in list(real.parameters.values())[2:])]
    assert re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", page, re.MULTILINE) == [(p.name, p.value) for p in Promise]


# Bad ones.  Each is a function that makes a plugin, and knows the promise that it breaks.

BAD: list[Any] = []


def breaks(promise: Promise, pattern: str, **how: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        BAD.append(pytest.param(make, promise, pattern, how, id=make.__name__))
        return make

    return register


def bad_handler(promise: Promise, pattern: str, **declared: Any) -> Callable[[Handler], Handler]:
    """The same, for a handler that is all that is wrong."""

    def register(bad: Handler) -> Handler:
        BAD.append(pytest.param(lambda: plugin(handler=bad, **declared), promise, pattern, {}, id=bad.__name__))
        return bad

    return register


@breaks(Promise.LOADS, "the kind 'completion' is taken by plugin 'completion'")
def takes_a_kind_of_another() -> PluginSpec:
    return plugin(kind="completion")


@breaks(Promise.LOADS, "laneway_plugin\\(\\) raised ZeroDivisionError")
def cannot_declare() -> object:
    class Plugin:
        @laneway.hookimpl
        def laneway_plugin(self) -> PluginSpec:
            raise ZeroDivisionError

    return Plugin()


@breaks(Promise.LOADS, "declares nothing")
def declares_nothing() -> object:
    class Plugin:
        @laneway.hookimpl
        def laneway_plugin(self) -> None:
            return None

    return Plugin()


@breaks(Promise.PREPARES, "it returned \\[")
def prepares_something_else() -> PluginSpec:
    async def prepare_list(model: laneway.Model, request: Ask) -> Any:
        return await model.tokenize(request.text)

    return plugin(prepare=prepare_list)


@breaks(Promise.PREPARES, "it raised InvalidRequestError")
def refuses_all() -> PluginSpec:
    async def refuse(model: laneway.Model, request: Ask) -> Prepared:
        raise laneway.InvalidRequestError("no")

    return plugin(prepare=refuse)


@breaks(Promise.PREPARES, "it does not come to an end")
def prepares_for_ever() -> PluginSpec:
    async def wait(model: laneway.Model, request: Ask) -> Prepared:
        await trio.sleep_forever()
        raise AssertionError

    return plugin(prepare=wait)


@attrs.define
class Mutable:
    text: str = "Tell me"


@breaks(
    Promise.PREPARES,
    "the request was Mutable\\(text='Tell me'\\) before, and is .*TELL ME",
    requests={"ask": Mutable()},
)
def changes_the_request() -> PluginSpec:
    async def shout(model: laneway.Model, request: Mutable) -> Prepared:
        request.text = request.text.upper()
        return Prepared(payload=await model.tokenize(request.text))

    return plugin(request_type=Mutable, prepare=shout)


@breaks(Promise.PREPARES, "there were 0 permits, .* tasks before, and there are 0 permits, .* tasks now")
def starts_a_task_before_it_arrives() -> PluginSpec:
    async def start(model: laneway.Model, request: Ask) -> Prepared:
        trio.lowlevel.spawn_system_task(trio.sleep_forever)
        return await prepare(model, request)

    return plugin(prepare=start)


@breaks(Promise.REFUSES, "it let _Stranger\\(\\) in")
def takes_everything() -> PluginSpec:
    async def take(model: laneway.Model, request: object) -> Prepared:
        return Prepared(payload=await model.tokenize(str(request)))

    return plugin(request_type=object, prepare=take)


@breaks(Promise.REFUSES, "given Ask\\(text='wrong'\\), it raised ValueError", wrong={"ask": [Ask("wrong")]})
def refuses_with_a_bare_error() -> PluginSpec:
    async def refuse(model: laneway.Model, request: Ask) -> Prepared:
        if request.text == "wrong":
            raise ValueError(request.text)
        return await prepare(model, request)

    return plugin(prepare=refuse)


@breaks(Promise.REFUSES, "it let Ask\\(text='wrong'\\) in", wrong={"ask": [Ask("wrong")]})
def refuses_too_late() -> PluginSpec:
    async def refuse(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
        if len(prepared.payload) == len("wrong") + 1:
            raise laneway.InvalidRequestError("wrong", "text")
        return await handler(ctx, prepared)

    return plugin(handler=refuse)


@breaks(Promise.CANCELLED, "its prepare, cancelled at checkpoint 1 of 1, returned")
def prepares_what_nobody_wants_any_more() -> PluginSpec:
    async def stubborn(model: laneway.Model, request: Ask) -> Prepared:
        try:
            await trio.sleep(1)
        except trio.Cancelled:
            pass
        return Prepared(payload=[1])

    return plugin(prepare=stubborn)


@bad_handler(Promise.COMPLETES, "it ended with KeyError\\('colour'\\)")
async def fails(ctx: RequestContext, prepared: Prepared) -> None:
    raise KeyError("colour")


@bad_handler(Promise.COMPLETES, "it does not come to an end")
async def never_ends(ctx: RequestContext, prepared: Prepared) -> None:
    await trio.sleep_forever()


@bad_handler(Promise.DONE, "it emits 1 of its own")
async def says_when_it_is_done(ctx: RequestContext, prepared: Prepared) -> None:
    await ctx.emit(laneway.Done("stop", ctx.stats))


@bad_handler(Promise.DONE, "item 'a' has 0 among 2 events")
async def leaves_an_item_open(ctx: RequestContext, prepared: Prepared) -> None:
    await ctx.emit(laneway.BatchEvent("a", laneway.TextDelta("x")))
    await ctx.emit(laneway.BatchEvent("b", laneway.Done("stop", ctx.stats)))
    await ctx.emit(laneway.BatchEvent("a", laneway.TextDelta("y")))


@bad_handler(Promise.DONE, "item 'a' has 1 among 2 events")
async def goes_on_with_an_item(ctx: RequestContext, prepared: Prepared) -> None:
    await ctx.emit(laneway.BatchEvent("a", laneway.Done("stop", ctx.stats)))
    await ctx.emit(laneway.BatchEvent("a", laneway.TextDelta("x")))


@bad_handler(Promise.TEXT, "they make .* and the text is 'something else'")
async def tells_another_text(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
    return attrs.evolve(await handler(ctx, prepared), text="something else")


@bad_handler(Promise.USE, "with use='none' it generates", use="none")
async def generates_without_a_permit(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
    return await handler(ctx, prepared)


@breaks(Promise.USE, "with use='shared' two of it had their permits, and one generated nothing until")
def shares_nothing() -> PluginSpec:
    limits: list[trio.Lock] = []

    async def one_at_a_time(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
        if not limits:
            limits.append(trio.Lock())
        async with limits[0]:
            return await handler(ctx, prepared)

    return plugin(handler=one_at_a_time)


@bad_handler(Promise.SCOPE, "with scope='request', cancelled at .* it goes on for more than 1 s")
async def tears_down_for_long(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
    try:
        return await handler(ctx, prepared)
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)


@bad_handler(Promise.SCOPE, "with scope='request', cancelled at checkpoint 1 of .* it goes on for more than 1 s")
async def waits_for_ever_in_a_shield(ctx: RequestContext, prepared: Prepared) -> None:
    try:
        await handler(ctx, prepared)
    except trio.Cancelled:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


@bad_handler(Promise.SCOPE, "with scope='request', one was cancelled, and another ended with InferenceCancelledError")
async def takes_all_with_it(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
    try:
        return await handler(ctx, prepared)
    except trio.Cancelled:
        ctx.model.engine.cancel_all(kind="ask")
        raise


@bad_handler(Promise.CANCELLED, "cancelled at checkpoint .* it swallowed that and returned 'as far as it came'")
async def returns_what_it_has(ctx: RequestContext, prepared: Prepared) -> str:
    try:
        return (await handler(ctx, prepared)).text
    except trio.Cancelled:
        return "as far as it came"


@bad_handler(Promise.CANCELLED, "cancelled at checkpoint .* it raised RuntimeError\\('lost'\\) instead")
async def raises_something_else(ctx: RequestContext, prepared: Prepared) -> str:
    try:
        return (await handler(ctx, prepared)).text
    except trio.Cancelled as error:
        raise RuntimeError("lost") from error


@bad_handler(Promise.CANCELLED, "cancelled at step 2 of .* it raised ExceptionGroup.* instead")
async def fails_in_a_child(ctx: RequestContext, prepared: Prepared) -> None:
    async def child() -> None:
        async with ctx.generate(prepared.payload, GREEDY, max_tokens=4) as tokens:
            try:
                await tokens.finish()
            except trio.Cancelled:
                # Not so at the handler's own checkpoints, which come before the first step and after the last.
                if tokens.tokens:
                    raise RuntimeError("lost") from None
                raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)


@bad_handler(Promise.FAILED_STEP, "when step 1 of .* failed, it does not come to an end")
async def waits_for_what_never_comes(ctx: RequestContext, prepared: Prepared) -> laneway.Answer:
    try:
        return await handler(ctx, prepared)
    except laneway.DecodeError:
        await trio.sleep_forever()
        raise


@bad_handler(Promise.FAILED_STEP, "when step 1 of .* failed, it raised ExceptionGroup")
async def groups_its_errors(ctx: RequestContext, prepared: Prepared) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handler, ctx, prepared)


@bad_handler(Promise.FAILED_STEP, "when step 1 of .* failed, it raised AttributeError")
async def stumbles_over_a_failed_step(ctx: RequestContext, prepared: Prepared) -> str:
    answer: Any = None
    try:
        answer = await handler(ctx, prepared)
    except laneway.DecodeError:
        pass
    text: str = answer.text
    return text


@attrs.frozen
class Count:
    """An event that cannot do what unread events have to do."""

    number: int

    def merge(self, later: object) -> Count:
        raise NotImplementedError


@bad_handler(Promise.READER, "without a reader it ended with NotImplementedError")
async def needs_a_quick_reader(ctx: RequestContext, prepared: Prepared) -> None:
    for number in range(3):
        await ctx.emit(Count(number))
        await trio.sleep(1)


@bad_handler(Promise.SCOPE, "with scope='request', cancelled while its reader kept it paused, it goes on")
async def waits_for_its_reader(ctx: RequestContext, prepared: Prepared) -> None:
    with trio.CancelScope(shield=True):
        for number in range(20):
            await ctx.emit(number)


@bad_handler(Promise.LEAVES_NOTHING, "after a run that completed there are more tasks .* the poller")
async def leaves_a_task(ctx: RequestContext, prepared: Prepared) -> None:
    trio.lowlevel.spawn_system_task(trio.sleep_forever, name="the poller")


@bad_handler(Promise.LEAVES_NOTHING, "after a cancel at checkpoint 1 of 1 there are more tasks .* the rescuer")
async def leaves_a_task_when_cancelled(ctx: RequestContext, prepared: Prepared) -> None:
    try:
        await trio.sleep(1)
    except trio.Cancelled:
        trio.lowlevel.spawn_system_task(trio.sleep_forever, name="the rescuer")
        raise


@breaks(Promise.LEAVES_NOTHING, "after a run that completed there are still nap 'nap-1' \\(running\\)")
def leaves_a_run() -> PluginSpec:
    async def nap(ctx: RequestContext, prepared: Prepared) -> None:
        await trio.sleep_forever()

    # A run that is collected ends its request.
    kept: list[Any] = []

    async def wander_off(ctx: RequestContext, prepared: Prepared) -> None:
        kept.append(await ctx.model.engine.run(ctx.model, "nap", Ask()).__aenter__())

    return plugin(operation("nap", handler=nap, lane_group="beds"), handler=wander_off)


@bad_handler(Promise.PROGRAM, "it raised SystemExit\\(3\\)")
async def ends_the_program(ctx: RequestContext, prepared: Prepared) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(("make", "promise", "pattern", "how"), BAD)
def test_a_broken_promise_is_named(
    make: Callable[[], Any], promise: Promise, pattern: str, how: dict[str, Any]
) -> None:
    spec = make()
    with pytest.raises(BrokenPromise, match=pattern) as caught:
        check(spec, **how)
    error = caught.value
    assert error.promise is promise
    assert promise.value in str(error)
    if promise is not Promise.LOADS:
        assert (error.plugin, error.kind) == ("asker", "ask")
        assert "plugin 'asker', operation 'ask': " in str(error)
    # It has ended, and is out of the way.
    assert not getattr(error, "__notes__", [])
    trio.run(trio.lowlevel.checkpoint)


def test_each_promise_is_broken_by_one() -> None:
    assert {each.values[1] for each in BAD} == set(Promise)


@pytest.mark.parametrize(
    ("where", "promise", "abandoned"),
    [("handler", Promise.COMPLETES, 0), ("child", Promise.COMPLETES, 1), ("teardown", Promise.SCOPE, 0)],
)
def test_a_task_that_never_rests_does_not_keep_the_caller(
    where: str, promise: Promise, abandoned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_plugin_module, "MAX_TICKS", 5000)
    before = len(check_plugin_module._abandoned)

    async def spin() -> None:
        while True:
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                continue

    async def spinning(ctx: RequestContext, prepared: Prepared) -> None:
        async with trio.open_nursery() as nursery:
            if where == "child":
                nursery.start_soon(spin)
            elif where == "handler":
                await spin()
            else:
                try:
                    await trio.sleep(1)
                except trio.Cancelled:
                    await spin()

    with pytest.raises(BrokenPromise, match="it does not come to an end") as caught:
        check(plugin(handler=spinning))
    assert caught.value.promise is promise
    # A handler can be made to end.  What it has started can not, but is out of everybody's way.
    assert len(check_plugin_module._abandoned) == before + abandoned
    trio.run(trio.lowlevel.checkpoint)
