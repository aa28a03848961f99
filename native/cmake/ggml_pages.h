// Forced into ggml.c: large buffers lie on large pages, where the system has them for those who ask.
//
// A decode step reads all weights.  On pages of 4 KiB the processor has to look up each of tens of thousands of pages
// again, in tables that the weights themselves push out of its caches.  On pages of 2 MiB it decodes a tenth faster.
//
// ggml allocates through posix_memalign alone, and frees with free.
#if defined(__linux__) && !defined(__cplusplus)
#include <stdlib.h>
#include <sys/mman.h>

static inline int laneway_memalign(void **memory, size_t alignment, size_t size) {
    const size_t page = (size_t)2 << 20;
    const int large = size >= 2 * page;
    const int result = posix_memalign(memory, large ? page : alignment, size);
    if (result == 0 && large) {
        // A wish: where it is not granted nothing changes.  The last, partial page may belong to others, too.
        (void)madvise(*memory, size / page * page, MADV_HUGEPAGE);
    }
    return result;
}
#define posix_memalign laneway_memalign
#endif
