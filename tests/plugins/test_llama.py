"""The loader of GGUF models: its options, what it takes, what it frees, and what it says without the extension."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import trio

import laneway
from laneway import InvalidRequestError, ModelLoadError, ModelSource
from laneway.testing import ScriptedDecoder, ScriptedTokenizer
from laneway_plugins import completion, llama
from laneway_plugins.llama import LlamaOptions
from tests.native import adapters
from tests.program_threads import all_tokens_held
from tests.tiny_model import CHATML, write_gguf, write_tiny_model

# Options.


@pytest.mark.parametrize(
    ("options", "parallel", "trained", "expected"),
    [
        ({}, 1, 8192, 2048),
        ({}, 4, 8192, 8192),
        ({}, 4, 512, 2048),
        ({}, 3, 0, 6144),
        ({"context_size": 1000}, 4, 512, 1000),
    ],
)
def test_the_default_context_gives_each_slot_2048_tokens_or_what_the_model_was_trained_on(
    options: dict[str, Any], parallel: int, trained: int, expected: int
) -> None:
    assert LlamaOptions(**options).context_for(parallel, trained) == expected


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("context_size", 0, "an integer from 1"),
        ("context_size", 2048.0, "an integer"),
        ("context_size", True, "an integer"),
        ("threads", 0, "an integer from 1 to 512"),
        ("poll", 101, "an integer from 0 to 100"),
        ("lora", "adapter.gguf", "must be a list of paths"),
        ("lora", [5], "must be a list of paths"),
        ("lora", [("a", "b")], "must be a list of paths"),
        ("lora", [("a", True)], "must be a list of paths"),
        ("lora", [("a", float("nan"))], "a finite number"),
        ("lora", [("a", 10**400)], "a finite number"),
        ("chunk_target", 10**400, "a number"),
        ("kv_type", 5, "must be str"),
        ("kv_mode", "both", "must be one of 'split', 'unified', None"),
        ("flash_attention", 1, "must be bool"),
        ("chunk_target", 0, "more than 0"),
        ("chunk_target", "fast", "a number"),
        ("delivery_interval", -1, "a number from 0"),
        ("stall_timeout", -1, "a number from 0"),
        ("n_gpu_layers", -2, "an integer from -1"),
        ("use_mmap", "yes", "must be bool"),
        ("rope_freq_base", -1, "a number from 0"),
        ("rope_freq_scale", float("nan"), "a number from 0"),
    ],
)
def test_wrong_options_are_refused_by_name(field: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        LlamaOptions(**{field: value})
    assert caught.value.field == field


def test_adapters_may_be_paths_or_pairs() -> None:
    assert LlamaOptions(lora=[("a", 0.5), Path("b"), ["c", 2]]).lora == (("a", 0.5), ("b", 1.0), ("c", 2.0))


# What it takes.


def test_every_path_but_those_of_translation_models(tmp_path: Path) -> None:
    translation = tmp_path / "translation"
    translation.mkdir()
    (translation / "model.bin").touch()
    for name, path, taken in [
        ("model.gguf", tmp_path / "model.gguf", True),
        ("no suffix", tmp_path / "model", True),
        ("directory", tmp_path, True),
        ("ctranslate2", translation, False),
        ("argos", tmp_path / "en_de.argosmodel", False),
    ]:
        assert llama.accepts(ModelSource(str(path), path, name)) is taken, name
    assert not llama.accepts(ModelSource("scripted:a", None, "a"))


# Without the extension.


def _import_anew(module: ModuleType) -> None:
    """Run the module's code again, in a module of its own, so that nothing else notices."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location("llama_once_more", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.laneway_plugin().name == "llama"


async def test_without_the_extension_loading_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "laneway_native", None)
    _import_anew(llama)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match=r"make build.*pip install"):
            await engine.load_model(file)
        assert not engine.models


# Freeing, seen on native objects that only take notes.


