"""Models: loading and its errors, tokens and text."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from laneway.decoder import InvalidRequestError, ModelLoadError, Tokenizer
from laneway_native import Loading, Model, load_model
from tests.native.driving import decoder_of
from tests.tiny_model import BOS, CHATML, EOS, IM_END, IM_START, tiny_model_parts, write_gguf, write_tiny_model


def test_facts(tiny: Model, tiny_path: Path) -> None:
    assert isinstance(tiny, Tokenizer)
    facts = tiny.facts
    assert (facts.architecture, facts.layers, facts.embedding, facts.heads, facts.heads_kv) == ("llama", 2, 64, 4, 2)
    assert (facts.context_train, facts.window, facts.vocabulary) == (512, 0, tiny.size)
    assert facts.cuttable
    assert 0 < facts.tensor_bytes < tiny_path.stat().st_size
    assert tiny.metadata["llama.context_length"] == "512"
    assert tiny.metadata["general.architecture"] == "llama"
    assert tiny.end_tokens == {EOS, IM_END}
    assert tiny.chat_template == CHATML
    assert (tiny.special_text("bos"), tiny.special_text("eos")) == ("<s>", "</s>")
    with pytest.raises(ValueError):
        tiny.special_text("pad")


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with Model.load(write_tiny_model(tmp_path / "plain.gguf", chat_template=None)) as model:
        assert model.chat_template is None


@pytest.mark.parametrize("tokenizer", ["spm", "bpe"])
def test_text_to_tokens_and_back(tmp_path: Path, tokenizer: Any) -> None:
    with Model.load(write_tiny_model(tmp_path / "model.gguf", tokenizer=tokenizer)) as model:

        def read_back(text: str) -> bytes:
            # SentencePiece writes a space as U+2581, so that character comes back as a space.
            return (text.replace("\u2581", " ") if tokenizer == "spm" else text).encode()

        @given(st.text(max_size=60) | st.text(alphabet="\u2581 a", max_size=6))
        def round_trip(text: str) -> None:
            tokens = model.tokenize(text, bos=False)
            assert all(0 <= token < model.size for token in tokens)
            assert model.detokenize(tokens) == read_back(text)
            assert b"".join(model.piece(token) for token in tokens) == read_back(text)
            assert model.tokenize(text) == [BOS, *tokens]

        @given(st.text(alphabet=st.characters(codec="utf-8"), min_size=2000, max_size=2000))
        def long_text(text: str) -> None:
            assert model.detokenize(model.tokenize(text, bos=False)) == read_back(text)

        round_trip()
        long_text()


def test_special_tokens_are_text_unless_asked_for(tiny: Model) -> None:
    text = "<|im_start|>user"
    assert tiny.tokenize(text, special=True)[:2] == [BOS, IM_START]
    plain = tiny.tokenize(text)
    assert IM_START not in plain
    assert tiny.detokenize(plain[1:]) == text.encode()
    assert tiny.piece(IM_START) == b""
    assert tiny.special_piece(IM_START) == b"<|im_start|>"
    assert tiny.detokenize([IM_START], special=True) == b"<|im_start|>"
    assert tiny.detokenize([IM_START]) == b""


def test_empty_text(tiny: Model) -> None:
    assert tiny.tokenize("", bos=False) == []
    assert tiny.tokenize("") == [BOS]
    assert tiny.detokenize([]) == b""


def test_tokens_and_texts_that_do_not_exist(tiny: Model) -> None:
    for token in (-1, tiny.size, 2**31 - 1):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            tiny.piece(token)
        with pytest.raises(ValueError, match="not in the vocabulary"):
            tiny.detokenize([5, token])
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        tiny.tokenize("half \ud83d a pair")


def test_null_characters_are_text(tiny: Model) -> None:
    assert tiny.detokenize(tiny.tokenize("a\0b", bos=False)) == b"a\0b"


def test_a_model_that_does_not_want_a_beginning(tmp_path: Path) -> None:
    metadata, tensors = tiny_model_parts()
    metadata["tokenizer.ggml.add_bos_token"] = False
    metadata["tokenizer.ggml.add_eos_token"] = True  # an answer must not begin after an end
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, tensors)
    with Model.load(path) as model:
        assert model.tokenize("a") == model.tokenize("a", bos=False)
        assert EOS not in model.tokenize("a")


def test_many_threads_tokenize_at_once(tiny: Model) -> None:
    texts = [f"thread number {number} says the same again and again " * 20 for number in range(4)]
    expected = [tiny.tokenize(text) for text in texts]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            tokens = tiny.tokenize(texts[number])
            if tokens != expected[number] or tiny.detokenize(tokens[1:]) != texts[number].encode():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_model_says_so(tiny_path: Path) -> None:
    model = Model.load(tiny_path)
    model.close()
    model.close()
    with pytest.raises(ValueError, match="closed"):
        model.tokenize("a")
    assert "closed" in repr(model)


async def test_a_model_in_use_is_not_freed(tiny_path: Path) -> None:
    model = Model.load(tiny_path)
    async with decoder_of(model):
        with pytest.raises(RuntimeError, match="1 open decoders"):
            model.close()
        assert model.tokenize("a")
    model.close()


# Loading.


def test_what_the_header_check_finds_never_reaches_llama(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        Model.load(tmp_path / "missing.gguf")
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><title>Not found</title>")
    with pytest.raises(ModelLoadError):
        Model.load(page)


def test_what_only_llama_finds_is_a_load_error_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer that this llama.cpp does not know: the header is in order."""
    metadata, tensors = tiny_model_parts(tokenizer="bpe")
    metadata["tokenizer.ggml.pre"] = "of-tomorrow"
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, tensors)
    with caplog.at_level(logging.WARNING, logger="laneway.llama"):
        with pytest.raises(ModelLoadError) as caught:
            Model.load(path)
    assert caught.value.source == str(path)
    assert "of-tomorrow" in caught.value.reason
    # The exception tells; a program that configures no logging prints nothing beside it.
    assert caplog.records == []


