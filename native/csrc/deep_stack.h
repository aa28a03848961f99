// Runs a function on a thread with a stack of a chosen size.
#pragma once

#include <cstddef>
#include <functional>

namespace laneway {

// Returns when `body` has; throws what it throws, or LANEWAY_OUT_OF_MEMORY if there is no room for such a stack.
// Only what is used of a stack takes memory.
void on_deep_stack(size_t bytes, const std::function<void()> &body);

} // namespace laneway
