// Forced into ggml-cpu.c: threads that wait for each other spin for a moment and then let other programs run.
//
// ggml's threads meet about a thousand times a step and spin until all have come.  That is the fastest way where every
// thread has a core of its own.  Where cores are shared with other programs it is ruinous: a thread that spins uses up
// the time that the one it waits for would need, and two threads fell to a tenth of the speed of one.  Yielding costs
// less than a microsecond where nobody else wants the core.
//
// ggml waits through _mm_pause alone, and nothing else in that file calls it.  Other processors keep ggml's way.
#if defined(__x86_64__) && (defined(__linux__) || defined(__APPLE__)) && !defined(__cplusplus)
#include <immintrin.h>
#include <sched.h>
#include <stdint.h>
#include <x86intrin.h>

static inline void laneway_wait(void) {
    // Cycles of the time stamp counter, which runs at 2 to 4 GHz.
    const uint64_t same_wait = 4000; // pauses that lie no further apart belong to one wait
    const uint64_t spin = 20000;     // most waits on cores of their own are shorter
    static _Thread_local uint64_t began, last;
    _mm_pause();
    const uint64_t now = __rdtsc();
    if (now - last > same_wait) {
        began = now;
    }
    last = now;
    if (now - began > spin) {
        sched_yield();
        last = __rdtsc();
    }
}
#define _mm_pause laneway_wait
#endif
