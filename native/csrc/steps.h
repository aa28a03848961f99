// Who computes holds this shared; who changes what all computations share, alone.
#pragma once

#include <shared_mutex>

namespace laneway {

std::shared_mutex &steps_under_way();

} // namespace laneway
