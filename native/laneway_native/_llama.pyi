# The compiled module, as native/csrc/llama.cdef.h declares it.  A test compares the names with the module's.
#
# cffi checks what its functions are given when they are called; the types here say what a handle is a handle of (a
# pointer to something of C's, false if it is NULL) and leave buffers to cffi.

from typing import Any, Final, final, type_check_only

@type_check_only
class Handle:
    def __bool__(self) -> bool: ...

@type_check_only
class ModelHandle(Handle): ...

@type_check_only
class SamplerHandle(Handle): ...

@type_check_only
class DecoderHandle(Handle): ...

@type_check_only
class Error:
    code: int
    slot: int
    text: Any

@type_check_only
class ModelFactsStruct:
    tensor_bytes: int
    parameters: int
    vocabulary: int
    context_train: int
    embedding: int
    layers: int
    heads: int
    heads_kv: int
    window: int
    recurrent: int
    hybrid: int
    encoder: int
    decoder: int
    diffusion: int
    vocabulary_type: int
    bos: int
    eos: int
    adds_bos: int

@final
@type_check_only
class _Ffi:
    NULL: Any
    def new(self, kind: str, init: Any = ..., /) -> Any: ...
    def cast(self, kind: str, value: Any, /) -> Any: ...
    def sizeof(self, kind: Any, /) -> int: ...
    def typeof(self, kind: Any, /) -> Any: ...
    def string(self, text: Any, limit: int = ..., /) -> bytes: ...
    def unpack(self, buffer: Any, length: int, /) -> Any: ...
    def from_buffer(self, kind: str, buffer: Any, require_writable: bool = ..., /) -> Any: ...
    def release(self, buffer: Any, /) -> None: ...

@final
@type_check_only
class _Lib:
    LANEWAY_OK: Final = 0
    LANEWAY_CELLS_FULL: Final = 1
    LANEWAY_INTERRUPTED: Final = 2
    LANEWAY_BAD_BATCH: Final = -1
    LANEWAY_DECODE_FAILED: Final = -2
    LANEWAY_BAD_ARGUMENT: Final = 100
    LANEWAY_EXCEPTION: Final = 101
    LANEWAY_OUT_OF_MEMORY: Final = 102
    LANEWAY_LOAD_FAILED: Final = 103
    LANEWAY_LOAD_CANCELLED: Final = 104
    LANEWAY_CONTEXT_FAILED: Final = 105
    LANEWAY_ADAPTER_FAILED: Final = 106
    LANEWAY_BAD_GRAMMAR: Final = 107
    LANEWAY_BAD_LOGITS: Final = 108
    LANEWAY_NO_TOKEN: Final = 109
    LANEWAY_UNSUPPORTED: Final = 110
    LANEWAY_BAD_STATE: Final = 111
    LANEWAY_TOP_LOGPROBS: Final = 20

    def laneway_start(self, folder: bytes, /) -> None: ...
    def laneway_llama_version(self) -> Any: ...
    def laneway_llama_commit(self) -> Any: ...
    def laneway_system_info(self) -> Any: ...
    def laneway_log_level(self, level: int, /) -> None: ...
    def laneway_log_waiting(self) -> int: ...
    def laneway_log_take(self, text: Any, size: int, /) -> int: ...
    def laneway_model_load(
        self,
        path: bytes,
        gpu_layers: int,
        load_mode: int,
        cancelled: Any,
        progress: Any,
        model: Any,
        error: Error,
        /,
    ) -> int: ...
    def laneway_model_free(self, model: ModelHandle, /) -> None: ...
    def laneway_model_describe(self, model: ModelHandle, facts: ModelFactsStruct, /) -> None: ...
    def laneway_model_template(self, model: ModelHandle, /) -> Any: ...
    def laneway_model_token_text(self, model: ModelHandle, token: int, /) -> Any: ...
    def laneway_model_metadata_count(self, model: ModelHandle, /) -> int: ...
    def laneway_model_metadata_key(self, model: ModelHandle, index: int, text: Any, size: int, /) -> int: ...
    def laneway_model_metadata_value(self, model: ModelHandle, index: int, text: Any, size: int, /) -> int: ...
    def laneway_model_end_tokens(self, model: ModelHandle, tokens: Any, size: int, /) -> int: ...
    def laneway_tokenize(
        self,
        model: ModelHandle,
        text: bytes,
        length: int,
        special: int,
        tokens: Any,
        size: int,
        count: Any,
        error: Error,
        /,
    ) -> int: ...
    def laneway_piece(
        self, model: ModelHandle, token: int, special: int, text: Any, size: int, count: Any, error: Error, /
    ) -> int: ...
    def laneway_detokenize(
        self,
        model: ModelHandle,
        tokens: Any,
        tokens_count: int,
        special: int,
        text: Any,
        size: int,
        count: Any,
        error: Error,
        /,
    ) -> int: ...
    def laneway_sampler_new(
        self, model: ModelHandle, sampling: Any, prompt: Any, prompt_count: int, sampler: Any, error: Error, /
    ) -> int: ...
    def laneway_sampler_free(self, sampler: SamplerHandle, /) -> None: ...
    def laneway_sampler_pick(
        self, sampler: SamplerHandle, logits: Any, count: int, choice: Any, error: Error, /
    ) -> int: ...
    def laneway_decoder_new(self, model: ModelHandle, options: Any, decoder: Any, error: Error, /) -> int: ...
    def laneway_decoder_free(self, decoder: DecoderHandle, /) -> None: ...
    def laneway_decoder_describe(self, decoder: DecoderHandle, facts: Any, /) -> None: ...
    def laneway_decoder_open(
        self, decoder: DecoderHandle, slot: int, sampling: Any, prompt: Any, prompt_count: int, error: Error, /
    ) -> int: ...
    def laneway_decoder_drop(self, decoder: DecoderHandle, slot: int, error: Error, /) -> int: ...
    def laneway_decoder_copy(
        self, decoder: DecoderHandle, source: int, target: int, length: int, error: Error, /
    ) -> int: ...
    def laneway_decoder_length(self, decoder: DecoderHandle, slot: int, /) -> int: ...
    def laneway_decoder_is_open(self, decoder: DecoderHandle, slot: int, /) -> int: ...
    def laneway_decoder_step(self, decoder: DecoderHandle, batch: Any, error: Error, /) -> int: ...
    def laneway_decoder_interrupt(self, decoder: DecoderHandle, /) -> None: ...
    def laneway_decoder_arm(self, decoder: DecoderHandle, /) -> None: ...
    def laneway_decoder_state_size(self, decoder: DecoderHandle, slot: int, size: Any, error: Error, /) -> int: ...
    def laneway_decoder_state_get(
        self, decoder: DecoderHandle, slot: int, state: Any, size: int, error: Error, /
    ) -> int: ...
    def laneway_decoder_state_set(
        self, decoder: DecoderHandle, slot: int, state: Any, size: int, error: Error, /
    ) -> int: ...

ffi: _Ffi
lib: _Lib
