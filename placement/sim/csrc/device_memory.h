// Device memory as torch sees it: the allocator of device `sim`, one CachingPool per device, and
// the loan of device memory to CPU kernels.
//
// The loan: operations of the simulation run as CPU kernels on aliases (fallback.h), and their
// results are CPU tensors that have to become device tensors. While a `LendToCpuKernels` is in
// scope, CPU allocations of this thread come from the device's pool, so a result is adopted by
// changing the tag on its address, without a copy; it is accounted to the byte, and the capacity
// can run out in the middle of a kernel. So can the temporaries of a CPU kernel, which count
// towards the peak as a real kernel's workspace does.
#pragma once

#include "caching_pool.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <optional>

namespace sim {

CachingPool& device_pool(c10::DeviceIndex device);

// Memory of `device`, allocated on its current stream. Raises c10::OutOfMemoryError.
c10::DataPtr allocate_on_device(size_t nbytes, c10::DeviceIndex device);

// The allocator that torch is given for the device.
c10::DeviceAllocator* device_allocator();

// The block behind a DataPtr of device memory; null for none (an empty or freed storage).
Block* block_of(const c10::DataPtr& data);

// Replaces a device storage's memory by `nbytes` bytes, keeping the contents as far as they fit.
void resize_device_storage(c10::StorageImpl* storage, size_t nbytes);

// Wraps torch's CPU allocator, once, so that lending is possible.
void install_cpu_allocator();

class LendToCpuKernels {
 public:
  explicit LendToCpuKernels(c10::DeviceIndex device);
  ~LendToCpuKernels();
  LendToCpuKernels(const LendToCpuKernels&) = delete;
  LendToCpuKernels& operator=(const LendToCpuKernels&) = delete;

 private:
  std::optional<c10::DeviceIndex> previous_;
};

// The memory of a CPU storage as memory of `device`. Lent memory is taken over, and whoever else
// holds the CPU storage must let go of it; any other memory is copied.
c10::DataPtr adopt_cpu_memory(c10::StorageImpl* cpu, c10::DeviceIndex device);

} // namespace sim
