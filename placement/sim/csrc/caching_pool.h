// One pool of memory, as CUDA's caching allocator manages one device: freed blocks are kept and
// handed out again, so that a benchmark measures copies and not the C library's page faults
// (without the cache one run in three of the same copy took two to three times as long).
//
// Two numbers describe a pool. "Allocated" is the sum of what callers asked for, to the byte; CUDA
// reports rounded sizes here, but a test wants to write down the size of its tensors. "Reserved" is
// what the blocks really take, cached ones included, and it is what the capacity limits.
//
// Differences from CUDA: blocks aren't split, so a cached block is reused only for a request almost
// as large; and a block is free for reuse at once even where record_stream named another stream,
// because here every kernel has finished by the time it returns (streams.h treats the copies).
#pragma once

#include "device.h"
#include "link.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

class CachingPool;

struct Block {
  CachingPool* pool;
  void* host; // the address as the host sees it, untagged
  size_t reserved; // bytes, a multiple of CachingPool::kGranularity
  size_t requested; // bytes the present owner asked for
  c10::StreamId stream; // the stream that was current at the allocation
  std::vector<c10::StreamId> recorded_streams; // named by record_stream since
  Ticket last_sent = 0; // the last copy on the link that uses it
};

class CachingPool {
 public:
  static constexpr size_t kGranularity = 512; // bytes
  static constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

  // `device`: the index of the device whose memory it is, or -1 for host memory.
  CachingPool(std::string name, c10::DeviceIndex device, size_t capacity);

  // Raises c10::OutOfMemoryError when the capacity (or the machine) has no room for `nbytes`, even
  // after the cached blocks were released. `temporary_capacity` outranks the capacity when lower.
  Block* allocate(
      size_t nbytes, c10::StreamId stream, std::optional<size_t> temporary_capacity = std::nullopt);
  void release(Block* block);

  // Gives the cached blocks back to the host.
  void empty_cache();

  size_t capacity() const;
  // Cached blocks above the new capacity are released, so that they can't serve a request which the
  // capacity forbids.
  void set_capacity(size_t nbytes);

  c10::CachingDeviceAllocator::DeviceStats stats() const;
  void reset_accumulated_stats();
  void reset_peak_stats();
  std::pair<size_t, size_t> free_and_total() const; // bytes

  c10::DeviceIndex device() const {
    return device_;
  }

 private:
  Block* take_cached(size_t rounded, c10::StreamId stream);
  Block* create(size_t rounded, c10::StreamId stream, size_t limit);
  void destroy(Block* block);
  void destroy_cached();
  size_t allocated() const;
  size_t reserved() const;
  [[noreturn]] void raise_out_of_memory(size_t nbytes, size_t limit, const char* reason);

  const std::string name_;
  const c10::DeviceIndex device_;

  mutable std::mutex mutex_;
  size_t capacity_;
  // By stream, as on CUDA: work on one stream is in order, so its own freed block is safe to reuse.
  std::unordered_map<c10::StreamId, std::multimap<size_t, Block*>> cached_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

} // namespace sim
