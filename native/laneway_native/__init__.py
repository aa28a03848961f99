"""The cffi binding to llama.cpp: models, and the decoder that runs them."""

from __future__ import annotations

from laneway_native._attention import attention_kernel as attention_kernel
from laneway_native._attention import has_attention_kernel as has_attention_kernel
from laneway_native._attention import use_attention_kernel as use_attention_kernel
from laneway_native._decoder import LlamaDecoder as LlamaDecoder
from laneway_native._gguf import GgufHeader as GgufHeader
from laneway_native._gguf import check_gguf as check_gguf
from laneway_native._machine import Available as Available
from laneway_native._machine import available as available
from laneway_native._machine import default_threads as default_threads
from laneway_native._model import Loading as Loading
from laneway_native._model import Model as Model
from laneway_native._model import ModelFacts as ModelFacts
from laneway_native._model import load_model as load_model
from laneway_native._policy import plan as plan
from laneway_native._weights import file_digest as file_digest