def test_llamas_log_can_be_had(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="laneway.llama"):
        Model.load(tiny_path).close()
    assert any("general.name" in record.getMessage() for record in caplog.records)
    assert all(record.levelno <= logging.INFO for record in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="laneway.llama"):
        Model.load(tiny_path).close()
    assert caplog.records == []


def test_progress(tiny_path: Path) -> None:
    loading = Loading()
    assert loading.progress == 0.0
    Model.load(tiny_path, loading=loading).close()
    assert loading.progress == 1.0


@pytest.mark.parametrize("use_mmap", [True, False, None])
def test_mapped_and_read_files_answer_alike(tiny: Model, tiny_path: Path, use_mmap: bool | None) -> None:
    with Model.load(tiny_path, use_mmap=use_mmap) as model:
        assert model.facts == tiny.facts


def test_a_cancelled_load_ends(tiny_path: Path) -> None:
    loading = Loading()
    loading.cancel()
    with pytest.raises(ModelLoadError, match="cancelled"):
        Model.load(tiny_path, loading=loading)


async def test_C8_a_cancelled_caller_leaves_no_model_behind(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is cancelled while the native call runs; what it has loaded by then is freed."""
    loaded: list[Model] = []
    load = Model.load.__func__  # type: ignore[attr-defined]

    def slow_load(cls: type[Model], /, *args: Any, **options: Any) -> Model:
        trio.from_thread.run_sync(scope.cancel)
        options["loading"] = Loading()  # deaf: the load succeeds although it was cancelled
        loaded.append(load(cls, *args, **options))
        return loaded[0]

    monkeypatch.setattr(Model, "load", classmethod(slow_load))
    with trio.CancelScope() as scope:
        await load_model(tiny_path)
    assert scope.cancelled_caught
    assert "closed" in repr(loaded[0])


async def test_a_cancelled_caller_ends_the_native_load(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[ModelLoadError] = []
    load = Model.load.__func__  # type: ignore[attr-defined]

    def cancelled_load(cls: type[Model], /, *args: Any, loading: Loading, **options: Any) -> Model:
        trio.from_thread.run_sync(scope.cancel)
        while not loading._cancelled[0]:
            trio.from_thread.run(trio.lowlevel.cancel_shielded_checkpoint)
        try:
            model: Model = load(cls, *args, loading=loading, **options)
        except ModelLoadError as error:
            errors.append(error)
            raise
        return model

    monkeypatch.setattr(Model, "load", classmethod(cancelled_load))
    with trio.CancelScope() as scope:
        await load_model(tiny_path)
    assert scope.cancelled_caught
    assert "cancelled" in errors[0].reason


async def test_load_model_raises_bare_errors(tmp_path: Path, tiny_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        await load_model(tmp_path / "missing.gguf")
    model = await load_model(tiny_path)
    assert model.tokenize("a")
    model.close()
