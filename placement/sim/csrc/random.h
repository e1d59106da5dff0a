// Random numbers: a generator of the device, with Philox's state, a seed and an offset of 8 bytes
// each. DTensor's random initialisation insists on these 16 bytes (it moves the offset by itself to
// give every shard its own numbers), and so on the CPU generator's 5 KB it stops with an assertion.
//
// A CPU kernel can't draw from it, so each random operation gets a CPU generator of its own, seeded
// from (seed, offset), and the offset moves on by the number of elements. The values are therefore
// those of no real device, but as reproducible.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// A CPU generator for one operation on `elements` elements. `generator`: one of the device, which
// moves on, or anything else, which is returned as it is.
at::Generator cpu_generator_for(const at::Generator& generator, uint64_t elements);

} // namespace sim
