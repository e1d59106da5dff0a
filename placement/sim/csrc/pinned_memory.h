// Pinned host memory: ordinary host memory in a pool of its own, with a register of the live
// blocks, so that Tensor.is_pinned() and the number of pinned bytes are exact.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstddef>

namespace sim {

at::HostAllocator* pinned_allocator();

// Whether the address lies in a live pinned block.
bool is_pinned_address(const void* address);

// The sum of the live pinned blocks as they were asked for, in bytes. Blocks that a delayed copy
// still uses are live; blocks in the cache aren't.
size_t pinned_bytes();

} // namespace sim
