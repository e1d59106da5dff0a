// What the simulation did since the process started, in numbers that only grow; a test takes the
// difference of two readings. Every field is counted where the event happens, for all devices and
// threads of the process together.
#pragma once

#include <atomic>
#include <cstdint>

namespace sim {

struct Counters {
  std::atomic<uint64_t> allocations{0}; // of device memory, served from the cache or not
  std::atomic<uint64_t> host_to_device_copies{0};
  std::atomic<uint64_t> host_to_device_bytes{0};
  std::atomic<uint64_t> device_to_host_copies{0};
  std::atomic<uint64_t> device_to_host_bytes{0};
  std::atomic<uint64_t> device_to_device_copies{0};
  std::atomic<uint64_t> device_to_device_bytes{0};
  std::atomic<uint64_t> collectives{0}; // of the simccl backend, point-to-point included
  std::atomic<uint64_t> fallback_operations{0}; // kernels that ran on the CPU through aliases
  std::atomic<uint64_t> out_resizes{0}; // arguments whose storage a CPU kernel replaced
};

Counters& counters();

} // namespace sim
