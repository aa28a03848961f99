#include "laneway.h"

#include "llama.h"

const char *laneway_llama_version(void) { return llama_version(); }
