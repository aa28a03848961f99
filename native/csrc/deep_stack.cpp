#include "deep_stack.h"

#include "border.h"

#include <exception>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace laneway {

namespace {

struct Work {
    const std::function<void()> &body;
    std::exception_ptr failure;
};

void *run(void *given) {
    auto *work = static_cast<Work *>(given);
    try {
        work->body();
    } catch (...) {
        work->failure = std::current_exception();
    }
    return nullptr;
}

// Memory of a stack.  Its lowest page cannot be touched, so that an overflow ends here and not in other memory.
class Stack {
public:
    explicit Stack(size_t wanted) {
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        size = (wanted / page + 2) * page;
        memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE)) {
            if (memory != MAP_FAILED) {
                munmap(memory, size);
            }
            throw Failure(LANEWAY_OUT_OF_MEMORY, "there is no room for a stack of " + std::to_string(size) + " bytes");
        }
    }
    ~Stack() { munmap(memory, size); }
    Stack(const Stack &) = delete;
    Stack &operator=(const Stack &) = delete;

    void *memory;
    size_t size;
};

} // namespace

void on_deep_stack(size_t bytes, const std::function<void()> &body) {
    const Stack stack(bytes);
    Work work{body, nullptr};
    pthread_attr_t attributes;
    pthread_t thread;
    bool started = false;
    if (pthread_attr_init(&attributes) == 0) {
        started = pthread_attr_setstack(&attributes, stack.memory, stack.size) == 0 &&
                  pthread_create(&thread, &attributes, run, &work) == 0;
        pthread_attr_destroy(&attributes);
    }
    if (!started) {
        throw Failure(LANEWAY_OUT_OF_MEMORY, "no thread with a stack of " + std::to_string(bytes) + " bytes could be started");
    }
    pthread_join(thread, nullptr);
    if (work.failure) {
        std::rethrow_exception(work.failure);
    }
}

} // namespace laneway
