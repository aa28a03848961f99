#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace laneway {

// Carries a status over to the C border.
struct Failure : std::runtime_error {
    int32_t code;
    int32_t slot;
    Failure(int32_t code, const std::string &text, int32_t slot = -1)
        : std::runtime_error(text), code(code), slot(slot) {}
};

} // namespace laneway
