// LSTM and GRU cells. Torch runs them on an accelerator through fused kernels that the CPU doesn't
// have, so they are written out here in differentiable operations, above autograd.
#pragma once

namespace sim {

void register_recurrent_cells();

} // namespace sim
