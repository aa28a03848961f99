"""What the pinned llama.cpp knows of model architectures: facts read from its source, for :mod:`laneway_native._gguf`.

``native/llama_source.toml`` says which tree is meant; a test compares the names with it when it is at hand.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EMBEDDINGS = "it makes embeddings, not text"
_DIFFUSION = "it is a diffusion model, which does not answer token by token"
_DRAFT = "it is a draft model, which runs only beside the model that it drafts for"
_SOUND = "it makes sound, not text"

REFUSED = {
    "bert": _EMBEDDINGS,
    "clip": "it is the image or sound encoder of another model",
    "dflash": _DRAFT,
    "dream": _DIFFUSION,
    "eagle3": _DRAFT,
    "eurobert": _EMBEDDINGS,
    "gemma-embedding": _EMBEDDINGS,
    "gemma4-assistant": _DRAFT,
    "gptj": "llama.cpp knows its name but cannot run it",
    "jina-bert-v2": _EMBEDDINGS,
    "jina-bert-v3": _EMBEDDINGS,
    "llada": _DIFFUSION,
    "llada-moe": _DIFFUSION,
    "llama-embed": _EMBEDDINGS,
    "modern-bert": _EMBEDDINGS,
    "neo-bert": _EMBEDDINGS,
    "nomic-bert": _EMBEDDINGS,
    "nomic-bert-moe": _EMBEDDINGS,
    "pockettts": _SOUND,
    "qwen3tts": _SOUND,
    "rnd1": _DIFFUSION,
    "t5": "it is an encoder-decoder model; Laneway runs decoders",
    "t5encoder": _EMBEDDINGS,
    "wavtokenizer-dec": _SOUND,
}
"""Architectures that llama.cpp has a name for and that cannot answer a prompt, each with the reason."""

SUPPORTED = _names(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon chatglm
    codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1
    dots3note ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4
    glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok
    grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba kimi-k3 kimi-linear
    laguna lfm2 lfm2moe llama llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2
    minimax-m3 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm
    orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen35
    qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe qwen4exp refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3
    spark2_5 stablelm starcoder starcoder2 step35 talkie xverse
    """
)
"""Architectures that answer a prompt token by token."""

RECURRENT = frozenset({"arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"})
"""No attention anywhere, so no heads to count."""

RMS_NORM = _names(
    """
    afmoe apertus arcee arctic baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet chameleon chatglm cogvlm deci deepseek
    deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1 dots3note ernie4_5 ernie4_5-moe exaone exaone-moe exaone4
    falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe glm5-next gpt-oss granite granite_swa
    granitehybrid granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4
    internlm2 jamba kimi-k3 kimi-linear laguna lfm2 lfm2moe llama llama4 maincoder mamba mamba2 maple mellum mimo2
    minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 muse-glimmer nanbeige olmo2 olmoe openelm
    paddleocr pangu-embedded phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen3 qwen35 qwen35moe qwen3moe
    qwen3next qwen3vl qwen3vlmoe qwen4exp refact seed_oss smallthinker smollm3 spark2_5 step35 talkie xverse
    """
)
"""These must say ``attention.layer_norm_rms_epsilon``."""

LAYER_NORM = _names(
    """
    bloom codeshell cohere2 command-r dbrx falcon gpt2 gptneox jais jais2 mpt nemotron nemotron_h nemotron_h_moe olmo
    orion phi2 stablelm starcoder starcoder2
    """
)
"""These must say ``attention.layer_norm_epsilon``."""

EQUAL_HEADS = _names(
    """
    afmoe apertus arcee arctic baichuan bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm cohere2 cohere2moe
    command-r dbrx deci deepseek dots1 ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon glm4 glm4moe gpt2 gptneox
    granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3
    internlm2 jais jais2 laguna lfm2 lfm2moe llama llama4 maincoder maple mellum minicpm minimax-01 minimax-m2
    minimax-m3 mistral3 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion
    paddleocr pangu-embedded phi2 phi3 phimoe plamo qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe
    qwen3next qwen3vl qwen3vlmoe qwen4exp refact seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2
    talkie xverse
    """
)
"""Keys and values have one size: llama.cpp asserts it, that is, ends the process."""

FULL_ROTATION = _names(
    """
    apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 ernie4_5 ernie4_5-moe
    exaone exaone-moe exaone4 falcon granite granite_swa granitemoe graniteswitch grok grovemoe hunyuan-dense
    hunyuan-moe hunyuan_vl hy_v3 internlm2 jais2 llama llama4 maincoder mellum minicpm mistral3 olmo olmo2 olmoe orion
    paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe seed_oss smallthinker
    smollm3 starcoder2 talkie xverse
    """
)
"""Rotary positions turn the whole head: llama.cpp asserts it too."""

EXPERTS = _names("bailingmoe2 glm4moe grovemoe lfm2moe smallthinker")
"""Without experts llama.cpp ends the process."""

SECTIONS = _names("paddleocr qwen2vl qwen35 qwen35moe qwen3vl qwen3vlmoe qwen4exp")
"""Rotary positions have several parts, which ``rope.dimension_sections`` must size."""

LATENT = _names("deepseek2 deepseek32 dots3note glm-dsa hy_v4 mistral4")
"""A part of each key must be free of rotation."""

BARE_OUTPUT = _names(
    """
    bailingmoe3 deepseek2 deepseek2-ocr deepseek32 deepseek4 dots3note glm-dsa glm5-next hy_v4 kimi-k3 kimi-linear
    mistral4
    """
)
"""Adapters leave the product that makes logits alone.  (Elsewhere they change it, if they have a pair for it.)"""

FIXED_GRAPH = _names(
    """
    bailingmoe3 deepseek4 glm5-next hrm_text hy_v4 kimi-k3 kimi-linear minimax-01 minimax-m3 nanbeige qwen35 qwen35moe
    qwen3next qwen4exp
    """
)
"""llama.cpp sizes their graphs by the model alone, and ends the process when adapters make them larger."""
