"""The loader of GGUF models: llama.cpp, through ``laneway_native``.

::

    model = await engine.load_model("smollm2", parallel=4, context_size=8192, threads=2)

Without the compiled extension this plugin still loads; only loading a model fails, and says what to do.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

from laneway import Backend, InvalidRequestError, Loader, ModelLoadError, ModelSource, PluginSpec, hookimpl, threads
from laneway.validators import is_number, number, of_type, optional, shown, whole

if TYPE_CHECKING:
    from types import ModuleType

    from laneway_native import LlamaDecoder, Model

log = logging.getLogger("laneway.llama")

DEFAULT_WINDOW = 2048
"""Tokens of one slot if ``context_size`` is not given and the model was trained on no fewer."""


def _adapters(value: object) -> tuple[tuple[str, float], ...]:
    wanted = "must be a list of paths, or of pairs of a path and a scale"
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{wanted}, not {value!r}", "lora")
    return tuple(_adapter(item, wanted) for item in value)


def _adapter(item: Any, wanted: str) -> tuple[str, float]:
    path, scale = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, 1.0)
    if not isinstance(path, (str, os.PathLike)) or not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise InvalidRequestError(f"{wanted}, not {shown(item)}", "lora")
    if not is_number(scale) or math.isinf(scale):
        raise InvalidRequestError(f"a scale is a finite number, not {shown(scale)}", "lora")
    return os.fspath(path), float(scale)


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise InvalidRequestError(f"must be more than 0, not {value!r}", attribute.name)


def _one_of(*words: str | None) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in words:
            raise InvalidRequestError(f"must be one of {', '.join(map(repr, words))}, not {value!r}", attribute.name)

    return check


_size = whole(1, 2**31 - 1)
_seconds = number(0, 1e9)


@attrs.frozen(kw_only=True)
class LlamaOptions:
    """Options of :meth:`laneway.Engine.load_model` for GGUF models."""

    context_size: int | None = attrs.field(default=None, validator=optional(_size))
    """Tokens that all slots hold together; each is promised floor(context_size / parallel), prompt and answer together.
    None gives each slot 2048, or the context that the model was trained on if that is smaller."""
    threads: int | None = attrs.field(default=None, validator=optional(whole(1, 512)))
    """None: one for each physical core that this process may run on."""
    poll: int = attrs.field(default=0, validator=whole(0, 100))
    """How long idle threads wait for the next step before they sleep, in units of some 0.05 s."""
    lora: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_adapters)
    """Adapter files with their scales, ``[(path, scale), ...]``; a path alone has the scale 1."""
    kv_type: str = attrs.field(default="f16", validator=of_type(str))
    """How keys and values are kept: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl."""
    kv_mode: Literal["split", "unified"] | None = attrs.field(default=None, validator=_one_of("split", "unified", None))
    """One store of cells a slot, or one for all; None leaves it to what was measured to be fast."""
    flash_attention: bool | None = attrs.field(default=None, validator=optional(of_type(bool)))
    """None: as is fast for the window's size."""
    chunk_target: float = attrs.field(default=0.1, validator=[number(0, 60), _positive])
    """Seconds for which the intake of a prompt may hold up those that are being answered."""
    delivery_interval: float = attrs.field(default=0.08, validator=number(0, 60))
    """Seconds of tokens, about, that are handed out together: going to and fro for each token of a fast model would
    cost a few percent of its speed.  0: each token at once.  Who comes or leaves never waits for it."""
    stall_timeout: float | None = attrs.field(default=None, validator=optional(_seconds))
    """Seconds for which a run may stay paused by its reader before it is ended; None: for ever."""
    prefix_cache: bool = attrs.field(default=True, validator=of_type(bool))
    """Compute what prompts have in common at their beginning once, where cells are unified; False: each on its own."""
    n_gpu_layers: int = attrs.field(default=-1, validator=whole(-1, 10_000))
    """Layers for the GPU, where the build has one; -1: all."""
    use_mmap: bool | None = attrs.field(default=None, validator=optional(of_type(bool)))
    """Map the file instead of reading it; None: as llama.cpp sees fit."""
    rope_freq_base: float = attrs.field(default=0.0, validator=number(0, 1e12))
    """0: the model's own."""
    rope_freq_scale: float = attrs.field(default=0.0, validator=number(0, 1e6))
    """0: the model's own."""

    def context_for(self, parallel: int, trained: int) -> int:
        """Tokens of the whole context.  ``trained`` is the model's training context, 0 if it is not known."""
        if self.context_size is not None:
            return self.context_size
        return parallel * (min(DEFAULT_WINDOW, trained) if trained > 0 else DEFAULT_WINDOW)


