#pragma once

#ifdef __cplusplus
extern "C" {
#endif

const char *laneway_llama_version(void);

#ifdef __cplusplus
}
#endif
