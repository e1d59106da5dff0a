// Process group backend `simccl`: collectives on device tensors, run by gloo on their aliases.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// `gloo`: the group's gloo backend, which does the work.
c10::intrusive_ptr<c10d::Backend> make_simccl(c10::intrusive_ptr<c10d::Backend> gloo);

} // namespace sim
