// Operators that concern a tensor and its storage, not its values: they make, view, resize and
// swap, and so have to work on the device tensor itself and can't go through a CPU alias.
#pragma once

namespace sim {

void register_tensor_operators();

} // namespace sim
