"""Scripted models for a whole engine: ``load_model("scripted:anything")`` needs neither files nor a compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, final

import attrs
import trio

from laneway._declarations import Backend, Loader, PluginSpec
from laneway.decoder import BatchPolicy, ModelLoadError
from laneway.testing._decoder import ScriptedDecoder
from laneway.testing._scripted_model import DEFAULT_END_EVERY, Script
from laneway.testing._tokenizer import SCRIPTED_CHAT_TEMPLATE, ScriptedTokenizer
from laneway.validators import number, optional, whole

if TYPE_CHECKING:
    from laneway._sources import ModelSource
    from laneway.decoder import DecodeError, StepBatch

PREFIX = "scripted:"

_seconds = number(0, 1e9)


@attrs.frozen(kw_only=True, slots=False)
class ScriptedOptions:
    """Options of the scripted loader.  What is not explained here goes to :class:`ScriptedDecoder` as it is."""

    context_size: int = attrs.field(default=256, validator=whole(1, 2**31 - 1))
    """Tokens of all slots together; each holds floor(context_size / parallel), at least 2."""
    chat_template: str | None = SCRIPTED_CHAT_TEMPLATE
    """None for a model that knows no chats."""
    bos: bool = True
    """Whether prompts begin with ``<|begin|>``."""
    stall_timeout: float | None = attrs.field(default=None, validator=optional(_seconds))
    """Seconds for which a run may stay paused by its reader (rule S2)."""
    prefix_cache: bool = True
    """Whether prompts share what they have in common at their beginning."""
    seconds_to_load: float = attrs.field(default=0.0, validator=_seconds)
    """How long loading takes; like a native call it is not cut short by a cancel."""
    load_error: Exception | None = None
    """What loading ends with instead of a model."""
    policy: BatchPolicy | None = None
    seconds_per_step: float = attrs.field(default=0.0, validator=_seconds)
    seconds_per_token: float = attrs.field(default=0.0, validator=_seconds)
    seconds_per_state: float = attrs.field(default=0.0, validator=_seconds)
    seconds_per_seal: float = attrs.field(default=0.0, validator=_seconds)
    end_every: int | None = attrs.field(default=DEFAULT_END_EVERY, validator=optional(whole(1, 2**31 - 1)))
    cuttable: bool = True
    script: Script | None = None
    fail_at: Mapping[int, Exception] | None = None
    hang_at: Collection[int] = ()
    fail_drop: Mapping[int, Exception] | None = None
    fail_save: Mapping[int, Exception] | None = None
    fail_load: Mapping[int, Exception] | None = None
    fail_copy: Mapping[int, Exception] | None = None
    fail_cut: Mapping[int, Exception] | None = None
    no_token: Callable[[tuple[int, ...], int], DecodeError | None] | None = None
    at_step: Callable[[int, StepBatch], object] | None = None


def scripted_backend(parallel: int = 1, *, name: str = "scripted", **options: Any) -> Backend:
    """A model as a loader would hand it over, with a :class:`ScriptedDecoder` of ``parallel`` slots.

    :param options: see :class:`ScriptedOptions`
    """
    return _build(name, PREFIX + name, parallel, ScriptedOptions(**options))[0]


@final
class ScriptedLoader:
    """A plugin whose loader takes every source that begins with ``scripted:``, and the decoders that it made.

    .. code-block:: python

        loader = ScriptedLoader(seconds_per_step=0.1)
        async with laneway.open_engine(plugins=[loader.plugin]) as engine:
            model = await engine.load_model("scripted:a", parallel=4, context_size=256)
            decoder = loader.decoders["scripted:a"]

    :param defaults: options that a ``load_model`` call does not give; see :class:`ScriptedOptions`
    """

    def __init__(self, **defaults: Any) -> None:
        self.decoders: dict[str, ScriptedDecoder] = {}
        """The newest decoder of each source."""
        self.plugin = scripted_loader_plugin(on_load=self.decoders.__setitem__, **defaults)

    def __repr__(self) -> str:
        return f"<laneway.testing.ScriptedLoader {', '.join(self.decoders) or 'nothing loaded'}>"

    def assert_idle(self) -> None:
        """:meth:`ScriptedDecoder.assert_idle` for every decoder."""
        for decoder in self.decoders.values():
            decoder.assert_idle()


def scripted_loader_plugin(
    *, on_load: Callable[[str, ScriptedDecoder], object] | None = None, **defaults: Any
) -> PluginSpec:
    """The plugin of :class:`ScriptedLoader` alone.

    :param on_load: called with the text of the source and the decoder made for it
    :param defaults: options that a ``load_model`` call does not give; see :class:`ScriptedOptions`
    """

    def accepts(source: ModelSource) -> bool:
        return source.text.startswith(PREFIX)

    async def load(source: ModelSource, parallel: int, options: ScriptedOptions) -> Backend:
        with trio.CancelScope(shield=True):
            await trio.sleep(options.seconds_to_load)
        await trio.lowlevel.checkpoint_if_cancelled()
        if options.load_error is not None:
            raise options.load_error
        backend, decoder = _build(source.name, source.text, parallel, options)
        if on_load is not None:
            on_load(source.text, decoder)
        return backend

    loader = Loader(name="scripted", accepts=accepts, load=load, options_type=_with_defaults(defaults))
    return PluginSpec(name="scripted", loaders=(loader,))


def _with_defaults(defaults: dict[str, Any]) -> type[ScriptedOptions]:
    """:class:`ScriptedOptions` with other defaults."""
    if not defaults:
        return ScriptedOptions
    ScriptedOptions(**defaults)  # a wrong name or value shows here, not when a model is loaded
    known = attrs.fields_dict(ScriptedOptions)
    fields = {name: attrs.field(default=value, validator=known[name].validator) for name, value in defaults.items()}
    return attrs.make_class("ScriptedOptions", fields, bases=(ScriptedOptions,), frozen=True, kw_only=True, slots=False)


def _build(name: str, source: str, parallel: int, options: ScriptedOptions) -> tuple[Backend, ScriptedDecoder]:
    window = options.context_size // parallel
    if window < 2:
        raise ModelLoadError(
            source,
            f"context_size {options.context_size} leaves {window} tokens for each of {parallel} slots and at least 2 "
            "are needed; use a larger context_size or a smaller parallel",
        )
    tokenizer = ScriptedTokenizer(chat_template=options.chat_template, bos=options.bos)
    decoder = ScriptedDecoder(
        parallel,
        window,
        vocabulary=tokenizer,
        policy=options.policy,
        seconds_per_step=options.seconds_per_step,
        seconds_per_token=options.seconds_per_token,
        seconds_per_state=options.seconds_per_state,
        seconds_per_seal=options.seconds_per_seal,
        end_every=options.end_every,
        cuttable=options.cuttable,
        script=options.script,
        fail_at=options.fail_at,
        hang_at=options.hang_at,
        fail_drop=options.fail_drop,
        fail_save=options.fail_save,
        fail_load=options.fail_load,
        fail_copy=options.fail_copy,
        fail_cut=options.fail_cut,
        no_token=options.no_token,
        at_step=options.at_step,
    )
    backend = Backend(
        name=name,
        decoder=decoder,
        tokenizer=tokenizer,
        metadata={"architecture": "scripted", "vocabulary": str(tokenizer.size)},
        context_size=options.context_size,
        stall_timeout=options.stall_timeout,
        prefix_cache=options.prefix_cache,
        aclose=decoder.aclose,
    )
    return backend, decoder
