// torch.autocast("sim"): the same operators in the same precisions as on CUDA.
#pragma once

namespace sim {

void register_autocast();

} // namespace sim