def accepts(source: ModelSource) -> bool:
    """Every file or directory, but for translation models: directories with ``model.bin``, and ``*.argosmodel``."""
    path = source.path
    if path is None or path.suffix == ".argosmodel":
        return False
    return not (path / "model.bin").exists()


async def load(source: ModelSource, parallel: int, options: LlamaOptions) -> Backend:
    """Load a model in worker threads.

    A cancelled load waits for the native call under way and then frees what there is (rule C8).
    """
    native = _native(source.text)
    assert source.path is not None, "accepts() takes paths only"
    model: Model = await native.load_model(source.path, n_gpu_layers=options.n_gpu_layers, use_mmap=options.use_mmap)
    context_size = options.context_for(parallel, model.facts.context_train)
    decoder: LlamaDecoder | None = None
    try:
        decoder = await _make_decoder(native, model, parallel, context_size, options)
        await trio.lowlevel.checkpoint_if_cancelled()
        _warn_of_a_long_window(source.name, options, decoder.window, model.facts.context_train)
        return Backend(
            name=source.name,
            decoder=decoder,
            tokenizer=model,
            metadata=_metadata(model),
            context_size=context_size,
            stall_timeout=options.stall_timeout,
            prefix_cache=options.prefix_cache,
            aclose=functools.partial(_close, decoder, model),
        )
    except BaseException:
        await _close(decoder, model)
        raise


async def _make_decoder(
    native: ModuleType, model: Model, parallel: int, context_size: int, options: LlamaOptions
) -> LlamaDecoder:
    make = functools.partial(
        native.LlamaDecoder,
        model,
        context_size=context_size,
        parallel=parallel,
        threads=options.threads,
        poll=options.poll,
        kv_type=options.kv_type,
        kv_mode=options.kv_mode,
        flash_attention=options.flash_attention,
        chunk_target=options.chunk_target,
        rounds_target=options.delivery_interval,
        lora=options.lora,
        rope_freq_base=options.rope_freq_base,
        rope_freq_scale=options.rope_freq_scale,
    )
    decoder: LlamaDecoder = await threads.run_long(make)
    return decoder


def _warn_of_a_long_window(name: str, options: LlamaOptions, window: int, trained: int) -> None:
    if 0 < trained < window and not options.rope_freq_base and not options.rope_freq_scale:
        log.warning(
            "model %s was trained on %d tokens, and each slot holds %d: answers may get worse beyond those",
            name,
            trained,
            window,
        )


async def _close(decoder: LlamaDecoder | None, model: Model) -> None:
    """Free both, the decoder first: it uses the model."""
    with trio.CancelScope(shield=True):
        try:
            if decoder is not None:
                await decoder.aclose()
        finally:
            await threads.run_long(model.close)


def _native(source: str) -> ModuleType:
    try:
        import laneway_native
    except ImportError as error:
        raise ModelLoadError(
            source,
            f"the native part of Laneway cannot be imported ({error}); build it: `make build` in a checkout, "
            "`python -m pip install --force-reinstall --no-deps laneway` elsewhere",
        ) from error
    return laneway_native


def _metadata(model: Model) -> dict[str, str]:
    facts = model.facts
    return {
        **model.metadata,
        "path": model.path,
        "architecture": facts.architecture,
        "parameters": str(facts.parameters),
        "tensor_bytes": str(facts.tensor_bytes),
        "vocabulary": str(facts.vocabulary),
        "context_train": str(facts.context_train),
    }


@hookimpl
def laneway_plugin() -> PluginSpec:
    """Declare the loader ``gguf``."""
    return PluginSpec(
        name="llama",
        loaders=(Loader(name="gguf", accepts=accepts, load=load, options_type=LlamaOptions),),
    )
