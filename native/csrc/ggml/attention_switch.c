#include "attention_switch.h"

#include <stdatomic.h>

static _Atomic int32_t wanted = 1;
static _Atomic int64_t counted = 0;

void laneway_ggml_attention_want(int32_t value) { atomic_store_explicit(&wanted, value != 0, memory_order_relaxed); }

int32_t laneway_ggml_attention_wanted(void) { return atomic_load_explicit(&wanted, memory_order_relaxed); }

void laneway_ggml_attention_count(void) { atomic_fetch_add_explicit(&counted, 1, memory_order_relaxed); }

int64_t laneway_ggml_attention_counted(void) { return atomic_load_explicit(&counted, memory_order_relaxed); }
