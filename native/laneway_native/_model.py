"""A model file that llama.cpp has loaded: its facts, and text to tokens and back."""

from __future__ import annotations

import functools
import itertools
import os
from typing import TYPE_CHECKING, Any, Self

import attrs
import trio

from laneway.decoder import InvalidRequestError, ModelLoadError, TokenizingStopped, Written
from laneway_native._errors import check_load, new_error, text_of
from laneway_native._ffi import ffi, lib
from laneway_native._gguf import GgufHeader, check_gguf
from laneway_native._log import follow_level
from laneway_native._machine import available
from laneway_native._memory import size_text
from laneway_native._threads import run_sync
from laneway_native._weights import WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from laneway_native._llama import ModelFactsStruct, ModelHandle


LONG_TEXT = 20_000
"""Characters from which tokenising is work for a thread: about 5 ms at SmolLM2's speed."""
MANY_SPECIALS = 64
"""Special tokens from which it is."""


class Loading:
    """A load under way, seen from other threads: how far it is, and how to end it."""

    def __init__(self) -> None:
        self._cancelled = ffi.new("int32_t *")
        self._progress = ffi.new("float *")

    def cancel(self) -> None:
        """Let the load end soon, with :class:`ModelLoadError`.  Safe from any thread."""
        self._cancelled[0] = 1

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        progress: float = self._progress[0]
        return progress


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What a model is.  Sizes are in bytes, ``window`` in tokens (0: every token is attended to)."""

    architecture: str
    tensor_bytes: int
    parameters: int
    vocabulary: int
    context_train: int
    embedding: int
    layers: int
    heads: int
    heads_kv: int
    window: int
    recurrent: bool
    hybrid: bool

    @property
    def cuttable(self) -> bool:
        """Whether a part of a sequence can be kept or copied: not so where layers carry a running state."""
        return not self.recurrent and not self.hybrid


class Model:
    """Weights and vocabulary.  Implements :class:`laneway.decoder.LongTextTokenizer`.

    Any thread may use it at any time, but for :meth:`close`, which comes after the decoders of this model are closed.
    A context manager; nothing is freed behind its back.
    """

    def __init__(
        self, handle: ModelHandle, path: str, header: GgufHeader, *, files: tuple[WeightFile, ...], on_gpu: bool
    ) -> None:
        self._handle = handle
        self.on_gpu = on_gpu
        """Whether layers of it run on a GPU."""
        self.path = path
        """The file it was loaded from."""
        self.header = header
        """What the file says of itself."""
        self.files = files
        """The files that the weights came from."""
        self.decoders = 0
        """How many are open on it; they keep the count."""
        self._facts: ModelFacts | None = None
        raw: ModelFactsStruct = ffi.new("laneway_model_facts *")
        lib.laneway_model_describe(handle, raw)
        self._size: int = raw.vocabulary
        self._bos, self._eos, self._adds_bos = raw.bos, raw.eos, bool(raw.adds_bos)
        self._pieces: list[bytes | None] = [None] * self._size
        self._end_tokens = frozenset(self._tokens_that(lib.laneway_model_end_tokens))
        self._user_defined: dict[str, int] | None = None
        template = lib.laneway_model_template(handle)
        self._chat_template = ffi.string(template).decode("utf-8", "replace") if template else None
        self.metadata = self._read_metadata()
        """The file's scalar metadata, as text."""
        self.facts = ModelFacts(
            architecture=self.metadata.get("general.architecture", ""),
            tensor_bytes=raw.tensor_bytes,
            parameters=raw.parameters,
            vocabulary=raw.vocabulary,
            context_train=raw.context_train,
            embedding=raw.embedding,
            layers=raw.layers,
            heads=raw.heads,
            heads_kv=raw.heads_kv,
            window=raw.window,
            recurrent=bool(raw.recurrent),
            hybrid=bool(raw.hybrid),
        )
        """Its size and shape."""
        self._refuse_what_cannot_answer(raw)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        use_mmap: bool | None = None,
        loading: Loading | None = None,
    ) -> Self:
        """Load a GGUF file.  Blocks for as long as the disk takes: call it in a worker thread, or :func:`load_model`.

        ``n_gpu_layers``: layers for the GPU, if the build has one (-1: all); ``use_mmap``: map the file (None: as
        llama.cpp sees fit).  Raises :class:`ModelLoadError` with the reason.
        """
        source = os.fspath(path)
        # Some damaged files end the process inside llama.cpp, so the header is read here first.
        header = check_gguf(source)
        on_gpu = n_gpu_layers != 0 and bool(lib.laneway_has_gpu())
        there = available().total
        if there is not None and header.tensor_bytes > there and not on_gpu:
            raise ModelLoadError(
                source,
                f"its weights take {size_text(header.tensor_bytes)}, and there are {size_text(there)} of memory in all",
            )
        loading = loading or Loading()
        files = tuple(WeightFile(part, mapped=use_mmap is not False) for part in header.parts)
        follow_level()
        out = ffi.new("laneway_model **")
        error = new_error()
        mode = -1 if use_mmap is None else int(use_mmap)
        status = lib.laneway_model_load(
            os.fsencode(source), n_gpu_layers, mode, loading._cancelled, loading._progress, out, error
        )
        check_load(status, error, source)
        try:
            for file in files:
                file.confirm()
            return cls(out[0], source, header, files=files, on_gpu=on_gpu)
        except BaseException:
            lib.laneway_model_free(out[0])
            raise

    def _refuse_what_cannot_answer(self, facts: ModelFactsStruct) -> None:
        if facts.encoder or not facts.decoder:
            raise ModelLoadError(
                self.path, f"architecture {self.facts.architecture!r} is an encoder; Laneway runs decoders"
            )
        if facts.diffusion:
            raise ModelLoadError(self.path, f"architecture {self.facts.architecture!r} is a diffusion model")
        if facts.vocabulary_type == 0:
            raise ModelLoadError(self.path, "the file has no vocabulary; Laneway needs one to read and write text")

    def close(self) -> None:
        """Free the weights.  A second call does nothing; :class:`RuntimeError` while a decoder uses them."""
        if self._handle:
            if self.decoders:
                raise RuntimeError(f"{self!r} has {self.decoders} open decoders; close them first")
            # Forgotten first: while this thread frees it, another must find a closed model.
            handle, self._handle = self._handle, ffi.NULL
            lib.laneway_model_free(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._handle else " closed"
        return f"<laneway_native.Model {os.path.basename(self.path)!r} {self.facts.architecture}{state}>"

    @property
    def handle(self) -> ModelHandle:
        """The native model, for this package's own use."""
        if not self._handle:
            raise ValueError(f"{self!r} is closed")
        return self._handle

    # Tokenizer.

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        return self._size

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_tokens

    @property
    def user_defined(self) -> Mapping[str, int]:
        """Tokens that were added to the vocabulary as whole texts, by their text."""
        if self._user_defined is None:
            tokens = self._tokens_that(lib.laneway_model_user_defined)
            self._user_defined = {self.special_piece(token).decode("utf-8", "replace"): token for token in tokens}
        return self._user_defined

    @property
    def chat_template(self) -> str | None:
        """The jinja2 template for chats, or None."""
        return self._chat_template

    def special_text(self, name: str) -> str:
        """The text of ``bos`` or ``eos``; empty if the model has none."""
        tokens = {"bos": self._bos, "eos": self._eos}
        if name not in tokens:
            raise ValueError(f"special tokens are bos and eos, not {name!r}")
        text = lib.laneway_model_token_text(self.handle, tokens[name])
        return ffi.string(text).decode("utf-8", "replace") if text else ""

    def tokenize(
        self, text: str, *, bos: bool = True, special: bool | Written = False, stop: bytearray | None = None
    ) -> list[int]:
        """Tokens of ``text``; see :meth:`laneway.decoder.LongTextTokenizer.tokenize`.

        Raises :class:`InvalidRequestError` for text that has no UTF-8 form, and for text that this vocabulary can only
        write as a special token where there must be none; :class:`TokenizingStopped` after ``stop``.
        """
        tokens, _ = self.tokenize_counted(text, special=special, stop=stop)
        if bos and self._adds_bos and self._bos >= 0:
            tokens.insert(0, self._bos)
        return tokens

    def tokenize_counted(
        self, text: str, *, special: bool | Written = False, stop: bytearray | None = None
    ) -> tuple[list[int], int]:
        """The same without a beginning, and how often llama.cpp was asked for it."""
        raw = _utf8(text)
        rules, keep = _rules(text, raw, special)
        flag = ffi.NULL if stop is None else ffi.from_buffer("uint8_t[]", stop)
        out, count, calls, error = ffi.new("int32_t **"), ffi.new("int32_t *"), ffi.new("int32_t *"), new_error()
        status = lib.laneway_tokenize(self.handle, raw, len(raw), rules, flag, out, count, calls, error)
        del keep
        if status == lib.LANEWAY_INTERRUPTED:
            raise TokenizingStopped(text_of(error))
        if status:
            raise InvalidRequestError(f"the text cannot be tokenised: {text_of(error)}")
        try:
            tokens: list[int] = ffi.unpack(out[0], count[0]) if count[0] else []
        finally:
            lib.laneway_tokens_free(out[0])
        return tokens, calls[0]

    def is_long(self, text: str) -> bool:
        """Whether tokenising ``text`` may take longer than the event loop can wait.

        Between two special tokens llama.cpp begins anew.  With some pre-tokenizers it compiles its patterns each time,
        which takes up to 1.3 ms.
        """
        if len(text) >= LONG_TEXT:
            return True
        if len(text) <= MANY_SPECIALS:
            return False
        raw = _utf8(text)
        count, error = ffi.new("int32_t *"), new_error()
        if lib.laneway_count_specials(self.handle, raw, len(raw), MANY_SPECIALS, count, error):
            raise InvalidRequestError(f"the text cannot be tokenised: {text_of(error)}")
        return int(count[0]) >= MANY_SPECIALS

    def least_tokens(self, text: str) -> int:
        """How few tokens ``text`` can have at the least, without working them out; 0 if this vocabulary tells nothing.

        Every byte is in one token, which is no longer than the longest token with such a byte.  So each byte counts for
        one over that length, and their sum is the bound.
        """
        raw = _utf8(text)
        least, error = ffi.new("int64_t *"), new_error()
        if lib.laneway_least_tokens(self.handle, raw, len(raw), least, error):
            raise InvalidRequestError(f"the text cannot be tokenised: {text_of(error)}")
        return int(least[0])

    def tokenize_with_llama(self, text: str, *, special: bool = False) -> list[int]:
        """What llama.cpp's own tokenizer gives for the whole text, to compare with; it takes as long as it takes."""
        raw = _utf8(text)
        room, count, error = len(raw) + 8, ffi.new("int32_t *"), new_error()
        while True:
            tokens = ffi.new("int32_t[]", room)
            if lib.laneway_llama_tokenize(self.handle, raw, len(raw), special, tokens, room, count, error):
                raise InvalidRequestError(f"the text cannot be tokenised: {text_of(error)}")
            if count[0] <= room:
                break
            room = count[0]
        found: list[int] = ffi.unpack(tokens, count[0]) if count[0] else []
        return found

    def piece(self, token: int) -> bytes:
        """The bytes of a token in an answer; empty for special tokens."""
        piece = self._pieces[token] if 0 <= token < self._size else None
        if piece is None:
            # Two threads may both ask for it: they get the same bytes.
            piece = self._pieces[token] = self._read_piece(token, special=False)
        return piece

    def special_piece(self, token: int) -> bytes:
        """The bytes of a token, special tokens spelled out."""
        return self._read_piece(token, special=True)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of a whole text, as an answer would have them; ``special`` spells special tokens out."""
        return b"".join(map(self.special_piece if special else self.piece, tokens))

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        count = ffi.new("int32_t *")
        error = new_error()
        while True:
            text = ffi.new("char[]", room)
            if lib.laneway_piece(self.handle, token, special, text, room, count, error):
                raise ValueError(text_of(error))
            if count[0] <= room:
                found: bytes = ffi.unpack(text, count[0])
                return found
            room = count[0]

    def _tokens_that(self, list_them: Callable[..., int]) -> list[int]:
        tokens = ffi.new("int32_t[]", self._size)
        found: list[int] = ffi.unpack(tokens, list_them(self._handle, tokens, self._size))
        return found

    def _read_metadata(self) -> dict[str, str]:
        metadata = {}
        for index in range(lib.laneway_model_metadata_count(self._handle)):
            key = self._metadata_text(lib.laneway_model_metadata_key, index)
            metadata[key] = self._metadata_text(lib.laneway_model_metadata_value, index)
        return metadata

    def _metadata_text(self, function: Callable[..., int], index: int) -> str:
        room = 256
        while True:
            text = ffi.new("char[]", room)
            length = function(self._handle, index, text, room)
            if length < room:
                return ffi.string(text).decode("utf-8", "replace")
            room = length + 1


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not valid Unicode: {error.reason} at {error.start}") from None


def _rules(text: str, raw: bytes, special: bool | Written) -> tuple[Any, list[Any]]:
    """``special`` for the C border, and what must live as long as it."""
    rules = ffi.new("laneway_rules *")
    if not isinstance(special, Written):
        rules.everywhere = special
        return rules, []
    places = [place for span in special.spans for place in span]
    if any(a > b for a, b in itertools.pairwise([0, *places, len(text)])):
        raise ValueError(f"spans of {len(text)} characters must be in order and apart from each other: {special.spans}")
    if len(raw) != len(text):
        # Characters to bytes: the bytes of what lies between two places, summed up.
        sizes = (len(text[a:b].encode()) for a, b in itertools.pairwise([0, *places]))
        places = list(itertools.accumulate(sizes))
    keep = [ffi.new("int32_t[]", numbers) for numbers in (places[::2], places[1::2], list(special.markers))]
    rules.spans, rules.markers_count = len(special.spans), len(special.markers)
    rules.begins, rules.ends, rules.markers = keep
    return rules, keep


async def load_model(
    path: str | os.PathLike[str],
    *,
    n_gpu_layers: int = -1,
    use_mmap: bool | None = None,
    loading: Loading | None = None,
) -> Model:
    """:meth:`Model.load` in a worker thread.

    A cancelled caller waits until the native call has returned, which is soon, and no model stays behind.
    """
    loading = loading or Loading()
    load = functools.partial(Model.load, path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, loading=loading)
    model: Model | None = None
    failure: Exception | None = None

    async def cancel_with_us() -> None:
        try:
            await trio.sleep_forever()
        finally:
            loading.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_with_us)
            with trio.CancelScope(shield=True):
                try:
                    model = await run_sync(load)
                except Exception as error:  # raised again outside of the nursery, which would wrap it in a group
                    failure = error
            nursery.cancel_scope.cancel()
    except BaseException:
        if model is not None:
            model.close()
        raise
    if model is None:
        assert failure is not None
        raise failure
    return model