class FakeNative:
    """Stands in for ``laneway_native``: its loads take as long as a test wants, in the threads they really run in."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.slow: set[str] = set()
        self.fail: dict[str, Exception] = {}
        self.entered = trio.Event()
        self.let_go = threading.Event()
        self.given: dict[str, Any] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("laneway_native")
        module.load_model = self.load_model  # type: ignore[attr-defined]
        module.LlamaDecoder = self.decoder  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "laneway_native", module)

    async def load_model(self, path: Path, **options: Any) -> Any:
        self.given["model"] = options
        await trio.lowlevel.checkpoint()
        model: Any = ScriptedTokenizer()
        model.path = str(path)
        model.metadata = {"general.name": "A Name"}
        model.facts = SimpleNamespace(
            architecture="llama", parameters=7, tensor_bytes=28, vocabulary=model.size, context_train=100
        )
        model.close = lambda: self.closed.append("model")
        return model

    def decoder(self, model: Any, *, context_size: int, parallel: int, **options: Any) -> Any:
        self.given["decoder"] = {"context_size": context_size, **options}
        self._take_time("decoder")
        decoder = ScriptedDecoder(parallel, context_size // parallel, vocabulary=model)
        close = decoder.aclose

        async def aclose() -> None:
            self.closed.append("decoder")
            await close()
            if "closing" in self.fail:
                raise self.fail["closing"]

        decoder.aclose = aclose  # type: ignore[method-assign]
        return decoder

    def _take_time(self, what: str) -> None:
        if what in self.slow:
            trio.from_thread.run_sync(self.entered.set)
            self.let_go.wait()
        if what in self.fail:
            raise self.fail[what]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    fake = FakeNative()
    fake.install(monkeypatch)
    return fake


async def test_options_reach_the_native_objects(native: FakeNative, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    async with laneway.open_engine() as engine:
        model = await engine.load_model(
            file, parallel=2, threads=3, kv_type="q8_0", lora=["a"], n_gpu_layers=4, use_mmap=False, stall_timeout=9.0
        )
        assert native.given == {
            "model": {"n_gpu_layers": 4, "use_mmap": False},
            "decoder": {
                "context_size": 200,
                "threads": 3,
                "poll": 0,
                "kv_type": "q8_0",
                "kv_mode": None,
                "flash_attention": None,
                "chunk_target": 0.1,
                "rounds_target": 0.08,
                "lora": (("a", 1.0),),
                "rope_freq_base": 0.0,
                "rope_freq_scale": 0.0,
            },
        }
        assert (model.name, model.window, model.context_size, model.stall_timeout) == ("tiny", 100, 200, 9.0)
        assert model.metadata["general.name"] == "A Name"
        assert model.metadata["parameters"] == "7"
        assert (await completion.complete(model, "Hello", max_tokens=3)).stats.generated_tokens == 3
        assert not native.closed
    assert native.closed == ["decoder", "model"]


async def test_a_window_beyond_the_training_context_is_warned_of(
    native: FakeNative, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    async with laneway.open_engine() as engine:
        await engine.load_model(file, context_size=100)
        await engine.load_model(file, context_size=101, rope_freq_scale=0.5)
        assert "trained on" not in caplog.text
        await engine.load_model(file, context_size=101)
        assert "was trained on 100 tokens, and each slot holds 101" in caplog.text


async def test_C8_a_cancelled_load_frees_what_there_is_when_the_native_call_returns(
    native: FakeNative, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    native.slow.add("decoder")
    async with laneway.open_engine() as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.load_model, file)
            await native.entered.wait()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert not native.closed
                native.let_go.set()
        assert native.closed == ["decoder", "model"]
        assert not engine.models


async def test_a_decoder_that_cannot_be_made_takes_the_model_with_it(native: FakeNative, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    native.fail["decoder"] = ModelLoadError(str(file), "no room")
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match="no room"):
            await engine.load_model(file)
        assert native.closed == ["model"]


async def test_a_decoder_that_cannot_be_closed_does_not_keep_the_model(
    native: FakeNative, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    native.fail["closing"] = RuntimeError("stuck")
    async with laneway.open_engine() as engine:
        model = await engine.load_model(file)
        await engine.unload_model(model)
        assert native.closed == ["decoder", "model"]
    assert "stuck" in caplog.text


# The real thing, on a model without sense.


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    pytest.importorskip("laneway_native", reason="the native part is not built (make build)", exc_type=ImportError)
    return write_tiny_model(tmp_path / "tiny.gguf")


async def test_a_tiny_model_needs_no_thread_of_the_programs_own(tiny_file: Path, tmp_path: Path) -> None:
    async with all_tokens_held(), laneway.open_engine(strict_plugins=True, cache_dir=tmp_path / "cache") as engine:
        for _ in range(2):
            model = await engine.load_model(tiny_file, parallel=1, context_size=256, threads=1, prefix_cache=False)
            talk = [{"role": "user", "content": "Hi"}]
            for expected in (0, 1):
                answer = await completion.complete(model, talk, temperature=0.0, max_tokens=9, kv_cache="k")
                assert answer.stats.cache is not None
                assert answer.stats.cache.ended == "commit"
                assert (answer.stats.cached_tokens > 0) is bool(expected)
            with pytest.raises(laneway.ContextOverflowError):
                await completion.complete(model, "word " * 5000)
            await engine.unload_model(model)
            await engine.kv_caches.delete("k")


async def test_a_tiny_model_is_loaded_and_answers(tiny_file: Path) -> None:
    async with laneway.open_engine(strict_plugins=True) as engine:
        model = await engine.load_model(tiny_file, parallel=2, context_size=256, threads=1)
        assert (model.name, model.window, model.context_size) == ("tiny", 128, 256)
        assert model.metadata["architecture"] == "llama"
        assert model.tokenizer.chat_template == CHATML
        first = await completion.complete(model, [{"role": "user", "content": "Hi"}], temperature=0.0, max_tokens=9)
        again = await completion.complete(
            model, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", temperature=0.0, max_tokens=9
        )
        assert first.tokens == again.tokens
        assert (len(first.tokens), first.stop_reason) == (9, "length")


Spoil = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.unlink(), "there is no such file"),
        (lambda file: (file.unlink(), file.mkdir()), "directory"),
        (lambda file: file.write_bytes(b""), "empty"),
        (lambda file: file.write_bytes(b"<!DOCTYPE html><title>Not found"), "not a GGUF file"),
        (lambda file: file.write_bytes(file.read_bytes()[:37]), "37 bytes"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1000]), "are missing at its end"),
    ],
)
async def test_a_file_that_is_no_model_is_a_load_error(tiny_file: Path, spoil: Spoil, reason: str) -> None:
    spoil(tiny_file)
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match=reason):
            await engine.load_model(tiny_file)
        assert not engine.models


async def test_a_broken_adapter_is_a_load_error_and_changes_nothing(tiny_file: Path, tmp_path: Path) -> None:
    metadata, tensors = adapters.adapter_parts()
    good = write_gguf(tmp_path / "good.gguf", metadata, tensors)
    bad = write_gguf(tmp_path / "bad.gguf", metadata | {adapters.ALPHA: 8}, tensors)
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match=r"bad\.gguf': metadata 'adapter.lora.alpha' is stored as u32; .* f32"):
            await engine.load_model(tiny_file, lora=[good, bad])
        assert not engine.models
        model = await engine.load_model(tiny_file, lora=[good])
        assert (await completion.complete(model, "hello", max_tokens=2)).tokens


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parallel": 0}, "1 to 256"),
        ({"kv_type": "f64"}, "kv_type"),
        ({"lora": ["/no/such/adapter.gguf"]}, "no/such/adapter"),
        ({"context_size": 2**31 - 1}, "context_size"),
        ({"context_size": 2, "parallel": 4}, "context_size"),
        ({"context": 5}, "no option context"),
        ({"threads": "many"}, "threads"),
    ],
)
async def test_options_that_cannot_be_met_are_a_load_error(
    tiny_file: Path, options: dict[str, Any], reason: str
) -> None:
    async with laneway.open_engine() as engine:
        with pytest.raises(ModelLoadError, match=reason):
            await engine.load_model(tiny_file, **options)
        assert not engine.models
