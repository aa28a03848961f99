// Where C++ ends: exceptions become a status and a text.
#pragma once

#include "laneway.h"
#include "sampling.h"

#include <cstdio>
#include <exception>
#include <new>

namespace laneway {

inline int32_t fail(laneway_error *error, int32_t code, int32_t slot, const char *text) {
    error->code = code;
    error->slot = slot;
    std::snprintf(error->text, sizeof error->text, "%s", text);
    return code;
}

template <typename Body> int32_t guarded(laneway_error *error, Body body) {
    error->code = LANEWAY_OK;
    error->slot = -1;
    error->text[0] = '\0';
    try {
        body();
        return LANEWAY_OK;
    } catch (const Failure &failure) {
        return fail(error, failure.code, failure.slot, failure.what());
    } catch (const std::bad_alloc &) {
        return fail(error, LANEWAY_OUT_OF_MEMORY, -1, "out of memory");
    } catch (const std::exception &exception) {
        return fail(error, LANEWAY_EXCEPTION, -1, exception.what());
    } catch (...) {
        return fail(error, LANEWAY_EXCEPTION, -1, "an exception of an unknown kind");
    }
}

// The first error line that llama.cpp has logged on this thread since the object was made: the reason why a call of it
// gave nothing, of which later lines only say that it had consequences.  Not nested.
class FirstError {
public:
    FirstError();
    ~FirstError();
    FirstError(const FirstError &) = delete;
    FirstError &operator=(const FirstError &) = delete;
    // `otherwise` if nothing was logged.
    std::string text(const char *otherwise) const;
};

// A line of llama.cpp's log without the function that it begins with.
std::string without_speaker(const std::string &line);

} // namespace laneway
