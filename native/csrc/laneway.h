// The C border, for C and C++.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "llama.cdef.h"

#ifdef __cplusplus
}
#endif
