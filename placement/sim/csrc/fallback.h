// The kernel of every operator that has none of its own here: check the devices of the arguments as
// a real accelerator's kernels do, run the CPU kernel on aliases, and map its results back.
//
// torch's own at::native::cpu_fallback must not take this place. It copies arguments to the CPU and
// results back, so an operation that mixes devices succeeds silently, which is the very mistake the
// simulation is there to show, and every operation counts as copies between host and device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void register_fallback();

} // namespace sim
