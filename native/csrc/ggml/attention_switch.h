// Whether the CPU takes our attention or llama.cpp's, for the whole process.
#pragma once

#include "ggml.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// On from the start.  May be changed at any time, from any thread: an operation asks once, before its threads part.
GGML_API void laneway_ggml_attention_want(int32_t wanted);
GGML_API int32_t laneway_ggml_attention_wanted(void);

// How many operations ours has computed.
GGML_API void laneway_ggml_attention_count(void);
GGML_API int64_t laneway_ggml_attention_counted(void);

#ifdef __cplusplus
}
#endif
